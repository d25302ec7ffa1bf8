"""Fine-tuning: frozen parameters, and LoRA."""

from fnmatch import fnmatchcase

from gpt_lightning.errors import UserError
from gpt_lightning.model import lora
from gpt_lightning.model.gpt import GPT
from gpt_lightning.runs.settings import Settings


def prepare(model: GPT, settings: Settings) -> None:
    """Freeze parameters, and add LoRA's, as the settings say.

    Raises:
        UserError: A pattern matches nothing, or no parameter is left to train.
    """
    if settings.lora_rank is not None:
        lora.install(model, settings.lora_rank, settings.lora_alpha, settings.lora_targets)
    names = [name for name, _ in model.named_parameters()]
    for key in ("freeze", "learning_rate_factors"):
        for pattern in getattr(settings, key) or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"model.{key} {pattern!r} matches no parameter: their names are like "
                    f"{names[0]} and {names[2]}"
                )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in settings.freeze):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model.freeze leaves no parameter to train: shorten it")
