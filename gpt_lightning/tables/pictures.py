"""Pictures of results: runs, and quantities of a sweep over a size."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure  # not pyplot: no global state, no window
from matplotlib.ticker import LogFormatter, MaxNLocator

from gpt_lightning.files import Fields, write_atomic, yaml_beside
from gpt_lightning.tables.rows import short_names

LOSSES_WIDTH_IN = 7.2  # its text stays legible at the width of a README
LOSSES_COLUMNS = 64  # characters of a title's line
TABLE = yaml_beside(__file__)
PHASES = TABLE["phases"]  # phase of a run -> color
styled = rc_context(TABLE["style"])


def write_picture(figure: Figure, path: Path, title: str = "") -> None:
    """Write a figure to a file that at every moment is absent, the old one, or complete.

    Args:
        figure: The figure.
        path: File to write: .png, .svg or .pdf.
        title: Title in the file's own data, which is not drawn.
    """
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), metadata={"Title": title})
    write_atomic(path, content.getvalue())


@styled
def plot_runs(paths: Sequence[Path], runs: dict[str, Fields], mark: str = "") -> None:
    """Draw losses of runs over steps, tokens and wall time, and below them speed and phases.

    Several runs have bits per byte, too, by which those of other tokens compare.

    Args:
        paths: Files to write: .png, .svg or .pdf.
        runs: Run folder -> its curves, as read_curves of runs/history.py returns them. A published
            curve has its name instead, and neither `rate` nor `phases`.
        mark: Title in the files' own data, which is not drawn.
    """
    figure = Figure(figsize=(LOSSES_WIDTH_IN, 8.4))
    heights = {"time": 2.5, "bits": 2.0, "rate": 1.5, "phases": 0.2 + 0.15 * len(runs)}
    if len(runs) == 1 or not any(run.get("bits") for run in runs.values()):
        del heights["bits"]  # it is the loss in another unit, for runs of other tokens
    panels: Any = [["step", "tokens"], *([name] * 2 for name in heights)]
    axes = figure.subplot_mosaic(panels, height_ratios=[3, *heights.values()])
    bars = axes["phases"]
    found = {name for run in runs.values() for name, *_ in run.get("phases", ())}
    kinds = [*(kind for kind in PHASES if kind in found), *sorted(found - PHASES.keys())]
    for i, (label, run) in enumerate(zip(short_names(list(runs)), runs.values(), strict=True)):
        # matplotlib leaves out a label with _ at its beginning, and sets what is between $ as math
        axes["step"].plot([], [], color=f"C{i}", label=" " + label.replace("$", r"\$"))
        for key, width in {"train": 0.7, "val": 1.8, "bits": 1.8, "rate": 1.0}.items():
            points = np.array(run.get(key, ()), dtype=float).reshape(-1, 4)
            dots = len(points) == 1 or (key in ("val", "bits") and len(points) <= 40)
            style = f"{'-' if 'rate' in run else '--'}{'o' if dots else ''}C{i}"
            step, tokens, time, value = points.T
            x = {"step": step, "tokens": tokens / 1e6, "time": time / 60}
            for name, values in (x if key in ("train", "val") else {key: x["time"]}).items():
                if name in axes:
                    axes[name].plot(values, value, style, lw=width, ms=4)
        for kind in kinds:
            phases = run.get("phases", ())
            spans = [(begin / 60, length / 60) for name, begin, length in phases if name == kind]
            look = {"color": PHASES.get(kind, "lightgray"), "label": "" if i else kind}
            bars.broken_barh(spans, (-i - 0.4, 0.8), **look)
    for name, title in {"step": "optimizer step", "tokens": "tokens (millions)"}.items():
        axes[name].set(xlabel=title, ylabel="loss (nats per token)")
        axes[name].xaxis.set_major_locator(MaxNLocator(5))
    axes["time"].set(ylabel="loss (nats per token)")
    axes["rate"].set(ylabel="tokens/s", ylim=(0, None))
    if "bits" in axes:
        axes["bits"].set(ylabel="bits per byte")
    bars.set_xlabel("wall time (minutes); bars: no training")
    bars.set_yticks(range(0, -len(runs), -1))
    for name in heights.keys() - {"time"}:
        axes[name].sharex(axes["time"])
    axes["time"].set_xlim(left=0)  # compilation precedes the first loss
    for panel in axes.values():
        panel.yaxis.set_major_formatter("{x:,.6g}")
    for i, tick in enumerate(bars.set_yticklabels(["■"] * len(runs))):
        tick.set_color(f"C{i}")
    dashed = "" if all("rate" in run for run in runs.values()) else "; dashed: published"
    figure.suptitle(f"thin: training loss; thick: validation loss{dashed}")
    figure.legend(loc="outside lower center", fontsize="small")
    for path in paths:
        write_picture(figure, path, mark)


# ---- sweeps --------------------------------------------------------------------------------------


@styled
def plot_rows(
    path: Path,
    title: str,
    rows: Sequence[Any],
    x: tuple[str, str],
    quantities: dict[str, str],
    place: Callable[[Any], tuple[str, str, str]],
) -> None:
    """Draw fields of the rows of a sweep over another field, in one color for each label.

    Values of 0 and None are left out: the axes are logarithmic.

    Args:
        path: PNG file.
        title: Title of the picture.
        rows: Rows of the sweep.
        x: Field of the horizontal axes, and its label.
        quantities: Fields to draw, a row of panels each, with their labels and units.
        place: Function from a row to the title of its column of panels, and the label and the style
            of its line.
    """
    lines: dict[tuple[str, str, str], list[Any]] = {}
    for row in rows:
        lines.setdefault(place(row), []).append(row)
    columns = list(dict.fromkeys(column for column, _, _ in lines))
    colors = list(dict.fromkeys(label for _, label, _ in lines))
    figure = Figure(figsize=(4.2 * max(2, len(columns)), 3.9 * len(quantities)))
    grid = figure.subplots(len(quantities), len(columns), sharex=True, sharey="row", squeeze=False)
    figure.suptitle(title)
    for panels, (field, quantity) in zip(grid, quantities.items(), strict=True):
        for axes in panels:
            axes.set_xscale("log", base=2)  # sizes are powers of two, so their ticks are too
            axes.set(xlabel=x[1], ylabel=quantity, yscale="log")
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_formatter(LogFormatter())  # where there are few powers of ten
            axes.label_outer()
        for (column, label, style), drawn in lines.items():
            points = sorted((getattr(row, x[0]), y) for row in drawn if (y := getattr(row, field)))
            color = f"C{colors.index(label)}"
            name = label if points else "_"  # a line without points is not in the legend
            xy = np.array(points).reshape(-1, 2).T
            panels[columns.index(column)].plot(*xy, f"o{style}{color}", ms=3, lw=1, label=name)
    for top, column in zip(grid[0], columns, strict=True):
        top.set_title(column)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, loc="outside lower center", ncols=2)
    write_picture(figure, path)
