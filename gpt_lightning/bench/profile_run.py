"""What `bench profile` does in a row's own process."""

import gzip
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from gpt_lightning.bench.core import trace as traces
from gpt_lightning.bench.core.timing import StepTimer, measure
from gpt_lightning.bench.core.trace import Work
from gpt_lightning.bench.core.training_step import VOCABULARY, autocast, make_model, use_dtype
from gpt_lightning.bench.core.worker import SkippedError
from gpt_lightning.bench.profile import ProfileRow
from gpt_lightning.bench.profile_tables import (
    attention_flops,
    attention_table,
    kernels_table,
    ranges_table,
    summary,
    write_tensorboard,
)
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.model.attention import AttentionFn, naive_attention
from gpt_lightning.model.gpt import GPT, MLP, CausalSelfAttention

MODULES: dict[type[nn.Module], str] = {
    CausalSelfAttention: "attention",
    MLP: "MLP",
    nn.LayerNorm: "layer norm",
}
PARTS = ("attention scores", "softmax", "value product")
PHASES = ("step", "data", "forward", "backward", "optimizer")
NAMES = (*PHASES, *MODULES.values(), *PARTS)

RangeFn = Callable[[str], AbstractContextManager[None]]


def measure_profile(
    device: str,
    dtype: str,
    size: str,
    shape: list[int],
    batch: int,
    context: int,
    mode: str,
    steps: int,
    warmup: int,
    top: int,
    folder: str,
    nsys: bool = False,
) -> dict[str, Any]:
    """Times a step, then profiles it.

    Raises:
        SkippedError: torch.profiler does not see what the device does.
    """
    where = torch.device(device)
    use_dtype(dtype, where)
    if where.type == "mps":
        raise SkippedError("torch.profiler sees no kernels of MPS")
    torch.manual_seed(0)
    step = Step(make_model(shape, context).to(where), where, dtype, batch, mode)
    times, _ = measure(step.timed, where, warmup, steps)
    step.add_ranges()
    if nsys:
        watched(step, steps)
        return {"timer_ms": times["total"].median}
    label = f"{device}-{dtype}-{size}-{batch}x{context}-{mode}".replace("/", "-")
    works = profiled(step, steps, Path(folder) / f"trace-{label}.json.gz")
    result = {
        "trace": f"trace-{label}.json.gz",
        **summary(works, steps, times["total"].median, step.on_gpu),
        "ranges": ranges_table(works, steps, step.on_gpu),
        "attention": attention_table(works, steps, attention_flops(shape, batch, context)),
        "kernels": kernels_table(works, steps, top),
    }
    shown = ProfileRow(device, dtype, size, batch, context, mode)
    write_tensorboard(Path(folder) / "tensorboard" / label, vars(shown) | result)
    return result


class Step:
    """A step of a GPT with attention written out, on random tokens.

    Args:
        model: On the device.
        device: That does the work.
        dtype: One of bench.sizes.DTYPES.
        batch: Sequences.
        mode: One of bench.profile.MODES.
    """

    def __init__(self, model: GPT, device: torch.device, dtype: str, batch: int, mode: str) -> None:
        self.model, self.device, self.dtype, self.mode = model, device, dtype, mode
        self.on_gpu = device.type == "cuda"
        self.tokens = torch.randint(VOCABULARY, (1_000_000,))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.shape = (batch, model.config.block_size)
        self.range: RangeFn = silent
        self.x, self.y = self.data()
        set_attention(model, naive_attention)

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows of the tokens, on the device: 2 x (B, T)."""
        B, T = self.shape
        starts = torch.randint(len(self.tokens) - T, (B, 1))
        windows = self.tokens[starts + torch.arange(T + 1)]  # (B, T + 1)
        return windows[:, :-1].to(self.device), windows[:, 1:].to(self.device)

    def __call__(self) -> None:
        with self.range("step"):
            if self.mode == "inference":
                with self.range("forward"), torch.no_grad(), autocast(self.dtype, self.device):
                    self.model(self.x)
                return
            if self.mode == "full-step":
                with self.range("data"):
                    self.x, self.y = self.data()
            with self.range("forward"), autocast(self.dtype, self.device):
                loss = self.model(self.x, self.y)
            with self.range("backward"):
                loss.backward()
            with self.range("optimizer"):
                if self.mode == "full-step":
                    self.optimizer.step()
                self.optimizer.zero_grad()

    def timed(self, timer: StepTimer) -> None:
        """For bench.timing.measure: the step is one phase."""
        self()
        timer.end("step")

    def add_ranges(self) -> None:
        """From now on the step names what it does."""
        self.range = nvtx_range if self.on_gpu else cpu_range
        set_attention(self.model, attention_in_parts(self.range))
        for module in self.model.modules():
            if type(module) in MODULES:
                module.forward = inside(self.range, MODULES[type(module)], module.forward)


# ---- ranges --------------------------------------------------------------------------------------


@contextmanager
def silent(name: str) -> Iterator[None]:
    """No range."""
    yield


@contextmanager
def cpu_range(name: str) -> Iterator[None]:
    """A range of torch.profiler."""
    with record_function(name):
        yield


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """A range of torch.profiler, and of nsys when that watches."""
    with record_function(name), torch.cuda.nvtx.range(name):
        yield


def inside(range_: RangeFn, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside a named range."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with range_(name):
            return function(*args, **kwargs)

    return wrapped


def set_attention(model: GPT, attention: AttentionFn) -> None:
    """Gives every layer this attention."""
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            module.attention = attention


def attention_in_parts(range_: RangeFn) -> AttentionFn:
    """`naive_attention`, op for op, with its three parts in ranges."""
    scores_, softmax_, values_ = PARTS

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float
    ) -> torch.Tensor:
        T, S = q.size(-2), k.size(-2)
        with range_(scores_):
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))  # (B, nh, T, S)
            future = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
            scores = scores.masked_fill(future, -math.inf)
        with range_(softmax_):
            weights = scores.softmax(dim=-1)
        with range_(values_):
            return F.dropout(weights, dropout_p) @ v

    return attention


# ---- profiling -----------------------------------------------------------------------------------


def profiled(step: Step, steps: int, path: Path) -> list[Work]:
    """Profiles steps, one before them unseen, and writes the trace.

    Raises:
        RuntimeError: the profiler saw nothing of the device.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if step.on_gpu else [])]
    synchronize(step.device)
    with profile(
        activities=activities, schedule=schedule(wait=0, warmup=1, active=steps, repeat=1)
    ) as profiler:
        for _ in range(1 + steps):
            step()
            profiler.step()
        synchronize(step.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        works = traces.read_trace(json.load(file), NAMES, step.on_gpu)
    if not works:
        raise RuntimeError("torch.profiler recorded no kernel; may this user profile the GPU?")
    return works


def watched(step: Step, steps: int) -> None:
    """Runs steps for nsys, which cannot watch together with torch.profiler."""
    step()
    synchronize(step.device)
    torch.cuda.profiler.start()
    for _ in range(steps):
        step()
    synchronize(step.device)
    torch.cuda.profiler.stop()
