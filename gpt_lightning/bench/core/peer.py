"""GPT-2 of transformers with the weights of ours, for benches that compare the two."""

from typing import Any

import torch
import torch.nn.functional as F

from gpt_lightning.model.gpt import GPT
from gpt_lightning.model.pretrained.huggingface import to_huggingface
from gpt_lightning.model.pretrained.weights import SIZE_KEYS
from gpt_lightning.tables.worker import SkippedError


def make_peer(model: GPT) -> Any:
    """Make transformers' GPT-2 with our weights, as a module of tokens and targets to a loss.

    Raises:
        SkippedError: transformers is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise SkippedError(f"{error.name} is not installed: pip install transformers") from error

    class Peer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(peer_config(model, transformers))
            missing = self.model.load_state_dict(
                to_huggingface(model.state_dict(), model.config), strict=False
            )
            # the file format omits the tied head; every other weight must be present
            assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
            assert not missing.unexpected_keys, missing
            self.attention = str(self.model.config._attn_implementation)
            self.version = str(transformers.__version__)

        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = self.model(idx, use_cache=False).logits  # (B, T, V)
            return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1))

    return Peer().train()


def peer_config(model: GPT, transformers: Any) -> Any:
    """Return the GPT2Config of one of our models."""
    ours = model.config
    return transformers.GPT2Config(
        **{key: getattr(ours, key) for key in SIZE_KEYS},
        n_positions=ours.block_size,
        vocab_size=ours.vocab_size,
        activation_function="gelu_new",  # transformers' name of the tanh approximation
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,  # the default, 50,256, exceeds a small vocabulary
        eos_token_id=0,
    )
