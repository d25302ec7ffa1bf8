"""Models and decoders by `GPTConfig.variant`."""

import torch

from gpt_lightning.model.decoder import Decoder
from gpt_lightning.model.gpt import GPT, GPTConfig


def make_model(config: GPTConfig) -> GPT:
    """Return a model with random weights.

    Raises:
        UserError: The variant does not have a part that the configuration sets.
    """
    if config.variant == "gpt2":
        return GPT(config)
    from gpt_lightning.model.speedrun import SpeedrunGPT  # for these models alone

    return SpeedrunGPT(config)


def make_decoder(model: GPT, dtype: torch.dtype | None = None, pack: bool = True) -> Decoder:
    """Return the Decoder of a model; the arguments are those of Decoder."""
    if model.config.variant == "gpt2":
        return Decoder(model, dtype, pack)
    from gpt_lightning.model.speedrun import RecomputingDecoder  # for these models alone

    return RecomputingDecoder(model, dtype)
