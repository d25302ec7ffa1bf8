"""Lean dispatch of hooks: the calls, their order and all results are those of plain Lightning."""

import logging
from contextlib import nullcontext
from pkgutil import resolve_name

import lightning as L
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call

from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.training import lean_hooks, lean_step, module, trainer
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.module import GPTModule

ALONE = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
HOOKS = [name for name in vars(L.Callback) if name.startswith("on_") or name == "setup"]
MODULE_HOOKS = [
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "optimizer_step", "backward", "on_train_batch_end"),
    *("on_train_start", "on_train_end", "configure_gradient_clipping", "optimizer_zero_grad"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
]


def recording(base, names, record):
    """Return a subclass whose hooks note their name, the module's hook, and the tensors given."""

    def noting(name):
        def hook(self, *args, **kwargs):
            module = next((a for a in (self, *args) if isinstance(a, L.LightningModule)), None)
            shapes = [a.shape for a in args if isinstance(a, torch.Tensor)]
            record.append((base.__name__, name, getattr(module, "_current_fx_name", None), shapes))
            output = getattr(super(cls, self), name)(*args, **kwargs)
            record.append((name, getattr(module, "_current_fx_name", None)))  # after inner hooks
            return output

        return hook

    cls = type("Recording", (base,), {name: noting(name) for name in names})
    return cls


class LogsItself(L.Callback):
    """Logs in two hooks, and adds a callback in the middle of the run."""

    def __init__(self, added):
        self.added = added

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.log("mine/start", float(batch_idx))
        if batch_idx == 2:
            trainer.callbacks.append(self.added)

    def on_after_backward(self, trainer, pl_module):
        pl_module.log("mine/backward", 1.0, on_epoch=True, prog_bar=True)


class Answers(L.Callback):
    """Has every attribute, as an object that stands for another one."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class Batches:
    tokens = torch.randint(8, (6, 2, 9), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __iter__(self):
        return ((x[:, :-1], x[:, 1:]) for x in self.tokens)


def run(record, kind=trainer.Trainer, hooks=HOOKS, module_hooks=MODULE_HOOKS, more=(), **settings):
    """Return metrics after each batch and the weights of a run of six batches."""
    torch.manual_seed(0)
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            names = [n for n in trainer.callback_metrics if not n.startswith("perf/")]
            seen.append({n: float(trainer.callback_metrics[n]) for n in names})

    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=8, dropout=0.1)
    model = recording(GPTModule, module_hooks, record)(config, schedule="constant")
    recorder = recording(L.Callback, hooks, record)
    alone = recorder()
    alone.on_train_batch_end = lambda *args: record.append("of this object")  # not of its class
    fit = kind(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=2,
        callbacks=[LogsItself(recorder()), alone, Answers(), SpeedMonitor(), Watch(), *more],
        use_distributed_sampler=False,
        **ALONE,
        **settings,
    )
    fit.fit(model, train_dataloaders=Batches())
    return seen, {n: p.tolist() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        pytest.param(
            {
                "precision": "bf16-mixed",
                "gradient_clip_val": 0.1,
                "gradient_clip_algorithm": "value",
            },
            marks=pytest.mark.slow,
        ),
        {"precision": "64-true", "limit_train_batches": 3},
    ],
)
@pytest.mark.parametrize("module_hooks", [MODULE_HOOKS, []])
def test_hooks_metrics_and_weights_are_those_of_plain_lightning(
    settings, module_hooks, monkeypatch
):
    lean_calls, plain_calls = [], []
    lean = run(lean_calls, module_hooks=module_hooks, **settings)
    monkeypatch.setattr(trainer, "lean_hooks", nullcontext)
    plain = run(plain_calls, module_hooks=module_hooks, **settings)
    assert lean_calls == plain_calls
    assert len(lean_calls) > 30
    assert lean == plain
    assert any("mine/backward" in metrics for metrics in lean[0])


def test_a_hook_that_nobody_overrides_is_not_called(monkeypatch):
    called = []
    for name in ("on_before_backward", "on_train_batch_end"):

        def empty(self, *args, name=name):
            called.append(name)

        monkeypatch.setitem(lean_step.EMPTY_HOOKS, name, empty)
        monkeypatch.setattr(L.Callback, name, empty)
    run([], hooks=["on_before_backward"], module_hooks=[])
    # by way of `super` of the two that override it; the second one comes in the third batch
    assert called.count("on_before_backward") == 6 + 4
    assert "on_train_batch_end" not in called


def test_a_profiler_still_counts_every_call(monkeypatch):
    def counts():
        profiler = SimpleProfiler()
        run([], profiler=profiler)
        return {name: len(times) for name, times in profiler.recorded_durations.items()}

    lean = counts()
    monkeypatch.setattr(trainer, "lean_hooks", nullcontext)
    assert lean == counts()
    assert lean["[Callback]SpeedMonitor.on_before_backward"] == 6


def test_lightnings_own_trainer_stays_plain():
    before = resolved()
    run([], kind=L.Trainer)
    assert resolved() == before


def resolved():
    return {at: resolve_name(f"lightning.pytorch.{at}") for at in lean_hooks.REPLACEMENTS}


def test_all_functions_are_replaced_in_this_lightning_and_put_back():
    before, within = resolved(), {}

    def fail():
        with lean_hooks.lean_hooks():
            within.update(resolved())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    # else Lightning has changed: read its new functions, adapt the replacements, then the digests
    assert all(within[at] is not before[at] for at in before)
    assert resolved() == before


def test_a_function_that_looks_different_is_left_alone(monkeypatch):
    def instrumented(*args, **kwargs):
        return plain(*args, **kwargs)

    plain = call._call_strategy_hook
    instrumented.__wrapped__ = plain  # inspect would read the source of the wrapped function
    monkeypatch.setattr(call, "_call_strategy_hook", instrumented)
    addresses = ("no_such_module:f", "trainer.call:no_such_function", "trainer.call:log")
    missing = dict.fromkeys(addresses, (lean_hooks.callback_hooks, ""))
    monkeypatch.setattr(lean_hooks, "REPLACEMENTS", missing | lean_hooks.REPLACEMENTS)
    with lean_hooks.lean_hooks():
        assert call._call_strategy_hook is instrumented
        assert call._call_callback_hooks.__module__ == lean_hooks.__name__


def test_a_module_that_is_given_is_the_one_that_is_called():
    class Module(L.LightningModule):
        def hook(self):
            return self, self._current_fx_name

    given, own = Module(), Module()
    fit = L.Trainer(**ALONE)
    fit.strategy.connect(own)
    own.not_callable = None
    with lean_hooks.lean_hooks():
        assert call._call_lightning_module_hook(fit, "hook", pl_module=given) == (given, "hook")
        assert call._call_lightning_module_hook(fit, "hook") == (own, "hook")
        assert call._call_lightning_module_hook(fit, "not_callable") is None
    assert own._current_fx_name is None


def test_debug_messages_stay(caplog):
    with caplog.at_level(logging.DEBUG, "lightning.pytorch"):
        run([], limit_train_batches=1)
    assert "calling callback hook: on_before_backward" in caplog.text


def test_a_metric_moves_to_another_device():
    class Metric:
        value = torch.zeros(1)

    moved = []
    to = lean_hooks.result_mover(lambda *args, **kwargs: moved.append(args[1]))
    metric = Metric()
    assert to(metric, torch.device("cpu")) is metric
    to(metric, torch.device("meta"))
    metric.cumulated_batch_size = torch.zeros(1, device="meta")
    to(metric, torch.device("cpu"))
    assert moved == [torch.device("meta"), torch.device("cpu")]


def test_the_memory_of_the_process_is_read_every_tenth_of_a_second(monkeypatch):
    now, read = [8.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "limit_kept_memory", lambda: read.append(now[0]))
    times = iter([9.0, 9.05, 9.125, 9.15, 9.25, 9.26])

    class Clock(L.Callback):
        def on_train_batch_start(self, *args):
            now[0] = next(times)

    run([], module_hooks=[], hooks=[], more=[Clock()])
    assert read == [8.0, 9.0, 9.125, 9.25]  # the first at the start of the epoch
