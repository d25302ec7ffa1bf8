"""Models by `GPTConfig.variant`."""

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
