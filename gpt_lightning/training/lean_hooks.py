"""Lean dispatch of Lightning's hooks: a hook that nobody overrides costs next to nothing.

At each batch Lightning calls 6 hooks of every callback and 16 of the module and the strategy. Most
of them are empty, and around each call are a context of the profiler and two assignments to
`LightningModule._current_fx_name`, which search the module's parameters. While a `Trainer` of ours
runs, `lean_hooks` replaces private functions of Lightning. The replacements call the same hooks
with the same arguments in the same order. They skip what has no effect: empty hooks of
`lightning.Callback`, contexts of the profiler that records nothing, the move of a metric to the
device where it is, the description of a value that is logged again, and repeated inspections of one
signature. benchmarks/overhead.md has the gain.

A function is replaced only if its source is the one that this file was written for. With another
Lightning, and for a function that another program has replaced, Lightning's own way stays.
"""

import hashlib
import inspect
import logging
import pkgutil
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from lightning.pytorch.profilers import PassThroughProfiler

from gpt_lightning.training.lean_step import Function, call, call_callbacks, lean_run, step_counter


@contextmanager
def lean_hooks() -> Iterator[None]:
    """Replace Lightning's dispatch of hooks, unless its debug messages are wanted."""
    with ExitStack() as stack:
        if not logging.getLogger("lightning.pytorch.trainer.call").isEnabledFor(logging.DEBUG):
            for address, (replacement, digest) in REPLACEMENTS.items():
                owner_address, name = re.split(r"[.:](?=\w+$)", address)
                with suppress(ImportError, AttributeError, OSError):  # another Lightning, no source
                    owner = pkgutil.resolve_name(f"lightning.pytorch.{owner_address}")
                    plain = getattr(owner, name)
                    code = getattr(plain, "fget", plain).__code__  # a wrapper has its own
                    if source_digest(code).startswith(digest):
                        setattr(owner, name, replacement(plain))
                        stack.callback(setattr, owner, name, plain)
        yield


@cache
def source_digest(code: CodeType) -> str:
    """Return the SHA-256 of a function's source; reading it takes some milliseconds."""
    return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()


def is_usual(trainer: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call records nothing and chooses no module and no kind of callbacks."""
    if type(trainer.profiler) is not PassThroughProfiler or trainer.lightning_module is None:
        return False
    return "pl_module" not in kwargs and "monitoring_callbacks" not in kwargs


# ---- each takes Lightning's function, and returns the function to use instead --------------------


def hooks_of(owner: str, plain: Function) -> Function:
    """Return a function that calls a hook of the Trainer's `lightning_module` or `strategy`."""

    def lean(trainer: Any, hook: str, *args: Any, **kwargs: Any) -> Any:
        if not is_usual(trainer, kwargs):
            return plain(trainer, hook, *args, **kwargs)
        function = getattr(getattr(trainer, owner), hook)
        return call(function, trainer.lightning_module, hook, *args, **kwargs)

    return lean


def callback_hooks(plain: Function) -> Function:
    """Return a function that calls a hook of the callbacks that override it."""

    def lean(trainer: Any, hook: str, *args: Any, **kwargs: Any) -> None:
        if not is_usual(trainer, kwargs):
            plain(trainer, hook, *args, **kwargs)
            return
        call_callbacks(trainer, trainer.lightning_module, hook, *args, **kwargs)

    return lean


def result_mover(plain: Function) -> Function:
    """Return a function that moves a metric, which copies its description, to a device."""

    def lean(metric: Any, device: Any, **kwargs: Any) -> Any:
        count = getattr(metric, "cumulated_batch_size", metric.value)
        if metric.value.device == device == count.device:
            return metric
        return plain(metric, device, **kwargs)

    return lean


def signatures(plain: Function) -> Function:
    """Return a function that inspects the signature of a method once."""
    cached = cache(plain)

    def lean(hook: Function, *args: Any, **kwargs: Any) -> bool:
        if inspect.ismethod(hook):  # a new object at each access, of one function
            return cached(hook.__func__, *args, **kwargs)
        return plain(hook, *args, **kwargs)

    return lean


def step_log(plain: Function) -> Function:
    """Return LightningModule.log; a value that a hook logs at steps, again, is put in its place."""

    def lean(module: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        trainer = module._trainer
        metric: Any = None
        if trainer is not None and trainer.training and module._fabric is None:
            connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
            metric = results.get(f"{module._current_fx_name}.{name}")
        usual = (
            metric is not None
            and not (args or kwargs.keys() - {"batch_size", "sync_dist"})  # means of epochs need it
            and not (connector._first_loop_iter or trainer._accelerator_connector.is_distributed)
            and not torch.compiler.is_compiling()
            and is_step_value(metric)
        )
        if usual and type(value) is float:
            value = torch.tensor(value, device=module.device, dtype=torch.get_default_dtype())
        elif not usual or not is_number(value):
            plain(module, name, value, *args, **kwargs)
            return
        else:
            value = value.detach().clone()
        if value.device != metric.value.device:
            metric.to(value.device)
        metric._forward_cache = metric.value = value
        metric.has_reset = False
        connector._current_fx = module._current_fx_name

    return lean


def is_step_value(metric: Any) -> bool:
    """Return whether a metric is logged as by `log(name, value)` in a hook of a batch."""
    meta = metric.meta
    usual = meta.logger and meta.on_step and meta.add_dataloader_idx and metric.is_tensor
    unusual = meta.on_epoch or meta.prog_bar or meta.enable_graph
    return usual and not unusual and meta.is_mean_reduction and meta.dataloader_idx is None


def is_number(value: Any) -> bool:
    """Return whether a value is a tensor that Lightning logs as it is."""
    plain = type(value) is torch.Tensor and value.dim() == 0
    return plain and value.dtype in (torch.float32, torch.float64)


# address below lightning.pytorch -> what makes its replacement, and the digest of its source
REPLACEMENTS: dict[str, tuple[Function, str]] = {
    "trainer.call:_call_callback_hooks": (callback_hooks, "c413fb9a"),
    "trainer.call:_call_lightning_module_hook": (partial(hooks_of, "lightning_module"), "558a87d0"),
    "trainer.call:_call_strategy_hook": (partial(hooks_of, "strategy"), "ff429e3a"),
    "trainer.connectors.logger_connector.result:_ResultMetric.to": (result_mover, "f45ccd76"),
    "core.module:LightningModule.log": (step_log, "439eca99"),
    "core.module:is_param_in_hook_signature": (signatures, "6bd4f22c"),
    "trainer.trainer:Trainer.global_step": (step_counter, "c3ca6f19"),
    "loops.training_epoch_loop:_TrainingEpochLoop.run": (lean_run, "e8393a21"),
    "loops.training_epoch_loop:is_param_in_hook_signature": (signatures, "6bd4f22c"),
}
