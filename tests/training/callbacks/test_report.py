"""The summary of a run prints commands that work."""

import re
import shlex
from pathlib import Path

import pytest

from gpt_lightning.cli import main
from gpt_lightning.parsing import program
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint

TINY = [
    "--model.config.n_layer=1",
    "--model.config.n_head=1",
    "--model.config.n_embd=8",
    "--model.config.block_size=16",
    "--model.config.vocab_size=null",
    "--data.text_file=text.txt",
    "--data.tokenizer=char",
    "--data.batch_size=4",
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=1",
    "--trainer.max_steps=2",
    "--samples.max_new_tokens=0",
    "--run_name=a run",
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, text_file, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_command_to_sample_works_as_it_is_printed(capsys):
    assert main(["fit", *TINY]) == 0
    printed = re.search(r"^sample +(.*)$", capsys.readouterr().out, re.M)[1]
    name, *arguments = shlex.split(printed)
    assert name == program()
    assert main([*arguments, "--max_new_tokens=3"]) == 0
    assert Path("lightning_logs/a run/version_0/config.yaml").is_file()


def test_without_checkpoints_there_is_nothing_to_sample_from(capsys):
    assert main(["fit", *TINY, "--trainer.enable_checkpointing=false"]) == 0
    out = capsys.readouterr().out
    assert "\nlook        " in out
    assert "\nsample" not in out


def test_a_session_that_ends_before_its_first_log_prints_its_steps_alone(capsys):
    assert main(["fit", *TINY, "--trainer.limit_val_batches=0"]) == 0
    out = capsys.readouterr().out
    assert "\nsteps       2, none logged in this session\n" in out
    assert "\nloss " not in out


def best(out: str) -> str:
    return re.search(r"best val/loss (.*) after \d+ steps$", out, re.M)[1]


def test_the_best_loss_is_of_all_sessions(capsys, monkeypatch):
    run = [*TINY, "--model.schedule=constant", "--trainer.val_check_interval=2"]
    assert main(["fit", *run]) == 0
    first = best(capsys.readouterr().out)
    worse = [*run, "--resume=auto", "--trainer.max_steps=4", "--model.learning_rate=10"]
    assert main(["fit", *worse]) == 0
    out = capsys.readouterr().out
    assert f" val/loss {first}" not in out.partition("best")[0]
    assert best(out) == first


def test_the_best_loss_since_a_file_without_one_has_its_step(capsys, monkeypatch):
    run = [*TINY, "--model.schedule=constant", "--trainer.val_check_interval=2"]
    with monkeypatch.context() as earlier:
        earlier.setattr(RunCheckpoint, "state_dict", lambda self: {})
        assert main(["fit", *run]) == 0
    capsys.readouterr()
    assert main(["fit", *run, "--resume=auto", "--trainer.max_steps=4"]) == 0
    assert re.fullmatch(r"\d\.\d{4} since step 2", best(capsys.readouterr().out))
