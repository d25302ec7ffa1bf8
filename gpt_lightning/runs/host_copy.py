"""Copy of a checkpoint in the host's memory, for a save in a thread.

Lightning's AsyncCheckpointIO clones each tensor by itself (tied weights are written twice), on its
device, into new memory, queues any number of saves, and raises an error at the save after the next.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from gpt_lightning.errors import UserError, is_out_of_memory
from gpt_lightning.runs.shards import mapped


class HostCopy:
    """Copy a checkpoint's dict to the host's memory, which the next copy reuses.

    torch.save writes the same bytes for the copy: a storage that tensors share is copied once, as a
    whole, and strides and offsets are kept. Tensors of a device become tensors of the CPU, and
    parameters become tensors.
    """

    def __init__(self) -> None:
        self._stager: DefaultStager | None = None

    def __call__(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the copy, which is valid until the next call.

        Raises:
            UserError: The dict has a tensor that is no plain view of memory.
        """
        mapped(check_plain, checkpoint)
        if self._stager is None:
            on_cuda = torch.cuda.is_available()
            options = StagingOptions(
                use_pinned_memory=on_cuda,
                use_shared_memory=False,  # a file descriptor for each tensor
                use_async_staging=False,
                use_non_blocking_copy=on_cuda,
            )
            self._stager = DefaultStager(options)
        try:
            copied: Any = self._stager.stage(checkpoint)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                "no memory for a copy of the checkpoint: set --checkpoint.asynchronous false"
            ) from error
        return dict(copied)


def check_plain(name: str, value: Any) -> None:
    """Raise a UserError for a tensor that is more than a view of memory."""
    if isinstance(value, torch.Tensor) and (
        value.layout != torch.strided or value.is_conj() or value.is_neg() or value.is_quantized
    ):
        raise UserError(
            f"{name} of the checkpoint is no plain tensor, which --checkpoint.asynchronous true "
            "does not copy: set it to false"
        )
