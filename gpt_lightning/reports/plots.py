"""Pictures of results."""

import textwrap
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: no global state, no window
from matplotlib.ticker import MaxNLocator

WIDTH_IN, DPI = 10.0, 120
LOSSES_WIDTH_IN = 7.2  # its text stays legible at the width of a README
LOSSES_COLUMNS = 64  # characters of a title's line


def plot_losses(path: Path, title: str, rows: Sequence[Any]) -> None:
    """Draw published losses as circles over our curves, and the differences below them.

    Args:
        path: A .png file.
        title: Title of the picture.
        rows: Rows with the fields of reproduce's LossRow.
    """
    figure = Figure(figsize=(LOSSES_WIDTH_IN, 6.4), dpi=DPI, layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    series = list(dict.fromkeys((row.rung, row.split) for row in rows if row.split != "best"))
    several = len({rung for rung, _ in series}) > 1
    ladder = all(split == "batch" for _, split in series)
    for index, (rung, split) in enumerate(series):
        points = [row for row in rows if (row.rung, row.split) == (rung, split)]
        published = [row for row in points if row.theirs is not None]
        color = f"C{index % 10}"
        name = f"{rung} {split}" if several else f"{split} loss"
        label = rung if ladder else name
        losses.plot([r.step for r in points], [r.ours for r in points], color=color, label=label)
        steps = [r.step for r in published]
        circles: dict[str, Any] = {"ls": "", "marker": "o", "mfc": "none", "mec": color}
        circles["ms"] = 8 if len(published) <= 20 else 4
        losses.plot(steps, [r.theirs for r in published], **circles)
        distance = [max(abs(r.difference), 1e-7) for r in published]  # 0 has no logarithm
        differences.plot(steps, distance, "o-", ms=3, lw=0.8, color=color)
        differences.step(
            steps, [r.tolerance or nan for r in published], where="post", color=color, ls="--", lw=1
        )
    losses.plot([], [], color="0.3", label="line: ours")  # what line and circle stand for
    losses.plot([], [], ls="", marker="o", mfc="none", mec="0.3", label="circle: published")
    losses.set(ylabel="loss (nats per token)", title=textwrap.fill(title, LOSSES_COLUMNS))
    losses.legend(ncols=1 if len(series) <= 2 else 2)
    differences.set(ylabel="difference (nats)", xlabel="optimizer step", yscale="log")
    differences.set_title("absolute difference; dashed: tolerance", fontsize="medium")
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    figure.savefig(path)


def plot_curves(
    path: Path, title: str, panels: dict[str, dict[str, Sequence[tuple[float, float]]]]
) -> None:
    """Draw losses over tokens on a logarithmic axis, a panel for each kind of loss.

    Args:
        path: A .png file.
        title: Title of the picture.
        panels: Title of a panel -> name of a curve -> (tokens, loss); points at 0 are left out.
    """
    size = (LOSSES_WIDTH_IN, 3.2 * len(panels) + 0.6)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    figure.suptitle(title)
    for axes, (name, curves) in zip(
        figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0],
        panels.items(),
        strict=True,
    ):
        for index, (label, points) in enumerate(curves.items()):
            xs, ys = [x for x, _ in points if x], [y for x, y in points if x]
            dots = "o" if len(xs) <= 100 else ""
            axes.plot(xs, ys, f"{dots}{('-', '--')[index % 2]}", ms=3, lw=1, label=label)
        axes.set(xscale="log", ylabel="loss (nats per token)", title=name)
        axes.legend()
        axes.grid(alpha=0.3)
    axes.set_xlabel("tokens")
    figure.savefig(path)


def plot_bars(
    path: Path, title: str, labels: Sequence[str], panels: dict[str, Sequence[float | None]]
) -> None:
    """Draw a panel of horizontal bars for each quantity, the first label on top.

    Args:
        path: A .png file.
        title: Title of the picture.
        labels: Names of the bars.
        panels: Quantities, name with unit -> values; None leaves a row empty.
    """
    figure = Figure(figsize=(WIDTH_IN, 1.5 + 0.4 * len(labels)), dpi=DPI, layout="constrained")
    figure.suptitle(title)
    for axes, (name, values) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        bars = axes.barh(range(len(labels)), [value or 0.0 for value in values], color="C0")
        texts = ["" if value is None else f"{value:,.4g}" for value in values]
        axes.bar_label(bars, texts, padding=3, fontsize=8)
        axes.set(xlabel=name, yticks=range(len(labels)), yticklabels=labels)
        axes.margins(x=0.2)
    axes.invert_yaxis()
    figure.savefig(path)
