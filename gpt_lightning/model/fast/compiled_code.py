"""Settings under which code of ours is compiled, and its folder, which survives a restart."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import torch


@contextlib.contextmanager
def trusted_instructions() -> Iterator[None]:
    """Let Inductor take AVX-512 without its test programs, which take 5 s before its first loop.

    They also test how PyTorch was built, which get_cpu_capability() reports. Another PyTorch may
    lack the setting; then its programs run.
    """
    from torch._inductor import config  # takes a second

    known = getattr(config.cpp, "vec_isa_ok", True) is not None
    if known or torch.backends.cpu.get_cpu_capability() != "AVX512":
        yield
        return
    with config.patch({"cpp.vec_isa_ok": True}):
        yield


@contextlib.contextmanager
def kept_code() -> Iterator[None]:
    """Let code that is compiled meanwhile survive a restart: PyTorch's folder is a temporary one.

    The code is for the processor at hand (-march=native), and machines may share a home folder. A
    folder without write or execute permission leaves PyTorch's choice, and so does a folder that
    TORCHINDUCTOR_CACHE_DIR names.
    """
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # PyTorch sets the variable, too: to torchinductor_USER in the temporary folder
    if before is None or Path(before).match(f"{tempfile.gettempdir()}/torchinductor_*"):
        folder = code_folder()
        if folder is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        os.environ.update({} if before is None else {"TORCHINDUCTOR_CACHE_DIR": before})


def code_folder() -> Path | None:
    """Return the user's folder of code compiled for this processor; None if it cannot have any."""
    capabilities = repr(sorted(torch.cpu.get_capabilities().items()))
    processor = hashlib.sha256(capabilities.encode()).hexdigest()[:8]
    folder = Path(platformdirs.user_cache_dir("gpt-lightning")) / "compiled" / processor
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    # Linux has ST_NOEXEC
    return None if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0) else folder
