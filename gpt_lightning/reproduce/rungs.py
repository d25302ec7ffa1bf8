"""Row of a published table, and the table: settings, published rows, tolerances."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Device = Literal["any", "cpu", "mps", "gpu"]


@dataclass(frozen=True)
class Rung:
    """One row of a ladder, or one variant of a run.

    Attributes:
        name: Name on the command line and in the tables.
        tolerance: (step, largest difference from that step on), in order of steps.
        configs: Names of configurations: a base, then overlays.
        iterations: Tolerance of the losses of training steps beside evaluations; empty: these are
            not compared.
        drift: (step, largest difference from that step on) where rounding errors have grown beyond
            the tolerance. A difference between the two bounds is `drift`, not a failure.
        published: Name of the published losses; None: `name`.
        published_times: Name of the published step times; None: that of the losses; empty: no times
            were published.
        settings: Options of `fit` beside the configurations.
        device: Device that the rung needs.
        losses_anywhere: True if every device gives its losses; the speed columns then stay empty.
        on_cpu: Keys of model.config on a CPU, where the values of the configuration need too much
            memory.
        not_on: Device on which the setting of this rung has another meaning.
        memory_gib: Memory in GiB that a machine needs to run it on a CPU; 0: little.
        time: Duration, as text.
        below: (step, bound): the loss at that step must be below the bound.
        note: Note in the table.
    """

    name: str
    tolerance: tuple[tuple[int, float], ...]
    configs: tuple[str, ...] = ()
    iterations: tuple[tuple[int, float], ...] = ()
    drift: tuple[tuple[int, float], ...] = ()
    published: str | None = None
    published_times: str | None = None
    settings: tuple[str, ...] = ()
    device: Device = "any"
    losses_anywhere: bool = False
    on_cpu: Mapping[str, str | int] = field(default_factory=dict)
    not_on: Device | None = None
    memory_gib: float = 0.0
    time: str = "seconds"
    below: tuple[int, float] | None = None
    note: str = ""

    def tolerance_at(self, step: int, split: str = "val") -> float:
        """Return the largest difference from the published loss that passes at a step."""
        bounds = self.iterations if self.iterations and split == "batch" else self.tolerance
        return [bound for first, bound in bounds if first <= step][-1]

    def drift_at(self, step: int) -> float:
        """Return the largest difference at a step that rounding errors explain; 0: none."""
        return [bound for first, bound in ((0, 0.0), *self.drift) if first <= step][-1]

    def on(self, device: str) -> "Rung":
        """Return the rung as it runs on a device: cpu, mps or gpu."""
        if device != "cpu" or not self.on_cpu:
            return self
        options = [f"--model.config.{key}={value}" for key, value in self.on_cpu.items()]
        settings = (*self.settings, "--trainer.accelerator=cpu", *options)
        values = ", ".join(f"{key} {value}" for key, value in self.on_cpu.items())
        note = f"{values}: theirs needs over 24 GB on a CPU"
        return replace(self, settings=settings, note="; ".join(filter(None, (self.note, note))))


@dataclass(frozen=True)
class Case:
    """A published table.

    Attributes:
        name: Name on the command line.
        title: Title of the report.
        source: Origin of the settings.
        kind: steps: the loss of each optimizer step. evaluations: losses of both splits at
            intervals.
        reference: File under reference/ with the published losses.
        times: File with the published step times, if it is another.
        eval_batches: Batches of each split in a published evaluation; None for steps.
        rungs: Rows of the table, in order.
        alternatives: True if the rungs are variants of one run. By default only the first one that
            this machine can run is run.
    """

    name: str
    title: str
    source: str
    kind: Literal["steps", "evaluations"]
    reference: str
    rungs: tuple[Rung, ...]
    times: str | None = None
    eval_batches: int | None = None
    alternatives: bool = False
