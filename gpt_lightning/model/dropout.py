"""Dropout, and a mask for compiled code on a CPU that costs next to nothing.

PyTorch draws a CPU's masks from one serial generator: 0.14 s for the 25 million attention weights
of one layer of nanoGPT's baby GPT, more than the layer's matrix products take in bfloat16. A hash
of each element's number and two seeds has no such order: Inductor vectorizes it into the loop that
uses it, and the backward computes the mask again instead of reading it.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Dropout(nn.Dropout):
    """`dropout` as a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.p if self.training else 0.0)


def dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    """Zeroes each element with probability p and divides the others by 1 - p.

    Args:
        x: of any shape.
        p: 0 changes nothing.
    """
    if p > 0.0 and torch.compiler.is_compiling() and x.device.type == "cpu":
        seeds = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)
        return hashed_dropout(x, p, seeds)
    return F.dropout(x, p)


def hashed_dropout(x: torch.Tensor, p: float, seeds: torch.Tensor) -> torch.Tensor:
    """Dropout whose mask is a function of two seeds.

    Args:
        x: of any shape, fewer than 2^31 elements.
        p: probability of a zero, exact to 2^-32.
        seeds: int32 (2,), uniformly distributed over all 2^32 values each.
    """
    keep = hashed_numbers(x.shape, seeds) >= round(p * 2**32) - 2**31
    return torch.where(keep, x * (1.0 / (1.0 - p)), 0.0)


def hashed_numbers(shape: torch.Size, seeds: torch.Tensor) -> torch.Tensor:
    """Numbers that look independent and uniform in [-2^31, 2^31), int32 of a shape.

    Wellons' triple32, an integer hash with next to no bias
    (https://github.com/skeeto/hash-prospector), of the elements' numbers: the first seed moves the
    numbers, the second joins after the first round. Without its last round, which changes the low
    18 bits only.
    """
    h = torch.arange(shape.numel(), dtype=torch.int32, device=seeds.device).view(shape) + seeds[0]
    h = mixed(h, 17) * (0xED5AD4BB - 2**32) ^ seeds[1]  # int32 wraps
    h = mixed(h, 11) * (0xAC4C1B51 - 2**32)
    return mixed(h, 15) * 0x31848BAB


def mixed(h: torch.Tensor, shift: int) -> torch.Tensor:
    """h ^ (h >> shift), whose sign bits int32's shift would drag along."""
    low: torch.Tensor = (h >> shift) & (2 ** (32 - shift) - 1)
    return h ^ low
