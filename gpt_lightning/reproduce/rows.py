"""Options of `reproduce`, and the rows of the tables that it prints and writes."""

from dataclasses import dataclass
from enum import StrEnum

from gpt_lightning.reproduce.rungs import Case, Rung
from gpt_lightning.tables.rows import column


class Verdict(StrEnum):
    """Result of a comparison, or the reason why there is none."""

    OK = "ok"
    DRIFT = "drift"
    FAILED = "FAIL"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Options:
    """Changes that the command line makes to every rung.

    Attributes:
        steps: Optimizer steps; None: those of the rung's configuration.
        accelerator: Accelerator of the Trainer; None: that of the rung's configuration.
        fit: Options of `fit`; they override everything else.
    """

    steps: int | None = None
    accelerator: str | None = None
    fit: tuple[str, ...] = ()

    def arguments(self, case: Case, rung: Rung) -> list[str]:
        """Return the arguments of `fit` for a rung."""
        quiet = ["--samples.max_new_tokens=0"]
        if case.kind == "steps":  # each step prints a line, and nobody resumes these runs
            quiet += [
                "--trainer.log_every_n_steps=1",
                "--trainer.enable_progress_bar=false",
                "--trainer.enable_checkpointing=false",
            ]
        configs = [f"--config={name}" for name in rung.configs]
        steps = [] if self.steps is None else [f"--trainer.max_steps={self.steps}"]
        accelerator = [f"--trainer.accelerator={self.accelerator}"] if self.accelerator else []
        return [*configs, *quiet, *rung.settings, *steps, *accelerator, *self.fit]


@dataclass(frozen=True)
class LossRow:
    """One published loss and ours; without a verdict if ours is of fewer batches than theirs."""

    rung: str = column("rung", width=17)
    step: int = column("step", "d")
    split: str = column("split")
    theirs: float | None = column("theirs", ".6f", 9)
    ours: float = column("ours", ".6f", 9)
    difference: float | None = column("difference", "+.6f")
    tolerance: float | None = column("tolerance", "g")
    verdict: str = column("verdict")
    step_ms: float | None = column("step ms", ",.1f", 9)
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    batches: int | None = column("batches", "d")


@dataclass(frozen=True)
class RungRow:
    """Outcome of a rung."""

    rung: str = column("rung", width=17)
    verdict: str = column("verdict", width=7)
    device: str = column("device", default="")
    losses: int = column("losses", "d", default=0)
    drifted: int = column("drift", "d", default=0)
    worst_difference: float | None = column("worst difference", ".2g")
    first_step_ms: float | None = column("first step ms", ",.0f")
    step_ms: float | None = column("step ms", ",.1f", 9)
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    mfu: float | None = column("MFU", ".1%", 6)
    peak_tflops: float | None = column("of TFLOP/s", ".4g")
    peak_memory_gib: float | None = column("memory GiB", ".2f")
    attention: str = column("attention", default="")
    speedup: float | None = column("speed-up", ".2f")
    fp32_speedup: float | None = column("over fp32", ".2f")
    published_first_step_ms: float | None = column("their first ms", ",.0f")
    published_step_ms: float | None = column("their ms", ",.1f", 9)
    published_tokens_per_sec: float | None = column("their tokens/s", ",.0f")
    published_mfu: float | None = column("their MFU", ".1%")
    published_speedup: float | None = column("their speed-up", ".2f")
    published_fp32_speedup: float | None = column("their over fp32", ".2f")
    note: str = column("note", default="")


@dataclass(frozen=True)
class SettingRow:
    """Setting of the published run, and the one that was read from ours."""

    rung: str = column("rung", width=17)
    setting: str = column("setting", width=23)
    theirs: str = column("theirs", width=12)
    ours: str = column("ours", width=12)
    verdict: str = column("verdict")

    @property
    def is_wrong(self) -> bool:
        """True if ours is another."""
        return self.verdict == Verdict.FAILED

    def difference(self) -> str:
        """Return both settings in one line."""
        return f"{self.setting} is {self.ours}, theirs is {self.theirs}"


@dataclass(frozen=True)
class PhaseRow:
    """Wall time of one phase of a rung."""

    rung: str = column("rung", width=17)
    phase: str = column("phase", width=19)
    seconds: float = column("seconds", ",.1f", 9)
