"""Muon for the blocks' matrices and AdamW for the other parameters.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, as torch.optim.Muon
implements it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Muon, Optimizer

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training.optim import DEFERRED_ON, decay_groups, make_adamw
from gpt_lightning.training.stacked_muon import stacked_step


def check(settings: Settings) -> None:
    """Raise a UserError for settings of AdamW that Muon does not have."""
    if settings.decay == "all":
        raise UserError("model.decay is all, which muon does not support: set it to matrices")
    if settings.learning_rate_factors:
        raise UserError(
            "model.learning_rate_factors is set, which muon does not support: set it to null"
        )


class MuonAdamW(Optimizer):
    """Muon for the blocks' matrices and AdamW for everything else, as one optimizer.

    Lightning supports accumulation and clipping with one optimizer only. State and parameter groups
    live here and are shared with the two, so state_dict and load_state_dict are PyTorch's own. A
    matrix moves by muon_learning_rate * sqrt(max(1, rows / columns)) along an orthogonal direction.

    Args:
        model: Model; tensors of two dimensions in `transformer.h.*` go to Muon.
        settings: Learning rates, betas, momentum and weight decay.
        fused: True if AdamW runs in one kernel.

    Attributes:
        takes_found_inf: True if `found_inf`, a scalar on the device, skips the next update.
    """

    found_inf: torch.Tensor | None = None

    def __init__(self, model: GPT, settings: Settings, fused: bool) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if n.startswith("transformer.h.") and p.dim() == 2]
        taken = {id(p) for p in matrices}
        rest = [(n, p) for n, p in named if id(p) not in taken]
        if not rest:  # model.freeze, or LoRA
            raise UserError(
                "model.optimizer muon has no parameter for its AdamW, since all but matrices of "
                "the blocks are frozen: set it to adamw"
            )
        self.muon = Muon(
            [{"params": matrices, "peak_lr": settings.muon_learning_rate}],
            lr=settings.muon_learning_rate,
            weight_decay=settings.weight_decay,
            momentum=settings.muon_momentum,
        )
        groups = decay_groups(rest, settings.weight_decay)
        self.adamw = make_adamw(groups, settings.learning_rate, settings.betas, fused)
        self.dtype = getattr(torch, settings.muon_dtype)
        needed = "model.muon_dtype float32" if settings.muon_dtype == "float32" else ""
        needed = "trainer.strategy fsdp2" if hasattr(model, "unshard") else needed
        stacked = settings.muon_stacked
        if needed and stacked is False:
            raise UserError(f"model.muon_stacked is false, and {needed} needs it: set it to auto")
        on_gpu = model.lm_head.weight.device.type in DEFERRED_ON
        self.stacked = bool(needed) or on_gpu if stacked == "auto" else stacked
        self.takes_found_inf = self.stacked and fused
        super().__init__(self.muon.param_groups + self.adamw.param_groups, defaults={})
        self._share()

    def _share(self) -> None:
        n = len(self.muon.param_groups)
        self.muon.param_groups = self.param_groups[:n]
        self.adamw.param_groups = self.param_groups[n:]
        self.muon.state = self.adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()  # PyTorch replaced the lists and the state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = None
        if self.found_inf is not None:
            skip = self.found_inf > 0
            self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        if self.stacked:
            stacked_step(self.muon, skip, self.dtype)
        else:
            self.muon.step()
        self.adamw.step()
        return loss


build = MuonAdamW
