"""One training step for all benchmarks of models, and the facts of a row's own process."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpt_lightning.bench.core.course_model import CourseModel
from gpt_lightning.hardware.device import keep_freed_memory
from gpt_lightning.hardware.peaks import device_name, lookup, measured_peak
from gpt_lightning.hardware.precision import cuda_has_bf16
from gpt_lightning.model import flops
from gpt_lightning.model.fast.compilation import attention_kernel
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.tables.rows import Row, column
from gpt_lightning.tables.worker import SkippedError
from gpt_lightning.training import optim

VOCABULARY = 10_000  # the systems course's
MAX_NORM = 1.0  # of gradients, as in all files of configs/
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
Norm = Literal["clip", "check", "none"]
PhaseContext = Callable[[str], AbstractContextManager[Any]]  # surrounds a named phase of a step


@dataclass(frozen=True)
class DeviceRow:
    """First columns of a row."""

    device: str = column("device")
    dtype: str = column("dtype")


@dataclass(frozen=True)
class SubjectRow(DeviceRow):
    """First columns of a row about a model of `make_subject`."""

    model: str = column("model")
    size: str = column("size", width=8)
    batch: int = column("batch", "d")
    context: int = column("context", "d")


@dataclass(frozen=True)
class ModelRow(DeviceRow):
    """First columns of a row about the training of a GPT-2."""

    compile: bool = column("compile")
    size: str = column("size", width=8)
    batch: int = column("batch", "d")
    context: int = column("context", "d")


# ---- precision -----------------------------------------------------------------------------------


def set_products(dtype: str, device: torch.device) -> torch.dtype:
    """Set the precision of float32 products; on a CPU also keep freed memory, as `fit` does.

    Returns:
        Dtype of tensors whose products are in `dtype`.

    Raises:
        SkippedError: The device has no such products and would silently compute others.
    """
    if dtype == "tf32" and device.type != "cuda":
        raise SkippedError(f"tf32 is a mode of NVIDIA GPUs, not of {device.type}")
    if dtype == "bf16" and device.type == "cuda" and not cuda_has_bf16():
        raise SkippedError(f"{torch.cuda.get_device_name(device)} has no bfloat16")
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    if device.type == "cpu":
        keep_freed_memory()
    return AUTOCAST.get(dtype, torch.float32)


def use_dtype(dtype: str, device: torch.device) -> None:
    """Call `set_products` for training under `autocast`.

    Raises:
        SkippedError: See `set_products`; also for fp16 on a CPU, which `fit` does not support.
    """
    if dtype == "fp16" and device.type == "cpu":
        raise SkippedError("fp16 training needs a GPU")
    set_products(dtype, device)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass in a dtype."""
    return torch.autocast(device.type, AUTOCAST[dtype]) if dtype in AUTOCAST else nullcontext()


# ---- the step ------------------------------------------------------------------------------------


def prepare(row: Row) -> torch.device:
    """Set precision and seed of the process of a row; return the row's device."""
    device = torch.device(row.device)
    use_dtype(row.dtype, device)
    torch.manual_seed(0)
    return device


def make_config(shape: list[int], context: int) -> GPTConfig:
    """Return a model's shape, (layers, heads, width), with the course's vocabulary."""
    n_layer, n_head, n_embd = shape
    return GPTConfig(n_layer, n_head, n_embd, block_size=context, vocab_size=VOCABULARY)


def make_model(shape: list[int], context: int) -> GPT:
    """Make a GPT-2 of (layers, heads, width)."""
    return GPT(make_config(shape, context))


def make_subject(model: str, shape: list[int], context: int) -> GPT | CourseModel:
    """Make a model, one of options.MODELS, of (layers, heads, width)."""
    config = make_config(shape, context)
    return GPT(config) if model == "gpt2" else CourseModel(config)


def kernel_of(model: nn.Module, device: torch.device, dtype: str, context: int) -> str:
    """Return the attention kernel of a GPT; empty for another model."""
    if not isinstance(model, GPT):
        return ""
    with autocast(dtype, device):
        return attention_kernel(model, device, context, model.config.dropout)


def random_batch(
    batch: int, context: int, device: torch.device, vocab_size: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets, int64 (B, T) each."""
    x, y = (torch.randint(vocab_size, (batch, context), device=device) for _ in range(2))
    return x, y


def fit_optimizer(model: nn.Module, device: torch.device, dtype: str) -> torch.optim.AdamW:
    """Make AdamW as `fit` does: decay on matrices, fused where the device has it."""
    groups = optim.decay_groups(model.named_parameters(), 0.1, "matrices")
    fused = device.type in optim.FUSED_ADAMW_DEVICES and dtype != "fp16"  # GradScaler unscales
    return optim.make_adamw(groups, 1e-4, (0.9, 0.95), fused)


class TrainingStep:
    """One optimizer step of a model that maps tokens and targets to a loss.

    Args:
        model: Model on the device.
        device: Device of the model and its batches.
        dtype: Dtype of the forward pass, one of options.DTYPES.
        optimizer: Optimizer; None: the one of `fit_optimizer`.
        norm: clip: clip gradients to MAX_NORM and raise if their norm is not finite, as `fit`
            does. check: raise only. none: neither.
        scaled: Scale gradients of fp16.
        updates: Run the optimizer; False: only free the gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: str,
        optimizer: torch.optim.Optimizer | None = None,
        norm: Norm = "clip",
        scaled: bool = True,
        updates: bool = True,
    ) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self.optimizer = optimizer or fit_optimizer(model, device, dtype)
        self.norm, self.updates = norm, updates
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled and dtype == "fp16")

    def __call__(
        self, x: Tensor, y: Tensor, phase: PhaseContext = nullcontext, micro_batches: int = 1
    ) -> Tensor:
        """Train on one batch.

        Args:
            x: Tokens, int64 (B, T).
            y: Targets, int64 (B, T).
            phase: Context of each of the phases forward, backward and optimizer.
            micro_batches: Forward and backward passes on the batch before the update.

        Returns:
            Loss of the last micro-batch, a scalar without a graph.
        """
        for _ in range(micro_batches):
            with phase("forward"), autocast(self.dtype, self.device):
                loss: Tensor = self.model(x, y)
            with phase("backward"):
                part = loss / micro_batches if micro_batches > 1 else loss
                self.scaler.scale(part).backward()
        with phase("optimizer"):
            self.update()
        return loss.detach()

    def update(self) -> None:
        """Check and clip gradients, update the weights, and free the gradients.

        Raises:
            RuntimeError: The norm of the gradients is not finite; with fp16 the scaler skips such
                a step instead.
        """
        if self.updates:
            if self.norm != "none":
                self.check_norm()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def check_norm(self) -> None:
        """Clip gradients where asked to, and raise if their norm is not finite."""
        self.scaler.unscale_(self.optimizer)
        limit = MAX_NORM if self.norm == "clip" else None
        norm = optim.clip_gradients(self.model.parameters(), limit)
        if not self.scaler.is_enabled() and not norm.isfinite():
            raise RuntimeError(f"the gradient's norm is {norm.item()}")


# ---- facts of the process ------------------------------------------------------------------------


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it would take 100 MiB
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def checked_graphs(compiled: bool, before: int) -> int:
    """Return the number of graphs made since `before`; only a compiled row may have any.

    Args:
        compiled: The row is called compiled.
        before: `compiled_graphs` before the first step.

    Raises:
        RuntimeError: The row is called compiled and has no graph, or the other way round.
    """
    graphs = compiled_graphs() - before
    if compiled != (graphs > 0):
        raise RuntimeError(f"compile is {compiled}, but torch.compile made {graphs} graphs")
    return graphs


def reset_peak_memory() -> None:
    """Begin a new peak: of tensors on CUDA, resident of the process on Linux."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")  # VmHWM


def rates(
    model: GPT | CourseModel, device: torch.device, dtype: str, tokens_per_sec: float, context: int
) -> dict[str, float]:
    """Return tokens/s and MFU as SpeedMonitor defines them.

    Args:
        model: Model, also on the meta device.
        device: Device whose peak counts.
        dtype: Dtype of the products, one of options.DTYPES.
        tokens_per_sec: Measured tokens/s.
        context: Tokens per sequence.
    """
    per_token = flops.flops_per_token(
        model.num_params(embeddings=False), model.config.n_layer, model.config.n_embd, context
    )
    mfu = flops.mfu(tokens_per_sec, per_token, peak_flops(device, dtype))
    return {"tokens_per_sec": tokens_per_sec, "mfu": mfu}


def peak_flops(device: torch.device, dtype: str) -> float:
    """Return the published peak of a device in FLOP/s, or the measured one."""
    return (lookup(device_name(device), dtype) or measured_peak(device, dtype)).flops
