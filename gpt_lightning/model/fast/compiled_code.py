"""Settings under which code of ours is compiled, and its folder, which survives a restart."""

import contextlib
import hashlib
import os
import shutil
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
    TORCHINDUCTOR_CACHE_DIR names. PyTorch looks for the compiled header of all loops in its own
    folder alone, also where all loops are kept, and takes 5 s to make it: it is copied.
    """
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # PyTorch sets the variable, too: to torchinductor_USER in the temporary folder
    free = before is None or Path(before).match(f"{tempfile.gettempdir()}/torchinductor_*")
    folder = code_folder() if free else None
    try:
        if not folder:
            yield
        else:
            headers = Path(before or folder) / "precompiled_headers"
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
            copy_folder(folder / headers.name, headers)
            yield
            copy_folder(headers, folder / headers.name)
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        os.environ.update({} if before is None else {"TORCHINDUCTOR_CACHE_DIR": before})


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder to a place that has none, if it can be; no process sees a part of the copy."""
    if source.is_dir() and not target.exists():
        with contextlib.suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as part:
                shutil.copytree(source, Path(part) / "copy").rename(target)


def code_folder() -> Path | None:
    """Return the user's folder of code for this processor and PyTorch; None if it can have none."""
    capabilities = repr(sorted(getattr(torch.cpu, "get_capabilities", dict)().items()))
    processor = hashlib.sha256(f"{capabilities} {torch.__version__}".encode()).hexdigest()[:8]
    folder = Path(platformdirs.user_cache_dir("gpt-lightning")) / "compiled" / processor
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    # Linux has ST_NOEXEC; Inductor does not quote the paths in a compiler's command
    no_code = os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)
    return None if no_code or len(str(folder).split()) > 1 else folder
