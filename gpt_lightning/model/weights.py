"""Weights of a trained GPT-2 from any program, and the models of this one that they fill."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.files import Fields
from gpt_lightning.model.gpt import SIZES, GPTConfig
from gpt_lightning.model.network import Network, build

Weights = dict[str, torch.Tensor]
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
SIZE_KEYS = ("n_layer", "n_head", "n_embd")  # what a file in configs/model/ sets
SHAPE_KEYS = (*SIZE_KEYS, "vocab_size", "bias", "block_size", "tie_weights")
COMPILED = "_orig_mod."  # prefix of the names in a compiled model


@dataclass(frozen=True)
class Pretrained:
    """Weights of a trained GPT-2, and what their source records.

    Attributes:
        source: Path or name, for error messages.
        weights: Tensors under the names of `GPT.state_dict()`, on the CPU: matrices (out, in), wte
            and lm_head (V, C), wpe (block_size, C). A tied head may be missing.
        recorded: Recorded keys of GPTConfig; the others follow from the tensors.
        tokenizer: Spec of the tokenizer, for tokenizer_from_spec; None if it is not known.
        figures: Figures of the training, by name: step, tokens, validation loss.
        network: Network of one's own that the weights are of; None: GPT.
    """

    source: str
    weights: Weights
    recorded: Fields = field(default_factory=dict)
    tokenizer: Fields | None = None
    figures: Fields = field(default_factory=dict)
    network: Network | None = None

    def shape(self) -> Fields:
        """Return the keys SHAPE_KEYS of GPTConfig; n_head is None if the source does not record it.

        Raises:
            UserError: The weights are not those of a GPT-2.
        """
        if self.network is not None:
            return {key: self.recorded[key] for key in SHAPE_KEYS}
        with user_errors(f"{self.source} is not a GPT-2"):
            weights = self.weights
            (vocab_size, n_embd), head = weights[WTE].shape, weights.get(HEAD, weights[WTE])
            blocks = {k.split(".")[2] for k in weights if k.startswith("transformer.h.")}
            tied = head.shape == weights[WTE].shape and torch.equal(head, weights[WTE])
            return {
                "n_layer": len(blocks),
                "n_head": self.recorded.get("n_head"),
                "n_embd": n_embd,
                "vocab_size": vocab_size,
                "bias": "transformer.h.0.attn.c_attn.bias" in weights,
                "block_size": len(weights[WPE]),
                "tie_weights": self.recorded.get("tie_weights", tied),
            }

    def config(self, **changes: Any) -> GPTConfig:
        """Return the model of these weights.

        Args:
            **changes: Other values of GPTConfig's keys.

        Raises:
            UserError: The weights are not those of a GPT-2, or their heads are not recorded.
        """
        shape = self.shape()
        if shape["n_head"] is None:
            raise UserError(
                f"{self.source} does not record its number of heads: give the folder with its "
                "config.json"
            )
        return GPTConfig(**(self.recorded | shape | changes))

    def state_dict(self, config: GPTConfig) -> Weights:
        """Return the weights as `GPT(config).load_state_dict` takes them.

        Args:
            config: The model to fill. `block_size` may be smaller than the source's: the first rows
                of wpe are taken, as in nanoGPT's crop_block_size. `vocab_size` may be larger: each
                new row of wte and lm_head is the mean of all rows, so that its logit is the mean of
                all logits. The rest of the shape must equal the source's; n_head is compared if the
                source records it, `activation` is not compared.

        Returns:
            Every key of `GPT(config).state_dict()`, in the source's precision. Some are views.

        Raises:
            UserError: The weights are not those of a GPT-2, not of config's shape, or not finite.
        """
        theirs, weights = self.shape(), dict(self.weights)
        if self.network is not None:
            return weights
        biases = {name: tensor for name, tensor in weights.items() if name.endswith(".bias")}
        if not config.bias and not any(tensor.any() for tensor in biases.values()):
            theirs["bias"] = False  # biases of 0 are none
            weights = {name: weights[name] for name in weights.keys() - biases.keys()}
        check_shape(self.source, config, theirs)
        if WPE in weights:
            weights[WPE] = weights[WPE][: config.block_size]
        weights[WTE] = grown(weights[WTE], config.vocab_size)
        head = self.weights.get(HEAD)
        if config.tie_weights:
            weights[HEAD] = weights[WTE]
        else:
            weights[HEAD] = weights[WTE].clone() if head is None else grown(head, config.vocab_size)
        with torch.device("meta"):  # names and shapes without memory or random numbers
            expected = {k: v.shape for k, v in build(None, config).state_dict().items()}
        if wrong := expected.items() ^ {k: v.shape for k, v in weights.items()}.items():
            raise UserError(
                f"{self.source} is not a GPT-2: {min(wrong)[0]} is missing, unknown or of a wrong "
                "shape"
            )
        for name, tensor in weights.items():
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise UserError(
                    f"{self.source}: {name} has integers, NaN or infinity: copy it again, or give "
                    "another checkpoint of it"
                )
        return weights

    def model(self, **changes: Any) -> Any:
        """Return the model of these weights in float32, on the CPU, in evaluation mode.

        Args:
            **changes: Other values of GPTConfig's keys.

        Raises:
            UserError: As `config` and `state_dict`.
        """
        config = self.config(**changes)
        weights = self.state_dict(config)
        model = build(self.network, config)
        with user_errors(f"{self.source} does not fit {type(model).__name__}"):
            model.load_state_dict(weights)
        return model.eval()


def grown(matrix: torch.Tensor, rows: int | None) -> torch.Tensor:
    """Return a (V, C) matrix with further rows, each the mean of its V rows."""
    missing = (rows or 0) - len(matrix)
    if missing <= 0:
        return matrix
    mean = matrix.double().mean(dim=0, keepdim=True).to(matrix.dtype)  # (1, C)
    return torch.cat((matrix, mean.expand(missing, -1)))


def check_shape(source: str, config: GPTConfig, theirs: Fields) -> None:
    """Check that weights of a shape fill a model.

    Args:
        source: Origin of the weights.
        config: The model to fill.
        theirs: Shape of the weights, by the keys of GPTConfig; None where any value fits.

    Raises:
        UserError: Every difference, and the settings that fit.
    """
    ours = dataclasses.asdict(config)
    ours["block_size"] = max(config.block_size, theirs["block_size"])
    if config.vocab_size is not None:
        ours["vocab_size"] = min(config.vocab_size, theirs["vocab_size"])
    ours["tie_weights"] = config.tie_weights or theirs["tie_weights"]  # a tied head is copied
    wrong = {k: json.dumps(v) for k, v in theirs.items() if v is not None and v != ours[k]}
    if not wrong:
        return
    ours = {k: json.dumps(getattr(config, k)) for k in wrong}
    differ = ", ".join(f"{k} is {ours[k]}, there {v}" for k, v in wrong.items())
    sized = [k for k in SIZE_KEYS if k in wrong and source in SIZES]
    fixes = [f"--config model/{source}"] if sized else []
    fixes += [f"--model.config.{k} {v}" for k, v in wrong.items() if k not in sized]
    raise UserError(f"model.config does not fit {source}: {differ}: set {' '.join(fixes)}")


@contextmanager
def user_errors(problem: str) -> Iterator[None]:
    """Turn errors of parsers, HTTP clients and disks, which share no base class, into one line."""
    try:
        yield
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: pip install 'gpt-lightning[hf]'") from error
    except Exception as error:
        raise UserError(f"{problem} ({reason_of(error)})") from error


# ---- checkpoints of nanoGPT's train.py: https://github.com/karpathy/nanoGPT ----------------------


def read_nanogpt(path: Path, content: Fields) -> Pretrained:
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


def nanogpt_meta_files(path: Path, content: Fields) -> list[Path]:
    """Return where the characters of a checkpoint's dataset may be.

    Args:
        path: ckpt.pt, in nanoGPT's folder out-*.
        content: Its content.
    """
    dataset = str((content.get("config") or {}).get("dataset", ""))
    folders = (path.parent, path.absolute().parent.parent / "data" / Path(dataset).name)
    return [folder / "meta.pkl" for folder in folders]
