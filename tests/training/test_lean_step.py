"""Lean batches: the state in every hook, and what a run leaves, are those of plain Lightning."""

import copy
import math
from contextlib import nullcontext
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from gpt_lightning.training import lean_step, trainer
from gpt_lightning.training.optimizers import adamw

ALONE = dict.fromkeys(
    ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
HOOKS = [name for name in vars(L.Callback) if name.startswith("on_") and "checkpoint" not in name]
TRANSFERS = lean_step.TRANSFERS.split()


class Data:
    """Six batches, on the host."""

    def __init__(self, n=6, none=()):
        tokens = torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(0))
        self.batches = [None if i in none else (x, x.sum(1)) for i, x in enumerate(tokens)]

    def __iter__(self):
        return iter(self.batches)


class Sized(Data):
    def __len__(self):
        return len(self.batches)


class Module(L.LightningModule):
    def __init__(self, answers=None, optimizer=torch.optim.AdamW):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
        self.answers, self.optimizer = answers or {}, optimizer

    def loss(self, batch):
        return (self.layer(batch[0]).sum(1) - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("bar", loss * 2, prog_bar=True)
        self.log("number", float(batch_idx))
        self.log("epoch_loss", loss, on_step=False, on_epoch=True, logger=False)
        return self.answers.get(batch_idx, lambda loss: loss)(loss)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.05)


class Notes(L.Callback):
    """Notes the state in every hook, then acts."""

    def __init__(self, acts):
        self.seen, self.acts, self.calls = [], acts, {}


def noting(name):
    def hook(self, trainer, module, *args, **kwargs):
        number = self.calls[name] = self.calls.get(name, -1) + 1
        self.seen.append((name, state(trainer, module), plain([args, kwargs])))
        act = self.acts.get(name)
        if act is not None:
            act(trainer, module, number)

    return hook


for hook in HOOKS:
    setattr(Notes, hook, noting(hook))


def plain(value):
    """Return a value without tensors and objects."""
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.requires_grad
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(part) for part in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def state(trainer, module):
    fit, logs = trainer.fit_loop, trainer._logger_connector
    loop, fetcher = fit.epoch_loop, fit._data_fetcher
    return copy.deepcopy(
        {
            "loops": fit.state_dict(),
            "stepped": (loop._batches_that_stepped, trainer.global_step, loop._restarting),
            "fx": (module._current_fx_name, logs._first_loop_iter, logs._current_fx),
            "shown": plain([logs._callback_metrics, logs._logged_metrics]),
            "bar": logs._progress_bar_metrics,
            "order": [[*logs._callback_metrics], [*logs._logged_metrics]],
            "results": plain({k: m._forward_cache for k, m in loop._results.items()}),
            "batch": (plain(loop._results.batch), loop._results.batch_size),
            "fetcher": fetcher and (fetcher.fetched, fetcher.done, len(fetcher.batches)),
            "stage": trainer.state.stage,
            "weights": plain(list(module.parameters())),
            "gradients": plain([p.grad for p in module.parameters()]),
        }
    )


class Rows(DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((metrics, step))

    def __getattr__(self, name):
        raise AttributeError(name)


def run(make=Module, data=None, acts=None, more=(), ckpt_path=None, **settings):
    """Fit; return the notes, the logged rows, the final state, the error, and the lean batches."""
    torch.manual_seed(0)
    module, notes, rows = make(), Notes(acts or {}), Rows()
    defaults = {"max_epochs": 1, "log_every_n_steps": 2, "num_sanity_val_steps": 0}
    fit = trainer.Trainer(
        accelerator="cpu",
        logger=rows,
        callbacks=[notes, *more],
        use_distributed_sampler=False,
        **ALONE | defaults | settings,
    )
    error = None
    try:
        fit.fit(module, Sized() if data is None else data, Sized(2), ckpt_path=ckpt_path)
    except (Exception, SystemExit) as raised:
        error = repr(raised)
    return notes.seen, rows.rows, state(fit, module), error


@pytest.fixture
def both(monkeypatch):
    """Run a case with and without the lean step; return notes, rows, state, error, and batches."""
    counted = []
    advance = lean_step.LeanLoop.advance
    monkeypatch.setattr(
        lean_step.LeanLoop, "advance", lambda self: (counted.append(1), advance(self))[1]
    )

    def compare(case):
        lean = case()
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "lean_hooks", nullcontext)
            patch.setattr(lean_step.LeanLoop, "__init__", None)  # not entered
            expected = case()
        for ours, theirs in zip(lean[0], expected[0], strict=False):
            assert ours == theirs
        assert lean == expected
        return *lean, len(counted)

    return compare


def test_fused_adamw_and_values_that_are_logged_again(both, monkeypatch):
    monkeypatch.setattr(adamw, "update", partial(counting, adamw.update, updated := []))

    class Logs(Module):
        def __init__(self):
            super().__init__(optimizer=partial(torch.optim.AdamW, fused=True))

        def on_after_backward(self):
            n = self.trainer.global_step
            self.log("half", torch.tensor(n, dtype=torch.float16))
            self.log("double", torch.tensor([2.0**40 + n], dtype=torch.float64))
            self.log("whole", n, batch_size=2)
            self.log("with_graph", self.layer[0].bias.sum(), sync_dist=True)
            self.log("infinite", math.inf if n == 2 else 0.1)
            if n % 2:
                self.log("sometimes", n / 3)

    _, rows, _, error, lean = both(lambda: run(Logs, max_epochs=2))
    assert (error, lean, len(updated)) == (None, 12, 11)
    assert rows[0][0]["sometimes"] == pytest.approx(1 / 3)


def counting(function, calls, *args):
    calls.append(1)
    function(*args)


def test_a_value_that_is_logged_again_in_another_way_is_an_error(both):
    class Logs(Module):
        def on_after_backward(self):
            self.log("x", 1.0, prog_bar=self.trainer.global_step == 2)

    assert "twice in `on_after_backward` with different" in both(lambda: run(Logs))[3]


SETTINGS = [
    ({"accumulate_grad_batches": 4}, 6),
    ({"max_epochs": 2, "max_steps": 3, "limit_train_batches": 2, "val_check_interval": 1}, 3),
]
MORE_SETTINGS = [
    ({}, 6),
    ({"max_epochs": 2, "accumulate_grad_batches": 4}, 12),
    ({"val_check_interval": 2, "max_epochs": 2}, 12),
    ({"val_check_interval": 0.5, "accumulate_grad_batches": 3}, 6),
    ({"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2}, 12),
    ({"max_epochs": 3, "check_val_every_n_epoch": 2, "limit_train_batches": 3}, 9),
    ({"max_epochs": -1, "max_steps": 8}, 8),
    ({"max_epochs": 2, "min_epochs": 2, "max_steps": 5, "gradient_clip_val": 0.1}, 5),
    ({"limit_val_batches": 0, "log_every_n_steps": 0}, 6),
    ({"fast_dev_run": 2}, 2),
    ({"precision": "bf16-mixed"}, 6),
    ({"precision": "bf16-true"}, 0),
]


@pytest.mark.parametrize(("settings", "batches"), SETTINGS)
def test_the_state_in_every_hook_is_that_of_plain_lightning(settings, batches, both):
    assert both(lambda: run(**settings))[3:] == (None, batches)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "batches"), MORE_SETTINGS)
def test_the_state_with_other_settings(settings, batches, both):
    assert both(lambda: run(**settings))[3:] == (None, batches)


def zero(loss):
    return {"loss": loss, "more": loss.detach() * 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "data", "batches"),
    [
        ({1: lambda loss: None, 2: zero, 4: lambda loss: loss.double()}, Sized, 6),
        ({1: lambda loss: {"other": loss}}, Sized, 2),
        ({1: lambda loss: "text"}, Sized, 2),
        ({1: lambda loss: loss.detach()}, Sized, 2),
        ({}, Data, 6),  # no length: a batch is fetched ahead
        ({}, lambda: Sized(none={2}), 6),
        ({}, lambda: Data(none={5}), 6),
        ({}, lambda: {"a": Sized()}, 0),
        ({}, lambda: torch.utils.data.DataLoader(Sized().batches, batch_size=None), 6),
    ],
)
def test_unusual_outputs_and_batches(answers, data, batches, both):
    class Unpacks(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(getattr(batch, "get", {"a": batch}.get)("a"), batch_idx)

    assert both(lambda: run(lambda: Unpacks(answers), data()))[4] == batches


@pytest.mark.slow
def test_without_an_index(both):
    class Bare(Module):
        def training_step(self, batch):
            return self.loss(batch)

    assert both(lambda: run(Bare))[3:] == (None, 6)


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_a_stop_and_the_end_of_an_epoch(hook, both):
    def stop(trainer, module, number):
        trainer.should_stop = trainer.should_stop or number == 2

    assert both(lambda: run(acts={hook: stop}, min_epochs=0, min_steps=5))[3:] == (None, 5)

    class Ends(Module):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    assert both(lambda: run(Ends, max_epochs=2))[3:] == (None, 5 + 6)


@pytest.mark.parametrize(
    "hook",
    [
        *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
        *("on_before_optimizer_step", "on_train_batch_end", "on_validation_batch_start"),
    ],
)
@pytest.mark.parametrize(
    "error", [RuntimeError, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)]
)
def test_an_error_in_a_hook_leaves_the_same_counters(hook, error, both):
    def fail(trainer, module, number):
        if number == 2:
            raise error("here")

    seen, *_, raised, batches = both(lambda: run(acts={hook: fail}, val_check_interval=1))
    assert seen[-1][0] in ("on_exception", hook, "teardown")
    assert raised is not None
    assert batches >= 2


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_checkpoints_and_runs_that_continue_them(hook, accumulate, both, tmp_path):
    saved = tmp_path / "saved.ckpt"
    settings = {"val_check_interval": 2, "max_epochs": 2, "accumulate_grad_batches": accumulate}
    held = []

    def save(trainer, module, number):
        if number == (hook != "on_train_epoch_end"):
            trainer.save_checkpoint(saved, weights_only=False)

    def first():
        outcome = run(acts={hook: save}, **settings)
        held.append(torch.load(saved, weights_only=False))
        return outcome

    assert both(first)[4] == 12
    assert plain(held[0]) == plain(held[1])
    assert both(lambda: run(ckpt_path=saved, **settings))[4] > 12


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRANSFERS, "optimizer_step", "optimizer_zero_grad", "backward"])
def test_a_module_that_overrides_a_step_gets_lightnings_own(name, both):
    called = []

    def override(self, *args, **kwargs):
        called.append(name)
        return getattr(Module, name)(self, *args, **kwargs)

    own = type("Own", (Module,), {name: override})
    assert both(lambda: run(own))[3:] == (None, 0)
    lean_calls = len(called)
    assert lean_calls >= 12  # both ways

    def replace(trainer, module, number):
        if number == 2:
            setattr(module, name, override.__get__(module))

    # an attribute of the object, in the middle of an epoch
    called.clear()
    *_, error, batches = both(lambda: run(acts={"on_train_batch_end": replace}))
    assert (error, batches) == (None, 3)
    assert len(called) >= 6


class Silent(torch.optim.SGD):
    def step(self, closure=None):
        return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "batches"), [(Silent, 1), (torch.optim.LBFGS, 6), (torch.optim.SGD, 6)]
)
def test_other_optimizers(optimizer, batches, both):
    *_, error, lean = both(lambda: run(lambda: Module(optimizer=optimizer)))
    assert lean == batches
    assert ("closure" in str(error)) == (optimizer is Silent)


@pytest.mark.slow
def test_schedulers_and_manual_optimization_are_lightnings(both):
    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    for kind in (Scheduled, Manual):
        assert both(lambda kind=kind: run(kind))[3:] == (None, 0)


@pytest.mark.slow
def test_another_lightning_and_other_functions_are_left_alone(both, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(lean_step, "DIGEST", "of another version")
        assert both(run)[3:] == (None, 0)

    def backward(self, *args, **kwargs):
        return plain_backward(self, *args, **kwargs)

    plain_backward = L.pytorch.strategies.Strategy.backward
    monkeypatch.setattr(L.pytorch.strategies.Strategy, "backward", backward)
    assert both(run)[3:] == (None, 0)
