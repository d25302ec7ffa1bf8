"""`gpt-lightning reproduce --resume`: a killed run ends with the table of one that was not."""

import pytest

from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.reproduce import command
from gpt_lightning.reproduce import runner as resume
from gpt_lightning.reproduce.cases import Rung
from gpt_lightning.tables.ledger import Ledger
from gpt_lightning.training.callbacks.recorder import RunRecorder

CPU = Rung("cpu", [[0, 1.0]])
GPU = Rung("gpu", [[0, 1.0]])
# the smallest run of the case: other numbers than nanoGPT's, so without one verdict
SMALL = [
    "reproduce",
    "shakespeare-char",
    "--variant=cpu",
    "--max-steps=4",
    "--model.compile=false",
    "--model.config.n_layer=1",
    "--model.config.n_embd=24",
    "--model.config.block_size=16",
    "--data.batch_size=2",
    "--data.eval_batches=3",
    "--data.eval_train_batches=1",
    "--trainer.val_check_interval=2",
]
pytestmark = pytest.mark.usefixtures("own_folder")


def save(folder, rung="cpu", rows=()):
    """Write an empty checkpoint of a rung, and the losses of an earlier session."""
    path = folder / rung / "checkpoints" / "step-0000002.ckpt"
    path.parent.mkdir(parents=True)
    path.touch()
    for row in rows:
        Ledger(folder).append({name: row[name] for name in ("rung", "step", "split")}, row)
    return path


def loss(step, split, rung="cpu", **more):
    row = {"rung": rung, "step": step, "split": split, "ours": 2.0 + step, "batches": None}
    return row | more


def test_auto_is_the_newest_folder_with_a_checkpoint_of_each_rung(tmp_path):
    assert resume.find_folder("auto", tmp_path, [CPU]) is None
    for number in (2, 10):
        save(tmp_path / f"version_{number}")
    (tmp_path / "version_11" / "cpu" / "checkpoints").mkdir(parents=True)  # nothing saved yet
    assert resume.find_folder("auto", tmp_path, [CPU]) == tmp_path / "version_10"
    assert resume.find_folder("auto", tmp_path, [CPU, GPU]) is None


def test_a_folder_that_is_named_has_a_checkpoint_and_no_other_rung(tmp_path):
    save(tmp_path / "a")
    assert resume.find_folder(str(tmp_path / "a"), tmp_path, [CPU]) == tmp_path / "a"
    with pytest.raises(UserError, match="checkpoints in gpu/checkpoints"):
        resume.find_folder(str(tmp_path / "a"), tmp_path, [GPU])
    save(tmp_path / "version_0", rows=[loss(0, "val"), loss(0, "val", "gpu")])
    with pytest.raises(UserError, match="results of cpu alone"):
        resume.find_folder(str(tmp_path / "version_0"), tmp_path, [CPU])
    assert resume.find_folder("auto", tmp_path, [CPU]) is None


def test_losses_after_the_checkpoint_are_made_again(tmp_path, monkeypatch):
    rows = [loss(step, split, batches=7) for step in (0, 2, 4) for split in ("train", "val")]
    rows += [loss(2, "best"), loss(2, "val", "gpu"), loss(1, "batch"), loss(2, "batch")]
    path = save(tmp_path, rows=rows)
    monkeypatch.setattr(resume, "newest_checkpoint", lambda run: path)
    found, step, seen = resume.earlier(tmp_path, CPU)
    assert (found, step) == (path, 2)
    assert [(one.step, one.split, one.loss, one.batches) for one in seen] == [
        (0, "train", 2.0, 7), (0, "val", 2.0, 7), (2, "train", 4.0, 7), (2, "val", 4.0, 7),
        (1, "batch", 3.0, None),  # two updates have been made, those of the steps 0 and 1
    ]  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_table(tinyshakespeare, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(resume, "plot_losses", lambda *given: None)  # after each loss
    assert main(SMALL) == 1  # nothing that could be compared
    with monkeypatch.context() as patch:
        evaluated = RunRecorder.on_validation_end

        def killed(self, trainer, module):
            evaluated(self, trainer, module)  # step 4 is in the results and in no checkpoint
            if trainer.global_step == 4:
                raise SystemExit(137)

        patch.setattr(RunRecorder, "on_validation_end", killed)
        assert main(SMALL) == 137
    capsys.readouterr()
    assert main([*SMALL, "--resume", "auto"]) == 1
    out = capsys.readouterr().out
    assert "continued at step 2: times are of the steps since" in out
    assert "0 of 1 losses within their tolerance" in out  # the loss of step 0
    whole, resumed = (
        (command.ROOT / "shakespeare-char" / f"version_{i}" / "losses.csv").read_text()
        for i in range(2)
    )
    assert resumed == whole
    assert [row.split(",")[1] for row in whole.splitlines()[1:]] == list("00022440")
    batches = [row.split(",")[-1] for row in whole.splitlines()[1:]]
    assert batches == ["1", "3", "", "1", "3", "1", "3", "3"]
    assert not (command.ROOT / "shakespeare-char" / "version_2").exists()
