"""Precisions of training: the ones that a device supports, and the fastest of them."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import device_kind


class Dtype(NamedTuple):
    """Arithmetic of matrix products.

    Attributes:
        operands: Dtype of the operands.
        precision: Precision of the Trainer that trains in it.
        cast: Dtype to which that training casts the operands; None: they have it.
    """

    operands: torch.dtype
    precision: str
    cast: torch.dtype | None = None


# tf32 has float32 tensors, of which NVIDIA's tensor cores read 19 bits
DTYPES = {
    "fp32": Dtype(torch.float32, "32-true"),
    "tf32": Dtype(torch.float32, "32-true"),
    "bf16": Dtype(torch.bfloat16, "bf16-mixed", cast=torch.bfloat16),
    "fp16": Dtype(torch.float16, "16-mixed", cast=torch.float16),
    "fp64": Dtype(torch.float64, "64-true"),
}


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass whose products are in one of DTYPES."""
    cast = DTYPES[dtype].cast
    return torch.autocast(device.type, cast) if cast else nullcontext()


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype to which a precision of the Trainer casts operands; None if to none."""
    casts = {dtype.precision: dtype.cast for dtype in DTYPES.values()}
    return casts.get(precision)


def check_accelerator(accelerator: str, flag: str) -> None:
    """Raise an error for an accelerator that this machine lacks.

    Args:
        accelerator: Accelerator of the Trainer: auto, cpu, gpu, cuda or mps.
        flag: Option that set the accelerator, e.g. --trainer.accelerator.

    Raises:
        UserError: Names the flag, the devices of this machine, and a value that works.
    """
    kind = device_kind()
    there = ["cpu"] if kind == "cpu" else ["cpu", kind, "gpu"]
    if accelerator not in ("auto", *there):
        raise UserError(
            f"{flag} {accelerator}: this machine has no such device "
            f"(it has: {', '.join(there)}); use {flag} auto"
        )


def check_precision(kind: str, precision: str) -> None:
    """Raise a UserError for a precision that a device lacks.

    Without a warning, Lightning replaces 16-mixed by bf16-mixed on a CPU, and CUDA emulates bf16.

    Args:
        kind: cuda, mps or cpu.
        precision: Precision of the Trainer.
    """
    reason = ""
    if kind == "cpu" and precision in ("16-mixed", "16-true", "16"):
        reason = "float16 training needs a GPU; use bf16-mixed or 32-true"
    elif kind == "mps" and precision in ("64-true", "64"):
        reason = "MPS has no float64; use 32-true"
    elif kind == "cuda" and precision.startswith("bf16") and not cuda_has_bf16():
        reason = f"{torch.cuda.get_device_name()} has no bfloat16; use 16-mixed or 32-true"
    if reason:
        raise UserError(f"--trainer.precision {precision} on {kind}: {reason}")


def cuda_has_bf16() -> bool:
    """Return whether the GPU has bfloat16 units; torch emulates missing ones silently."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def cpu_bf16_units() -> list[str]:
    """Return the names of the CPU's units that multiply bfloat16 fast; torch 2.10 reports none.

    On Intel's CPUs, those with avx512_fp16, it is AMX. Where a virtual machine hides it, float32 is
    faster than avx512_bf16 (137 for 198 ms a step of a small GPT on a Xeon). On AMD's it is not.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    units = ["amx_bf16"] if capabilities.get("avx512_fp16") else ["amx_bf16", "avx512_bf16"]
    return [name for name in units if capabilities.get(name)]


def fastest_precision(accelerator: str) -> tuple[str, str]:
    """Return the fastest safe precision of a device as the Trainer names it, and the reason.

    Args:
        accelerator: Accelerator of the Trainer.
    """
    kind = device_kind(accelerator)
    if kind == "cuda":
        if cuda_has_bf16():
            return "bf16-mixed", "this GPU multiplies bfloat16"
        return "16-mixed", "this GPU has no bfloat16"
    if kind != "cpu":
        return "32-true", f"nothing faster is known to be safe on {kind}"
    if units := cpu_bf16_units():
        return "bf16-mixed", f"this CPU multiplies bfloat16 ({', '.join(units)})"
    return "32-true", "PyTorch reports no fast bfloat16 units of this CPU"


def resolve_precision(trainer: Any) -> None:
    """Check accelerator and precision in the settings of a Trainer; replace `precision: auto`.

    Every rank resolves for its own device; only the process that starts the others prints.

    Args:
        trainer: Parsed settings with `accelerator` and `precision`.

    Raises:
        UserError: This machine lacks the accelerator, or the accelerator lacks the precision.
    """
    accelerator = str(trainer.accelerator)
    check_accelerator(accelerator, "--trainer.accelerator")
    if trainer.precision == "auto":
        trainer.precision, why = fastest_precision(accelerator)
        if "LOCAL_RANK" not in os.environ:
            print(f"precision   auto: {trainer.precision}, {why}")
    check_precision(device_kind(accelerator), str(trainer.precision or "32-true"))


def product_dtype(precision: str, matmul_precision: str, device: torch.device) -> str:
    """Return the dtype of matrix products: bf16, fp16, tf32, fp32 or fp64.

    Args:
        precision: Precision of the Trainer, e.g. bf16-mixed.
        matmul_precision: Value of torch.get_float32_matmul_precision().
        device: Device of the products. high and medium mean TF32 on CUDA, medium means bfloat16 on
            a CPU.
    """
    if named := {"bf16": "bf16", "16": "fp16", "64": "fp64"}.get(precision.partition("-")[0]):
        return named
    if device.type == "cpu" and matmul_precision == "medium":
        return "bf16"
    return "tf32" if device.type == "cuda" and matmul_precision != "highest" else "fp32"
