"""Sharded checkpoints: each rank writes its own tensors, with PyTorch's distributed checkpoint.

`NAME.ckpt` has everything but the tensors in shards, for which tensors of the meta device stand;
the folder `NAME.ckpt.shards` has a safetensors file of each rank, with the place of each shard in
its header. Any number of processes can read them, one process into whole tensors. The dict has a
key more than a full checkpoint's, `shards`:

| key | value |
| --- | --- |
| files | SHA-256 of each file by name |
| tied | by the name of a tensor, the name under which its memory is saved |

The name of a tensor is its path in the dict, such as `state_dict.model.transformer.wte.weight`.
"""

import shutil
import warnings
from collections.abc import Callable
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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.utils._pytree import KeyPath, tree_map_with_path

from gpt_lightning.errors import UserError
from gpt_lightning.files import file_sha256, sync_folder
from gpt_lightning.runs.digests import shards_folder


def is_sharded(name: str, value: Any) -> bool:
    """Return whether a value is a tensor of which this rank has a shard."""
    return isinstance(value, DTensor)


def is_of_parameter(name: str, value: Any) -> bool:
    """Return whether a value is a weight, or a tensor of an optimizer's state but its counter."""
    of_model = name.startswith(("state_dict.", "optimizer_states."))
    return of_model and isinstance(value, Tensor) and value.ndim > 0


def write_shards(
    checkpoint: dict[str, Any], path: Path, chosen: Callable[[str, Any], bool] = is_sharded
) -> dict[str, Any]:
    """Write tensors of a checkpoint to its folder of shards; all ranks must call this.

    Args:
        checkpoint: Lightning's dict.
        path: File of the checkpoint.
        chosen: Function of a value's name and the value, True for the tensors to write.

    Returns:
        The dict for the file.

    Raises:
        UserError: A rank cannot write its file, or rank 0 does not see it.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    tied: dict[str, str] = {}

    def take(keys: KeyPath, value: Any) -> Any:
        own = name_of(keys)
        if not chosen(own, value):
            return value.detach() if isinstance(value, Tensor) else value
        memory = id(value) if isinstance(value, DTensor) else value.data_ptr()
        name = names.setdefault(memory, own)
        if name == own:
            tensors[name] = value.detach()
        else:
            tied[own] = name
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    rest: dict[str, Any] = tree_map_with_path(take, checkpoint)
    folder, alone = shards_folder(path), not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    try:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of a save that was killed
        if not alone:
            dist.barrier()
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        with warnings.catch_warnings(action="ignore"):  # one process is meant
            save(tensors, storage_writer=writer, no_dist=alone)
    except (CheckpointException, OSError) as error:
        raise cannot_write(folder, error) from error
    written = {file.name: file_sha256(file) for file in folder.glob(f"shard-{rank + 1:05d}-*")}
    everyone = [written]
    if not alone:
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, written)
    files = {name: digest for each in everyone for name, digest in each.items()}
    if rank == 0:
        sync_folder(folder)
        sync_folder(folder.parent)
        for name in files:
            if not (folder / name).exists():
                raise UserError(
                    f"rank 0 does not see {folder / name}: checkpoint.sharded needs a folder that "
                    "all machines share; choose one with --trainer.default_root_dir"
                )
    return rest | {"shards": {"files": files, "tied": tied}}


def cannot_write(folder: Path, error: BaseException) -> UserError:
    """Return the error for shards that could not be written, with the first rank's reason."""
    cause = error
    if isinstance(error, CheckpointException):
        cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, ModuleNotFoundError):
        return UserError(f"checkpoint.sharded needs {cause.name}: pip install 'gpt_lightning[hf]'")
    reason = " ".join(str(getattr(cause, "strerror", None) or cause).split())
    return UserError(
        f"cannot write {folder}: {reason[:200]}; the checkpoints before it are untouched: free "
        "some space or choose another folder with --trainer.default_root_dir"
    )


def whole(placeholder: Tensor) -> Tensor:
    """Return memory on the CPU for a whole tensor."""
    return torch.empty_like(placeholder, device="cpu")


def read_shards(
    checkpoint: dict[str, Any], path: Path, allocate: Callable[[Tensor], Tensor] = whole
) -> dict[str, Any]:
    """Return a checkpoint's dict with the tensors from its folder of shards.

    Args:
        checkpoint: Dict of a sharded checkpoint's file.
        path: File of the checkpoint.
        allocate: Function that returns the memory to fill for a tensor of the meta device. If it
            returns a DTensor, all ranks must call `read_shards`, and each reads its own shard.

    Raises:
        UserError: A file of the shards is missing or damaged.
    """
    tied = checkpoint["shards"]["tied"]
    tensors: dict[str, Tensor] = {}

    def fill(keys: KeyPath, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_meta):
            return value
        name = tied.get(name_of(keys), name_of(keys))
        if name not in tensors:
            tensors[name] = allocate(value)
        return tensors[name]

    filled: dict[str, Any] = tree_map_with_path(fill, checkpoint)
    del filled["shards"]
    folder = shards_folder(path)
    try:
        reader = HuggingFaceStorageReader(str(folder))
        alone = not any(isinstance(tensor, DTensor) for tensor in tensors.values())
        with warnings.catch_warnings(action="ignore"):  # one process is meant
            load(tensors, storage_reader=reader, no_dist=alone)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{path} is in shards; reading them needs {error.name}: pip install 'gpt_lightning[hf]'"
        ) from error
    except Exception as error:  # any content may raise any error
        raise UserError(
            f"{folder} is damaged or incomplete ({type(error).__name__}): copy it again together "
            f"with {path.name}, or take another checkpoint"
        ) from error
    return filled


def name_of(keys: KeyPath) -> str:
    """Return the path of a value in a tree of dicts and lists, its keys joined by dots."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)
