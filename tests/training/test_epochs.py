"""Epochs under overfit_batches, limit_train_batches and reload_dataloaders_every_n_epochs."""

import hashlib
from pathlib import Path

import lightning as L
import pytest
from tiny_fit import TINY_FIT

from gpt_lightning.cli import main
from gpt_lightning.commands.check_resume import compare
from gpt_lightning.training import fit

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]  # CI runs them
BASE = (
    *TINY_FIT,
    "--data.batch_size=32",
    "--trainer.max_steps=20",
    "--trainer.log_every_n_steps=1",
    "--trainer.check_val_every_n_epoch=null",
    "--trainer.val_check_interval=10",
)
EPOCH = 27  # micro-batches
RELOAD = "--trainer.reload_dataloaders_every_n_epochs=1"


class Batches(L.Callback):
    """The first characters of the digest of each micro-batch, and those of the validations."""

    def __init__(self, stop: int | None = None) -> None:
        self.trained: list[str] = []
        self.validated: list[int] = []
        self.stop = stop

    def on_train_batch_start(self, trainer, module, batch, *args) -> None:
        self.trained.append(hashlib.sha256(batch[0].numpy().tobytes()).hexdigest()[:6])

    def on_train_batch_end(self, trainer, *args) -> None:
        trainer.should_stop |= len(self.trained) == self.stop

    def on_validation_start(self, trainer, module) -> None:
        self.validated.append(trainer.num_val_batches[0])


def run(*args: str, name: str = "run", stop: int | None = None) -> Batches:
    batches = Batches(stop)
    fit.run_cli(["fit", *BASE, f"--run_name={name}", *args], callbacks=[batches])
    return batches


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_overfitting_repeats_the_first_batches(order):
    plain = run(f"--data.order={order}").trained
    seen = run(f"--data.order={order}", "--trainer.overfit_batches=3")
    assert seen.trained == (plain[:3] * 7)[:20]
    assert len(set(plain[:3])) == 3
    assert seen.validated == [3, 3]  # batches of the validation split


@pytest.mark.parametrize("reload", [(), (RELOAD,)])
def test_a_limited_epoch_is_the_beginning_of_its_order(reload):
    epochs = ("--trainer.max_epochs=3", "--trainer.max_steps=60", "--trainer.limit_val_batches=0")
    whole = run(*epochs).trained
    n = EPOCH
    seen = run("--trainer.limit_train_batches=7", *reload).trained
    assert seen == whole[:7] + whole[n : n + 7] + whole[2 * n : 2 * n + 6]
    assert len(set(seen)) == 20
    assert run("--trainer.limit_train_batches=0.28", *reload).trained == seen  # 7.56


EPOCHS = ("--trainer.max_epochs=3", "--trainer.max_steps=-1", "--model.decay_steps=21")


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        (("--trainer.overfit_batches=4",), 10),
        (("--trainer.limit_train_batches=7", RELOAD, *EPOCHS), 10),
        (("--trainer.overfit_batches=4", *EPOCHS), 10),
        (("--trainer.limit_train_batches=7", *EPOCHS), 14),
        ((RELOAD, *EPOCHS), 30),
        (("--trainer.limit_train_batches=0.5", "--data.order=nanogpt"), 15),
        (("--trainer.limit_train_batches=7", "--data.order=repeat"), 9),
    ],
)
def test_a_resume_is_the_whole_run(kind, stop):
    whole = run(*kind, name="whole").trained
    first = run(*kind, stop=stop).trained
    second = run(*kind, "--resume=auto").trained
    assert first + second == whole
    found = compare(*(Path("lightning_logs") / name / "version_0" for name in ("whole", "run")))
    assert all(found.values()), found


def test_another_limit_is_refused_on_resume(capsys):
    run("--trainer.limit_train_batches=7", stop=10)
    assert main(["fit", *BASE, "--run_name=run", "--resume=auto"]) == 2
    assert "trainer.limit_train_batches 7, this run has None" in capsys.readouterr().err
