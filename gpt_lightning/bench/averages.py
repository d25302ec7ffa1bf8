"""Averages of torch.profiler for one step: ops, kernels and named ranges."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.profiler import ProfilerActivity, profile, schedule

from gpt_lightning.hardware.device import synchronize

TABLE = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8"))
KINDS = ("products", "softmax", "elementwise", "reductions", "other")
STEP = "ProfilerStep"  # beginning of the name that the profiler gives a step


@dataclass
class Work:
    """Op, kernel or range in one step.

    Attributes:
        name: Name of the op, kernel or range.
        calls: Calls in a step.
        ms: Milliseconds of its own; of a range those of all kernels in it.
        span_ms: Milliseconds from its begin to its end.
    """

    name: str
    calls: float
    ms: float
    span_ms: float

    @property
    def kind(self) -> str:
        """Kind of an op or a kernel, one of KINDS."""
        op = re.fullmatch(r"(?:aten|gpt_lightning)::(.*?)_?", self.name)
        if op is None:
            return first_match(TABLE["kernels"], self.name.lower(), re.search)
        return first_match(TABLE["ops"], op[1], re.fullmatch)

    @property
    def part(self) -> str:
        """Part of a training step, one of `parts` in kinds.yaml or other."""
        return first_match(TABLE["parts"], self.name.lower(), re.search)


def first_match(table: dict[str, list[str]], name: str, match: Any) -> str:
    """Return the first key of which a pattern matches a name; `other` if none does."""
    return next((key for key, names in table.items() if match("|".join(names), name)), "other")


class Profiled(profile):
    """Profiler of some steps, after one that it does not record.

    Args:
        device: Device that does the work.
        steps: Number of recorded steps.
        path: File of the trace, .json.gz.
    """

    def __init__(self, device: torch.device, steps: int, path: Path) -> None:
        gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        once = schedule(wait=0, warmup=1, active=steps, repeat=1)
        super().__init__(activities=[ProfilerActivity.CPU, *gpu], schedule=once)
        self.device, self.steps, self.path = device, steps, path

    def step(self) -> None:
        """End a step when the device is idle."""
        synchronize(self.device)
        super().step()

    def averages(self) -> "Averages":
        """Write the trace and return the averages.

        Raises:
            RuntimeError: The profiler recorded no kernel.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.export_chrome_trace(str(self.path))
        found = Averages(self.key_averages(), self.steps, self.device.type == "cuda")
        if not found.kernels:
            raise RuntimeError("torch.profiler recorded no kernel; may this user profile the GPU?")
        return found


class Averages:
    """Work of one step, from the averages of torch.profiler over some steps.

    Args:
        averages: FunctionEventAvg of each name.
        steps: Profiled steps.
        on_gpu: True if the device is a GPU, False if it is a CPU.
    """

    def __init__(self, averages: Iterable[Any], steps: int, on_gpu: bool) -> None:
        self._all, self.steps, self.on_gpu = list(averages), steps, on_gpu
        spans = [a.cpu_time_total for a in self._all if a.key.startswith(STEP) and on_host(a)]
        self.span_ms = sum(spans) / steps / 1e3
        own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        named = [a for a in self._all if not a.is_user_annotation and not a.key.startswith(STEP)]
        self.ops = [self._work(a, own) for a in named if on_host(a) and "::" in a.key]
        self.kernels = self.ops
        if on_gpu:
            self.kernels = [self._work(a, own) for a in named if not on_host(a)]
        self.kernels_ms = sum(work.ms for work in self.kernels)

    def _work(self, average: Any, own: str) -> Work:
        ms, span_ms = getattr(average, own) / 1e3, average.cpu_time_total / 1e3
        return Work(average.key, average.count / self.steps, ms / self.steps, span_ms / self.steps)

    def times(self, timer_ms: float) -> dict[str, float]:
        """Return the columns of a step's times."""
        times = {"timer_ms": timer_ms, "span_ms": self.span_ms, "kernels_ms": self.kernels_ms}
        return times | {"busy": self.kernels_ms / self.span_ms}

    def shares(self) -> dict[str, float]:
        """Return the share of each kind in the time of all ops; the shares add up to 1."""
        whole = sum(op.ms for op in self.ops)
        return {kind: sum(op.ms for op in self.ops if op.kind == kind) / whole for kind in KINDS}

    def parts(self) -> list[str]:
        """Return the names of all parts."""
        return [*TABLE["parts"], "other"]

    def ranges(self, names: Iterable[str]) -> dict[str, Work]:
        """Return the named ranges that the step has, in the order of the names."""
        found: dict[str, Work] = {}
        time = "device_time_total" if self.on_gpu else "cpu_time_total"
        for name in names:
            for average in self._all:
                if average.key == name and on_host(average):
                    found[name] = self._work(average, time)
        for average in self._all:  # a GPU has the time from the first to the last kernel, too
            if average.key in found and not on_host(average):
                found[average.key].span_ms = average.device_time_total / 1e3 / self.steps
        return found


def on_host(average: Any) -> bool:
    """Return whether an average is of the host's work, not of the device's."""
    return bool(average.device_type.name == "CPU")
