"""Attention: the definition, the fused kernels of PyTorch, and a user's own."""

import importlib
import operator
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt_lightning.bench.core.course_model import RoPE
from gpt_lightning.model.attention import FUSED as FUSED_IN_TRAINING
from gpt_lightning.model.attention import NoKernelError, graph_nodes, naive_attention
from gpt_lightning.tables import worker

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# kernel -> backend, and a part of the name of its node in the autograd graph
FUSED = {"sdpa-math": (SDPBackend.MATH, "Softmax")}
FUSED |= {f"sdpa-{kernel}": backend for kernel, backend in FUSED_IN_TRAINING.items()}
KERNELS = ("naive", "compiled", *FUSED)


def make_attention(kernel: str, causal: bool, rope: RoPE | None = None) -> Attention:
    """Return a function of q, k and v, (B, nh, T, d) each; with `rope` it rotates q and k first."""
    if ":" in kernel:
        inner = own_attention(kernel, causal)
    elif kernel in FUSED:
        inner = fused_attention(kernel, causal)
    else:
        inner = partial(naive_attention, dropout_p=0.0) if causal else unmasked_attention

    def rotated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert rope is not None
        return inner(rope(q).type_as(q), rope(k).type_as(k), v)

    attention = inner if rope is None else rotated
    return torch.compile(attention, dynamic=False) if kernel == "compiled" else attention


def unmasked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention by definition, without a mask."""
    scores = (q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5  # (B, nh, T, T)
    out: torch.Tensor = scores.softmax(dim=-1) @ v
    return out


def fused_attention(kernel: str, causal: bool) -> Attention:
    """Return F.scaled_dot_product_attention restricted to the backend of a kernel."""
    backend, _ = FUSED[kernel]

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return fused


def own_attention(kernel: str, causal: bool) -> Attention:
    """Return MODULE:FUNCTION of the user, of (B nh, T, d), as a function of (B, nh, T, d)."""
    module, _, name = kernel.partition(":")
    function = operator.attrgetter(name)(importlib.import_module(module))

    def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = function(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), causal)
        return out.unflatten(0, q.shape[:2])

    return own


def check_own(attention: Attention, causal: bool, tensors: Sequence[torch.Tensor]) -> None:
    """Compare the output and the gradients of a user's kernel with those of the definition.

    Args:
        attention: Kernel of the user.
        causal: Mask the future.
        tensors: q, k, v and the output's gradient, (B, nh, T, d) each.

    Raises:
        RuntimeError: A shape differs (message of torch), or an error exceeds its limit.
    """
    plain = make_attention("naive", causal)
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]  # MPS has no float64

    def outputs(function: Attention, *given: torch.Tensor) -> list[torch.Tensor]:
        q, k, v, gradient = given
        out = function(q, k, v)
        return [out, *torch.autograd.grad(out, (q, k, v), gradient)]

    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    found = (outputs(attention, *tensors), outputs(plain, *tensors), outputs(plain, *exact))
    for name, own, rounded, true in zip(names, *found, strict=True):
        error, usual = ((t.cpu().double() - true).abs().max().item() for t in (own, rounded))
        limit = 4 * usual + 1e-5 * true.abs().max().item()
        if not error <= limit:
            raise RuntimeError(
                f"wrong {name}: {error:.2e} off the definition in float64; the limit is {limit:.2e}"
            )


def check_kernel(kernel: str, attention: Attention, make: Callable[[], torch.Tensor]) -> None:
    """Call a fused kernel once and find the kernel that ran in the autograd graph.

    Raises:
        SkippedError: torch has no such kernel for these tensors (the message has torch's reason),
            or torch ran another kernel.
    """
    if kernel not in FUSED:
        return
    try:
        ran = graph_nodes(lambda: attention(make(), make(), make()))
    except NoKernelError as error:
        raise worker.SkippedError(str(error)) from error
    if not any(FUSED[kernel][1] in name for name in ran):
        raise worker.SkippedError(f"torch took another kernel: {', '.join(sorted(ran))}")
