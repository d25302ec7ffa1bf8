"""Trainer: Lightning's, whose precision may also be auto."""

from typing import Any, Literal

import lightning as L
from lightning.fabric.connector import _PRECISION_INPUT


class Trainer(L.Trainer):
    """Lightning's Trainer, whose precision may also be auto.

    Args:
        precision: Precision of training. auto: the fastest that is safe on the device, resolved
            before the Trainer is made. null: 32-true.
        kwargs: Arguments of Lightning's Trainer.
    """

    def __init__(
        self, *, precision: _PRECISION_INPUT | Literal["auto"] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(precision=precision, **kwargs)  # type: ignore[arg-type]  # never auto
