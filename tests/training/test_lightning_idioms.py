"""What engineers write with Lightning by habit: subclasses, own loaders, metrics, data alone."""

import csv
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import RUN, TINY_RUN, logged_steps, rows
from torch import nn
from torch.utils.data import DataLoader

from gpt_lightning import GPTCLI
from gpt_lightning.cli import main
from gpt_lightning.data.loader import tokens_and_targets
from gpt_lightning.errors import UserError
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.training.command import TrainingCLI
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.trainer import Trainer

CONFIG = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "vocab_size": 16}
QUIET = ("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing")


def stock(**changes) -> L.Trainer:
    quiet = {**dict.fromkeys(QUIET, False), "num_sanity_val_steps": 0}
    return L.Trainer(
        **{"log_every_n_steps": 1, "accelerator": "cpu", "max_steps": 2, **quiet, **changes}
    )


def loader(batch, number: int = 4) -> DataLoader:
    return DataLoader([batch] * number, batch_size=None)


def pairs(number: int = 4) -> DataLoader:
    return loader((torch.zeros(2, 8).long(), torch.ones(2, 8).long()), number)


class Named(GPTModule):
    def __init__(self, config, aux=0.1, loss_fn: nn.Module | None = None, **settings):
        super().__init__(config, **settings)
        self.save_hyperparameters()
        self.aux = aux


class FromDict(GPTModule):
    def __init__(self, config, aux=0.1, **settings):
        super().__init__(config, **settings)
        self.save_hyperparameters({"aux": aux})
        self.aux = aux


class Whole(GPTModule):
    def __init__(self, config, own=None, **settings):
        super().__init__(config, **settings)
        self.save_hyperparameters(own)
        self.aux = own["aux"]


@pytest.mark.parametrize(
    ("kind", "given"),
    [(Named, {"aux": 0.7}), (FromDict, {"aux": 0.7}), (Whole, {"own": {"aux": 0.7}})],
)
def test_a_subclass_keeps_its_hyperparameters(own_folder, recwarn, kind, given):
    more = {"loss_fn": nn.ReLU()} if kind is Named else {}
    module = kind(CONFIG, **given, **more, schedule="constant", learning_rate=2e-3)
    trainer = stock()
    trainer.fit(module, pairs())
    trainer.save_checkpoint("a.ckpt")
    assert any("loss_fn, a ReLU" in str(w.message) for w in recwarn) == (kind is Named)
    loaded = kind.load_from_checkpoint("a.ckpt")
    assert (loaded.aux, loaded.settings.learning_rate, loaded.config) == (0.7, 2e-3, module.config)
    assert read_checkpoint(Path("a.ckpt"), check=False).record.settings == module.settings
    again = kind(CONFIG, **given, schedule="constant", learning_rate=2e-3)
    stock(max_steps=4).fit(again, pairs(), ckpt_path="a.ckpt")
    assert again.aux == 0.7


def first_batch(stage="fit", loader="train_dataloader", prepare=True, **changes):
    settings = {"text_file": "text.txt", "tokenizer": "char", "block_size": 8, "batch_size": 2}
    data = TokenDataModule(**settings | changes)
    if prepare:
        data.prepare_data()
    if prepare is not None:
        data.setup(stage)
    found = getattr(data, loader)()
    return next(iter(found[0] if isinstance(found, list) else found))


@pytest.mark.parametrize(
    ("stage", "loader"),
    [("fit", "train"), ("fit", "val"), ("validate", "val"), ("predict", "predict")],
)
def test_data_alone_give_a_batch(own_folder, stage, loader):
    x, y = first_batch(stage, f"{loader}_dataloader")
    assert x.shape == y.shape == (2, 8)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_a_batch_of_an_evaluation_is_no_larger_than_the_split(own_folder):
    _, y = first_batch("validate", "val_dataloader", eval_batch_size=10**9)
    assert (y == -100).sum() < 8  # padding of the last window alone


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"block_size": None}, r"data\.block_size is not set: set it"),
        ({"block_size": 10**6}, r"fewer than a window of block_size \+ 1 = 1,000,001: lower"),
        ({"prepare": None}, r"call prepare_data\(\) and setup\('fit'\) first"),
        ({"prepare": False}, r"data/text-char does not exist: call prepare_data\(\) first"),
    ],
)
def test_data_alone_name_what_is_missing(own_folder, changes, line):
    with pytest.raises(UserError, match=line):
        first_batch(**changes)


TOKENS = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(9) < 6, TOKENS, -100)
MASK = (torch.arange(9) < 6).long().expand(2, 9)


def losses(batch) -> tuple[float, float]:
    L.seed_everything(1)
    module = GPTModule(CONFIG, schedule="constant")
    trainer = stock(max_steps=1)
    trainer.fit(module, loader(batch))
    trained = float(trainer.callback_metrics["train/loss"])
    found = trainer.predict(module, loader(batch))
    assert found[0].shape == (2, 8)
    (validated,) = trainer.validate(module, loader(batch), verbose=False)
    return trained, validated["val/loss"]


@pytest.mark.parametrize(
    "batch",
    [TOKENS, [TOKENS], TOKENS.int(), {"input_ids": TOKENS, "labels": TOKENS}],
    ids=["tensor", "list of one", "int32", "dict"],
)
def test_a_loader_of_ones_own_trains_as_pairs_do(batch):
    assert losses(batch) == losses((TOKENS[:, :-1], TOKENS[:, 1:]))


def test_labels_are_those_of_transformers():
    named = {"input_ids": TOKENS, "labels": LABELS, "attention_mask": MASK}
    assert losses(named) == losses((TOKENS[:, :-1], LABELS[:, 1:]))
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    short = {name: values[:, :8] for name, values in named.items()}
    x, y = tokens_and_targets(short)
    logits = theirs(x).logits.transpose(1, 2)
    torch.testing.assert_close(theirs(**short).loss, nn.functional.cross_entropy(logits, y))


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (
            (TOKENS, TOKENS, TOKENS),
            "a batch is list of torch.int64 (2, 9), torch.int64 (2, 9), torch.int64 (2, 9);",
        ),
        ((TOKENS, TOKENS[:, 1:]), "a batch is list of torch.int64 (2, 9), torch.int64 (2, 8);"),
        (TOKENS.float(), "a batch is Tensor of torch.float32 (2, 9);"),
        (TOKENS[0], "a batch is Tensor of torch.int64 (9,);"),
        (TOKENS[:, :1], "a batch is Tensor of torch.int64 (2, 1);"),
        ({"input_ids": TOKENS}, "a batch is dict of input_ids;"),
        ("text", "a batch is str of no tokens;"),
        (
            {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": 1 - MASK},
            "a batch is dict of input_ids, labels, attention_mask;",
        ),
    ],
)
def test_another_batch_is_one_line(batch, found):
    with pytest.raises(UserError) as error:
        stock().fit(GPTModule(CONFIG, schedule="constant"), loader(batch))
    assert str(error.value).startswith(found)
    assert "\n" not in str(error.value)


class Measured(GPTModule):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.losses = []
        self.mean = torchmetrics.MeanMetric()
        self.several = torchmetrics.MetricCollection({"own/low": torchmetrics.MinMetric()})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        self.mean(loss)
        self.log("own/mean", self.mean, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)
        self.several(torch.tensor(3.0 + batch_idx))
        self.log_dict(self.several)


def test_metrics_of_torchmetrics_are_logged():
    runs = []
    for kind in (GPTModule, Measured):
        L.seed_everything(1)
        module = kind(CONFIG, schedule="constant")
        trainer = stock(max_steps=4)
        trainer.fit(module, loader(TOKENS), loader(TOKENS))
        runs.append(trainer.callback_metrics)
    plain, found = runs
    assert found["own/mean_step"] == pytest.approx(module.losses[-1])
    assert found["own/mean_epoch"] == pytest.approx(sum(module.losses) / 4)
    assert found["own/low"] == 3
    assert found["val/loss"] == plain["val/loss"]


class OwnLoss(GPTModule):
    def training_step(self, batch, batch_idx):
        return {"loss": self(batch[:, :-1], batch[:, 1:])}


class Skipping(GPTModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


class TwoOptimizers(GPTModule):
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD([p], lr=0.1) for p in self.model.transformer.wte.parameters()] * 2

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()


class NoOptimizer(GPTModule):
    def configure_optimizers(self):
        return None


class OwnHooks(GPTModule):
    def setup(self, stage):
        pass

    on_train_start = on_train_epoch_end = lambda self: None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("own", 1.0)  # Lightning allows it in no hook of a validation


@pytest.mark.parametrize("kind", [OwnLoss, Skipping, TwoOptimizers, NoOptimizer, OwnHooks])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_of_a_subclass_log_the_true_loss(kind, accumulate):
    """Each batch is the same, so that the first step's loss is known."""
    if kind is TwoOptimizers and accumulate > 1:
        pytest.skip("Lightning's rule for manual optimization")
    found = []
    for each in (GPTModule, kind):
        L.seed_everything(1)
        trainer = stock(max_epochs=1, max_steps=1, accumulate_grad_batches=accumulate)
        trainer.fit(each(CONFIG, schedule="constant"), loader(TOKENS), loader(TOKENS))
        found.append(trainer.callback_metrics.get("train/loss"))
    assert float(found[0]) == pytest.approx(float(found[1]), abs=2e-2 * (kind is NoOptimizer))


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        ((TOKENS, torch.full_like(TOKENS, -100)), "the loss is nan at step 1: weights were not"),
        (TOKENS + 16, r"idx has tokens from \d+ to \d+; expected int64 .* from 0 to 15"),
        ((TOKENS[:, 1:], TOKENS[:, 1:] + 99), "targets has tokens from"),
        (TOKENS.repeat(1, 2), "idx has rows of 17 tokens: at most 8 fit"),
    ],
)
def test_another_batch_of_tokens_is_one_line(batch, line):
    config = CONFIG | {"block_size": 9} if "loss" in line else CONFIG
    with pytest.raises(UserError, match=f"^{line}"):
        stock().fit(GPTModule(config, schedule="constant"), loader(batch))


class Watching(GPTModule):
    def configure_callbacks(self):
        return [*super().configure_callbacks(), L.pytorch.callbacks.LearningRateMonitor()]


class Forgetting(GPTModule):
    def configure_callbacks(self):
        return [L.pytorch.callbacks.LearningRateMonitor()]


def test_a_subclass_adds_callbacks_and_cannot_lose_ours(own_folder):
    logger = CSVLogger(".", flush_logs_every_n_steps=1)
    stock(logger=logger).fit(Watching(CONFIG, learning_rate=0.1), loader(TOKENS))
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    ours, theirs = (
        [float(row[name]) for row in rows if row[name]] for name in ("optim/lr", "lr-AdamW/pg1")
    )
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert len(ours) == 2
    with pytest.raises(UserError, match=r"Forgetting leaves out .* return \[\*super\(\)"):
        stock(logger=logger).fit(Forgetting(CONFIG), loader(TOKENS))


def test_several_training_loaders_are_no_pair():
    with pytest.raises(UserError, match="there are several training loaders: give one"):
        stock().fit(GPTModule(CONFIG), [loader(TOKENS), loader(TOKENS)])


class Frozen(GPTModule):
    def configure_model(self):
        super().configure_model()
        self.model.requires_grad_(False)


def test_frozen_weights_are_one_line():
    with pytest.raises(UserError, match=r"GPT has no parameter to train$"):
        stock().fit(Frozen(CONFIG, schedule="constant"), loader(TOKENS))


def test_an_optimizer_of_ones_own_needs_no_end_of_our_decay():
    trainer = stock(max_steps=-1, max_epochs=1)
    trainer.fit(NoOptimizer(CONFIG), loader(TOKENS))
    with pytest.raises(UserError, match="the decay of the learning rate has no end"):
        stock(max_steps=-1, max_epochs=-1).fit(GPTModule(CONFIG), loader(TOKENS))


def test_the_decay_ends_with_the_last_epoch_of_a_loader():
    trainer = stock(max_steps=-1, max_epochs=2, accumulate_grad_batches=2)
    module = GPTModule(CONFIG, warmup_steps=1, learning_rate=0.1, min_learning_rate=0.0)
    trainer.fit(module, loader(TOKENS))
    assert module.schedule.decay_steps == trainer.global_step == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0


class Replacing(L.Callback):
    """Puts an optimizer that changes nothing in place of the module's, in the second step."""

    def __init__(self, hook):
        self.weights, self.replaced = [], False
        setattr(self, hook, self.replace)

    def replace(self, trainer, module, *args):
        if trainer.global_step == 1 and not self.replaced:
            self.replaced = True
            trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.0)]

    def on_train_batch_end(self, trainer, module, *args):
        self.weights.append(module.model.transformer.wpe.weight.detach().clone())


@pytest.mark.parametrize(
    ("hook", "own_steps"),
    [
        ("on_train_batch_start", 1),
        ("on_before_zero_grad", 2),
        ("on_before_backward", 2),
        ("on_after_backward", 2),
        ("on_before_optimizer_step", 2),
    ],
)
def test_an_optimizer_is_replaced_in_any_hook(hook, own_steps):
    """A hook inside the optimizer's step replaces it from the next step on, as for any module."""
    callback = Replacing(hook)
    trainer = stock(max_steps=4, callbacks=[callback])
    trainer.fit(GPTModule(CONFIG, schedule="constant"), loader(TOKENS))
    steps = [not torch.equal(a, b) for a, b in pairwise(callback.weights)]
    assert steps == [n < own_steps for n in range(1, 4)]


class Pieces(TokenDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(72).view(8, 9) % 9, batch_size=2)


def test_a_loader_of_ones_own_is_saved_and_stopped_between_steps(own_folder, capsys):
    shape = "{n_layer: 1, n_head: 1, n_embd: 8, block_size: 8, vocab_size: null}"
    stops = "{class_path: EarlyStopping, init_args: {monitor: val/loss, stopping_threshold: 99}}"
    Path("own.yaml").write_text(
        f"model: {{config: {shape}}}\ncheckpoint: {{every_n_steps: 3, keep_last: 9}}\n"
        "data: {text_file: text.txt, tokenizer: char, batch_size: 2}\n"
        "trainer: {accelerator: cpu, max_steps: 30, limit_val_batches: 1, val_check_interval: 10,"
        f" check_val_every_n_epoch: null, callbacks: [{stops}]}}\n"
    )
    fit = ["fit", "--config", "own.yaml", "--samples.max_new_tokens=0"]
    GPTCLI(datamodule_class=Pieces, args=fit)
    saved = Path("lightning_logs/own/version_0/checkpoints").glob("*.ckpt")
    assert sorted(int(path.name[5:12]) for path in saved) == [3, 6, 9, 10]
    assert "stopped after step 10" in capsys.readouterr().err
    own = [*fit, "--resume", "auto", "--trainer.callbacks", "[]"]
    GPTCLI(datamodule_class=Pieces, args=own)
    named = [*fit, "--resume", "lightning_logs/own", "--run_name", "a"]
    with pytest.raises(UserError, match="--run_name has no effect on lightning_logs/own"):
        GPTCLI(datamodule_class=Pieces, args=named)


# ---- the number of a step ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"every_n_train_steps": 2}, [2, 4, 6, 8, 10]),
        ({"every_n_train_steps": 3, "filename": "{step}"}, [3, 6, 9]),
        ({"every_n_train_steps": 5, "monitor": "val/loss"}, [5, 10]),
        ({"train_time_interval": timedelta(0)}, list(range(1, 11))),
        ({"every_n_epochs": 1, "save_last": True}, [5, 10, 10]),
        ({}, [5, 10]),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_model_checkpoint_names_each_file_by_its_step(tmp_path, settings, steps, accumulate):
    """It takes a metric named `step` for the step; a row is logged every fourth step."""
    saver = ModelCheckpoint(tmp_path, **{"save_top_k": -1, **settings})
    trainer = stock(
        max_steps=10,
        log_every_n_steps=4,
        val_check_interval=5 * accumulate,
        check_val_every_n_epoch=None,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=True,
        callbacks=[saver],
    )
    trainer.fit(GPTModule(CONFIG, schedule="constant"), pairs(4 * accumulate), pairs(1))
    found = {}
    for path in tmp_path.glob("*.ckpt"):
        found[path.stem] = torch.load(path, weights_only=True)["global_step"]
    assert sorted(found.values()) == steps
    assert all(name.endswith(f"step={step}") for name, step in found.items() if name != "last")


class Own(L.Callback):
    """Logs a metric of its own at the end of an epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("own", float(trainer.global_step))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("trainer_class", "early"), [(Trainer, 0), (L.Trainer, 1)])
def test_every_logger_has_the_steps_that_the_optimizer_has_taken(
    tmp_path, accumulate, trainer_class, early
):
    """With early 0, stock Lightning no longer logs a step early: GlobalStepConnector may go."""
    logger = CSVLogger(tmp_path)
    trainer = trainer_class(
        accelerator="cpu",
        max_steps=8,
        log_every_n_steps=2,
        val_check_interval=4 * accumulate,
        accumulate_grad_batches=accumulate,
        logger=logger,
        callbacks=[Own()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(GPTModule(CONFIG, schedule="constant"), pairs(4 * accumulate), pairs(1))
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    steps = {
        name: [int(row["step"]) + early for row in rows if row[name]]
        for name in ("train/loss", "val/loss", "own")
    }
    assert steps == {"train/loss": [2, 4, 6, 8], "val/loss": [4, 8], "own": [4, 8]}
    assert trainer.callback_metrics.keys().isdisjoint({"step", "epoch"})


class Odd(GPTModule):
    """Logs metrics whose names metrics.jsonl and timeline.jsonl have for other things."""

    names = ("step", "time", "event", "text", "steps", "epoch", "tokens")

    def training_step(self, batch, batch_idx):
        self.log_dict(dict.fromkeys(self.names, 1000.0))
        return super().training_step(batch, batch_idx)


def test_a_metric_of_any_name_leaves_the_rows_of_a_run_whole(own_folder, capsys):
    run = ["fit", *TINY_RUN, "--trainer.log_every_n_steps=2"]
    TrainingCLI(Odd, args=[*run, "--trainer.max_steps=4"])
    TrainingCLI(Odd, args=[*run, "--trainer.max_steps=6", "--resume=auto"])
    assert "lost" not in capsys.readouterr().err
    assert logged_steps() == [2, 4, 6]
    found = rows()
    assert all(row["time"] > 1e9 for row in found)
    assert {row["own/time"] for row in found if "train/loss" in row} == {1000.0}
    assert main(["plot", str(RUN)]) == 0
