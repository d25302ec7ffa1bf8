"""Results as pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: no global state, no window
from matplotlib.ticker import MaxNLocator

WIDTH_IN, DPI = 10.0, 120


def plot_losses(path: Path, title: str, rows: Sequence[Any]) -> None:
    """Published losses as lines, ours as dots, and below how far they are apart.

    Args:
        path: A .png file.
        title: Of the picture.
        rows: With the fields of reproduce's LossRow.
    """
    figure = Figure(figsize=(WIDTH_IN, 8.0), dpi=DPI, layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    names = dict.fromkeys((row.rung, row.split) for row in rows if row.split != "best")
    for index, name in enumerate(names):
        points = [row for row in rows if (row.rung, row.split) == name]
        compared = [row for row in points if row.theirs is not None]
        color = f"C{index % 10}"
        label = name[0] if name[1] == "batch" else " ".join(name)
        losses.plot([r.step for r in compared], [r.theirs for r in compared], color=color, lw=1)
        losses.plot(
            [r.step for r in points], [r.ours for r in points], "o", ms=3, color=color, label=label
        )
        distance = [max(abs(r.difference), 1e-7) for r in compared]  # 0 has no logarithm
        differences.plot([r.step for r in compared], distance, "o-", ms=3, lw=0.5, color=color)
        differences.step(
            [r.step for r in compared],
            [r.tolerance for r in compared],
            where="post",
            color=color,
            ls="--",
            lw=1,
        )
    losses.set(ylabel="loss (nats)", title=f"{title}\nlines: published, dots: ours")
    losses.legend(fontsize=8, ncols=2)
    differences.set(
        ylabel="difference (nats)", xlabel="step", yscale="log", title="dashed: tolerance"
    )
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    figure.savefig(path)


def plot_bars(
    path: Path, title: str, labels: Sequence[str], panels: dict[str, Sequence[float | None]]
) -> None:
    """A panel of horizontal bars for each quantity, the first label on top.

    Args:
        path: A .png file.
        title: Of the picture.
        labels: One a bar.
        panels: What is shown, with its unit -> values; None is an empty row.
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
