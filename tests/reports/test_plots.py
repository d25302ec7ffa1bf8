"""Pictures: their texts are inside them."""

from matplotlib.figure import Figure

from gpt_lightning.reports.plots import plot_losses
from gpt_lightning.reproduce.rows import LossRow


def test_a_title_is_as_wide_as_the_picture_at_most(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    title = "nanoGPT's baby GPT on tiny Shakespeare, 5,000 steps, on a CPU, a Mac and a GPU"
    row = LossRow("cpu", 0, "val", 4.2, 4.3, 0.1, 0.5, "ok", None, None, None)
    plot_losses(tmp_path / "losses.png", title, [row, row])
    (figure,) = figures
    figure.draw_without_rendering()
    box = figure.axes[0].title.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert figure.axes[0].title.get_text().replace("\n", " ") == title
