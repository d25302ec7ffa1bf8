"""A process keeps the memory that it has freed."""

import subprocess
import sys

import pytest

from gpt_lightning.hardware.device import keep_freed_memory


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_kept():
    """After its first steps, training takes no new pages, which the system would clear."""
    code = (
        "import resource, sys, torch\n"
        "from gpt_lightning.hardware.device import keep_freed_memory\n"
        "kept = sys.argv[1] == 'keep' and keep_freed_memory()\n"
        "layer, x = torch.nn.Linear(8, 4096), torch.rand(4096, 8)\n"
        "for step in range(8):\n"
        "    if step == 4: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.nn.functional.gelu(layer(x)).sum().backward()\n"  # blocks of 64 MiB
        "print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    faults = {}
    for how in ("keep", "leave"):
        done = subprocess.run(
            [sys.executable, "-c", code, how], capture_output=True, text=True, check=True
        )
        kept, count = done.stdout.split()
        faults[how] = int(count)
        if how == "keep" and kept == "False":
            pytest.skip("another C library")
    assert faults["leave"] > 4 * 16_384  # pages of 4 KiB in a block
    assert faults["keep"] < faults["leave"] / 4  # a few blocks more, now and then
    assert keep_freed_memory()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_blocks_of_more_than_2_gib_are_kept_too():
    """Compare the end of the heap before and after an untouched block of 2.5 GiB."""
    code = (
        "import ctypes\n"
        "from gpt_lightning.hardware.device import hand_back_freed_memory, keep_freed_memory\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p\n"
        "libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]\n"
        "kept, size = keep_freed_memory(), 5 * 2**29\n"
        "start = libc.sbrk(0)\n"
        "libc.free(libc.malloc(size))\n"
        "grown = libc.sbrk(0) - start\n"
        "hand_back_freed_memory()\n"
        "print(kept, grown >= size, libc.sbrk(0) - start < size)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["True", "True"] or done.stdout.startswith("False")
