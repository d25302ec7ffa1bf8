"""AdamW for all parameters: the shortest example of an optimizer of `--model.optimizer`.

The update is PyTorch's. `make_adamw` in training/optim.py makes its groups, which Muon shares.
"""

from torch.optim import AdamW

from gpt_lightning.model.gpt import GPT
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training.optim import make_adamw


def build(model: GPT, settings: Settings, fused: bool) -> AdamW:
    """Return AdamW, with weight decay of the tensors that settings.decay names."""
    return make_adamw(model.named_parameters(), settings, fused)
