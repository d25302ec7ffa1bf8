"""Sharded checkpoints: each rank writes its own tensors, with PyTorch's distributed checkpoint.

`NAME.ckpt` has everything but the tensors in shards, for which tensors of the meta device stand;
`shards/FOLDER` beside it has a safetensors file of each rank, with the place of each shard in its
header. Any number of processes can read them, one process into whole tensors. The dict has a key
more than a full checkpoint's, `shards`:

| key | value |
| --- | --- |
| folder | name of the folder in `shards`, of this save alone |
| files | SHA-256 of each file, by its path from the folder of NAME.ckpt |
| tied | by the name of a tensor, the name under which its memory is saved |

The name of a tensor is its path in the dict, such as `state_dict.model.transformer.wte.weight`.

HostCopy, for checkpoints that are written in a thread, is on PyTorch's distributed checkpoint too.
"""

import copy
import re
import secrets
import shutil
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from gpt_lightning.errors import UserError, is_out_of_memory, warn
from gpt_lightning.files import Fields, file_sha256, sync_folder
from gpt_lightning.hardware.distributed import is_lost_peer
from gpt_lightning.runs.checkpoint import cannot_write, read_content
from gpt_lightning.runs.folders import ASIDE, SHARDS, SIDECAR, SKIPPED, sidecar


def check_package() -> None:
    """Raise a UserError if safetensors, an optional package, is missing."""
    if not find_spec("safetensors"):
        raise UserError("checkpoints in shards need safetensors: pip install safetensors")


def is_sharded(name: str, value: Any) -> bool:
    """Return whether a value is a tensor of which this rank has a shard."""
    return isinstance(value, DTensor)


def is_of_parameter(name: str, value: Any) -> bool:
    """Return whether a value is a weight, or a tensor of an optimizer's state but its counter."""
    of_model = name.startswith(("state_dict.", "optimizer_states."))
    return of_model and isinstance(value, Tensor) and value.ndim > 0


def write_shards(
    checkpoint: Fields, path: Path, chosen: Callable[[str, Any], bool] = is_sharded
) -> Fields:
    """Write tensors of a checkpoint to a new folder of shards; all ranks must call this.

    Args:
        checkpoint: Lightning's dict.
        path: File of the checkpoint.
        chosen: Function of a value's name and the value, True for the tensors to write.

    Returns:
        The dict for the file.

    Raises:
        UserError: A rank cannot write its file, or rank 0 does not see it.
    """
    check_package()
    tensors = {}
    names: dict[int, str] = {}
    tied = {}

    def take(own: str, value: Any) -> Any:
        if not chosen(own, value):
            return value.detach() if isinstance(value, Tensor) else value
        memory = id(value) if isinstance(value, DTensor) else value.data_ptr()
        name = names.setdefault(memory, own)
        if name == own:
            tensors[name] = value.detach()
        else:
            tied[own] = name
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    rest = mapped(take, checkpoint)
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    folder = path.parent / SHARDS / of_all_ranks(f"{path.stem}-{secrets.token_hex(4)}")[0]
    try:
        with warnings.catch_warnings(action="ignore"):  # one process is meant
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            save(tensors, storage_writer=writer, no_dist=alone)
        names_of = f"{SHARDS}/{folder.name}/"
        own_files = folder.glob(f"shard-{rank + 1:05d}-*")
        gathered = of_all_ranks({names_of + file.name: file_sha256(file) for file in own_files})
        files = {name: digest for each in gathered for name, digest in each.items()}
        for parent in (folder, folder.parent, path.parent) if rank == 0 else ():
            sync_folder(parent)
        for name in files if rank == 0 else ():
            if not (path.parent / name).exists():
                raise UserError(
                    f"rank 0 does not see {path.parent / name}: checkpoint.sharded needs a folder "
                    "that all machines share; choose one with --trainer.default_root_dir"
                )
    except BaseException as error:  # DCP raises the first rank's error on all ranks
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, CheckpointException | OSError):
            raise cannot_write(folder, error) from error
        raise
    return rest | {"shards": {"folder": folder.name, "files": files, "tied": tied}}


def of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def whole(placeholder: Tensor) -> Tensor:
    """Return memory on the CPU for a whole tensor."""
    return torch.empty_like(placeholder, device="cpu")


def read_shards(
    checkpoint: Fields, path: Path, allocate: Callable[[Tensor], Tensor] = whole
) -> Fields:
    """Return a checkpoint's dict with the tensors of its shards.

    Args:
        checkpoint: Dict of a sharded checkpoint's file.
        path: File of the checkpoint.
        allocate: Function that returns the memory to fill for a tensor of the meta device. If it
            returns a DTensor, all ranks must call `read_shards`, and each reads its own shard.

    Raises:
        UserError: A file of the shards is missing or damaged.
    """
    check_package()
    tied, files = checkpoint["shards"]["tied"], checkpoint["shards"]["files"]
    folder = path.resolve().parent / SHARDS / checkpoint["shards"]["folder"]
    present = {f"{SHARDS}/{folder.name}/{file.name}" for file in folder.glob("*.safetensors")}
    if present != set(files):
        differ = min(present ^ set(files))
        raise UserError(
            f"{path} is in shards, and {path.resolve().parent / differ} is "
            f"{'missing' if differ in files else 'not of them'}: copy its folder {folder.name} to "
            f"{folder.parent} again"
        )
    tensors = {}

    def fill(own: str, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_meta):
            return value
        name = tied.get(own, own)
        if name not in tensors:
            tensors[name] = allocate(value)
        return tensors[name]

    filled = mapped(fill, checkpoint)
    del filled["shards"]
    try:
        reader = HuggingFaceStorageReader(str(folder))
        alone = not any(isinstance(tensor, DTensor) for tensor in tensors.values())
        with warnings.catch_warnings(action="ignore"):  # one process is meant
            load(tensors, storage_reader=reader, no_dist=alone)
    except (Exception, CheckpointException) as error:  # any content may raise any error
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
        for cause in causes:  # one for each rank
            if isinstance(cause, Exception) and (is_lost_peer(cause) or is_out_of_memory(cause)):
                raise cause from None
        raise UserError(
            f"{folder} is damaged ({type(error).__name__}): copy it again, or take another one"
        ) from error
    return filled


def mapped(function: Callable[[str, Any], Any], value: Any, name: str = "") -> Any:
    """Return a tree of dicts and lists with the function's results as its leaves.

    Args:
        function: Function of a leaf's name, which is its keys joined by dots, and the leaf.
        value: The tree.
        name: Name of the tree itself.
    """
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps its class
        for key, item in value.items():
            copied[key] = mapped(function, item, f"{name}{key}.")
        return copied
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, x, f"{name}{i}.") for i, x in enumerate(value))
    return function(name.removesuffix("."), value)


# ---- old shards ----------------------------------------------------------------------------------


def sweep(folder: Path) -> None:
    """Delete the folders of shards that no checkpoint in a folder names, whatever its name is.

    None is deleted if a checkpoint cannot be read: they may be its shards.
    """
    present = [path for path in folder.glob(f"{SHARDS}/*") if is_shard_folder(path)]
    used = set()
    for path in filter(Path.is_file, folder.iterdir() if present else ()):
        try:
            content = read_content(path, check=False) if path.suffix != SIDECAR else None
        except (UserError, OSError) as error:
            # a file of the user's is no checkpoint
            if path.suffix in (".ckpt", ASIDE, SKIPPED) or sidecar(path).exists():
                warn(f"no old shards are deleted: {error}")
                return
        else:
            found = content.get("shards") if isinstance(content, dict) else None
            used |= {found["folder"]} if isinstance(found, dict) else set()
    for path in present:
        if path.name not in used:
            shutil.rmtree(path, ignore_errors=True)


def is_shard_folder(path: Path) -> bool:
    """Return whether a folder is one of `write_shards`, with nothing else in it."""
    ours = path.is_dir() and re.fullmatch(r".+-[0-9a-f]{8}", path.name)
    return bool(ours) and all(
        re.fullmatch(r"shard-\d{5}-.+\.safetensors", file.name) for file in path.iterdir()
    )


# ---- copies in memory ----------------------------------------------------------------------------


class HostCopy:
    """Copy a checkpoint's dict to the host's memory, which the next copy reuses.

    Lightning's AsyncCheckpointIO clones each tensor by itself (tied weights are written twice), on
    its device, into new memory, queues any number of saves, and raises an error at the save after
    the next.

    torch.save writes the same bytes for the copy: a storage that tensors share is copied once, as a
    whole, and strides and offsets are kept. Tensors of a device become tensors of the CPU, and
    parameters become tensors.
    """

    def __init__(self) -> None:
        on_cuda = torch.cuda.is_available()
        self._options = StagingOptions(
            use_pinned_memory=on_cuda,
            use_shared_memory=False,  # a file descriptor for each tensor
            use_async_staging=False,
            use_non_blocking_copy=on_cuda,
        )
        self._stager = DefaultStager(self._options)

    def __call__(self, checkpoint: Fields) -> Fields:
        """Return the copy, which is valid until the next call.

        Raises:
            UserError: The dict has a tensor that is no plain view of memory.
        """
        mapped(check_plain, checkpoint)
        try:
            try:
                copied: Any = self._stager.stage(checkpoint)
            except KeyError:  # torch 2.11 closes a stager after its first copy
                self._stager = DefaultStager(self._options)
                copied = self._stager.stage(checkpoint)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise UserError("no memory for a copy: set --checkpoint.asynchronous false") from error
        return dict(copied)


def check_plain(name: str, value: Any) -> None:
    """Raise a UserError for a tensor that is more than a view of memory."""
    if isinstance(value, Tensor) and (
        value.layout != torch.strided or value.is_conj() or value.is_neg() or value.is_quantized
    ):
        raise UserError(
            f"{name} is no plain tensor, as an asynchronous save needs: set "
            "--checkpoint.asynchronous false"
        )
