"""Copy of a checkpoint in the host's memory, for a save in a thread.

Lightning's AsyncCheckpointIO clones each tensor by itself (tied weights are written twice), on its
device, into new memory, queues any number of saves, and raises an error at the save after the next.
"""

import copy
import io
import mmap
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import synchronize

ALIGNMENT = 64  # bytes
SPARE_BYTES = 2**20  # for what a checkpoint holds besides weights and optimizer


class HostCopy:
    """Copy a checkpoint's dict to the host's memory, which the next copy reuses.

    torch.save writes the same bytes for the copy: a storage that tensors share is copied once, as a
    whole, and strides, offsets and the identity of objects are kept. Tensors of a device become
    tensors of the CPU. Sparse tensors and subclasses are cloned each time.
    """

    def __init__(self) -> None:
        self._memory: Any = b""  # buffer

    def __call__(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the copy, which is valid until the next call."""
        storages = storages_of(checkpoint)
        self.reserve(storages)
        copies: dict[int, torch.Tensor] = {}
        offset = 0
        for key, storage in storages.items():
            copies[key] = self._copied(storage, offset)
            offset += aligned(storage.nbytes())
        for device in {storage.device for storage in storages.values()}:
            synchronize(device)
        # deepcopy takes objects that are in its memo from there
        memo = {
            id(tensor): on_storage(tensor, copies[storage_key(tensor)])
            if is_plain(tensor)
            else tensor.detach().clone()
            for tensor in find_tensors(checkpoint)
        }
        copied: dict[str, Any] = copy.deepcopy(checkpoint, memo)
        return copied

    def reservation(self, checkpoint: dict[str, Any]) -> Callable[[], None]:
        """Return a function that reserves the memory for the copy of a dict."""
        return partial(self.reserve, storages_of(checkpoint))

    def reserve(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Make the memory large enough for the bytes of storages.

        Raises:
            UserError: The machine has not enough memory.
        """
        n_bytes = sum(aligned(storage.nbytes()) for storage in storages.values())
        if len(self._memory) >= n_bytes:
            return
        self._memory = b""  # freed first
        if on_cuda(storages):
            pinned = torch.empty(n_bytes + SPARE_BYTES, dtype=torch.uint8, pin_memory=True)
            self._memory = pinned.numpy()
        else:
            # shared memory: a private page would be copied at the first write after a fork of a
            # loader worker. Zeros make the system provide the pages now.
            try:
                self._memory = mmap.mmap(-1, n_bytes + SPARE_BYTES)
            except OSError as error:
                raise UserError(
                    f"no memory for a copy of the checkpoint ({n_bytes / 1e6:,.0f} MB): set "
                    "--checkpoint.asynchronous false"
                ) from error
            torch.frombuffer(self._memory, dtype=torch.uint8).zero_()

    def _copied(self, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        """Copy a storage to an offset of the memory; return its bytes, (storage.nbytes(),)."""
        if storage.nbytes() == 0:
            return torch.empty(0, dtype=torch.uint8)
        target = torch.frombuffer(
            self._memory, dtype=torch.uint8, count=storage.nbytes(), offset=offset
        )
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return target.copy_(source, non_blocking=True)


def storages_of(checkpoint: dict[str, Any]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of a dict's plain tensors by storage_key."""
    tensors = filter(is_plain, find_tensors(checkpoint))
    return {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}


def find_tensors(checkpoint: dict[str, Any]) -> list[torch.Tensor]:
    """Return all tensors that torch.save would find in a dict."""
    finder = TensorFinder()
    finder.dump(checkpoint)
    return finder.found


class TensorFinder(pickle.Pickler):
    """Pickler that collects tensors instead of writing them."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.found.append(value)
        return "tensor"


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of a storage and nothing else: no subclass, not sparse."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.__dict__:
        return False
    altered = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_meta
    return tensor.layout == torch.strided and not altered


def aligned(n_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def on_cuda(storages: dict[int, torch.UntypedStorage]) -> bool:
    """Return whether a GPU copies one of the storages, without blocking the host."""
    return any(storage.device.type == "cuda" for storage in storages.values())


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which PyTorch keeps while the storage is held."""
    return id(tensor.untyped_storage())


def on_storage(tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape, strides and offset on another storage.

    Args:
        tensor: Tensor of any shape and strides.
        content: Bytes of the other storage, (n,).
    """
    view = torch.empty(0, dtype=tensor.dtype).set_(
        content.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(view, tensor.requires_grad)
    return view.requires_grad_(tensor.requires_grad)
