"""What `bench profile` does in a row's own process."""

import gzip
import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from gpt_lightning.attention import AttentionFn, naive_attention
from gpt_lightning.bench import trace as traces
from gpt_lightning.bench.profile import BENCH, ProfileRow
from gpt_lightning.bench.sizes import autocast, check_dtype, make_model
from gpt_lightning.bench.sweep import make_row
from gpt_lightning.bench.timing import StepTimer, measure
from gpt_lightning.bench.trace import KINDS, Work
from gpt_lightning.bench.worker import SkippedError
from gpt_lightning.device import synchronize
from gpt_lightning.model import GPT, MLP, CausalSelfAttention
from gpt_lightning.tables import markdown

VOCABULARY = 10_000  # of make_model
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
    check_dtype(dtype, where)
    if where.type == "mps":
        raise SkippedError("torch.profiler sees no kernels of MPS")
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
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


# ---- tables, all of one step ---------------------------------------------------------------------


def summary(works: list[Work], steps: int, timer_ms: float, on_gpu: bool) -> dict[str, float]:
    """The row: times, calls and shares."""
    spans = [
        traces.span_ms(place, inner, on_gpu)
        for place, inner in traces.by_range(works)[("step",)].items()
    ]
    kernels_ms = traces.total_ms(works) / steps
    return {
        "timer_ms": timer_ms,
        "span_ms": statistics.fmean(spans),
        "kernels_ms": kernels_ms,
        "busy": kernels_ms / statistics.fmean(spans),
        "kernel_calls": len(works) / steps,
        "products_calls": sum(work.kind == "products" for work in works) / steps,
        **traces.shares(works),
    }


def ranges_table(works: list[Work], steps: int, on_gpu: bool) -> list[dict[str, Any]]:
    """A row a range, in the order of the step; what is its own adds up to all kernels."""
    whole = traces.total_ms(works)
    rows = []
    for path, places in traces.by_range(works).items():
        within = [work for inner in places.values() for work in inner]
        own = [work for work in within if work.inside[-1].path == path]
        products = [work for work in within if work.kind == "products"]
        spans = [traces.span_ms(place, inner, on_gpu) for place, inner in places.items()]
        rows.append(
            {
                "range": " / ".join(path),
                "calls": len(places) / steps,
                "span_ms": sum(spans) / steps,
                "kernels_ms": traces.total_ms(within) / steps,
                "own_ms": traces.total_ms(own) / steps,
                "products_ms": traces.total_ms(products) / steps,
                "share": traces.total_ms(within) / whole,
            }
        )
    return rows


def attention_flops(shape: list[int], batch: int, context: int) -> dict[str, int]:
    """FLOPs of the attention of all layers in one forward pass, by part.

    Args:
        shape: Layers, heads, width C.
        batch: Sequences B.
        context: Tokens T.

    Returns:
        projections: 3 C and C columns from C rows, 2 FLOPs a multiply-add. Scores and values: the
        full T x T square a head. softmax: maximum, difference, exponential, sum, quotient.
    """
    n_layer, n_head, C = shape
    square = batch * context**2
    return {
        "projections": n_layer * 8 * batch * context * C**2,
        "attention scores": n_layer * 2 * square * C,
        "softmax": n_layer * 5 * square * n_head,
        "value product": n_layer * 2 * square * C,
    }


def attention_table(works: list[Work], steps: int, flops: dict[str, int]) -> list[dict[str, Any]]:
    """Softmax against matrix products: a row a part, in time and in FLOPs."""
    parts: dict[str, list[Work]] = {part: [] for part in flops}
    for work in works:
        path = work.inside[-1].path
        if "attention" in path:
            parts[path[-1] if path[-1] in parts else "projections"].append(work)
    whole_ms = sum(map(traces.total_ms, parts.values())) / steps
    rows = []
    for part, inner in parts.items():
        ms = traces.total_ms(inner) / steps
        rows.append(
            {
                "part": part,
                "kernels_ms": ms,
                "products_ms": traces.total_ms(w for w in inner if w.kind == "products") / steps,
                "time_share": ms / whole_ms,
                "gflop": flops[part] / 1e9,
                "flop_share": flops[part] / sum(flops.values()),
                "gflop_per_s": flops[part] / ms / 1e6,
            }
        )
    return rows


def kernels_table(works: list[Work], steps: int, top: int) -> list[dict[str, Any]]:
    """A row a kernel, what takes longest first; the last row is the rest."""
    whole = traces.total_ms(works)
    groups = list(traces.by_kernel(works).items())
    rest = [work for _, inner in groups[top:] for work in inner]
    shown = [*groups[:top], *([(("", f"{len(groups) - top} more", ""), rest)] if rest else [])]
    return [
        {
            "kind": kind,
            "kernel": kernel,
            "op": op if op != kernel else "",
            "calls": len(inner) / steps,
            "ms": traces.total_ms(inner) / steps,
            "share": traces.total_ms(inner) / whole,
        }
        for (kind, kernel, op), inner in shown
    ]


# ---- TensorBoard ---------------------------------------------------------------------------------


def write_tensorboard(folder: Path, result: dict[str, Any]) -> None:
    """The tables as texts, times and shares as scalars: a run a row."""
    from torch.utils.tensorboard import SummaryWriter

    setting = {name: value for name, value in result.items() if not isinstance(value, list)}
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("profile/step", markdown([make_row(ProfileRow, setting)]))
        for name, row in BENCH.tables.items():
            rows = [make_row(row, setting | part) for part in result[name]]
            writer.add_text(f"profile/{name}", markdown(rows))
        for name in ("timer_ms", "span_ms", "kernels_ms", "busy"):
            writer.add_scalar(f"profile/{name}", result[name], 0)
        for kind in KINDS:
            writer.add_scalar(f"share/{kind}", result[kind], 0)
        for part in result["ranges"]:
            tag = part["range"].replace(" / ", "/").replace(" ", "_")
            writer.add_scalar(f"kernels_ms/{tag}", part["kernels_ms"], 0)
