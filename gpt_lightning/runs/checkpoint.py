"""Reading checkpoints of `gpt-lightning fit` without running anything that they name."""

import dataclasses
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.data.tokenizers import Tokenizer, tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.huggingface import fit_weights, pretrained_state_dict
from gpt_lightning.runs.checkpoint_io import check_digest, read_sidecar
from gpt_lightning.runs.settings import Settings

# GPTModule's arguments as a checkpoint has them. Lightning acts on some other names, such as
# _instantiator, which says what to import; a file that has any is refused.
HYPERPARAMETERS = frozenset(("config", *(field.name for field in dataclasses.fields(Settings))))
NAME = re.compile(r"step-(\d+)(?:-loss-(\d+\.\d+))?\.ckpt")  # RunCheckpoint's files


@dataclass(frozen=True)
class Saved:
    """A checkpoint file by its name: after which step, and the validation loss there."""

    path: Path
    step: int
    loss: float | None


def checkpoint_name(step: int, loss: float | None) -> str:
    """The file of a step; the name is what files are chosen by, never their time."""
    return f"step-{step:07d}{'' if loss is None else f'-loss-{loss:.4f}'}.ckpt"


def saved_checkpoints(folder: Path) -> list[Saved]:
    """The checkpoints in a folder, those of the highest step first."""
    found = [
        Saved(path, int(match[1]), None if match[2] is None else float(match[2]))
        for path in folder.glob("*.ckpt")
        if (match := NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda saved: (-saved.step, saved.path.name))


def run_folders(path: Path) -> list[Path]:
    """A run folder itself, and the runs `version_N` in it, the highest N first."""
    runs = [p for p in path.glob("version_*") if re.fullmatch(r"version_\d+", p.name)]
    return [path, *sorted(runs, key=lambda p: -int(p.name.removeprefix("version_")))]


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means, for whoever wants the best model.

    Args:
        path: a file, which is taken as it is; a run folder, of which the checkpoint of the lowest
            validation loss is taken, else the newest; or a folder of runs `version_N`, of which
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
    for run in run_folders(path):
        saved = saved_checkpoints(run / "checkpoints")
        if saved:
            best = [file for file in saved if file.loss is not None]
            return min(best, key=lambda file: file.loss or 0.0).path if best else saved[0].path
    raise UserError(
        f"{path} has no checkpoints/*.ckpt: give a checkpoint, or train one with gpt-lightning fit"
    )


def newest_run(path: Path) -> Path:
    """The run folder that a path means: itself, or the newest of the runs `version_N` in it."""
    runs = run_folders(path)[1:]
    return runs[0] if runs else path


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint that a run goes on from: the highest step that is whole.

    A damaged file is named on standard error and passed over.

    Args:
        run: its folder.

    Returns:
        None if there is none.
    """
    for saved in saved_checkpoints(run / "checkpoints"):
        try:
            check_digest(saved.path)
        except UserError as error:
            print(f"warning: {error}; passed over", file=sys.stderr)
        else:
            return saved.path
    return None


@dataclass(frozen=True)
class Checkpoint:
    """What a file says of a model.

    Args:
        config: its shape.
        weights: under the names of `GPT.state_dict()`, on the CPU, mapped from the file.
        tokenizer: the spec of its data's tokenizer; None if it was trained without our data.
        optimizer: adamw or muon.
        step: optimizer steps done.
        tokens: trained on; None if the run did not count them.
        hyperparameters: the module's arguments.
        facts: what else the run said of itself: tokens, position in the data, versions.
    """

    config: GPTConfig
    weights: dict[str, torch.Tensor]
    tokenizer: dict[str, Any] | None
    optimizer: str
    step: int
    tokens: int | None
    hyperparameters: dict[str, Any]
    facts: dict[str, Any]

    def check_fits(self, config: GPTConfig, optimizer: str, decay: str) -> None:
        """Refuses to go on with another model or optimizer.

        Raises:
            UserError: names each key that differs, with both values.
        """
        ours = dataclasses.asdict(config) | {"optimizer": optimizer, "decay": decay}
        theirs = dataclasses.asdict(self.config) | {
            "optimizer": self.optimizer,
            "decay": self.hyperparameters.get("decay", decay),
        }
        if ours["vocab_size"] is None:  # the data's own
            ours["vocab_size"] = theirs["vocab_size"]
        shape = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "tie_weights")
        differ = [
            f"{'model.config.' if key in shape else 'model.'}{key} is {ours[key]}, "
            f"the checkpoint's {theirs[key]}"
            for key in (*shape, "optimizer", "decay")
            if ours[key] != theirs[key]
        ]
        if differ:
            raise UserError(f"cannot go on from the checkpoint: {'; '.join(differ)}")


def differences(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> list[str]:
    """What two mappings say differently: `key theirs -> ours`, nested keys with dots.

    Not config.vocab_size, which the data may fill in later, and check_fits looks at.
    """
    lines = []
    for key in ours:
        if isinstance(ours[key], dict) and isinstance(theirs.get(key), dict):
            lines += differences(theirs[key], ours[key], f"{prefix}{key}.")
        elif key in theirs and theirs[key] != ours[key] and f"{prefix}{key}" != "config.vocab_size":
            lines.append(f"{prefix}{key} {theirs[key]} -> {ours[key]}")
    return lines


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads tensors, numbers and words, and nothing that could run code.

    Raises:
        UserError: the file is missing, damaged, would run code, or is not one of ours.
    """
    if read_sidecar(path):
        check_digest(path)
    try:
        raw = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        unknown = raw["hyper_parameters"].keys() - HYPERPARAMETERS
        if unknown:
            raise ValueError(f"unknown hyper_parameters: {', '.join(sorted(unknown))}")
        return Checkpoint(
            config=GPTConfig(**raw["hyper_parameters"]["config"]),
            weights={
                name.removeprefix("model."): tensor
                for name, tensor in raw["state_dict"].items()
                if name.startswith("model.")
            },
            tokenizer=raw.get("gpt_lightning", {}).get("tokenizer"),
            optimizer=raw["hyper_parameters"].get("optimizer", "adamw"),
            step=int(raw.get("global_step", 0)),
            tokens=raw.get("callbacks", {}).get("SpeedMonitor", {}).get("tokens"),
            hyperparameters=raw["hyper_parameters"],
            facts=raw.get("gpt_lightning", {}),
        )
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UserError(
            f"{path} is not a checkpoint of gpt-lightning fit, or is damaged "
            f"({type(error).__name__}: {reason})"
        ) from error


def load_model(path: str | Path) -> tuple[GPT, Tokenizer]:
    """Return the model, on the CPU and in evaluation mode, and the tokenizer of its data.

    Args:
        path: Checkpoint or folder, as find_checkpoint takes it.

    Raises:
        UserError: as find_checkpoint and read_checkpoint, or the file names no tokenizer.
    """
    checkpoint = read_checkpoint(find_checkpoint(Path(path)))
    if checkpoint.tokenizer is None:
        raise UserError(f"{path} names no tokenizer: it was not trained on a TokenDataModule")
    model = GPT(checkpoint.config)
    model.load_state_dict(checkpoint.weights)
    return model.eval(), tokenizer_from_spec(checkpoint.tokenizer)


def initial_weights(source: str, config: GPTConfig) -> dict[str, torch.Tensor]:
    """Return the weights of `model.init_from` for `GPT(config).load_state_dict`, on the CPU.

    Args:
        source: A .ckpt of `gpt-lightning fit`, or what `pretrained_state_dict` takes.
        config: The model to fill.

    Raises:
        UserError: as read_checkpoint and pretrained_state_dict.
    """
    path = Path(source)
    if path.suffix != ".ckpt" or not path.is_file():
        return pretrained_state_dict(source, config)
    checkpoint = read_checkpoint(path)
    return fit_weights(source, checkpoint.weights, checkpoint.config.n_head, config)
