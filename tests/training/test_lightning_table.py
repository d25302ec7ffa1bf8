"""Every row of lightning_table.py: the effect of what works, the message of what is refused."""

import contextlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks, loggers
from lightning_table import (
    ARGUMENTS,
    CALLBACKS,
    DOCS,
    LOGGERS,
    TABLES,
    Halt,
    Row,
    Run,
    Watch,
    document,
)
from tiny_fit import TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.commands.check_resume import compare
from gpt_lightning.errors import UserError
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.fit import default_callbacks, run_cli
from gpt_lightning.training.trainer import Trainer

BASE = ["--data.batch_size=2", "--model.compile=false", "--trainer.log_every_n_steps=1"]


def cases(verdict: str) -> list:
    """Return the rows of a verdict as parameters with readable names."""
    return [
        pytest.param(row, id=f"{row.name}-{i}", marks=[pytest.mark.slow] * row.slow)
        for rows in TABLES.values()
        for i, row in enumerate(rows)
        if row.verdict == verdict
    ]


def option(key: str, value) -> str:
    """Return an argument of the Trainer as an option of the command line."""
    if isinstance(value, list):
        value = [{"class_path": f"{type(v).__module__}.{type(v).__name__}"} for v in value]
    return f"--trainer.{key}={value if isinstance(value, str) else json.dumps(value)}"


def fit(row: Row, capsys, caplog, more: Sequence[L.Callback] = (), *options: str) -> Run:
    """Train as the row says, in the working folder, with the notes of a Watch."""
    given = {"max_steps": 4} | row.given
    watch, theirs = Watch(), given.pop("callbacks", list)()
    options = [*(option(key, value) for key, value in given.items()), *options]
    failing = any(type(callback).__name__ == "Raise" for callback in theirs)
    found = [*theirs, *more, watch, *default_callbacks("fit")]
    try:
        run_cli(["fit", *TINY_RUN, *BASE, *options, *row.also], callbacks=found)
    except RuntimeError:
        assert failing
    trainer = watch.trainer
    text = capsys.readouterr()
    written = [str(path) for path in Path().rglob("*") if path.is_file()]
    files = [name for name in written if name != "text.txt" and not name.startswith("data/")]
    metrics = [Path(name) for name in files if name.endswith("metrics.jsonl")]
    rows = [json.loads(line) for path in metrics for line in path.read_text().splitlines()]
    output = text.out + text.err + caplog.text
    return Run(trainer, trainer.lightning_module, trainer.datamodule, watch, output, rows, files)


@pytest.fixture
def folder(tmp_path, text_file, monkeypatch):
    """A working folder, and PyTorch's global switches restored."""
    monkeypatch.chdir(tmp_path)
    before = torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = before[0]
    torch.autograd.set_detect_anomaly(before[1])


def fit_by_ranks(row: Row) -> Run:
    """Train in processes of their own, which Lightning's launcher starts anew for each rank."""
    options = [option(key, value) for key, value in ({"max_steps": 4} | row.given).items()]
    command = [sys.executable, "-m", "gpt_lightning", "fit", *TINY_RUN, *BASE, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    lines = Path("lightning_logs/run/version_0/metrics.jsonl").read_text().splitlines()
    return Run(None, None, None, Watch(), done.stdout, [json.loads(line) for line in lines], [])


@pytest.mark.slow
@pytest.mark.parametrize("row", cases("works"))
def test_works_also_across_a_resume(row, folder, capsys, caplog):
    # tests/faults/test_two_ranks.py resumes two ranks
    run = fit_by_ranks(row) if row.given.get("devices") == 2 else fit(row, capsys, caplog)
    if row.resumes and row.given.get("devices") != 2:
        check_resume(row, run, capsys, caplog)
    assert row.check(run), (run.watch.__dict__, run.files, run.output[-3000:], run.rows[-3:])


def check_resume(row: Row, whole: Run, capsys, caplog) -> None:
    """Train again in two sessions, in a folder of their own, and compare with the whole run."""
    parts = Path("parts")
    parts.mkdir()
    for name in ("text.txt", "data"):
        (parts / name).symlink_to(Path(name).resolve())
    with contextlib.chdir(parts):
        assert fit(row, capsys, caplog, [Halt()]).trainer.global_step == 2
        resumed = fit(row, capsys, caplog, (), "--resume=auto")
    assert "step 2, " in resumed.output
    assert resumed.trainer.global_step == whole.trainer.global_step
    root = Path(row.given.get("default_root_dir", "."))
    one, two = (where / root / "lightning_logs" / "run" / "version_0" for where in (Path(), parts))
    equal = dict.fromkeys(("weights", "optimizer", "data", "metrics"), True)
    assert compare(one, two) == equal


@pytest.mark.parametrize("row", cases("error"))
def test_is_refused(row, folder, capsys, monkeypatch):
    package = re.search(r"pip install '?(\w+)", row.says)
    if package and package[1] == "psutil":
        monkeypatch.setitem(sys.modules, "psutil", None)  # as if it were missing
    elif package and find_spec(package[1].replace("-", "_")):
        pytest.skip(f"{package[1]} is installed")
    if row.also:  # not for Trainer alone
        theirs = row.given.get("callbacks", list)()
        with pytest.raises(UserError) as error:
            run_cli(["fit", *TINY_RUN, *BASE, *row.also], callbacks=theirs)
        assert not Path("lightning_logs").exists()
    else:
        given = dict(row.given)
        given["callbacks"] = [*given.get("callbacks", list)(), RunCheckpoint()]
        with pytest.raises(UserError) as error:
            Trainer(**{"accelerator": "cpu", "logger": False, **given})
    message = str(error.value)
    assert row.says in message, message
    assert "\n" not in message
    assert len(message) < 300
    assert "http" not in message


@pytest.mark.parametrize(
    "wrong",
    ["gradient_clip_val=-1", "strategy=ddp_spawn", "callbacks+=StochasticWeightAveraging"],
)
def test_a_refusal_is_one_line_with_exit_code_2_and_leaves_nothing(wrong, folder, capsys):
    more = ["--trainer.callbacks.swa_lrs=0.1"] if "callbacks" in wrong else []
    assert main(["fit", *TINY_RUN, f"--trainer.{wrong}", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: trainer.")
    assert error.count("\n") == 1
    assert not Path("lightning_logs").exists()


def test_every_argument_of_lightning_has_a_row():
    arguments = set(inspect.signature(L.Trainer).parameters)
    assert {row.name for row in ARGUMENTS} == arguments


@pytest.mark.parametrize(("rows", "module"), [(CALLBACKS, callbacks), (LOGGERS, loggers)])
def test_every_class_of_lightning_has_a_row(rows, module):
    assert {row.name for row in rows} == set(module.__all__)


def test_the_document_is_made_from_the_rows():
    advice = "run python tests/training/lightning_table.py"
    assert DOCS.read_text(encoding="utf-8") == document(), advice
