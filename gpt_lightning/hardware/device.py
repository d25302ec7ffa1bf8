"""Operations that each kind of device spells differently: wait, seed, time, free memory."""

import gc
import time
from typing import Any

import torch

from gpt_lightning.hardware.memory import hand_back_freed_memory

Timestamp = Any  # seconds on a CPU, an event of the stream on other devices


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work that was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the CPU's generator and the device's.

    torch.manual_seed seeds every backend, and records a stack trace for each one that is not
    initialized yet, which takes up to a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def free_memory() -> None:
    """Free all memory that is no longer referenced, and forget all compiled code."""
    gc.collect()  # a module and its trainer refer to each other
    hand_back_freed_memory()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def record_event(device: torch.device) -> Timestamp:
    """Record a timestamp on the device's stream without synchronizing."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def elapsed_s(start: Timestamp, end: Timestamp) -> float:
    """Return the seconds between two timestamps; the device must have passed both."""
    seconds: float = end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
    return seconds


def device_kind(accelerator: str = "auto") -> str:
    """Return cuda, mps or cpu for a Trainer's accelerator; auto and gpu: the machine's best."""
    if accelerator not in ("auto", "gpu"):
        return accelerator
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
