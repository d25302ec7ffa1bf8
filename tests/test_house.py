"""The floor plan, measured: what a step enters, what a fit imports, how long functions are."""

import ast
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest

import gpt_lightning
from gpt_lightning.cli import main
from gpt_lightning.training import fit

PACKAGE = Path(gpt_lightning.__file__).parent
TINY = (
    "--model.config.n_layer=2",
    "--model.config.n_head=2",
    "--model.config.n_embd=16",
    "--model.config.block_size=16",
    "--model.config.vocab_size=null",
    "--model.compile=false",
    "--model.schedule=constant",
    "--data.batch_size=2",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=8",
)


@pytest.fixture
def shards(text_file, tmp_path, monkeypatch) -> str:
    """A prepared dataset, and a working directory of its own for the run."""
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", str(text_file), "--out", "shards", "--tokenizer", "char"]) == 0
    return "shards"


class Entered(L.Callback):
    """Notes which of our files Python enters in one optimizer step.

    From the start of the seventh step's batch to the start of the eighth's, past the warm-up of the
    rates: reading the batch, forward, backward, update, and every callback.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 6:
            sys.setprofile(self._note)
        elif batch_idx == 7:
            sys.setprofile(None)

    def _note(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.files.add(str(path.relative_to(PACKAGE)))


def test_an_optimizer_step_enters_few_files(shards):
    entered = Entered()
    fit.run_cli(["fit", *TINY, f"--data.dataset={shards}"], callbacks=[entered])
    assert "model/gpt.py" in entered.files
    # the rebuild had 12; since then the signals and the watchdog have files of their own
    assert len(entered.files) <= 15, "\n".join(sorted(entered.files))


@pytest.mark.slow
def test_a_fit_on_ready_shards_imports_few_files(shards):
    code = (
        "import sys; from gpt_lightning.cli import main; assert main(sys.argv[1:]) == 0; "
        "print(*(m for m in sys.modules if m.startswith('gpt_lightning')))"
    )
    command = [sys.executable, "-c", code, "fit", *TINY, f"--data.dataset={shards}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {*done.stdout.splitlines()[-1].split()} - {"gpt_lightning", "gpt_lightning.cli"}
    assert "gpt_lightning.training.module" in imported
    assert not any(name.startswith("gpt_lightning.prepare") for name in imported)
    # the rebuild had 45; since then Trainer's checks, signals, watchdog, output and TensorBoard's
    # events have own files, the events name the commit (hardware.machine), models have variants,
    # and checkpointing has policies
    assert len(imported) <= 57, "\n".join(sorted(imported))


def test_no_function_is_longer_than_a_screen():
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= 72
    ]
    assert not long, long
