"""Memory that a process keeps, so that it need not be cleared again.

glibc hands every block of more than 128 KiB to 32 MiB back to the system as it is freed, and the
system clears each page that it gives out: of adding two matrices of 25 million bfloat16 numbers,
12 of 14 ms on the machine of benchmarks/speed.md.
"""

import ctypes
import os
import sys

# mallopt's parameters (malloc.h)
M_TRIM_THRESHOLD = -1  # bytes free at the heap's end before it shrinks
M_MMAP_MAX = -4  # how many blocks may have a mapping of their own, which goes when they do


def keep_freed_memory() -> bool:
    """Lets this process reuse what it has freed, whatever its size, instead of handing it back.

    The process then holds the most that it ever used.

    Returns:
        Whether there is a glibc that could be told; other systems' allocators are left alone.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))  # -1: never


def hand_back_freed_memory() -> None:
    """Gives the system once what this process has freed and kept."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def memory_gib() -> float:
    """Memory of the machine, in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
