"""The parts of the fit command that need no run: who writes config.yaml, and ends of a command."""

import gc
import logging
import os
import signal
import sys
import threading
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from tiny_fit import RUN, TINY_RUN, logged_steps
from torch._dynamo.exc import InternalTorchDynamoError

from gpt_lightning import cli
from gpt_lightning.errors import MemoryExhaustedError, PeerError, UserError
from gpt_lightning.parsing import read_config
from gpt_lightning.runs import mirror
from gpt_lightning.training import step_shape
from gpt_lightning.training.callbacks import EVERY_RUN
from gpt_lightning.training.command import TrainingCLI
from gpt_lightning.training.fit import _argument, fit, run_cli
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.trainer import TABLES

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def ended(monkeypatch, error: Exception) -> None:
    """End a subcommand of a command without a run with an error."""

    def fail(self, subcommand):
        raise error

    monkeypatch.setattr(LightningCLI, "_run_subcommand", fail)
    cli = object.__new__(TrainingCLI)
    cli.trainer, cli.model, cli.datamodule = "the trainer", "the module", "the data"
    cli._run_subcommand("validate")


def test_a_lack_of_memory_is_one_line_about_the_subcommand(monkeypatch):
    monkeypatch.setattr(step_shape, "out_of_memory_line", lambda *args: " ".join(args))
    with pytest.raises(MemoryExhaustedError, match=r"^validate the module the data$"):
        ended(monkeypatch, OUT_OF_MEMORY)


def test_a_failed_compilation_a_lost_rank_and_a_defect_differ(monkeypatch):
    compilation = InternalTorchDynamoError("g++ failed\n\n  in a file\nmore lines")
    with pytest.raises(UserError, match=r"\(InternalTorchDynamoError: g\+\+ failed in a file\): s"):
        ended(monkeypatch, compilation)
    compiler = InternalTorchDynamoError("C++ failed\nCommand:\ng++ x\nx.cpp:3: error: no y\nmore")
    with pytest.raises(UserError, match=r"Error: C\+\+ failed Command: x.cpp:3: error: no y\): s"):
        ended(monkeypatch, compiler)
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    with pytest.raises(PeerError, match="the connection to another rank is lost"):
        ended(monkeypatch, lost)
    with pytest.raises(KeyError):
        ended(monkeypatch, KeyError("a defect"))


def test_values_from_python_are_typed_and_callbacks_are_objects():
    values = (np.array([0.9, 0.95]), {2, 1}, np.float64(0.5), Path("a"), None)
    assert [*map(_argument, values)] == ["[0.9, 0.95]", "[1, 2]", "0.5", "a", "null"]
    with pytest.raises(UserError, match=r"callbacks has 'EarlyStopping'; give an object"):
        fit("quickstart", callbacks=["EarlyStopping"])


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_only_resume_auto_fetches_the_run_of_another_folder(
    resume, tmp_path, text_file, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    fetched = []
    monkeypatch.setattr(mirror, "restore", lambda *args: fetched.append(args))
    options = [f"--resume={resume}", "--checkpoint.folder=shared", "--ckpt_path=missing.ckpt"]
    with pytest.raises(UserError, match=r"missing\.ckpt"):
        run_cli(["fit", *TINY_RUN, *options])
    assert fetched == ([("shared", Path("lightning_logs/run"))] if resume == "auto" else [])


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(own_folder):
    words = ["fit", *TINY_RUN, "--trainer.log_every_n_steps=1"]
    assert cli.main([*words, "--trainer.max_steps=3"]) == 0
    run = Path("lightning_logs") / "run" / "version_0"
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    assert cli.main([*words, "--trainer.max_steps=4", "--resume=auto"]) == 0
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    assert logged_steps() == [1, 2, 3, 4]


def test_the_model_of_a_run_that_failed_is_freed_for_the_next_one(own_folder, monkeypatch):
    models = []

    step = GPTModule.training_step

    def training_step(self, *args):
        models.append(weakref.ref(self.model))
        if len(models) == 2:  # after the first step, GPTModule freezes what there is
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, *args)

    monkeypatch.setattr(GPTModule, "training_step", training_step)
    with pytest.raises(MemoryExhaustedError):
        run_cli(["fit", *TINY_RUN, "--trainer.max_steps=2"], callbacks=[])
    assert cli.main(["fit", "--print_config"]) == 0  # parser keeps last model
    gc.collect()
    assert models[0]() is None


def process_state() -> list:
    """Return what a run changes in its process and has to put back."""
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    return [
        dict(os.environ), [signal.getsignal(number) for number in numbers], descriptor,
        sys.excepthook, threading.excepthook, sys.stdout, sys.stderr, warnings.filters[:],
        gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(),
        {name: logging.getLogger(name).level for name in TABLES["quiet_loggers"]},
        torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
    ]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_its_process_as_it_was(fails, own_folder, monkeypatch):
    class Fails(L.Callback):
        def on_train_start(self, trainer, pl_module):
            assert process_state()[0] != before[0]  # PL_GLOBAL_SEED
            assert signal.getsignal(signal.SIGTERM) != before[1][0]
            assert torch.get_float32_matmul_precision() == "medium"
            if fails:
                raise KeyError("stopped")

    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    changes = ("--model.matmul_precision=medium", "--trainer.deterministic=true")
    before = process_state()
    with pytest.raises(KeyError) if fails else nullcontext():
        argv = ["fit", *TINY_RUN, "--trainer.max_steps=2", "--trainer.benchmark=true", *changes]
        run_cli(argv, callbacks=[Fails()])
    assert process_state() == before


def test_config_yaml_is_written_once_and_whole(own_folder):
    seen = set()

    class Looks(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.add((RUN / "config.yaml").stat().st_mtime_ns)

    argv = ["fit", *TINY_RUN, "--trainer.max_steps=8", "--trainer.num_sanity_val_steps=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *args, **kwargs: pytest.fail("not atomic"))
        run_cli(argv, callbacks=[Looks()])
    assert len(seen) == 1
    assert read_config(RUN / "config.yaml")["trainer"]["max_steps"] == 8
    assert not [*RUN.glob(".*")]  # no temporary file is left


IN_PLACE: list[str] = []  # files that were opened to be written anew


def note_opened(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & os.O_TRUNC:
        IN_PLACE.append(os.fsdecode(args[0]))


def test_no_file_of_a_run_is_written_in_place(own_folder):
    """A reader, or a kill in the middle of it, would leave a part of the file."""
    sys.addaudithook(note_opened)  # there is no way to remove it
    assert cli.main(["fit", *TINY_RUN, "--trainer.max_steps=8"]) == 0
    for command, *options in (
        ["resume", "--trainer.max_steps=12"],
        ["validate"],
        ["predict", "--trainer.limit_predict_batches=1"],
        ["plot"],
        ["report"],
    ):
        assert cli.main([command, str(RUN), *options]) == 0
    files = {Path(name).name for name in IN_PLACE if "lightning_logs" in name}
    assert {"hparams.yaml", "curves.png", "metrics.jsonl"} <= {path.name for path in RUN.iterdir()}
    assert {name for name in files if not name.startswith((".", "events."))} == set()


@pytest.mark.parametrize("section", [*EVERY_RUN, "trainer", "model", "data"])
def test_a_section_without_keys_is_one_line(section, own_folder, capsys):
    Path("wrong.yaml").write_text(f"\n{section}: 5\n")
    assert cli.main(["fit", *TINY_RUN, "--config=wrong.yaml"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"--config wrong.yaml: {section} is 5; expected keys below it" in line
    key = line.partition("such as ")[2].partition(";")[0]
    assert key.startswith(f"{section}.")
