"""Checkpoints of nanoGPT's train.py: https://github.com/karpathy/nanoGPT."""

from pathlib import Path
from typing import Any

from gpt_lightning.model.weights import Pretrained, user_errors

COMPILED = "_orig_mod."  # prefix of the names in a compiled model


def is_checkpoint(content: Any) -> bool:
    """Return whether the content of a file of torch.save is nanoGPT's."""
    return isinstance(content, dict) and content.keys() >= {"model", "model_args"}


def read(path: Path, content: dict[str, Any]) -> Pretrained:
    """Return the model of a checkpoint, without its tokenizer, which is no part of the file.

    Args:
        path: The file, for error messages.
        content: Its content.

    Raises:
        UserError: The content is damaged.
    """
    with user_errors(f"{path} is no checkpoint of nanoGPT, or is damaged"):
        weights = {
            name.removeprefix(COMPILED): tensor
            for name, tensor in content["model"].items()
            if not name.endswith(".attn.bias")  # causal masks, without flash attention
        }
        arguments = {"dropout": 0.0} | content["model_args"]
        recorded = {"activation": "gelu", "tie_weights": True}
        recorded |= {key: arguments[key] for key in ("n_head", "dropout")}
        figures = {"step": int(content["iter_num"]), "val_loss": float(content["best_val_loss"])}
    return Pretrained(str(path), weights, recorded, None, figures)


def meta_files(path: Path, content: dict[str, Any]) -> list[Path]:
    """Return where the characters of a checkpoint's dataset may be.

    Args:
        path: ckpt.pt, in nanoGPT's folder out-*.
        content: Its content.
    """
    dataset = str((content.get("config") or {}).get("dataset", ""))
    folders = (path.parent, path.absolute().parent.parent / "data" / Path(dataset).name)
    return [folder / "meta.pkl" for folder in folders]
