"""Reading checkpoints of `gpt-lightning fit` without running anything that they name."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.data.tokenizers import Tokenizer, tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.model import GPT, GPTConfig

BEST = re.compile(r"best-step-\d+-loss-(\d+\.\d+)\.ckpt")  # RunCheckpoint's names


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means.

    Args:
        path: a file, which is taken as it is; a run folder, of which the checkpoint of the lowest
            validation loss is taken, else `last.ckpt`; or a folder of runs `version_N`, of which
            the highest N that has a checkpoint is taken.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(
            f"{path} does not exist: give a checkpoint or a run folder, "
            "such as lightning_logs/NAME/version_0"
        )
    runs = [p for p in path.glob("version_*") if re.fullmatch(r"version_\d+", p.name)]
    runs.sort(key=lambda p: int(p.name.removeprefix("version_")), reverse=True)
    folders = [list((run / "checkpoints").glob("*.ckpt")) for run in [path, *runs]]
    files = next(filter(None, folders), [])
    losses = {float(match[1]): file for file in files if (match := BEST.fullmatch(file.name))}
    last = [file for file in files if file.name == "last.ckpt"]
    if not losses and not last:
        raise UserError(
            f"{path} has no checkpoints/*.ckpt: give a checkpoint, "
            "or train one with gpt-lightning fit"
        )
    return losses[min(losses)] if losses else last[0]


@dataclass(frozen=True)
class Checkpoint:
    """What a file says of a model.

    Args:
        config: its shape.
        weights: under the names of `GPT.state_dict()`, on the CPU, mapped from the file.
        tokenizer: the spec of its data's tokenizer; None if it was trained without our data.
    """

    config: GPTConfig
    weights: dict[str, torch.Tensor]
    tokenizer: dict[str, Any] | None
    optimizer: str

    def check_fits(self, config: GPTConfig, optimizer: str) -> None:
        """Refuses to go on with another model or optimizer.

        Raises:
            UserError: names each key that differs, with both values.
        """
        ours = dataclasses.asdict(config) | {"optimizer": optimizer}
        theirs = dataclasses.asdict(self.config) | {"optimizer": self.optimizer}
        if ours["vocab_size"] is None:  # the data's own
            ours["vocab_size"] = theirs["vocab_size"]
        shape = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "tie_weights")
        differ = [
            f"{'model.' if key == 'optimizer' else 'model.config.'}{key} is {ours[key]}, "
            f"the checkpoint's {theirs[key]}"
            for key in (*shape, "optimizer")
            if ours[key] != theirs[key]
        ]
        if differ:
            raise UserError(f"cannot go on from the checkpoint: {'; '.join(differ)}")


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads tensors, numbers and words, and nothing that could run code.

    Raises:
        UserError: the file is missing, damaged, would run code, or is not one of ours.
    """
    try:
        raw = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return Checkpoint(
            config=GPTConfig(**raw["hyper_parameters"]["config"]),
            weights={
                name.removeprefix("model."): tensor
                for name, tensor in raw["state_dict"].items()
                if name.startswith("model.")
            },
            tokenizer=raw.get("gpt_lightning", {}).get("tokenizer"),
            optimizer=raw["hyper_parameters"].get("optimizer", "adamw"),
        )
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UserError(
            f"{path} is not a checkpoint of gpt-lightning fit, or is damaged "
            f"({type(error).__name__}: {reason})"
        ) from error


def load_model(path: Path) -> tuple[GPT, Tokenizer]:
    """The model, on the CPU and in evaluation mode, and the tokenizer of its data.

    Raises:
        UserError: as read_checkpoint, or the file names no tokenizer.
    """
    checkpoint = read_checkpoint(path)
    if checkpoint.tokenizer is None:
        raise UserError(f"{path} names no tokenizer: it was not trained on a TokenDataModule")
    model = GPT(checkpoint.config)
    model.load_state_dict(checkpoint.weights)
    return model.eval(), tokenizer_from_spec(checkpoint.tokenizer)
