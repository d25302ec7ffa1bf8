"""What the benchmarks of models have in common, in a row's own process."""

import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_lightning.hardware.memory import keep_freed_memory

if TYPE_CHECKING:
    import torch

    from gpt_lightning.model.gpt import GPT

VOCABULARY = 10_000  # the systems course's
MAX_NORM = 1.0  # of gradients, as in all files of configs/


def set_products(dtype: str, device: "torch.device") -> None:
    """Sets the precision of float32 products, and refuses what would silently be something else.

    On a CPU the process also keeps its memory, as `fit` does.

    Raises:
        SkippedError: the device has no such products.
    """
    import torch

    from gpt_lightning.bench.core.worker import SkippedError

    if dtype == "tf32" and device.type != "cuda":
        raise SkippedError(f"tf32 is a mode of NVIDIA GPUs, not of {device.type}")
    if dtype == "bf16" and device.type == "cuda" and not has_bf16():
        raise SkippedError(f"{torch.cuda.get_device_name(device)} has no bfloat16")
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    if device.type == "cpu":
        keep_freed_memory()


def tensor_dtype(dtype: str, device: "torch.device") -> "torch.dtype":
    """The dtype of tensors whose products are in `dtype`; float32's precision is set.

    Raises:
        SkippedError: as `set_products`.
    """
    import torch

    set_products(dtype, device)
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)


def use_dtype(dtype: str, device: "torch.device") -> None:
    """`set_products` for training under `autocast`.

    Raises:
        SkippedError: as `set_products`, and for fp16 on a CPU, which `fit` refuses too.
    """
    from gpt_lightning.bench.core.worker import SkippedError

    if dtype == "fp16" and device.type == "cpu":
        raise SkippedError("fp16 training needs a GPU")
    set_products(dtype, device)


def has_bf16() -> bool:
    """Whether the GPU has bfloat16 units; torch emulates them without a word."""
    import torch

    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def make_model(shape: list[int], context: int) -> "GPT":
    """A GPT-2 of (layers, heads, width) with the course's vocabulary."""
    from gpt_lightning.model.gpt import GPT, GPTConfig

    n_layer, n_head, n_embd = shape
    return GPT(GPTConfig(n_layer, n_head, n_embd, block_size=context, vocab_size=VOCABULARY))


def autocast(dtype: str, device: "torch.device") -> AbstractContextManager[Any]:
    """The context of a forward pass in a dtype."""
    import torch

    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, names[dtype]) if dtype in names else nullcontext()


class TrainingOptimizer:
    """What `fit` does with gradients: clipping, AdamW, and a GradScaler for fp16.

    Args:
        model: On the device.
        device: That does the work.
        dtype: One of options.DTYPES.
    """

    def __init__(self, model: "GPT", device: "torch.device", dtype: str) -> None:
        import torch

        from gpt_lightning.training import optim

        self._model = model
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")
        groups = optim.decay_groups(model.named_parameters(), 0.1, "matrices")
        fused = device.type in optim.FUSED_ADAMW_DEVICES and not self._scaler.is_enabled()
        self._adamw = optim.make_adamw(groups, 1e-4, (0.9, 0.95), fused)

    def backward(self, loss: "torch.Tensor") -> None:
        """Gradients, scaled for fp16."""
        self._scaler.scale(loss).backward()

    def step(self) -> None:
        """Clips to a norm, which must be finite unless the scaler sees to that, and updates."""
        from gpt_lightning.training import optim

        self._scaler.unscale_(self._adamw)
        norm = optim.clip_gradients(self._model.parameters(), MAX_NORM)
        if not self._scaler.is_enabled() and not norm.isfinite():
            raise RuntimeError(f"the gradient's norm is {norm.item()}")
        self._scaler.step(self._adamw)
        self._scaler.update()
        self._adamw.zero_grad()


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # asked for, it would be imported: 100 MiB
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def checked_graphs(compiled: bool, before: int) -> int:
    """Graphs that were made since, which there are if and only if the row was to be compiled.

    Args:
        compiled: What the row says.
        before: `compiled_graphs` before its first step.

    Raises:
        RuntimeError: the row is not what it says.
    """
    graphs = compiled_graphs() - before
    if compiled != (graphs > 0):
        raise RuntimeError(f"compile is {compiled}, but torch.compile made {graphs} graphs")
    return graphs


def peak_memory_gib(device: "torch.device") -> float:
    """The most memory so far: of tensors on a GPU, resident of the process elsewhere."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    if status.exists():
        # not ru_maxrss: on Linux that begins at the resident memory of the process that started us
        (line,) = (s for s in status.read_text().splitlines() if s.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**20  # of KiB
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def rates(
    model: "GPT", device: "torch.device", dtype: str, tokens_per_sec: float, context: int
) -> dict[str, float]:
    """Tokens/s and MFU, as SpeedMonitor has them."""
    from gpt_lightning.hardware.peaks import device_name, lookup, measured_peak
    from gpt_lightning.model import flops

    per_token = flops.flops_per_token(
        model.num_params(embeddings=False), model.config.n_layer, model.config.n_embd, context
    )
    peak = lookup(device_name(device), dtype) or measured_peak(device, dtype)
    mfu = flops.mfu(tokens_per_sec, per_token, peak.flops)
    return {"tokens_per_sec": tokens_per_sec, "mfu": mfu}
