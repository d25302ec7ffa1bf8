"""Pictures: their texts are inside them, and their numbers can be read."""

from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from gpt_lightning.reproduce.runner import LossRow, plot_losses
from gpt_lightning.tables.pictures import PHASES, plot_rows, plot_runs, short_names


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


def drawn(monkeypatch, tmp_path, runs):
    """The axes of the picture of runs, by the name of their panel."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    plot_runs([tmp_path / "curves.png"], runs)
    return figures[0], {axes.get_label(): axes for axes in figures[0].axes}


def points(n, seconds=1.0):
    return [(step, step * 1e6, step * seconds, 3.0) for step in range(n)]


def lines(axes):
    return [
        (line.get_linestyle(), line.get_marker()) for line in axes.lines if len(line.get_xdata())
    ]


def test_one_point_is_seen_and_published_curves_are_dashed(tmp_path, monkeypatch):
    ours = {"train": points(1), "val": points(3), "rate": points(2), "phases": []}
    runs = {"ours": ours, "theirs": {"train": points(100), "val": points(100)}}
    figure, axes = drawn(monkeypatch, tmp_path, runs)
    for panel in ("step", "tokens", "time"):
        expected = [("-", "o"), ("-", "o"), ("--", "None"), ("--", "None")]
        assert lines(axes[panel]) == expected
    assert lines(axes["rate"]) == [("-", "None")]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [" ours", " theirs"]
    assert figure.get_suptitle().endswith("; dashed: published")


def test_several_runs_have_bits_per_byte(tmp_path, monkeypatch):
    run = {key: points(3) for key in ("train", "val", "bits", "rate")}
    _, alone = drawn(monkeypatch, tmp_path, {"run": run})
    assert "bits" not in alone  # the loss in another unit
    _, axes = drawn(monkeypatch, tmp_path, {"run": run, "earlier": run | {"bits": []}})
    assert lines(axes["bits"]) == [("-", "o")]
    assert axes["bits"].get_ylabel() == "bits per byte"


def test_any_name_of_a_folder_is_in_the_legend(tmp_path, monkeypatch):
    names = ["_mine/version_0", r"a$\b$/version_0"]
    figure, _ = drawn(monkeypatch, tmp_path, {name: {"train": points(2)} for name in names})
    assert len(figure.legends[0].get_texts()) == 2
    figure.draw_without_rendering()  # raises for wrong math


def test_the_wall_time_is_in_minutes_and_phases_are_bars(tmp_path, monkeypatch):
    run = {key: points(2, 600.0) for key in ("train", "val", "rate")}
    phases = [("stall", 0.0, 300.0), ("validation", 300.0, 300.0)]
    figure, axes = drawn(monkeypatch, tmp_path, {"run": run | {"phases": phases}})
    assert "wall time (minutes)" in axes["phases"].get_xlabel()
    assert axes["time"].lines[0].get_xdata()[-1] == 10.0
    bars = [box.get_paths()[0].get_extents() for box in axes["phases"].collections]
    assert [(bar.x0, bar.width) for bar in bars] == [(5.0, 5.0), (0.0, 5.0)]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [" run", "validation", "stall"]
    assert axes["time"].get_xlim()[0] == axes["phases"].get_xlim()[0] == 0.0
    assert "dashed" not in figure.get_suptitle()


def test_a_phase_has_one_color_that_is_no_run_s(tmp_path, monkeypatch):
    colors = []
    for n, kinds in enumerate(("stall", "validation"), start=1):
        run = {"rate": [], "phases": [(kinds, 0.0, 1.0), ("checkpoint", 1.0, 1.0)]}
        _, axes = drawn(monkeypatch, tmp_path, {f"run {i}": run for i in range(n)})
        bars = {bar.get_label(): bar.get_facecolor() for bar in axes["phases"].collections}
        colors.append(tuple(bars["checkpoint"][0]))
    assert colors[0] == colors[1]
    assert not {to_hex(color) for color in PHASES.values()} & {to_hex(f"C{i}") for i in range(10)}


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        ("logs/mine/version_0", "mine"),
        ("logs/mine/version_0 /old/larger/version_3 llm.c", "mine larger llm.c"),
        ("logs/mine/version_0 logs/mine/version_1", "mine/version_0 mine/version_1"),
        ("a/x/version_0 b/x/version_0", "a/x/version_0 b/x/version_0"),
        ("version_0 version_1", "version_0 version_1"),
    ],
)
def test_a_legend_has_no_more_of_a_path_than_it_needs(runs, names):
    assert short_names(runs.split()) == names.split()


# ---- sweeps --------------------------------------------------------------------------------------


@pytest.fixture
def drawn_rows(tmp_path, monkeypatch):
    """Draw lines with these values over 64, 128 and 256; return the drawn figure."""
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: kept.append(figure))

    def draw(*values: float) -> Figure:
        rows = [
            SimpleNamespace(name=f"line {n}", context=x, a_ms=y, b_mib=None if n == 3 else y)
            for n in range(4)
            for x, y in zip((64, 128, 256), values, strict=True)
        ]
        quantities = {"a_ms": "a (ms)", "b_mib": "b (MiB)"}
        x = ("context", "context (tokens)")
        plot_rows(tmp_path / "a.png", "", rows, x, quantities, lambda r: ("d = 16", r.name, "-"))
        FigureCanvasAgg(kept[-1]).draw()
        return kept[-1]

    return draw


@pytest.mark.parametrize("values", [(31.0, 35.0, 39.0), (12.0, 20.0, 70.0), (1.0, 200.0, 5000.0)])
def test_the_values_have_numbers(drawn_rows, values):
    for axes in drawn_rows(*values).axes:
        low, high = axes.get_ylim()
        ticks = axes.yaxis.get_major_ticks() + axes.yaxis.get_minor_ticks()
        labels = [t.label1.get_text() for t in ticks if low <= t.get_loc() <= high]
        numbers = [label for label in labels if label]
        assert 2 <= len(numbers) <= 12
        assert all(float(label.replace(",", "")) > 0 for label in numbers)  # no powers, no 10^1


def test_lines_have_their_points_and_the_legend_covers_no_label(drawn_rows):
    figure = drawn_rows(1.0, 10.0, 100.0)
    times, memory = figure.axes
    assert [list(line.get_ydata()) for line in times.lines] == [[1.0, 10.0, 100.0]] * 4
    assert [len(line.get_xdata()) for line in memory.lines] == [3, 3, 3, 0]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"line {n}" for n in range(4)]
    box = legend.get_window_extent()
    for axes in figure.axes:
        assert not box.overlaps(axes.get_tightbbox())
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "context (tokens)"]
