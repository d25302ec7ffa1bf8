"""GPTModule and TokenDataModule with Lightning's own Trainer: the same numbers as the command's."""

import datetime
import functools
import json
import shutil
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.tuner import Tuner
from ranks import run_ranks
from tiny_fit import TINY_MODEL

from gpt_lightning.errors import UserError
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.fit import run_cli
from gpt_lightning.training.module import GPTModule

pytestmark = pytest.mark.slow  # CI runs them
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
CONFIG = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 16, "vocab_size": None}
QUIET = ("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing")


def make(seed: int = 1, kind: type[GPTModule] = GPTModule, **settings) -> GPTModule:
    """A tiny module, with dropout, whose weights are drawn from a seed."""
    L.seed_everything(seed)
    config = {**CONFIG, "dropout": 0.2, **settings.pop("config", {})}
    return kind(config, **{"schedule": "constant", **settings})


def data(**changes) -> TokenDataModule:
    settings = {"text_file": "text.txt", "tokenizer": "char", "batch_size": 8, **changes}
    return TokenDataModule(**settings)


def stock(*callbacks: L.Callback, **changes) -> L.Trainer:
    quiet = {**dict.fromkeys(QUIET, False), "limit_val_batches": 2, "num_sanity_val_steps": 0}
    settings = {"accelerator": "cpu", "max_steps": 6, **quiet, **changes}
    return L.Trainer(callbacks=[*callbacks], **settings)


def stock_ranks(ranks: int) -> None:
    """Train and evaluate in ranks; write the loss, and the number of tokens that were evaluated."""
    module = make(config={"dropout": 0.0})
    tokens = data(batch_size=8 // ranks)
    strategy = "ddp" if ranks > 1 else "auto"
    changes = {"val_check_interval": 3, "limit_val_batches": 1.0}
    trainer = stock(devices=ranks, strategy=strategy, **changes)
    read = []
    step = module.validation_step
    module.validation_step = lambda b, *args: (read.append((b[1] >= 0).sum()), step(b, *args))
    trainer.fit(module, tokens)
    read.clear()
    (result,) = trainer.validate(module, tokens, verbose=False)
    evaluated = trainer.strategy.reduce(torch.stack(read).sum(), reduce_op="sum")
    if trainer.is_global_zero:
        found = {"tokens": int(evaluated), "loss": result["val/loss"]}
        Path(f"{ranks}.json").write_text(json.dumps(found))


def same(a: GPTModule, b: GPTModule) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


@pytest.fixture(autouse=True)
def clean(own_folder, monkeypatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def test_two_ranks_of_a_stock_trainer_evaluate_the_whole_split_once():
    stock_ranks(1)
    run_ranks(2, stock_ranks, 2)
    one, two = (json.loads(Path(f"{ranks}.json").read_text()) for ranks in (1, 2))
    (manifest,) = Path().rglob("manifest.json")
    shards = json.loads(manifest.read_text())["splits"]["val"]
    targets = sum(shard["tokens"] for shard in shards) - 1
    assert one["tokens"] == two["tokens"] == targets
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_a_stock_trainer_computes_the_numbers_of_the_command():
    module, trainer = make(), stock(log_every_n_steps=1)
    trainer.fit(module, data())
    loss = float(trainer.callback_metrics["train/loss"])
    (result,) = trainer.validate(module, trainer.datamodule, verbose=False)
    options = ("seed_everything=1", "data.batch_size=8", "trainer.limit_val_batches=2")
    more = ("model.config.dropout=0.2", "trainer.max_steps=6", "trainer.log_every_n_steps=1")
    source = ("data.text_file=text.txt", "data.tokenizer=char", "trainer.num_sanity_val_steps=0")
    interval = ("trainer.val_check_interval=6", "trainer.check_val_every_n_epoch=null")
    argv = [*TINY_MODEL, *(f"--{o}" for o in (*options, *more, *source, *interval))]
    cli = run_cli(["fit", *argv])
    assert same(cli.model, module)
    assert float(cli.trainer.callback_metrics["train/loss"]) == loss
    assert float(cli.trainer.callback_metrics["val/loss"]) == result["val/loss"]


def test_a_second_and_a_third_fit_in_one_process_are_the_whole_run():
    whole = make()
    stock(max_steps=9).fit(whole, data())
    module = make()
    for steps in (3, 6, 9):
        trainer, path = stock(max_steps=steps), f"{steps - 3}.ckpt"
        trainer.fit(module, data(), ckpt_path=path if steps > 3 else None, weights_only=True)
        trainer.save_checkpoint(f"{steps}.ckpt")
    assert same(module, whole)


def test_a_run_without_a_seed_keeps_the_one_it_has_drawn(monkeypatch):
    def unseeded(state: int) -> GPTModule:
        torch.manual_seed(state)
        return GPTModule({**CONFIG, "dropout": 0.2}, schedule="constant")

    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    whole = unseeded(5)
    stock().fit(whole, data())
    first, trainer = unseeded(5), stock(max_steps=3)
    trainer.fit(first, data())
    trainer.save_checkpoint("3.ckpt")
    resumed = unseeded(6)
    stock().fit(resumed, data(), ckpt_path="3.ckpt", weights_only=True)
    assert same(resumed, whole)
    other = unseeded(6)
    stock().fit(other, data())
    assert not same(other, whole)


@pytest.mark.parametrize("as_callback", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_learning_rate_finder_sweeps_and_leaves_no_trace(as_callback):
    module, tokens, finder = make(), data(), LearningRateFinder(num_training_steps=30)
    if as_callback:
        stock(finder).fit(module, tokens)
        found = finder.optimal_lr
    else:
        trainer = stock()
        found = Tuner(trainer).lr_find(module, tokens, num_training=30)
        trainer.fit(module, tokens)
    assert found.results["lr"][-1] == pytest.approx(1, rel=0.5)
    assert found.results["loss"][-1] != pytest.approx(found.results["loss"][0], rel=1e-3)
    assert module.learning_rate == found.suggestion()
    alone = make(learning_rate=found.suggestion())
    stock().fit(alone, data())
    assert same(module, alone)


@pytest.mark.parametrize("as_callback", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_batch_size_finder_leaves_no_trace(as_callback):
    module, tokens = make(), data()
    if as_callback:
        stock(BatchSizeFinder(init_val=2, max_trials=3)).fit(module, tokens)
    else:
        trainer = stock()
        size = Tuner(trainer).scale_batch_size(module, tokens, init_val=2, max_trials=3)
        assert size == tokens.batch_size
        trainer.fit(module, tokens)
    assert tokens.batch_size == 8
    alone = make()
    stock().fit(alone, data(batch_size=8))
    assert same(module, alone)


class OwnOptimizer(GPTModule):
    """Another author's optimizer, and schedule."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_an_overridden_configure_optimizers_is_left_alone():
    module, trainer = make(kind=OwnOptimizer), stock(log_every_n_steps=1)
    trainer.fit(module, data())
    (group,) = trainer.optimizers[0].param_groups
    assert group["lr"] == 0.5**4
    assert group["momentum"] == 0.9
    assert "betas" not in group
    assert float(trainer.callback_metrics["optim/lr"]) == 0.5**3  # rate of the last step


def test_the_decay_ends_with_the_last_epoch(tmp_path):
    shape = {"max_steps": -1, "limit_train_batches": 6, "accumulate_grad_batches": 2}
    cosine = {"schedule": "cosine", "warmup_steps": 1, "min_learning_rate": 0.0}
    whole, trainer = make(**cosine), stock(max_epochs=2, **shape)
    trainer.fit(whole, data())
    assert whole.schedule.decay_steps == trainer.global_step == 6
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0
    half = stock(max_epochs=1, **shape)
    half.fit(make(decay_steps=6, **cosine), data())
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, trainer = make(**cosine), stock(max_epochs=2, **shape)
    trainer.fit(resumed, data(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert same(resumed, whole)


class NaNBatch(GPTModule):
    """The second validation batch has a loss that is no number."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0) -> None:
        if batch_idx == 1:
            self._evaluate = lambda *args: torch.tensor(float("nan"))
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.__dict__.pop("_evaluate", None)


def test_a_validation_batch_that_is_no_number_stops_the_run():
    with pytest.raises(UserError, match=r"the val loss is nan at step 3: lower"):
        stock(max_steps=6, val_check_interval=3, limit_val_batches=3).fit(
            make(kind=NaNBatch), data()
        )


def test_own_loaders_are_logged_under_their_own_names():
    tokens, module, trainer = data(), make(), stock()
    trainer.fit(module, tokens)
    loaders = [tokens.reader.split_loader("val") for _ in range(3)]
    results = trainer.validate(module, loaders, verbose=False)
    losses = {key: value for result in results for key, value in result.items() if "loss" in key}
    names = ["val/loss", "val/loss/dataloader_idx_1", "val/loss/dataloader_idx_2"]
    assert sorted(losses) == names
    assert len(set(losses.values())) == 1
    results = trainer.test(module, loaders[:2], verbose=False)
    assert {"test/loss", "test/loss/dataloader_idx_1"} <= results[0].keys()


MOMENTS = [
    {"every_n_train_steps": 2},
    {"every_n_epochs": 1},
    {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    {"train_time_interval": datetime.timedelta(0)},
]


@pytest.mark.parametrize("moment", [MOMENTS[0], *(SLOW(m) for m in MOMENTS[1:])])
def test_lightnings_checkpoints_resume_exactly_or_not_at_all(moment, tmp_path):
    shape = {"max_steps": 16, "accumulate_grad_batches": 2, "limit_train_batches": 10}
    whole = make()
    stock(**shape).fit(whole, data())
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", save_top_k=-1, **moment)
    kept = {"enable_checkpointing": True}
    first = stock(saver, Copies(tmp_path), **{**shape, **kept, "max_steps": 12})
    first.fit(make(), data())
    paths = sorted((tmp_path / "copies").glob("*.ckpt"))
    assert len(paths) >= 2
    for path in paths[:: max(1, len(paths) // 4)]:
        resumed, trainer = make(), stock(**shape)
        if torch.load(path, weights_only=True)["gpt_lightning"]["micro_batches"]:
            assert "train_time_interval" in moment
            with pytest.raises(UserError, match="in the middle of a step"):
                trainer.fit(resumed, data(), ckpt_path=path, weights_only=True)
        else:
            trainer.fit(resumed, data(), ckpt_path=path, weights_only=True)
            assert same(resumed, whole), path


class Copies(L.Callback):
    """Keeps every file that another callback saves; ModelCheckpoint overwrites some."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "copies"
        self.folder.mkdir()

    def on_train_batch_start(self, trainer, *args) -> None:
        self._copy(trainer)

    def on_train_end(self, trainer, *args) -> None:
        self._copy(trainer)

    def _copy(self, trainer) -> None:
        for path in self.folder.parent.glob("saved/*.ckpt"):
            shutil.copy(path, self.folder / f"{trainer.fit_loop.total_batch_idx:03}-{path.name}")


class Freeze(L.Callback):
    def setup(self, trainer, pl_module, stage) -> None:
        pl_module.configure_model()
        pl_module.model.transformer.h.requires_grad_(False)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_parameters_are_in_no_group(optimizer):
    module = make(optimizer=optimizer)
    trainer = stock(Freeze(), limit_train_batches=3, max_steps=3)
    trainer.fit(module, data())
    blocks = {id(p) for p in module.model.transformer.h.parameters()}
    groups = trainer.optimizers[0].param_groups
    assert blocks.isdisjoint(id(p) for group in groups for p in group["params"])


class Unfreeze(BaseFinetuning):
    """Lightning's callback, which adds a parameter group to the optimizer."""

    def freeze_before_training(self, pl_module) -> None:
        pl_module.configure_model()
        self.freeze(pl_module.model.transformer.h)

    def finetune_function(self, pl_module, epoch, optimizer) -> None:
        if epoch == 1:
            blocks = pl_module.model.transformer.h
            self.unfreeze_and_add_param_group(blocks, optimizer, lr=1e-4, train_bn=True)


def test_an_unfrozen_group_has_the_rate_of_its_callback():
    module = make()
    trainer = stock(Unfreeze(), limit_train_batches=3, max_steps=6)
    trainer.fit(module, data())
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    assert rates == [6e-4, 6e-4, 1e-4]
