"""Tracks and rules of the speedrun, and the figures of its runs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpt_lightning.tables.rows import column

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RULES: dict[str, Any] = TABLES["rules"]


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


@dataclass(frozen=True)
class SeedRow:
    """Run of one seed."""

    seed: int = column("seed", "d")
    loss: float = column("validation loss", ".4f")
    time_s: float = column("time s", ".1f")
    compile_s: float = column("of it compiling s", ".1f")
    process_s: float = column("process s", ".1f")
    steps: int = column("steps", ",d")
    tokens: float = column("tokens", ",.0f")
    parameters: int = column("parameters", ",d")
    curve: Sequence[tuple[float, float]] = column("curve", console=False)


@dataclass(frozen=True)
class Result:
    """Runs of a track, and the time of nanoGPT beside them.

    Attributes:
        track: The track.
        device: cpu, cuda or mps.
        rows: Runs by seed.
        nanogpt_step_s: Median seconds of nanoGPT's steps; None: not measured.
        breaches: Rules that the runs do not keep; empty for a record.
    """

    track: Track
    device: str
    rows: Sequence[SeedRow]
    nanogpt_step_s: float | None
    breaches: Sequence[str]

    def figures(self) -> dict[str, float]:
        """Return mean and worst of loss and time, and nanoGPT's time in seconds, if measured."""
        losses, times = [row.loss for row in self.rows], [row.time_s for row in self.rows]
        found = {
            "loss": statistics.mean(losses),
            "worst_loss": max(losses),
            "time_s": statistics.mean(times),
            "worst_time_s": max(times),
        }
        if self.nanogpt_step_s is not None:
            found["nanogpt_s"] = self.track.steps * self.nanogpt_step_s
        return found
