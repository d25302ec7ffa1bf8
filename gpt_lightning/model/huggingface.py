"""Hugging Face's format of GPT-2, in both directions.

Hugging Face stores the matrices of a block like OpenAI's Conv1D, (in, out); nn.Linear has (out,
in). Some files lack the prefix `transformer.`; some also hold causal masks or a tied head. Source:
transformers' GPT2LMHeadModel and GPT2Config; from_pretrained in
https://github.com/karpathy/nanoGPT, model.py.
"""

import json
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, check_regular, yaml_beside
from gpt_lightning.model.gpt import SIZES, GPTConfig
from gpt_lightning.model.weights import HEAD, SIZE_KEYS, WTE, Pretrained, Weights, user_errors

PREFIX = "transformer."
CONV1D = re.compile(r"\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
MASK = re.compile(r"\.attn\.(masked_)?bias$")  # h.0.attn.bias, not h.0.attn.c_attn.bias
FILES = ("model.safetensors", "pytorch_model.bin")  # or in pieces, with .index.json
TABLE = yaml_beside(__file__)
ACTIVATIONS: dict[str, str] = TABLE["activations"]  # theirs -> ours
OURS = "gpt_lightning"  # our own key in config.json, which transformers keeps


# ---- in ------------------------------------------------------------------------------------------


def is_folder(path: Path) -> bool:
    """Return whether a folder has weights in Hugging Face's format."""
    return any((path / f"{name}{end}").exists() for name in FILES for end in ("", ".index.json"))


def read(source: str) -> Pretrained:
    """Return a GPT-2 in Hugging Face's format.

    Args:
        source: gpt2, gpt2-medium, gpt2-large or gpt2-xl, downloaded once and cached by
            huggingface_hub (write ./gpt2 for a folder of that name); a folder written by
            save_pretrained of transformers, in one or several files of .safetensors or .bin; or one
            such file.

    Raises:
        UserError: The source is not found, damaged, would run code, or is not a GPT-2; or a package
            is missing.
    """
    path = downloaded(source) if source in SIZES else Path(source)
    files = weight_files(path) if path.is_dir() else [path]
    theirs: Weights = {}
    for file in files:
        theirs |= read_weights(file)
    beside = (path if path.is_dir() else path.parent) / "config.json"
    settings = read_settings(beside)
    named = {
        name if name == HEAD else PREFIX + name.removeprefix(PREFIX): tensor
        for name, tensor in theirs.items()
        if not MASK.search(name)
    }
    ours = settings.get(OURS, {})
    biases = {name for name in named if name.endswith(".bias")}
    # transformers has no GPT-2 without biases: they are zero, unless it has trained them since
    if ours.get("bias") is False and not any(named[name].any() for name in biases):
        named = {name: named[name] for name in named.keys() - biases}
    recorded = {"n_head": settings.get("n_head"), "dropout": settings.get("resid_pdrop")}
    recorded["activation"] = ACTIVATIONS[settings.get("activation_function", "gelu_new")]
    recorded = {key: value for key, value in recorded.items() if value is not None}
    facts = ours.get("tokenizer"), ours.get("figures", {})
    found = Pretrained(source, transposed(named), recorded, *facts)
    check_settings(beside, settings, found.shape(), HEAD in named)
    return found


def check_settings(path: Path, settings: Fields, shape: Fields, has_head: bool) -> None:
    """Raise a UserError if config.json contradicts the tensors beside it.

    Args:
        path: The file.
        settings: Its content.
        shape: Keys of GPTConfig, as the tensors have them.
        has_head: True if there is a tensor of the head.
    """
    C = shape["n_embd"]
    heads = settings.get("n_head")
    dropout = settings.get("resid_pdrop")
    sizes = {"n_layer": shape["n_layer"], "n_embd": C, "n_inner": 4 * C}
    sizes |= {"n_positions": shape["block_size"], "vocab_size": shape["vocab_size"]}
    wrong = {
        key: f"the tensors have {size}: set it to {size}"
        for key, size in sizes.items()
        if settings.get(key) not in (None, size)
    }
    if heads is not None and not (type(heads) is int and heads > 0 and C % heads == 0):
        wrong["n_head"] = f"it must divide n_embd, {C}: set it to the model's own"
    if dropout is not None and not (type(dropout) in (int, float) and 0 <= dropout < 1):
        wrong["resid_pdrop"] = "it must be at least 0 and below 1: set it to 0"
    if settings.get("tie_word_embeddings") is False and not has_head:
        wrong["tie_word_embeddings"] = f"the tensors have no {HEAD}: set it to true"
    for key, problem in wrong.items():
        raise UserError(
            f"{path}: {key} is {json.dumps(settings[key])}, but {problem}, or copy config.json and "
            "the weights again"
        )


def downloaded(name: str) -> Path:
    """Return the folder of a published size in huggingface_hub's cache, downloaded if needed."""
    advice = f"give a folder with its {FILES[0]} instead"
    with user_errors(f"cannot fetch {name} from huggingface.co: {advice}"):
        import huggingface_hub as hub

        repository, found = f"openai-community/{name}", None
        for file in ("config.json", FILES[0]):
            found = hub.try_to_load_from_cache(repository, file)
            if not isinstance(found, str):
                # this skips the download's long retries
                hub.get_hf_file_metadata(hub.hf_hub_url(repository, file))
                found = hub.hf_hub_download(repository, file)
    return Path(str(found)).parent


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights.

    Raises:
        UserError: There are none, or their index is damaged.
    """
    for name in FILES:
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():
            with user_errors(f"{index} is damaged"):
                names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
                if not names or any(Path(part).name != part for part in names):
                    raise UserError(f"{index} is damaged: its weight_map names no files beside it")
            return [folder / part for part in names]
    raise UserError(f"{folder} has none of {', '.join(FILES)}: give a folder with one of them")


def read_weights(path: Path) -> Weights:
    """Return the tensors of a file; nothing in it is run.

    Raises:
        UserError: The file is missing, damaged, would run code, or holds something else.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: copy it again")
    safe = path.suffix == ".safetensors"
    damaged = "is damaged" if safe else "is damaged, would run code"
    with user_errors(f"{path} {damaged}, or its content does not match its name"):
        weights: Any
        if safe:
            from safetensors.torch import load_file

            weights = load_file(path)
        else:  # files before torch 1.6 are no archives, which cannot be mapped
            mapped = zipfile.is_zipfile(path)
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
            raise TypeError("it holds more than tensors")
    return dict(weights)


def read_settings(path: Path) -> Fields:
    """Return the content of config.json; empty if there is none.

    Raises:
        UserError: The file is damaged, or the model of another architecture.
    """
    if not path.exists():
        return {}
    check_regular(path, "copy it again")
    with user_errors(f"{path} is damaged"):
        settings = {} | json.loads(path.read_bytes())
    for key, known in TABLE["settings"].items():
        if settings.get(key, known[0]) not in known:
            raise UserError(f"{path}: {key} is {settings[key]}, which GPT does not compute")
    with user_errors(f"{path}: its key {OURS} is damaged: delete the key"):
        ours = settings.setdefault(OURS, {})
        figures = [float(number) for number in ours.setdefault("figures", {}).values()]
        if not (
            isinstance(ours.get("tokenizer"), dict | None) and all(map(math.isfinite, figures))
        ):
            raise ValueError("its tokenizer is no object, or a figure no number")
    return settings


def has_gpt2_tokens(folder: Path) -> bool:
    """Return whether a folder's vocabulary has GPT-2's ids, or the folder has no vocabulary.

    tokenizer.json has its vocabulary in model.vocab. vocab.json is the vocabulary itself, in which
    `model` may be a token, as it is in GPT-2's.
    """
    for file in (folder / "tokenizer.json", folder / "vocab.json"):
        if file.is_file():
            with user_errors(f"{file} is damaged"):
                found = json.loads(file.read_bytes())  # with a mark of UTF-8, too
                if file.name == "tokenizer.json":
                    found = found["model"]["vocab"]
                return dict(found).items() >= TABLE["gpt2_ids"].items()
    return True


def transposed(weights: Weights) -> Weights:
    """Return the weights with the matrices of the blocks transposed."""
    return {k: v.t() if CONV1D.search(k) else v for k, v in weights.items()}


# ---- out -----------------------------------------------------------------------------------------


def to_huggingface(weights: Weights, config: GPTConfig, vocab_size: int | None = None) -> Weights:
    """Return weights in the format of transformers' GPT2LMHeadModel.

    Args:
        weights: State dict of a GPT.
        config: Its shape.
        vocab_size: Rows of the embedding and the head to keep, without those of padding; None: all.

    Returns:
        Contiguous tensors for safetensors' save_file: the matrices of the blocks (in, out), biases
        of 0 where the model has none, without a tied lm_head. Tensors that are neither transposed
        nor cut share the memory of `weights`.
    """
    found = {k: v for k, v in transposed(weights).items() if not (k == HEAD and config.tie_weights)}
    for name in {WTE, HEAD} & found.keys():
        found[name] = found[name][:vocab_size]
    for name in [] if config.bias else list(found):
        if name.startswith((f"{PREFIX}h.", f"{PREFIX}ln_f.")):
            zeros = found[name].new_zeros(found[name].shape[-1])
            found[name.removesuffix("weight") + "bias"] = zeros
    return {name: tensor.contiguous() for name, tensor in sorted(found.items())}


def settings_of(config: GPTConfig, vocab_size: int, eot_token: int | None, ours: Fields) -> Fields:
    """Return the content of config.json.

    Args:
        config: Shape of the model.
        vocab_size: Rows of its embedding.
        eot_token: Id of the token that ends a text; None if the vocabulary has none.
        ours: Values of our own key: tokenizer, bias, figures.
    """
    dropout = {f"{place}_pdrop": config.dropout for place in ("attn", "embd", "resid")}
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return TABLE["written"] | {
        "vocab_size": vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        **{key: getattr(config, key) for key in SIZE_KEYS},
        "activation_function": names[config.activation],
        **dropout,
        "bos_token_id": eot_token,
        "eos_token_id": eot_token,
        "tie_word_embeddings": config.tie_weights,
        OURS: ours,
    }
