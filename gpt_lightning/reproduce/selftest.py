"""`reproduce --selftest`: break each setting that a rung is about, and see that it is noticed.

Every run is built as `fit` builds it, compared, and ended before its first step, so that rungs of
any size take seconds on any machine.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import device_kind, free_memory
from gpt_lightning.parsing import resolve_configs
from gpt_lightning.reproduce import settings
from gpt_lightning.reproduce.cases import Case, Options, Rung, Settings
from gpt_lightning.tables.rows import Console, Row, column, row_type
from gpt_lightning.tables.verdicts import Verdict
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.recorder import ProbedError, RunProbe

TEXT = "".join(f"a text of another author, line {i}\n" for i in range(20_000))
BREAKS = yaml.safe_load(Path(__file__).with_name("breaks.yaml").read_text(encoding="utf-8"))


# setting of a rung that was broken, and what the comparison saw
BreakRow = row_type(
    "case rung setting value broken_to verdict seen_as",
    case=column("case", width=22),
    rung=column("rung", width=17),
    setting=column("setting", width=31),
    value=column("value", width=15),
)


def run_selftest(cases: list[Case], rungs: list[str] | None) -> int:
    """Break the rungs of some cases, of these names if any are given, and print a row for each.

    Returns:
        0: Every break was seen, and nothing else was. 1: One was not.
    """
    parser, console = training.training_parser(), Console(BreakRow)
    print(console.header())
    counts: Counter[str] = Counter()

    def values(case: Case, rung: Rung) -> Settings:
        options = resolve_configs(Options().arguments(case, rung))
        return vars(parser.parse_args(["fit", *options]).fit.as_flat())

    for case in cases:
        for before, rung in zip((None, *case.rungs), case.rungs, strict=False):
            if rungs is not None and rung.name not in rungs:
                continue
            ours, earlier = values(case, rung), {} if before is None else values(case, before)
            keys = {key for key in ours if ours[key] != earlier.get(key)}
            if before is None:
                keys = own_keys(parser, rung)
            for row in broken_rows(case, rung, ours, earlier, keys):
                print(console.line(row), flush=True)
                counts[row.verdict] += 1
    print(f"\n{', '.join(f'{n} {verdict}' for verdict, n in counts.items())}")
    return 1 if Verdict.FAILED in counts else 0


def broken_rows(
    case: Case, rung: Rung, values: Settings, before: Settings, keys: set[str]
) -> Iterator[Row]:
    """Yield a row for the rung as it is, and one for each setting of it that is broken.

    Args:
        case: Published table.
        rung: Rung of it.
        values: Values of all keys of `fit` in this rung.
        before: Those in the rung before; empty for the first rung.
        keys: Keys to break.
    """
    seen = wrong_settings(case, rung, [])
    unbroken = Verdict.FAILED if seen else Verdict.OK
    yield BreakRow(case.name, rung.name, "", "", "", unbroken, ", ".join(seen))
    for key in sorted(keys - {"config"}):
        start = (case.name, rung.name, key, option_text(values[key]))
        reason = why_whole(key, rung.theirs)
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


def own_keys(parser: ArgumentParser, rung: Rung) -> set[str]:
    """Return the keys that a rung's configurations and options set."""
    options = resolve_configs([*(f"--config={name}" for name in rung.configs), *rung.settings])
    return set(vars(parser.parse_args(["fit", *options], defaults=False).fit.as_flat()))


def why_whole(key: str, theirs: Settings) -> str:
    """Return the reason why a key is left whole; empty if it is broken."""
    name = key.rpartition(".")[2]
    if name in theirs and (name, theirs[name]) != ("accelerator", "cpu"):
        return ""
    return str(BREAKS["whole"].get(key, ""))


def wrong_value(key: str, value: Any, before: Settings) -> str:
    """Return another value of a key: that of the rung before, if there is one."""
    if key in before and key != "trainer.accelerator":
        return option_text(before[key])
    if key in BREAKS["wrong"]:
        return str(next(other for other in BREAKS["wrong"][key] if other != option_text(value)))
    if isinstance(value, bool):
        return option_text(not value)
    return str(value + 1 if isinstance(value, int) else value * 1.01)


def option_text(value: Any) -> str:
    """Return a value as an option has it."""
    return "null" if value is None else str(value).lower()


def wrong_settings(case: Case, rung: Rung, changes: list[str]) -> list[str]:
    """Build a run with changes, and return the settings in which it differs from the published one.

    On a machine without the rung's device it is built on the CPU, and that difference is left out.

    Raises:
        UserError: The changes cannot be run.
    """
    ours: Settings = {}
    probe = RunProbe(lambda module: ours.update(settings.read_settings(module)), stop=True)
    away = rung.device in ("gpu", "mps") and rung.device != device_kind().replace("cuda", "gpu")
    arguments = Options(accelerator="cpu" if away else None).arguments(case, rung)
    with tempfile.TemporaryDirectory() as folder:
        if "--data.corpus=null" in changes:
            (Path(folder) / "text.txt").write_text(TEXT)
            changes = [*changes, f"--data.text_file={folder}/text.txt", f"--data.data_dir={folder}"]
        run = ["fit", *arguments, "--trainer.enable_checkpointing=false", *changes]
        try:
            training.run_cli(run, callbacks=[probe], folder=Path(folder) / "run")
        except ProbedError:
            ours |= settings.batch_settings(probe.batches)
        finally:
            free_memory()
    rows = settings.compare_settings(rung, ours)
    left_out = "accelerator" if away and "--trainer.accelerator=cpu" not in changes else ""
    wrong = [row.setting for row in rows if row.verdict == Verdict.FAILED]
    unread = [f"{name} (not read)" for name in rung.theirs if name not in (*ours, "chip")]
    return [name for name in wrong if name != left_out] + unread
