"""What all ranks agree on, without waiting for the device."""

from typing import Any

import torch


class LaggedMaximum:
    """The largest number of any rank, as of the call before.

    Reading a sum over ranks at once would wait for everything that the device has been handed.
    What was handed to it a step ago is done by the time that it works on this step's share, which
    is queued already: waiting for that leaves it no gap. All ranks read the same number at the same
    call.

    Args:
        device: Of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        # on the host, where the device writes it in its own time
        self._host = torch.zeros((), dtype=torch.int64, pin_memory=self._cuda)
        self._written: Any = None  # the event after it

    def __call__(self, number: int) -> int:
        """Hands in this rank's number; returns the largest of the call before, first 0."""
        if self._written is not None:
            self._written.synchronize()
        before = int(self._host)
        # torch.tensor(number, device=...) would copy, and wait for the copy
        vote = torch.full((), number, dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MAX)
        self._host.copy_(vote, non_blocking=True)
        if self._cuda:
            self._written = torch.cuda.Event()
            self._written.record()
        return before
