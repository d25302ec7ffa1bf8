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
        if self.network:
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
                f"{self.source} does not record its number of heads: put config.json beside the "
                "weights, with its key n_head"
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
        if self.network:
            return weights
        bare = {name: tensor for name, tensor in weights.items() if not name.endswith(".bias")}
        if not config.bias and not any(weights[name].any() for name in weights.keys() - bare):
            theirs["bias"], weights = False, bare  # biases of 0 are none
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
        # nanoGPT's own files do not name its activation, those of `export` do
        activation = (content.get("config") or {}).get("activation", "gelu")
        recorded = {"activation": activation, "tie_weights": True}
        recorded |= {key: arguments[key] for key in ("n_head", "dropout")}
        figures = {"step": int(content["iter_num"]), "val_loss": float(content["best_val_loss"])}
    return Pretrained(str(path), weights, recorded, None, figures)


def to_nanogpt(found: Pretrained, vocab_size: int, dataset: str, training: Fields) -> Fields:
    """Return the content of ckpt.pt, for nanoGPT's sample.py and its --init_from=resume.

    Args:
        found: Weights of a GPT.
        vocab_size: Rows of the embedding to keep, without those of padding.
        dataset: Name of the folder in nanoGPT's data/ that has meta.pkl.
        training: Content of the checkpoint of ours with these weights; empty: none. The state of
            its AdamW is kept if it has nanoGPT's two groups over all parameters.

    Raises:
        UserError: The head is not the embedding.
    """
    config = found.config()
    if not config.tie_weights:
        raise UserError(
            f"{found.source} has a head of its own, and nanoGPT's is the embedding: give --to the "
            "name of a folder, for transformers"
        )
    weights = {name: tensor.float() for name, tensor in found.state_dict(config).items()}
    # a copy: torch.save writes the rows of the padding with a view
    weights[HEAD] = weights[WTE] = weights[WTE][:vocab_size].clone()
    with torch.device("meta"):  # the order of parameters() is nanoGPT's
        tensors = sorted(build(None, config).parameters(), key=lambda tensor: tensor.dim() < 2)
    ours: Fields = {"learning_rate": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours |= training.get("hyper_parameters", {})
    groups = [
        {"params": [t for t in tensors if t.dim() >= 2], "weight_decay": ours["weight_decay"]},
        {"params": [t for t in tensors if t.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=ours["learning_rate"], betas=ours["betas"])
    optimizer = adamw.state_dict()
    trained = training.get("optimizer_states", [{"param_groups": []}])[0]
    if ours.get("optimizer") == "adamw" and len(trained["param_groups"]) == 2:
        state = trained["state"]
        if [state[n]["exp_avg"].shape for n in sorted(state)] == [t.shape for t in tensors]:
            rows = {k: state[0][k][:vocab_size].clone() for k in ("exp_avg", "exp_avg_sq")}
            optimizer["state"] = state | {0: state[0] | rows}
    keys = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
    arguments = {key: getattr(config, key) for key in keys} | {"vocab_size": vocab_size}
    return {
        "model": weights,
        "optimizer": optimizer,
        "model_args": arguments,
        "iter_num": found.figures.get("step", 0),
        "best_val_loss": found.figures.get("val_loss", 1e9),
        "config": arguments | {"dataset": dataset, "activation": config.activation},
    }


def nanogpt_meta_files(path: Path, content: Fields) -> list[Path]:
    """Return where the characters of a checkpoint's dataset may be.

    Args:
        path: ckpt.pt, in nanoGPT's folder out-*.
        content: Its content.
    """
    dataset = str((content.get("config") or {}).get("dataset", ""))
    folders = (path.parent, path.absolute().parent.parent / "data" / Path(dataset).name)
    return [folder / "meta.pkl" for folder in folders]
