"""Tracks and rules of the speedrun, and the figures of its runs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml

from gpt_lightning.tables.rows import Column, Row, Text

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RULES: dict[str, Any] = TABLES["rules"]
NANOGPT: dict[str, dict[str, str]] = TABLES["nanogpt"]
RECORDS = Path("experiments") / "speedrun" / "records"
Figures = dict[str, Any]
Seconds = Annotated[float, Column(".1f")]
Number = Annotated[int, Column(",d")]


@dataclass(frozen=True)
class Track:
    """Track of the speedrun; tracks.yaml describes the fields."""

    name: str
    title: str
    target: float
    config: str
    steps: int
    curve: str
    nanogpt: str


TRACKS = {name: Track(name, **fields) for name, fields in TABLES["tracks"].items()}


@dataclass
class SeedRow(Row):
    """Run of one seed."""

    seed: Annotated[int, Column("d")]
    loss: Annotated[float, Column(".4f", "validation loss")]
    time_s: Seconds
    compile_s: Annotated[float, Column(".1f", "of it compiling s")]
    process_s: Seconds
    steps: Number
    tokens: Annotated[float, Column(",.0f")]
    parameters: Number
    curve: Annotated[Sequence[tuple[float, float]], Column(console=False)]
    precision: Text = None


@dataclass(frozen=True)
class Result:
    """Runs of a track, and the time of nanoGPT beside them.

    Attributes:
        track: The track.
        device: cpu, cuda or mps.
        rows: Runs by seed.
        nanogpt_step_s: Way to run nanoGPT -> median seconds of its steps; empty: not measured.
        breaches: Rules that the runs do not keep, apart from the shortfalls.
    """

    track: Track
    device: str
    rows: Sequence[SeedRow]
    nanogpt_step_s: dict[str, float]
    breaches: Sequence[str]

    def figures(self) -> Figures:
        """Return mean, bound and worst of loss and time, and nanoGPT's seconds by way.

        The bound is the upper end of the mean loss's one-sided interval of 99% confidence, for the
        numbers of seeds that the rules have.
        """
        losses, times = [row.loss for row in self.rows], [row.time_s for row in self.rows]
        found: Figures = {"loss": statistics.mean(losses)}
        if (n := len(losses)) in RULES["critical_t"]:
            error = statistics.stdev(losses) / n**0.5
            found["bound"] = found["loss"] + RULES["critical_t"][n] * error
        found |= {"worst_loss": max(losses)}
        found |= {"time_s": statistics.mean(times), "worst_time_s": max(times)}
        steps = self.nanogpt_step_s.items()
        return found | {"nanogpt_s": {way: self.track.steps * step_s for way, step_s in steps}}

    def shortfalls(self) -> list[str]:
        """Return the rules that all runs together do not keep."""
        figures, target = self.figures(), self.track.target
        found = [
            f"nanoGPT in {way} was not measured: give --nanogpt DIR"
            for way in NANOGPT[self.device]
            if way not in self.nanogpt_step_s
        ]
        first, least, most = RULES["first_seed"], RULES["seeds"], max(RULES["critical_t"])
        seeds, n = sorted(row.seed for row in self.rows), len(self.rows)
        if seeds != [*range(first, first + n)] or not least <= n <= most:
            found.append(
                f"the seeds are {', '.join(map(str, seeds))}; a record has {first} to "
                f"{first + least - 1} or more, at most to {first + most - 1}: give --seeds"
            )
        if figures["loss"] > target:
            found.append(f"the mean loss is {figures['loss']:.4f}; the target is {target}")
        elif figures.get("bound", 0.0) >= target:
            found.append(
                f"the mean loss is below {figures['bound']:.4f} with p < 0.01, not below {target}"
            )
        return found
