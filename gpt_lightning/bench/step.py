"""One training step for all benches of models, and the facts of a row's own process."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gpt_lightning.bench import timing
from gpt_lightning.bench.memory_meter import PhaseContext
from gpt_lightning.bench.models import VOCABULARY, CourseModel
from gpt_lightning.data.loader import Batch
from gpt_lightning.hardware.device import device_name, keep_freed_memory
from gpt_lightning.hardware.peaks import lookup, measured_peak
from gpt_lightning.hardware.precision import DTYPES, autocast, cuda_has_bf16
from gpt_lightning.model import flops
from gpt_lightning.model.fast.compilation import compile_in_place
from gpt_lightning.model.gpt import GPT
from gpt_lightning.runs.settings import Settings
from gpt_lightning.tables.worker import SkippedError
from gpt_lightning.training import optim

MAX_NORM = 1.0  # norm of the gradients in all files of configs/


def set_products(dtype: str, device: torch.device, keep: bool = True) -> torch.dtype:
    """Set the precision of float32 products; on a CPU also keep freed memory, as `fit` does.

    Args:
        dtype: Dtype of the products.
        device: Device of the row.
        keep: Keep freed memory.

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
    if device.type == "cpu" and keep:
        keep_freed_memory()
    return DTYPES[dtype].operands


def prepare(row: SimpleNamespace) -> torch.device:
    """Set precision and seed of the process of a row for training; return the row's device.

    Raises:
        SkippedError: See `set_products`; also for fp16 on a CPU, which `fit` does not support.
    """
    device = torch.device(row.device)
    if row.dtype == "fp16" and device.type == "cpu":
        raise SkippedError("fp16 training needs a GPU")
    set_products(row.dtype, device)
    torch.manual_seed(0)
    return device


def random_batch(
    batch: int, context: int, device: torch.device, vocab_size: int = VOCABULARY
) -> Batch:
    """Return random tokens and targets, int64 (B, T) each."""
    x, y = (torch.randint(vocab_size, (batch, context), device=device) for _ in range(2))
    return x, y


def fit_optimizer(model: nn.Module, device: torch.device, dtype: str) -> torch.optim.AdamW:
    """Make AdamW as `fit` does: decay on matrices, fused where the device has it."""
    fused = device.type in optim.FUSED_ADAMW_DEVICES and dtype != "fp16"  # GradScaler unscales
    return optim.make_adamw(model.named_parameters(), Settings(learning_rate=1e-4), fused)


@dataclass(eq=False)
class Training:
    """Training of a model that maps tokens and targets to a loss, on one batch again and again.

    Args:
        model: Model; it is moved to the batch's device.
        batch: Tokens and targets, int64 (B, T) each, on the device.
        dtype: Dtype of the forward pass, one of DTYPES.
        compiled: Compile the model.
        micro_batches: Forward and backward passes on the batch before an update.
        optimizer: Optimizer; None: the one of `fit_optimizer`.
        clip: Clip gradients to MAX_NORM and raise if their norm is not finite, as `fit` does.
        updates: Run the optimizer; False: only free the gradients.
    """

    model: nn.Module
    batch: Batch
    dtype: str
    compiled: bool = False
    micro_batches: int = 1
    optimizer: Any = None
    clip: bool = True
    updates: bool = True

    def __post_init__(self) -> None:
        self.device = self.batch[0].device
        self.model.to(self.device)
        if self.compiled:
            compile_in_place(self.model, self.device.type)
        self.optimizer = self.optimizer or fit_optimizer(self.model, self.device, self.dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == "fp16")
        self.times: timing.Times = {}  # milliseconds of the last block's steps
        self.first: dict[str, float] = {}  # phase -> milliseconds of the very first step
        self.loss, self.graphs = 0.0, 0  # the first step's

    def __call__(self, phase: PhaseContext = nullcontext) -> Tensor:
        """Train one step.

        Args:
            phase: Context of each of the phases forward, backward and optimizer.

        Returns:
            Loss of the last micro-batch, a scalar without a graph.

        Raises:
            RuntimeError: The norm of the gradients is not finite; with fp16 the scaler skips such
                a step instead.
        """
        for _ in range(self.micro_batches):
            with phase("forward"), autocast(self.dtype, self.device):
                loss = self.model(*self.batch)
            with phase("backward"):
                part = loss / self.micro_batches if self.micro_batches > 1 else loss
                self.scaler.scale(part).backward()
        with phase("optimizer"):
            if self.updates:
                if self.clip:
                    self.scaler.unscale_(self.optimizer)
                    norm = optim.clip_gradients(self.model.parameters(), MAX_NORM)
                    if not self.scaler.is_enabled() and not norm.isfinite():
                        raise RuntimeError(f"the gradient's norm is {norm.item()}")
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
        return loss.detach()

    def infer(self, phase: PhaseContext = nullcontext) -> None:
        """Compute the logits of the batch under no_grad, and free them."""
        with phase("forward"), torch.no_grad(), autocast(self.dtype, self.device):
            logits = self.model(self.batch[0])
        del logits  # held until the phase has ended

    def block(self, warmup: int, steps: int) -> list[float]:
        """Return the milliseconds of each of `steps` steps, after `warmup` others.

        Raises:
            RuntimeError: See `checked_graphs`.
        """
        graphs, losses = compiled_graphs(), []
        self.times, first = timing.record(
            lambda timer: losses.append(self(timer.phase)), self.device, warmup, steps
        )
        if not self.first:
            self.first, self.loss = first, float(losses[0])
            self.graphs = checked_graphs(self.compiled, graphs)
        return self.times["total"]


# ---- facts of the process ------------------------------------------------------------------------


def compiler_count(group: str, name: str) -> int:
    """Return a counter of torch.compile in this process; 0 where it has not run."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it would take 100 MiB
    return dynamo.counters[group][name] if dynamo else 0


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    return compiler_count("stats", "unique_graphs")


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


def rates(
    model: GPT | CourseModel, device: torch.device, dtype: str, tokens_per_sec: float, context: int
) -> dict[str, float]:
    """Return tokens/s and MFU as SpeedMonitor defines them.

    Args:
        model: Model, also on the meta device.
        device: Device whose peak counts.
        dtype: Dtype of the products, one of DTYPES.
        tokens_per_sec: Measured tokens/s.
        context: Tokens per sequence.
    """
    per_token = flops.flops_per_token(
        model.num_params(embeddings=False), model.config.n_layer, model.config.n_embd, context
    )
    peak = lookup(device_name(device), dtype) or measured_peak(device, dtype)
    mfu = flops.mfu(tokens_per_sec, per_token, peak.flops)
    return {"tokens_per_sec": tokens_per_sec, "mfu": mfu}
