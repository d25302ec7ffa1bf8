"""What a device can do, and waiting for it."""

import gc
import time
from typing import Any

import torch

from gpt_lightning.hardware.memory import hand_back_freed_memory

Timestamp = Any  # a moment on the device's own time line: seconds on the CPU, an event elsewhere


def synchronize(device: torch.device) -> None:
    """Waits until all work that was handed to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seed_device(device: torch.device, seed: int) -> None:
    """Seeds the CPU's generator and the device's.

    torch.manual_seed seeds every backend there is, and notes a stack trace for each that has not
    been used yet: up to a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def free_memory() -> None:
    """Leaves the process as a new one: what nobody holds is freed, and nothing is compiled."""
    gc.collect()  # a module and its trainer know each other
    hand_back_freed_memory()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def record_event(device: torch.device) -> Timestamp:
    """The moment at which the device gets here; asked without waiting for it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = (
        torch.cuda.Event(enable_timing=True)
        if device.type == "cuda"
        else torch.mps.Event(enable_timing=True)
    )
    event.record()
    return event


def elapsed_s(start: Timestamp, end: Timestamp) -> float:
    """Seconds from one mark to another; the device must have passed both (synchronize)."""
    seconds: float = end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
    return seconds


def default_device() -> str:
    """The best device there is: cuda, else mps, else cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
