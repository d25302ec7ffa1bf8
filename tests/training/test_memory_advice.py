"""Out-of-memory errors: one line, with a configuration of the same tokens per step."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from tiny_fit import TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.errors import UserError, is_out_of_memory
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.step_shape import largest_divisor

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]  # CI runs them
CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes."


def fit(steps: int, *args: str) -> int:
    return main(["fit", *TINY_RUN, f"--trainer.max_steps={steps}", *args])


@pytest.fixture
def fails_at(monkeypatch):
    """Plants an exception in the micro-batch with a number, counted from 1."""

    def plant(error: BaseException, number: int = 1, largest: int = 0) -> None:
        training_step, calls = GPTModule.training_step, []

        def step(self, batch, batch_idx):
            calls.append(batch)
            if len(calls) >= number and len(batch[0]) > largest:
                raise error
            return training_step(self, batch, batch_idx)

        monkeypatch.setattr(GPTModule, "training_step", step)

    return plant


def the_line(capsys) -> str:
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: out of memory in step ")
    return line


def proposed(line: str) -> list[str]:
    """The options of the line, to be used as they stand."""
    return shlex.split(
        re.search(r"tokens per step with (.*); \S*gpt-lightning bench fit-batch", line)[1]
    )


@pytest.mark.parametrize("error", [CUDA, RuntimeError(CPU_MESSAGE)], ids=["cuda", "cpu"])
def test_the_line_proposes_half_the_batch_and_it_works(error, fails_at, capsys):
    fails_at(error, largest=4)
    args = ["--data.batch_size=8", "--trainer.accumulate_grad_batches=2"]
    assert fit(4, *args) == 2
    line = the_line(capsys)
    assert (
        "step 1 with 8 x 16 tokens per micro-batch: compute the same 256 tokens per step with"
        in line
    )
    options = proposed(line)
    assert options == [
        *("--data.batch_size", "4"),
        *("--trainer.accumulate_grad_batches", "4"),
        *("--trainer.val_check_interval", "8"),
        *("--trainer.limit_val_batches", "2"),
    ]
    assert fit(4, *args, *options) == 0
    assert "256 tokens = 4 sequences x 16 tokens x 4 accumulated" in capsys.readouterr().out


def test_in_the_middle_of_a_run_it_goes_on_from_the_checkpoint(fails_at, capsys):
    fails_at(CUDA, number=6, largest=4)
    assert fit(8, "--data.batch_size=8") == 2
    line = the_line(capsys)
    assert "in step 6" in line
    assert fit(8, "--data.batch_size=8", *proposed(line)) == 0
    printed = capsys.readouterr().out
    assert "step 4" in printed.split("resume")[1].splitlines()[0]
    assert not Path("lightning_logs/run/version_1").exists()


def test_one_sequence_is_proposed_settings_that_need_less(fails_at, capsys):
    fails_at(CUDA)
    assert fit(4, "--data.batch_size=1") == 2
    assert "per micro-batch: set --model.config.checkpointing true, --model" in the_line(capsys)


def test_an_evaluation_is_proposed_a_smaller_batch(capsys, monkeypatch):
    assert fit(4) == 0

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        raise CUDA

    monkeypatch.setattr(GPTModule, "validation_step", validation_step)
    capsys.readouterr()
    evaluation = ["validate", *TINY_RUN, "--ckpt_path=lightning_logs/run/version_0"]
    assert main([*evaluation, "--data.eval_batch_size=6"]) == 2
    assert "6 sequences per batch: set --data.eval_batch_size 3" in capsys.readouterr().err
    assert main([*evaluation, "--data.eval_batch_size=1"]) == 2
    assert "set a smaller --data.block_size" in capsys.readouterr().err


def test_other_failures_are_what_they_were(fails_at, capsys):
    fails_at(RuntimeError("shapes do not match"))
    assert fit(4) == 2  # the line that has raised it is the user's own
    assert "in step: RuntimeError: shapes do not match" in capsys.readouterr().err
    assert not is_out_of_memory(UserError("lower it: out of memory"))
    assert not is_out_of_memory(ValueError("memory"))
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))


@pytest.mark.parametrize(("batch", "smaller"), [(12, 6), (9, 3), (7, 1), (2, 1)])
def test_a_smaller_batch_divides(batch, smaller):
    assert largest_divisor(batch, batch // 2) == smaller
