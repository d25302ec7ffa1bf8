"""Import of GPT-2's weights from Hugging Face's format, and export to it.

Hugging Face stores the matrices of a block like OpenAI's Conv1D, (in, out); nn.Linear has (out,
in). Some files lack the prefix `transformer.`; some also hold causal masks or a tied head. Source:
transformers' GPT2LMHeadModel; from_pretrained in https://github.com/karpathy/nanoGPT, model.py.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.model.gpt import GPT, SIZES, GPTConfig

Weights = dict[str, torch.Tensor]
PREFIX = "transformer."
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
CONV1D = re.compile(r"\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
MASK = re.compile(r"\.attn\.(masked_)?bias$")  # h.0.attn.bias, not h.0.attn.c_attn.bias
SIZE_KEYS = ("n_layer", "n_head", "n_embd")  # what a file in configs/model/ sets
# Values in config.json under which the weights mean the function that GPT computes.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_by_inverse_layer_idx": (False,),
}


def pretrained_state_dict(source: str, config: GPTConfig) -> Weights:
    """Return the weights of a trained GPT-2 for `GPT(config).load_state_dict`, on the CPU.

    Args:
        source: gpt2, gpt2-medium, gpt2-large or gpt2-xl, downloaded once and cached by
            huggingface_hub (write ./gpt2 for a folder of that name); a folder with
            model.safetensors, written by save_pretrained of transformers; or a .safetensors file.
        config: The model to fill. `block_size` may be smaller than the source's: the first rows of
            wpe are taken, as in nanoGPT's crop_block_size. The rest of the shape must equal the
            source's; n_head is compared if the source records it, `activation` is not compared.

    Returns:
        Every key of `GPT(config).state_dict()` in the source's precision: matrices (out, in), wte
        and lm_head (V, C), wpe (block_size, C). Some are views; load_state_dict copies.

    Raises:
        UserError: the source is not found, damaged, not a GPT-2 or not of config's shape, or a
            package is missing.
    """
    if source in SIZES:  # before a download of gigabytes
        keys = (*SIZE_KEYS, "vocab_size", "bias", "block_size")
        _check_shape(source, config, {key: getattr(SIZES[source], key) for key in keys})
    weights, n_head = _read(source)
    return fit_weights(source, weights, n_head, config)


def fit_weights(source: str, weights: Weights, n_head: int | None, config: GPTConfig) -> Weights:
    """Return weights under our names as `GPT(config).load_state_dict` takes them.

    Args:
        source: Origin of the weights, for error messages.
        weights: Tensors under the names of `GPT.state_dict()`; the head may be missing.
        n_head: Number of heads of their model; None if the source does not record it.
        config: The model to fill.

    Raises:
        UserError: the weights are not those of a GPT-2, or not of config's shape.
    """
    with _user_errors(f"{source} is not a GPT-2"):
        shape = _shape_of(weights)
    _check_shape(source, config, shape | {"n_head": n_head})
    weights[WPE] = weights[WPE][: config.block_size]
    if HEAD not in weights:
        weights[HEAD] = weights[WTE] if config.tie_weights else weights[WTE].clone()
    with torch.device("meta"):  # names and shapes without memory or random numbers
        expected = {k: v.shape for k, v in GPT(config).state_dict().items()}
    if wrong := expected.items() ^ {k: v.shape for k, v in weights.items()}.items():
        raise UserError(
            f"{source} is not a GPT-2: {min(wrong)[0]} is missing, unknown or of a wrong shape"
        )
    return weights


def state_dict_to_hf(model: GPT) -> Weights:
    """Return the weights in the format of transformers' GPT2LMHeadModel.

    Args:
        model: The model; for one without biases transformers initializes biases of 0.

    Returns:
        Contiguous tensors for safetensors' save_file, the matrices of the blocks (in, out), without
        a tied lm_head. Tensors that are not transposed share the model's memory.
    """
    weights = _transposed(model.state_dict())
    left_out = HEAD if model.config.tie_weights else None
    return {k: v.contiguous() for k, v in weights.items() if k != left_out}


@contextmanager
def _user_errors(problem: str) -> Iterator[None]:
    """Turn errors of parsers, HTTP clients and disks, which share no base class, into one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: pip install 'gpt-lightning[hub]'") from error
    except Exception as error:
        raise UserError(f"{problem} ({reason_of(error)})") from error


def _read(source: str) -> tuple[Weights, int | None]:
    """Return weights under our names, matrices (out, in), and n_head if it is recorded."""
    path = Path(source) / "model.safetensors" if Path(source).is_dir() else Path(source)
    if source in SIZES:
        advice = "give a folder with its model.safetensors as model.init_from instead"
        with _user_errors(f"cannot fetch {source} from huggingface.co: {advice}"):
            path = _downloaded(f"openai-community/{source}")
    elif not path.is_file() or path.suffix != ".safetensors":
        raise UserError(
            f"model.init_from: there is no .safetensors or .ckpt file {path}: give one, a folder "
            f"with model.safetensors (in one piece), or one of {', '.join(SIZES)}"
        )
    with _user_errors(f"{path} is damaged, or its content does not match its name"):
        from safetensors.torch import load_file

        theirs = {k: v for k, v in load_file(path).items() if not MASK.search(k)}
    named = {k if k == HEAD else PREFIX + k.removeprefix(PREFIX): v for k, v in theirs.items()}
    return _transposed(named), _read_n_head(path)


def _downloaded(repository: str) -> Path:
    """Return the weights' file in huggingface_hub's cache, downloaded if it is not there."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    name = "model.safetensors"
    found = try_to_load_from_cache(repository, name)
    if not isinstance(found, str):
        get_hf_file_metadata(hf_hub_url(repository, name))  # without the download's long retries
        found = hf_hub_download(repository, name)
    return Path(found)


def _transposed(weights: Weights) -> Weights:
    return {k: v.t() if CONV1D.search(k) else v for k, v in weights.items()}


def _read_n_head(weights_path: Path) -> int | None:
    """Return n_head from config.json in the folder of model.safetensors, if there is one."""
    path = weights_path.with_name("config.json")
    if weights_path.name != "model.safetensors" or not path.exists():
        return None
    with _user_errors(f"{path} is damaged"):
        settings: dict[str, Any] = {"n_head": None} | json.loads(path.read_text(encoding="utf-8"))
    for key, known in SETTINGS.items():
        if settings.get(key, known[0]) not in known:
            raise UserError(f"{path}: {key} is {settings[key]}, which GPT does not compute")
    return settings["n_head"]


def _shape_of(weights: Weights) -> dict[str, Any]:
    """Return the keys of GPTConfig that follow from the tensors; None where any value fits."""
    (vocab_size, n_embd), head = weights[WTE].shape, weights.get(HEAD, weights[WTE])
    return {
        "n_layer": len({k.split(".")[2] for k in weights if k.startswith("transformer.h.")}),
        "n_embd": n_embd,
        "vocab_size": vocab_size,
        "bias": "transformer.ln_f.bias" in weights,
        "block_size": len(weights[WPE]),
        "tie_weights": None if torch.equal(head, weights[WTE]) else False,
    }


def _check_shape(source: str, config: GPTConfig, theirs: dict[str, Any]) -> None:
    ours = vars(config) | {"block_size": max(config.block_size, theirs["block_size"])}
    wrong = {k: json.dumps(v) for k, v in theirs.items() if v is not None and v != ours[k]}
    if not wrong:
        return
    differ = ", ".join(f"{k} is {json.dumps(ours[k])}, there {v}" for k, v in wrong.items())
    if (config.vocab_size or 0) > theirs["vocab_size"]:
        differ += " (there are no weights for a padded vocabulary)"
    sized = [k for k in SIZE_KEYS if k in wrong and source in SIZES]
    fixes = [f"--config model/{source}"] if sized else []
    fixes += [f"--model.config.{k} {v}" for k, v in wrong.items() if k not in sized]
    raise UserError(f"model.config does not fit {source}: {differ}: set {' '.join(fixes)}")
