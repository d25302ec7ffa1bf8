"""Lean dispatch of Lightning's hooks: a hook that nobody overrides costs next to nothing.

At each batch Lightning calls 6 hooks of every callback and 16 of the module and the strategy. Most
of them are empty, and around each call are a context of the profiler and two assignments to
`LightningModule._current_fx_name`, which search the module's parameters. While a `Trainer` of ours
runs, `lean_hooks` replaces private functions of Lightning. The replacements call the same hooks
with the same arguments in the same order. They skip what has no effect: empty hooks of
`lightning.Callback`, contexts of the profiler that records nothing, the move of a metric to the
device where it is, and repeated inspections of one signature. benchmarks/overhead.md has the gain.

A function is replaced only if its source is the one that this file was written for. With another
Lightning, and for a function that another program has replaced, Lightning's own way stays.
"""

import hashlib
import inspect
import logging
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from types import CodeType
from typing import Any

import lightning as L
from lightning.pytorch.profilers import PassThroughProfiler

Function = Callable[..., Any]
EMPTY_HOOKS = dict(vars(L.Callback))  # by name


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
                    if source_digest(plain.__code__).startswith(digest):  # a wrapper has its own
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


def call(owner: Any, module: L.LightningModule, hook: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the module, the strategy or a callback; `module.log` reads its name."""
    function = getattr(owner, hook)
    if not callable(function):
        return None
    fields = vars(module)  # Module.__setattr__ would search its parameters
    outer, fields["_current_fx_name"] = fields["_current_fx_name"], hook
    output = function(*args, **kwargs)
    fields["_current_fx_name"] = outer
    return output


# ---- each takes Lightning's function, and returns the function to use instead --------------------


def hooks_of(owner: str, plain: Function) -> Function:
    """Return a function that calls a hook of the Trainer's `lightning_module` or `strategy`."""

    def lean(trainer: Any, hook: str, *args: Any, **kwargs: Any) -> Any:
        if not is_usual(trainer, kwargs):
            return plain(trainer, hook, *args, **kwargs)
        return call(getattr(trainer, owner), trainer.lightning_module, hook, *args, **kwargs)

    return lean


def callback_hooks(plain: Function) -> Function:
    """Return a function that calls a hook of the callbacks that override it."""

    def lean(trainer: Any, hook: str, *args: Any, **kwargs: Any) -> None:
        if not is_usual(trainer, kwargs):
            plain(trainer, hook, *args, **kwargs)
            return
        module, empty = trainer.lightning_module, EMPTY_HOOKS.get(hook)
        for callback in trainer.callbacks:  # may grow meanwhile
            if getattr(getattr(callback, hook), "__func__", None) is not empty:
                call(callback, module, hook, trainer, module, *args, **kwargs)

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


# address below lightning.pytorch -> what makes its replacement, and the digest of its source
REPLACEMENTS: dict[str, tuple[Function, str]] = {
    "trainer.call:_call_callback_hooks": (callback_hooks, "c413fb9a"),
    "trainer.call:_call_lightning_module_hook": (partial(hooks_of, "lightning_module"), "558a87d0"),
    "trainer.call:_call_strategy_hook": (partial(hooks_of, "strategy"), "ff429e3a"),
    "trainer.connectors.logger_connector.result:_ResultMetric.to": (result_mover, "f45ccd76"),
    "core.module:is_param_in_hook_signature": (signatures, "6bd4f22c"),
    "loops.training_epoch_loop:is_param_in_hook_signature": (signatures, "6bd4f22c"),
}
