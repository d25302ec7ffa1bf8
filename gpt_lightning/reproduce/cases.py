"""Published tables as data: rungs, settings, tolerances, curves and reports of reference/*.yaml."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

from gpt_lightning.files import Fields, yaml_beside

Device = Literal["any", "cpu", "mps", "gpu"]
Bounds = Sequence[Sequence[float]]  # pairs of a step and a difference


class Verdict(StrEnum):
    """Result of a comparison, or the reason why there is none."""

    OK = "ok"
    DRIFT = "drift"
    FAILED = "FAIL"
    ERROR = "error"
    SKIPPED = "skipped"


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
        published: Name of the published losses; in a file by default `name`.
        published_times: Name of the published step times, in a file by default that of the losses;
            empty: no times were published.
        settings: Options of `fit` beside the configurations.
        theirs: Fields of the published run, with its device if no other will do.
        device: Device that the rung needs.
        losses_anywhere: True if every device gives its losses; the speed columns then stay empty.
        on_cpu: Keys of model.config on a CPU, where the values of the configuration need too much
            memory.
        not_on: Device on which the setting of this rung has another meaning.
        memory_gib: Memory in GiB that a machine needs to run it on a CPU; 0: little.
        time: Duration, as text.
        below: (step, bound): the loss at that step must be below the bound; empty: no such bound.
        note: Note in the table.
    """

    name: str
    tolerance: Bounds
    configs: Sequence[str] = ()
    iterations: Bounds = ()
    drift: Bounds = ()
    published: str = ""
    published_times: str = ""
    settings: Sequence[str] = ()
    theirs: Fields = field(default_factory=dict)
    device: Device = "any"
    losses_anywhere: bool = False
    on_cpu: Mapping[str, str | int] = field(default_factory=dict)
    not_on: Device | None = None
    memory_gib: float = 0.0
    time: str = "seconds"
    below: Sequence[float] = ()
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
        values = ", ".join(f"{key} {value}" for key, value in self.on_cpu.items())
        notes = (self.note, f"{values}: theirs needs over 24 GB on a CPU")
        return replace(
            self,
            settings=(*self.settings, "--trainer.accelerator=cpu", *options),
            theirs={**self.theirs, **self.on_cpu},
            note="; ".join(filter(None, notes)),
        )


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
        rungs: Rows of the table, in order.
        times: File with the published step times, if it is another.
        eval_batches: Batches of each split in a published evaluation; None for steps.
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


def fit_arguments(case: Case, rung: Rung, changes: Iterable[str] = ()) -> list[str]:
    """Return the arguments of `fit` for a rung.

    Args:
        case: Case of the rung.
        rung: The rung.
        changes: Options of `fit` that override everything else.
    """
    quiet = ["--samples.max_new_tokens=0"]
    if case.kind == "steps":  # each step prints a line, and nobody resumes these runs
        quiet += [
            "--trainer.log_every_n_steps=1",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_checkpointing=false",
        ]
    return [*(f"--config={name}" for name in rung.configs), *quiet, *rung.settings, *changes]


@dataclass(frozen=True)
class Curve:
    """Published curve of losses by tokens.

    Attributes:
        title: Model and data.
        tokenizer: Name of the tokenizer.
        tokens_per_step: Tokens of an optimizer step.
        evaluations: File under reference/ with `step` and losses.
        name: Name in the first column of the files.
        iterations: File with the losses of training steps, if there is one.
    """

    title: str
    tokenizer: str
    tokens_per_step: int
    evaluations: str
    name: str
    iterations: str | None = None


def make_case(name: str, table: Fields) -> Case:
    """Make a case of a file of reference/.

    Beside the fields of Case and Rung a table has `stacked`, the folder of configurations with the
    rungs' names, each an overlay of all before it, and `settings`, options of all its rungs.
    """
    rungs: list[Rung] = []
    overlays: list[str] = []
    for values in table["rungs"]:
        published = values.get("published", values["name"])
        if "configs" not in values:
            overlays = [*overlays, f"{table['stacked']}/{values['name']}"]
        defaults = {"configs": overlays, "published": published, "published_times": published}
        rung = Rung(**defaults | values)
        anywhere = rung.device == "any" or rung.losses_anywhere
        theirs = rung.theirs | ({} if anywhere else {"accelerator": rung.device})
        settings = [*table.get("settings", ()), *rung.settings]
        rungs.append(replace(rung, settings=settings, theirs=theirs))
    fields = {key: table[key] for key in Case.__dataclass_fields__ if key in table}
    return Case(name, **fields | {"rungs": tuple(rungs)})


TABLES: dict[str, Fields] = {
    path.stem: yaml_beside(path)
    for path in sorted((Path(__file__).parents[1] / "reference").glob("*.yaml"))
}
CASES = {name: make_case(name, table) for name, table in TABLES.items() if "rungs" in table}
CURVES = {
    name: Curve(**fields)
    for table in TABLES.values()
    for name, fields in table.get("curves", {}).items()
}
# name -> title and origin of a report whose figures are no losses
REPORTS: dict[str, list[str]] = TABLES["reports"]["reports"]
