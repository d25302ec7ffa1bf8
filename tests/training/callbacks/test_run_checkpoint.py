"""RunCheckpoint saves finite numbers alone, through our own files, and leaves no old branches."""

import re
import shlex
from pathlib import Path

import lightning as L
import pytest
import torch
from tiny_fit import RUN, TINY_RUN, fit, logged_steps, quiet_trainer, tiny_config, tiny_data

from gpt_lightning import GPTModule
from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.runs import folders
from gpt_lightning.runs.checkpoint_io import HashingFile, write_durable_checkpoint
from gpt_lightning.runs.folders import check_digest, sidecar
from gpt_lightning.training.behaviours.non_finite import all_finite
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.fit import run_cli

pytestmark = pytest.mark.usefixtures("own_folder")


def saved(pattern: str = "*.ckpt") -> list[str]:
    return sorted(path.name[5:12] for path in (RUN / "checkpoints").glob(pattern))


def test_the_newest_the_best_and_every_third_file_are_kept():
    keep = ["--checkpoint.every_n_steps=1", "--checkpoint.keep_last=1"]
    assert fit(8, *keep, "--checkpoint.keep_best=0", "--checkpoint.keep_every_n_steps=3") == 0
    assert saved() == ["0000003", "0000006", "0000008"]
    names = [
        folders.Saved(Path(f"{step}"), step, loss)
        for step, loss in ((9, 2.0), (8, None), (7, 1.0), (6, 1.0), (5, 3.0))
    ]
    assert RunCheckpoint(keep_last=2, keep_best=2)._kept(names) == {"9", "8", "7", "6"}
    assert RunCheckpoint(keep_last=1, keep_best=1)._kept(names) == {"9", "7"}  # the newer of equals


def test_a_run_that_saves_nothing_leaves_the_files_of_later_steps():
    assert fit(4, "--checkpoint.every_n_steps=2") == 0
    (earlier,) = (RUN / "checkpoints").glob("step-0000002*.ckpt")
    assert fit(3, f"--resume={earlier}", "--checkpoint.enabled=false") == 0
    assert saved() == ["0000002", "0000004"]


def test_a_full_disk_ends_the_run_with_the_files_before(monkeypatch, capsys):
    real = HashingFile.write

    def write(self, content):
        if "step-0000004" in str(self.name):
            raise OSError(28, "No space left on device")
        return real(self, content)

    monkeypatch.setattr(HashingFile, "write", write)
    assert fit(6, "--checkpoint.every_n_steps=2") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: cannot write ")
    assert "No space left" in error
    assert saved() == ["0000002"]


# ---- finite numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_that_are_not_finite_after_the_last_step_are_not_saved(optimizer, capsys):
    rates = ["learning_rate", "muon_learning_rate"][: 1 + (optimizer == "muon")]
    wild = [f"--model.{rate}=1e38" for rate in rates]
    assert fit(1, *wild, f"--model.optimizer={optimizer}") == 2
    line = capsys.readouterr().err
    assert "not finite after step 1, which is not saved: lower model.learning_rate" in line
    assert "begin again" in line
    assert saved() == []


def test_the_advice_after_a_wild_step_works(capsys):
    often = "--checkpoint.every_n_steps=1"
    assert fit(2, often) == 0
    assert fit(3, often, "--resume=auto", "--model.learning_rate=1e38") == 2
    assert "lower model.learning_rate and continue from step 2 with --resume auto" in (
        capsys.readouterr().err
    )
    assert saved() == ["0000001", "0000002"]
    assert fit(4, often, "--resume=auto", "--model.learning_rate=1e-3") == 0
    assert logged_steps() == [1, 2, 3, 4]


def test_an_optimizer_state_that_is_not_finite_is_not_saved(capsys):
    assert fit(4) == 0
    (path,) = (RUN / "checkpoints").glob("*.ckpt")
    file = torch.load(path, weights_only=True)
    file["optimizer_states"][0]["state"][0]["exp_avg_sq"].view(-1)[3] = torch.inf
    write_durable_checkpoint(file, path)
    assert fit(5, "--resume=auto") == 2  # exp_avg / inf is 0: the weights stay finite
    assert "the optimizer's state are not finite after step 5" in capsys.readouterr().err
    assert saved() == ["0000004"]


def test_without_checkpoints_the_end_is_checked_too(capsys):
    assert fit(1, "--model.learning_rate=1e38", "--trainer.enable_checkpointing=false") == 2
    assert "not finite after step 1" in capsys.readouterr().err


def test_a_sum_that_overflows_is_no_reason():
    large = torch.full((4,), 6e4, dtype=torch.float16)
    assert all_finite([large, torch.ones(3), torch.ones(2, dtype=torch.int64), torch.empty(0)])
    assert all_finite([torch.full((4,), 3e38)])
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not all_finite([torch.ones(3), torch.tensor([1.0, bad])])
    assert not all_finite([torch.tensor([torch.inf, -torch.inf])])


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoints_that_were_set_aside_are_deleted_when_the_run_has_passed_them():
    often = [
        "--checkpoint.every_n_steps=1",
        "--checkpoint.keep_last=9",
        "--model.schedule=constant",
    ]
    assert fit(4, *often) == 0
    (second,) = (RUN / "checkpoints").glob("step-0000002*.ckpt")
    assert fit(3, *often, f"--resume={second}") == 0
    assert saved("*.ckpt.old") == ["0000004"]
    (first,) = (RUN / "checkpoints").glob("step-0000001*.ckpt")
    assert fit(1, *often, f"--resume={first}") == 0  # nothing to do, nothing set aside
    assert saved("*.ckpt.old") == ["0000004"]
    assert fit(2, *often, f"--resume={first}") == 0
    assert saved("*.ckpt.old") == ["0000003"]  # one generation; step 2 has been passed
    assert fit(5, *often, "--resume=auto") == 0
    assert saved("*.old*") == []
    assert saved() == ["0000001", "0000002", "0000003", "0000004", "0000005"]


@pytest.mark.slow
def test_a_checkpoint_of_another_run_that_was_set_aside_stays():
    assert fit(4) == 0
    assert fit(8, "--run_name=other") == 0
    other = Path("lightning_logs/other/version_0/checkpoints")
    for path in other.glob("step-0000008*"):
        path.rename(RUN / "checkpoints" / path.name)
    assert fit(12, "--resume=auto") == 0
    assert saved("*.ckpt.skipped") == saved("*.ckpt.skipped.sha256") == ["0000008"]


# ---- a digest that cannot be read ----------------------------------------------------------------

EVERY = ["--checkpoint.every_n_steps=1", "--checkpoint.keep_last=1", "--checkpoint.keep_best=0"]


def without_digest(step: int) -> Path:
    """Delete the digest of a step's checkpoint."""
    (path,) = (RUN / "checkpoints").glob(f"step-{step:07d}*.ckpt")
    sidecar(path).unlink()
    return path


@pytest.mark.parametrize("verb", ["auto", "resume"])
def test_a_resume_stops_at_a_missing_digest_and_its_line_works(verb, capsys):
    assert fit(3, *EVERY, "--checkpoint.keep_last=2") == 0
    path = without_digest(3)
    content = path.read_bytes()
    resume = ["resume", str(RUN), "--trainer.max_steps=4"]
    assert (fit(4, *EVERY, "--resume=auto") if verb == "auto" else main(resume)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert saved() == ["0000002", "0000003"]
    if verb == "auto":
        assert fit(5, *EVERY, f"--resume={re.search('--resume ([^,]+),', line)[1]}") == 0
    else:
        command = shlex.split(re.search("`.*(resume .*)`", line)[1])
        assert main([*command, "--trainer.max_steps=5", "--checkpoint.keep_best=0"]) == 0
    assert logged_steps() == [1, 2, 3, 4, 5]
    assert path.read_bytes() == content


def test_retention_never_deletes_a_checkpoint_without_a_digest():
    assert fit(4, *EVERY, "--checkpoint.keep_last=9") == 0
    middle = without_digest(2)
    assert fit(6, *EVERY, "--resume=auto") == 0
    assert saved() == ["0000002", "0000006"]
    (newest,) = (RUN / "checkpoints").glob("step-0000006*.ckpt")
    sidecar(newest).unlink()
    for _ in range(2):  # the second time there is a file of that name
        assert fit(8, *EVERY, f"--resume={middle}") == 0
        without_digest(8)
    assert saved("*.ckpt.skipped") == ["0000006", "0000008"]
    assert fit(9, *EVERY, f"--resume={middle}") == 0
    assert saved() == ["0000002", "0000009"]
    assert saved("*.skipped") == ["0000006", "0000008", "0000008"]


@pytest.mark.parametrize("damage", ["content", "digest of another", "a folder", "no checkpoint"])
def test_what_a_resume_skips_is_never_deleted(damage, capsys):
    assert fit(3, *EVERY, "--checkpoint.keep_last=2") == 0
    (path,) = (RUN / "checkpoints").glob("step-0000003*.ckpt")
    if damage == "content":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "digest of another":
        (older,) = (RUN / "checkpoints").glob("step-0000002*.ckpt")
        sidecar(path).write_bytes(sidecar(older).read_bytes())
    elif damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_text("no checkpoint")
        sidecar(path).unlink()
    assert fit(5, *EVERY, "--resume=auto") == 0
    assert f"{path.name}" in capsys.readouterr().err
    assert saved() == ["0000005"]
    assert saved("*.ckpt.skipped") == ["0000003"]


def test_a_stock_trainer_writes_our_files_without_a_plugin():
    trainer = quiet_trainer(max_steps=2, limit_val_batches=0, callbacks=[RunCheckpoint()])
    trainer.fit(GPTModule(tiny_config(), schedule="constant"), tiny_data(Path("text.txt")))
    (path,) = Path("checkpoints").glob("*.ckpt")
    assert path.name == "step-0000002.ckpt"
    assert check_digest(path)


@pytest.mark.parametrize("filename", ["step-{step}", "step-{step:07d}-loss-{val/loss:.4f}"])
def test_a_model_checkpoint_cannot_give_its_files_our_names(filename, capsys):
    theirs = ["--trainer.callbacks+=ModelCheckpoint", f"--trainer.callbacks.filename={filename}"]
    theirs.append("--trainer.callbacks.auto_insert_metric_name=false")
    assert fit(4, *theirs) == 2
    assert f"ModelCheckpoint: filename {filename} would" in capsys.readouterr().err
    assert not RUN.exists()
    assert fit(4, *theirs, "--trainer.callbacks.dirpath=theirs") == 0
    assert list(Path("theirs").glob("step-*4*.ckpt"))


def test_a_run_whose_folder_is_moved_does_not_go_on_in_the_old_place(capsys):
    class Moves(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                RUN.parent.rename("lightning_logs/moved")

    settings = ["--trainer.logger=false", "--trainer.limit_val_batches=0"]
    argv = [*TINY_RUN, *settings, "--trainer.max_steps=9", "--checkpoint.every_n_steps=2"]
    with pytest.raises(UserError, match=r"step 4 is not saved: lightning_logs/run/"):
        run_cli(["fit", *argv], callbacks=[Moves()])
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["moved"]
    assert main(["resume", "lightning_logs/moved", "--trainer.max_steps=4"]) == 0
