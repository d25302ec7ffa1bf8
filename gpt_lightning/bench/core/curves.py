"""Picture of memory over a step."""

from pathlib import Path

from matplotlib.figure import Figure  # not pyplot: no global state, no window

from gpt_lightning.bench.core.memory_meter import MIB, Memory

DPI = 120


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
