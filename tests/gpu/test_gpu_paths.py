"""Loss and gradients of every path on a device, compared with float32 on the CPU."""

import functools
from typing import Any

import pytest
import torch

from gpt_lightning.model.attention import FUSED, NoKernelError, find_kernel
from gpt_lightning.model.fast.compilation import compile_in_place
from gpt_lightning.model.gpt import GPT, GPTConfig

pytestmark = pytest.mark.gpu
# GPT-2's width, heads, context and vocabulary; four layers, so that a test takes seconds
SHAPE: dict[str, Any] = {"n_layer": 4, "n_head": 12, "n_embd": 768, "vocab_size": 50304}
SMALL: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 512}  # on a CPU
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Largest relative error of the gradients. float32: sums in another order. TF32 and bfloat16 round
# products to 11 and 8 significant bits, once for each of some 30 products in a row.
LIMITS = {"fp32": 1e-4, "tf32": 3e-3, "bf16": 3e-2, "fp16": 1e-2}
SCALE = 1024  # as a GradScaler: without it the softmax's 2e-8 are 0 in fp16, an error of 5e-2
PLAIN: dict[str, Any] = {}
VARIANTS = {
    "plain": PLAIN,
    "naive": {"attention": "naive"},
    "chunked-loss": {"loss_chunk": 300},
    "checkpointing": {"checkpointing": True},
    "untied": {"tie_weights": False},
    **{name: {"attention": name} for name in FUSED},
}


def shape(device: str, **settings: Any) -> GPTConfig:
    return GPTConfig(**(SMALL if device == "cpu" else SHAPE) | settings)


def batch(config: GPTConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(config.vocab_size or 0, (4, 257), generator=generator)
    return idx[:, :-1].contiguous(), idx[:, 1:].contiguous()


def gradients(
    config: GPTConfig, device: str, dtype: str, compiled: str = ""
) -> tuple[float, torch.Tensor]:
    """Return the loss and all gradients in one vector, on the CPU; the dropout has one seed."""
    torch.manual_seed(1)
    model = GPT(config).to(device)
    if compiled:
        torch.compiler.reset()
        compile_in_place(model, device, compiled)
    x, y = (tokens.to(device) for tokens in batch(config))
    torch.manual_seed(2)
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        with torch.autocast(device, DTYPES.get(dtype), enabled=dtype in DTYPES):
            loss = model(x, y)
        scale = SCALE if dtype == "fp16" else 1
        (loss * scale).backward()
    finally:
        torch.set_float32_matmul_precision("highest")
    grads = [p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(grads) / scale


@functools.cache
def exact(config: GPTConfig) -> tuple[float, torch.Tensor]:
    return gradients(config, "cpu", "fp32")


def compare(config: GPTConfig, device: str, dtype: str, compiled: str = "") -> None:
    plain = GPTConfig(**{**vars(config), "attention": "sdpa", "residual": "float32"})
    loss, found = gradients(config, device, dtype, compiled)
    expected_loss, expected = exact(plain)
    assert loss == pytest.approx(expected_loss, rel=LIMITS[dtype])
    assert (found - expected).norm() / expected.norm() < LIMITS[dtype]


def skip_without(config: GPTConfig, device: str, dtype: str) -> None:
    """Skip the test if PyTorch has no such kernel here."""
    if config.attention not in FUSED:
        return
    like = torch.empty(0, device=device, dtype=DTYPES.get(dtype, torch.float32))
    attention = GPT(GPTConfig(**vars(config) | SMALL)).transformer.h[0].attn.attention
    try:
        find_kernel(attention, like, config.n_embd // config.n_head, config.dropout)
    except NoKernelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_eager(name, dtype, device):
    if device != "cuda" and dtype in ("tf32", "fp16"):
        pytest.skip(f"{device} has no {dtype}")
    config = shape(device, **VARIANTS[name])
    skip_without(config, device, dtype)
    compare(config, device, dtype)


@pytest.mark.parametrize("scope", ["model", "block"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("plain", "fp32"),
        ("plain", "bf16"),
        ("plain", "fp16"),
        ("chunked-loss", "bf16"),
        ("checkpointing", "bf16"),
    ],
)
def test_compiled(name, dtype, scope, device):
    if device != "cuda" and (dtype == "fp16" or name == "checkpointing"):
        pytest.skip(f"{device} has no {dtype}, or is not compiled with checkpointing")
    compare(shape(device, **VARIANTS[name]), device, dtype, scope)


@pytest.mark.parametrize("compiled", ["", "model"])
def test_a_residual_stream_in_bfloat16(compiled, device):
    compare(shape(device, residual="bfloat16"), device, "bf16", compiled)


@pytest.mark.parametrize("compiled", ["", "model"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_with_dropout_are_those_of_its_masks(dtype, compiled, device):
    """The derivative along a direction, by differences with the same seed, needs no CPU's masks."""
    torch.manual_seed(1)
    model = GPT(shape(device, dropout=0.2, vocab_size=512)).to(device)
    if compiled:
        torch.compiler.reset()
        compile_in_place(model, device)
    x, y = (tokens.to(device) % 512 for tokens in batch(model.config))

    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            out: torch.Tensor = model(x, y)
        return out

    loss().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    step = 0.05  # along the gradient: large, so that rounding is small beside the difference
    values = []
    for side in (1, -2):
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.add_(g, alpha=side * step / norm.item())
        values.append(loss().item())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(norm.item(), rel=0.1)


def test_two_equal_steps_have_equal_bits_where_pytorch_is_deterministic(device):
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (gradients(shape(device), device, "bf16")[1] for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second)
