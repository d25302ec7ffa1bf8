"""Freed memory that a process keeps, and the memory of the machine.

glibc returns freed blocks of more than 128 KiB to 32 MiB to the system, and the system clears each
page before it hands it out again, which can take longer than the computation on it
(benchmarks/speed.md).
"""

import ctypes
import os
import sys
from typing import Any

# mallopt's parameters (malloc.h)
M_TRIM_THRESHOLD = -1  # free bytes at the end of the heap from which on it shrinks
M_MMAP_MAX = -4  # number of blocks that may be mapped, and unmapped, one by one


def keep_freed_memory() -> bool:
    """Let this process reuse freed blocks of any size instead of returning them to the system.

    The process then stays as large as it ever was.

    Returns:
        True if glibc accepted both settings; other allocators are left alone.
    """
    mallopt = _libc("mallopt")
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1))  # -1: never


def hand_back_freed_memory() -> None:
    """Return to the system, once, the memory that this process has freed and kept."""
    if trim := _libc("malloc_trim"):
        trim(0)


def _libc(function: str) -> Any:
    """Return a function of glibc; None on another system or with another C library."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None


def memory_gib() -> float:
    """Return the memory of the machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
