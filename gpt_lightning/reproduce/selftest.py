"""`reproduce --selftest`: break each setting that a rung is about, and see that it is noticed.

Every run is built as `fit` builds it, compared, and ended before its first step, so that rungs of
any size take seconds on any machine.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import device_kind
from gpt_lightning.parsing import resolve_configs
from gpt_lightning.reports.tables import Console, column
from gpt_lightning.reproduce.cases import Case, Rung
from gpt_lightning.reproduce.rows import Options, Verdict
from gpt_lightning.reproduce.runner import fit_arguments
from gpt_lightning.reproduce.settings import (
    Settings,
    batch_settings,
    compare_settings,
    published_settings,
    read_settings,
)
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.probe import ProbedError, RunProbe

# wrong values; without one here, a switch is flipped, an integer is one more, a number 1% more
WRONG = {
    "trainer.precision": ("bf16-mixed", "32-true"),
    "model.config.n_head": ("1",),
    "model.config.n_embd": ("132",),  # a multiple of every rung's heads
    "model.config.vocab_size": ("50300",),
    "model.config.dropout": ("0.1", "0.2"),
    "model.config.init": ("gpt2", "default"),
    "model.config.attention": ("naive", "sdpa"),
    "model.config.activation": ("gelu", "gelu_tanh"),
    "model.schedule": ("constant", "cosine"),
    "model.decay": ("matrices", "all"),
    "model.betas": ("[0.9, 0.95]",),
    "model.compile": ("true", "false"),
    "model.matmul_precision": ("high", "highest"),
    "data.corpus": ("null",),
    "data.tokenizer": ("char", "gpt2"),
    "data.val_fraction": ("0.2",),
    "data.order": ("sequential", "random"),
    "data.eval_batch_size": ("13",),
}
NOT_BROKEN = {
    "trainer.max_steps": "--steps shortens a run",
    "trainer.devices": "takes a second process",
    "trainer.log_every_n_steps": "no number depends on it",
    "trainer.check_val_every_n_epoch": "evaluations at other steps are missing losses",
    "speed.peak_flops": "MFU names its peak",
    "data.eval_train_batches": "losses of fewer batches have no verdict",
}
TEXT = "".join(f"a text of another author, line {i}\n" for i in range(20_000))


@dataclass(frozen=True)
class BreakRow:
    """Setting of a rung that was broken, and what the comparison saw."""

    case: str = column("case", width=22)
    rung: str = column("rung", width=17)
    setting: str = column("setting", width=31)
    value: str = column("value", width=12)
    broken: str = column("broken to", width=12)
    verdict: str = column("verdict", width=7)
    seen: str = column("seen as")


def run_selftest(cases: list[Case], rungs: list[str] | None) -> int:
    """Break the rungs of some cases, of these names if any are given, and print a row for each.

    Returns:
        0: Every break was seen, and nothing else was. 1: One was not.
    """
    parser, console = training.training_parser(), Console(BreakRow)
    print(console.header())
    counts: dict[str, int] = {}

    def values(case: Case, rung: Rung) -> Settings:
        options = resolve_configs(fit_arguments(case, rung, Options()))
        return vars(parser.parse_args(["fit", *options]).fit.as_flat())

    for case in cases:
        for before, rung in zip((None, *case.rungs), case.rungs, strict=False):
            if rungs is not None and rung.name not in rungs:
                continue
            earlier = {} if before is None else values(case, before)
            for row in broken_rows(case, rung, values(case, rung), earlier):
                print(console.line(row), flush=True)
                counts[row.verdict] = counts.get(row.verdict, 0) + 1
    print(f"\n{', '.join(f'{n} {verdict}' for verdict, n in counts.items())}")
    return 1 if Verdict.FAILED in counts else 0


def broken_rows(case: Case, rung: Rung, values: Settings, before: Settings) -> Iterator[BreakRow]:
    """Yield a row for the rung as it is, and one for each setting of it that is broken.

    Args:
        case: Published table.
        rung: Rung of it.
        values: Values of all keys of `fit` in this rung.
        before: Those in the rung before; empty for the first rung, whose own keys are all broken.
    """
    seen = wrong_settings(case, rung, [])
    unbroken = Verdict.FAILED if seen else Verdict.OK
    yield BreakRow(case.name, rung.name, "", "", "", unbroken, ", ".join(seen))
    keys = {key for key in values if values[key] != before.get(key)} if before else own_keys(rung)
    for key in sorted(keys - {"config"}):
        value = "null" if values[key] is None else str(values[key]).lower()
        start = (case.name, rung.name, key, value)
        reason = why_not_broken(case, rung, key)
        if reason:
            yield BreakRow(*start, "", Verdict.SKIPPED, reason)
            continue
        wrong = wrong_value(key, values[key], before)
        try:
            seen = wrong_settings(case, rung, [f"--{key}={wrong}"])
        except UserError as error:
            seen = [str(error)]
        verdict = "red" if seen else Verdict.FAILED
        yield BreakRow(*start, wrong, verdict, ", ".join(seen) or "nothing")


def own_keys(rung: Rung) -> set[str]:
    """Return the keys that a rung's configurations and options set."""
    files = resolve_configs([f"--config={name}" for name in rung.configs])
    keys = {option.removeprefix("--").partition("=")[0] for option in rung.settings}
    for file in files:
        path = Path(file.removeprefix("--config="))
        keys |= set(flat_keys(yaml.safe_load(path.read_text(encoding="utf-8"))))
    return keys


def flat_keys(table: Settings, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a nested table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def why_not_broken(case: Case, rung: Rung, key: str) -> str:
    """Return the reason why a key is not broken; empty if it is."""
    if key == "trainer.accelerator" and "device" not in published_settings(case, rung):
        return "every device gives its losses"
    if key == "trainer.accelerator" and rung.device == "cpu":
        return "the CPU is every machine's device"
    if key == "trainer.val_check_interval" and case.kind == "steps":
        return "there is no validation split"
    return NOT_BROKEN.get(key, "")


def wrong_value(key: str, value: Any, before: Settings) -> str:
    """Return another value of a key: that of the rung before, if there is one."""
    if key == "trainer.accelerator":
        return "cpu"
    if before:
        return "null" if before[key] is None else str(before[key]).lower()
    if key in WRONG:
        return next(other for other in WRONG[key] if other != str(value).lower())
    if isinstance(value, bool):
        return str(not value).lower()
    return str(value + 1 if isinstance(value, int) else value * 1.01)


def wrong_settings(case: Case, rung: Rung, changes: list[str]) -> list[str]:
    """Build a run with changes, and return the settings in which it differs from the published one.

    On a machine without the rung's device it is built on the CPU, and the device does not count.

    Raises:
        UserError: The changes cannot be run.
    """
    ours: Settings = {}
    probe = RunProbe(lambda module: ours.update(read_settings(module)), stop=True)
    away = rung.device in ("gpu", "mps") and rung.device != device_kind().replace("cuda", "gpu")
    arguments = fit_arguments(case, rung, Options(accelerator="cpu" if away else None))
    with tempfile.TemporaryDirectory() as folder:
        if "--data.corpus=null" in changes:
            (Path(folder) / "text.txt").write_text(TEXT)
            changes = [*changes, f"--data.text_file={folder}/text.txt", f"--data.data_dir={folder}"]
        run = ["fit", *arguments, "--trainer.enable_checkpointing=false", *changes]
        try:
            training.run_cli(run, callbacks=[probe], folder=Path(folder) / "run")
        except ProbedError:
            ours |= batch_settings(probe.batches)
    theirs = published_settings(case, rung)
    rows = compare_settings(rung, theirs, ours)
    ignored = "device" if away and "--trainer.accelerator=cpu" not in changes else ""
    wrong = [row.setting for row in rows if row.is_wrong and row.setting != ignored]
    return wrong + [f"{name} (not read)" for name in theirs if name not in (*ours, "chip")]
