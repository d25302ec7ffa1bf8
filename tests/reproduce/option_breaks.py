"""Break the options of a rung, one after the other, and see which settings differ.

Every run is built as `fit` builds it, compared, and ended before its first step, so that rungs of
any size take seconds on any machine.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, cast

from jsonargparse import ArgumentParser

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.hardware.device import device_kind, free_memory
from gpt_lightning.parsing import resolve_configs
from gpt_lightning.reproduce.cases import Case, Rung, fit_arguments
from gpt_lightning.reproduce.formulas import CHECKED
from gpt_lightning.reproduce.settings import (
    TABLE,
    batch_settings,
    compare_settings,
    read_settings,
)
from gpt_lightning.tables.rows import Console, Row, Verdict, row_type
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.recorder import RunRecorder
from gpt_lightning.training.datamodule import TokenDataModule, token_data
from gpt_lightning.training.module import GPTModule

TEXT = "".join(f"a text of another author, line {i}\n" for i in range(20_000))
# setting of a rung that was broken, and what the comparison saw
BreakRow = row_type("case:/22 rung:/17 setting:/31 value:/15 broken_to verdict seen_as")


def run_selftest(rungs: list[tuple[Case, Rung]]) -> int:
    """Break the settings of rungs, and print a row for each.

    Returns:
        0: Every break was seen, and nothing else was. 1: One was not.
    """
    parser, console = training.training_parser(), Console(BreakRow)
    print(console.header())
    counts: Counter[str] = Counter()
    for case, rung in rungs:
        for row in broken_rows(case, rung, parser):
            print(console.line(row), flush=True)
            counts[row.verdict] += 1
    print(f"\n{', '.join(f'{n} {verdict}' for verdict, n in counts.items())}")
    return 1 if Verdict.FAILED in counts else 0


def broken_rows(case: Case, rung: Rung, parser: ArgumentParser) -> Iterator[Row]:
    """Yield a row for the rung as it is, and one for each setting of it that is broken.

    These are the keys in which a rung differs from the rung before it, and all keys that the first
    rung's configurations set.
    """

    def values(rung: Rung, defaults: bool = True) -> Fields:
        own = resolve_configs([*(f"--config={name}" for name in rung.configs), *rung.settings])
        return {**vars(parser.parse_args(["fit", *own], defaults=defaults).fit.as_flat())}

    seen = wrong_settings(case, rung, [])
    unbroken = Verdict.FAILED if seen else Verdict.OK
    yield BreakRow(case.name, rung.name, "", "", "", unbroken, ", ".join(seen))
    ours, earlier, before = values(rung), {}, case.rungs[: case.rungs.index(rung)]
    keys = set(values(rung, defaults=False))
    if before:
        earlier = values(before[-1])
        keys = {key for key in ours if ours[key] != earlier.get(key)}
    for key in sorted(keys - {"config"}):
        start = (case.name, rung.name, key, option_text(ours[key]))
        if reason := why_whole(key, rung.theirs):
            yield BreakRow(*start, "", Verdict.SKIPPED, reason)
            continue
        wrong = wrong_value(key, ours[key], earlier)
        try:
            seen = wrong_settings(case, rung, [f"--{key}={wrong}"])
        except UserError as error:
            seen = [str(error)]
        verdict = "red" if seen else Verdict.FAILED
        yield BreakRow(*start, wrong, verdict, ", ".join(seen) or "nothing")


def why_whole(key: str, theirs: Fields) -> str:
    """Return the reason why a key is left whole; empty if it is broken."""
    name = key.rpartition(".")[2]
    if name in theirs and (name, theirs[name]) != ("accelerator", "cpu"):
        return ""
    return TABLE["whole"].get(key, "")


def wrong_value(key: str, value: Any, before: Fields) -> str:
    """Return another value of a key: that of the rung before, if there is one."""
    if key in before and key != "trainer.accelerator":
        return option_text(before[key])
    if key in TABLE["wrong"]:
        return next(other for other in TABLE["wrong"][key] if other != option_text(value))
    if isinstance(value, bool):
        return option_text(not value)
    return str(value + 1 if isinstance(value, int) else value * 1.01)


def option_text(value: Any) -> str:
    """Return a value as an option has it."""
    return "null" if value is None else str(value).lower()


class ReadError(Exception):
    """End of a run that was started for its settings alone."""


def wrong_settings(case: Case, rung: Rung, changes: list[str]) -> list[str]:
    """Build a run with changes, and return the settings in which it differs from the published one.

    On a machine without the rung's device it is built on the CPU, and that difference is left out.

    Raises:
        UserError: The changes cannot be run.
    """
    ours: Fields = {}

    def read(module: GPTModule) -> None:
        data = cast(TokenDataModule, token_data(module.trainer))
        batches = list(islice(data.reader.train_loader, 2))
        ours.update(read_settings(module) | batch_settings(batches))
        raise ReadError

    recorder = RunRecorder(lambda seen: None, each_step=False, begin=read)
    away = rung.device in ("gpu", "mps") and rung.device != device_kind().replace("cuda", "gpu")
    here = ["--trainer.enable_checkpointing=false"]
    here += ["--trainer.accelerator=cpu"] if away else []
    with tempfile.TemporaryDirectory() as folder:
        if "--data.corpus=null" in changes:
            (Path(folder) / "text.txt").write_text(TEXT)
            changes = [*changes, f"--data.text_file={folder}/text.txt", f"--data.data_dir={folder}"]
        arguments = fit_arguments(case, rung, [*here, *changes])
        with suppress(ReadError):
            training.run_cli(["fit", *arguments], callbacks=[recorder], folder=Path(folder) / "run")
    free_memory()
    if away and "--trainer.accelerator=cpu" not in changes:
        ours["accelerator"] = rung.device
    rows = compare_settings(rung, ours)
    unread = [f"{name} (not read)" for name in rung.theirs if name not in (*ours, *CHECKED, "chip")]
    return [row.setting for row in rows if row.verdict == Verdict.FAILED] + unread
