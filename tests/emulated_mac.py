"""A Mac's GPU on a machine without one: programs see the device mps, its tensors are the CPU's."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.accelerators.mps import MPSAccelerator
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

GIB = 2**30


class OnTheCPU(TorchFunctionMode):
    """Runs each call that names the device mps on the CPU; float64 is an error there, as on MPS."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **kwargs or {})
        named = False

        def moved(value: Any) -> Any:
            nonlocal named
            here = isinstance(value, torch.device | str) and str(value).partition(":")[0] == "mps"
            named |= here
            return "cpu" if here else value

        args, kwargs = tree_map(moved, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if named and isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            raise TypeError("MPS has no float64")
        return out


@contextmanager
def emulated_mac() -> Iterator[list[str]]:
    """Emulate a Mac; yield the names of the functions of torch.mps that are called."""
    called: list[str] = []

    def recorder(name: str, result: Any = None) -> Any:
        return lambda *args, **kwargs: called.append(name) or result

    functions = {"driver_allocated_memory": 3 * GIB, "current_allocated_memory": GIB}
    names = ("synchronize", "manual_seed", "empty_cache")
    MPSAccelerator.is_available.cache_clear()
    with (
        patch.multiple(torch.mps, **{n: recorder(n, r) for n, r in functions.items()}),
        patch.multiple(torch.mps, **{name: recorder(name) for name in names}),
        patch.object(torch.mps, "Event", event_class(called)),
        patch.object(torch.backends.mps, "is_available", lambda: True),
        patch.object(torch, "Generator", CPUGenerator),
        patch.object(platform, "processor", lambda: "arm"),
        OnTheCPU(),
    ):
        try:
            yield called
        finally:
            MPSAccelerator.is_available.cache_clear()


class CPUGenerator:
    """A generator of the CPU for every device; annotations need a class."""

    kind = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls.kind("cpu")


def event_class(called: list[str]) -> Any:
    """Return a class like torch.mps.Event; each event is 2 ms after the one before."""

    def make(enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at=0)

        def record() -> None:
            called.append("event")
            event.at = 2 * called.count("event")

        event.record, event.elapsed_time = record, lambda end: float(end.at - event.at)
        event.query, event.synchronize = lambda: True, lambda: None
        return event

    return make
