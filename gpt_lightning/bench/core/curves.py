"""Pictures of sweeps: quantities over a size on logarithmic axes, and memory over a step."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: no global state, no window
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from gpt_lightning.bench.core.memory_meter import MIB, Memory
from gpt_lightning.reports.tables import Row

DPI = 120
PANEL_IN = (4.2, 3.4)  # width and height


@dataclass(frozen=True)
class Line:
    """Line of a panel; points without a value are left out.

    Attributes:
        label: Label in the legend, which is the first panel's.
        points: Size and value.
        color: Matplotlib color.
        style: Matplotlib line style.
    """

    label: str
    points: list[tuple[float, float | None]]
    color: str
    style: str = "-"


def plot_rows(
    path: Path,
    title: str,
    rows: Sequence[Row],
    x: tuple[str, str],
    quantities: dict[str, str],
    place: Callable[[Row], tuple[str, str, str]],
) -> None:
    """Draw fields of the rows of a sweep over another field, in one color for each label.

    Args:
        path: PNG file.
        title: Title of the picture.
        rows: Rows of the sweep.
        x: Field of the horizontal axes, and its label.
        quantities: Fields to draw, with their labels and units.
        place: Function from a row to the title of its column of panels, and the label and the style
            of its line.
    """
    labels = list(dict.fromkeys(place(row)[1] for row in rows))
    panels: dict[tuple[str, str], dict[tuple[str, str], Line]] = {}
    for (field, quantity), row in itertools.product(quantities.items(), rows):
        column, label, style = place(row)
        lines = panels.setdefault((quantity, column), {})
        line = lines.setdefault((label, style), Line(label, [], f"C{labels.index(label)}", style))
        line.points.append((getattr(row, x[0]), getattr(row, field)))
    plot_panels(path, title, x[1], {panel: list(of.values()) for panel, of in panels.items()})


def plot_panels(
    path: Path, title: str, x_name: str, panels: dict[tuple[str, str], Sequence[Line]]
) -> None:
    """Draw a grid of panels with logarithmic axes.

    Args:
        path: PNG file.
        title: Title of the picture.
        x_name: Label of the horizontal axes.
        panels: (quantity with its unit, title of the column) -> lines; a row for each quantity.
    """
    quantities = list(dict.fromkeys(quantity for quantity, _ in panels))
    columns = list(dict.fromkeys(column for _, column in panels))
    size = (PANEL_IN[0] * max(2, len(columns)), PANEL_IN[1] * len(quantities) + 0.5)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    grid = figure.subplots(len(quantities), len(columns), sharex=True, sharey="row", squeeze=False)
    figure.suptitle(title)
    for (quantity, column), lines in panels.items():
        axes = grid[quantities.index(quantity)][columns.index(column)]
        draw_lines(axes, lines)
        axes.set_ylabel(quantity if column == columns[0] else "")
        axes.set_title(column if quantity == quantities[0] else "")
        axes.set_xlabel(x_name if quantity == quantities[-1] else "")
    for row in grid:
        number_values(row[0])
    handles, labels = grid[0][0].get_legend_handles_labels()
    widest = max(map(len, labels), default=1) + 8  # characters, with the line before them
    fit = max(1, int(size[0] * 15 / widest))  # 15 characters an inch at this size
    figure.legend(handles, labels, fontsize=7, loc="outside lower center", ncols=fit)
    figure.savefig(path)


def draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draw lines into one panel; sizes are powers of two, so their ticks are too."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:.0f}")
    for line in lines:
        points = sorted((x, y) for x, y in line.points if y is not None and y > 0)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        label = line.label if points else "_"  # a line without points is not in the legend
        axes.plot(xs, ys, "o" + line.style, ms=3, lw=1, color=line.color, label=label)
    axes.grid(alpha=0.3)


def number_values(axes: Any) -> None:
    """Write plain numbers beside the powers of ten, and between them where there are few powers."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter("{x:,g}")
    few = high < 10 * low  # else twice the time to draw, for clutter
    axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:,g}") if few else NullFormatter())


def plot_timeline(path: Path, title: str, memory: Memory) -> None:
    """Draw memory over the time of a step, with its phases shaded.

    Args:
        path: PNG file.
        title: Title of the picture.
        memory: Measurement with a timeline.
    """
    figure = Figure(figsize=(10.0, 4.0), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    start = min(t for t, _ in memory.timeline)
    times = [t - start for t, _ in memory.timeline]
    axes.step(times, [level / MIB for _, level in memory.timeline], where="post", lw=0.8, color="k")
    for index, (name, (first, last)) in enumerate(memory.spans.items()):
        axes.axvspan(first - start, last - start, alpha=0.2, color=f"C{index % 10}", label=name)
    axes.set(xlabel="ms, with the cost of recording", ylabel=f"MiB ({memory.method})", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path)
