"""Pictures of sweeps: numbers on both axes, and a legend that covers nothing."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gpt_lightning.tables.pictures import Line, plot_panels


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw lines with these values over 64, 128 and 256; return the drawn figure."""
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: kept.append(figure))

    def draw(*values: float) -> Figure:
        points = list(zip((64, 128, 256), values, strict=True))
        lines = [Line(f"line {n}", points, f"C{n}") for n in range(4)]
        panels = {("a (ms)", "d = 16"): lines, ("b (MiB)", "d = 16"): lines}
        plot_panels(tmp_path / "a.png", "title", "context (tokens)", panels)
        FigureCanvasAgg(kept[-1]).draw()
        return kept[-1]

    return draw


@pytest.mark.parametrize("values", [(31.0, 35.0, 39.0), (12.0, 20.0, 70.0), (1.0, 200.0, 5000.0)])
def test_the_values_have_numbers(drawn, values):
    for axes in drawn(*values).axes:
        low, high = axes.get_ylim()
        ticks = axes.yaxis.get_major_ticks() + axes.yaxis.get_minor_ticks()
        labels = [t.label1.get_text() for t in ticks if low <= t.get_loc() <= high]
        numbers = [label for label in labels if label]
        assert 2 <= len(numbers) <= 12
        assert all(float(label.replace(",", "")) > 0 for label in numbers)  # no powers, no 10^1


def test_the_legend_covers_no_label(drawn):
    figure = drawn(1.0, 10.0, 100.0)
    (legend,) = figure.legends
    box = legend.get_window_extent()
    for axes in figure.axes:
        assert not box.overlaps(axes.get_tightbbox())
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "context (tokens)"]
