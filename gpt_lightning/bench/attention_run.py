"""What `bench attention` does in a row's own process: one kernel, its times and its memory."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt_lightning.bench.attention import KERNELS
from gpt_lightning.bench.core.memory_meter import (
    MIB,
    Memory,
    PhaseContext,
    limit_memory,
    measure_memory,
)
from gpt_lightning.bench.core.timing import StepTimer, measure
from gpt_lightning.bench.core.training_step import checked_graphs, compiled_graphs, tensor_dtype
from gpt_lightning.bench.core.worker import SkippedError
from gpt_lightning.model.attention import naive_attention

NO_KERNEL = ("no viable backend", "no available kernel")  # torch's words
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def measure_attention(
    device: str,
    dtype: str,
    kernel: str,
    causal: bool,
    batch: int,
    d: int,
    context: int,
    warmup: int,
    steps: int,
    memory_gib: float | None,
) -> dict[str, Any]:
    """Times forward and backward of one kernel and tells what it holds in between."""
    where = torch.device(device)
    kind = tensor_dtype(dtype, where)
    limit_memory(where, memory_gib)
    graphs = compiled_graphs()
    torch.manual_seed(0)
    attention = make_attention(kernel, causal)
    make = partial(torch.randn, batch, 1, context, d, device=where, dtype=kind, requires_grad=True)
    check_kernel(kernel, attention, make)
    times = time_steps(attention, make, where, warmup, steps)
    return {
        **times,
        **memory_of(held_memory(attention, make, where)),
        "graphs": checked_graphs(kernel == "compiled", graphs),
        "replaced": replaced_patterns(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def make_attention(kernel: str, causal: bool) -> Attention:
    """A function of q, k and v, (B, 1, T, d) each."""
    if (backend := KERNELS[kernel]) is None:
        written = partial(naive_attention, dropout_p=0.0) if causal else unmasked_attention
        function: Attention = torch.compile(written, dynamic=False)
        return function if kernel == "compiled" else written

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.__members__[backend[0]]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return fused


def unmasked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition without a mask: every query sees every key."""
    scores = (q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5  # (B, 1, T, T)
    out: torch.Tensor = scores.softmax(dim=-1) @ v
    return out


def replaced_patterns() -> int:
    """Attentions that torch.compile has replaced by scaled_dot_product_attention so far."""
    return int(counters["inductor"]["fuse_attention"])


def check_kernel(kernel: str, attention: Attention, make: Callable[[], torch.Tensor]) -> None:
    """Calls a fused kernel once and looks into the autograd graph for what ran.

    Raises:
        SkippedError: torch has no such kernel for these tensors, with torch's reason, if any; or it
            took another one.
    """
    if (backend := KERNELS[kernel]) is None:
        return
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            out = attention(make(), make(), make())
        except RuntimeError as error:
            if not any(sign in str(error).lower() for sign in NO_KERNEL):
                raise
            said = [str(reason.message).split(" (Triggered")[0] for reason in reasons]
            raise SkippedError("; ".join([*said, str(error)])) from error
    ran = graph_nodes(out)
    if not any(backend[1] in name for name in ran):
        raise SkippedError(f"torch took another kernel: {', '.join(sorted(ran))}")


def graph_nodes(out: torch.Tensor) -> set[str]:
    """Names of the nodes that made a tensor."""
    names: set[str] = set()
    rest: list[Any] = [out.grad_fn]
    while rest:
        node = rest.pop()
        if node is not None:
            names.add(node.name())
            rest += [parent for parent, _ in node.next_functions]
    return names


def time_steps(
    attention: Attention,
    make: Callable[[], torch.Tensor],
    device: torch.device,
    warmup: int,
    steps: int,
) -> dict[str, Any]:
    """Times of forward and backward, each inside the step."""
    q, k, v, gradient = (make() for _ in range(4))

    def step(timer: StepTimer) -> None:
        out = attention(q, k, v)
        timer.end("forward")
        torch.autograd.grad(out, (q, k, v), gradient)
        timer.end("backward")

    times, first_step_s = measure(step, device, warmup, steps)
    found: dict[str, Any] = {"first_step_s": first_step_s}
    for phase in ("forward", "backward", "total"):
        found |= {f"{phase}_ms": times[phase].median, f"{phase}_std_ms": times[phase].std}
    for name in ("mean", "min", "p90", "max"):
        found[f"total_{name}_ms"] = getattr(times["total"], name)
    return found


def held_memory(
    attention: Attention, make: Callable[[], torch.Tensor], device: torch.device
) -> Memory:
    """Memory by phase of one more step, which nobody times."""

    def step(phase: PhaseContext) -> None:
        q, k, v, gradient = (make() for _ in range(4))
        with phase("forward"):
            out = attention(q, k, v)
        with phase("backward"):
            torch.autograd.grad(out, (q, k, v), gradient)

    return measure_memory(step, device)


def memory_of(memory: Memory) -> dict[str, Any]:
    """The columns of memory."""
    forward, backward = memory.phases["forward"], memory.phases["backward"]
    return {
        "held_mib": (forward.end - forward.begin) / MIB,
        "peak_mib": max(forward.peak, backward.peak) / MIB,
        "memory_method": memory.method,
    }
