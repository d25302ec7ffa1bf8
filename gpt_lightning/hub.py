"""GPT-2's weights from Hugging Face or a checkpoint into our GPT, and back out.

Hugging Face keeps a block's matrices as OpenAI's Conv1D did, (in, out); nn.Linear has (out, in).
Besides, the prefix `transformer.`, the causal masks and a tied head come and go. Source: GPT2LMHeadModel
in transformers, and `from_pretrained` in https://github.com/karpathy/nanoGPT/blob/master/model.py.
"""

import dataclasses
import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gpt_lightning.errors import UserError
from gpt_lightning.model import GPT, SIZES, GPTConfig

Weights = dict[str, torch.Tensor]

CONV1D = re.compile(r"\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
MASK = re.compile(r"\.attn\.(masked_)?bias$")  # h.0.attn.bias of old files, not h.0.attn.c_attn.bias
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
SIZE_KEYS = ("n_layer", "n_head", "n_embd")  # what a file in configs/model/ sets
# What a config.json may say without making another function of the weights than GPT computes.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}


def pretrained_state_dict(source: str, config: GPTConfig) -> Weights:
    """Weights of a trained GPT-2 for `GPT(config).load_state_dict`, on the CPU.

    Args:
        source: gpt2, gpt2-medium, gpt2-large or gpt2-xl, fetched once and cached by huggingface_hub
            (a folder of that name is ./gpt2); a folder with model.safetensors, as transformers'
            save_pretrained writes; a .safetensors file; or a .ckpt of gpt-lightning fit.
        config: The model to fill. `block_size` may be smaller than the source's: the first rows of
            wpe are taken, as nanoGPT's crop_block_size does. The rest of the shape must be the
            source's; n_head is known of the published names, our checkpoints and where a
            config.json lies beside model.safetensors. `activation` is not compared.

    Returns:
        Every key of `GPT(config).state_dict()` in the source's precision: matrices (out, in), wte
        and lm_head (V, C), wpe (block_size, C). Some are views; load_state_dict copies.

    Raises:
        UserError: not found, damaged, no GPT-2, not of config's shape, or a package is missing.
    """
    n_head: int | None
    if source in SIZES:
        n_head = SIZES[source].n_head
        shape = dataclasses.asdict(SIZES[source])
        keys = (*SIZE_KEYS, "vocab_size", "bias", "block_size")
        _check_shape(source, config, {key: shape[key] for key in keys})  # before gigabytes travel
        weights = _from_hf(_read_safetensors(_download(source)))
    elif (path := _find(source)).suffix == ".ckpt":
        weights, n_head = _read_checkpoint(path)
    else:
        weights, n_head = _from_hf(_read_safetensors(path)), _read_n_head(path)
    _check_shape(source, config, _shape_of(source, weights, n_head))
    weights[WPE] = weights[WPE][: config.block_size]
    if HEAD not in weights:
        weights[HEAD] = weights[WTE] if config.tie_weights else weights[WTE].clone()
    _check_tensors(source, config, weights)
    return weights


def state_dict_to_hf(model: GPT) -> Weights:
    """The weights as GPT2LMHeadModel of transformers saves them; after an import it is the identity.

    Args:
        model: Any GPT; one without biases gives none, and transformers then starts them at 0.

    Returns:
        Contiguous tensors for safetensors' save_file, the blocks' matrices (in, out), a tied
        lm_head left out. Those that are not transposed share the model's memory.
    """
    weights = model.state_dict()
    if model.config.tie_weights:
        del weights[HEAD]
    return {k: v.t().contiguous() if CONV1D.search(k) else v for k, v in weights.items()}


def _from_hf(weights: Weights) -> Weights:
    ours = {}
    for name, tensor in weights.items():
        if not MASK.search(name):
            prefix = "" if name.startswith(("transformer.", "lm_head.")) else "transformer."
            ours[prefix + name] = tensor.t() if CONV1D.search(name) else tensor
    return ours


def _find(source: str) -> Path:
    path = Path(source) / "model.safetensors" if Path(source).is_dir() else Path(source)
    if not path.is_file() or path.suffix not in (".safetensors", ".ckpt"):
        raise UserError(
            f"model.init_from: there is no .safetensors or .ckpt file {path}: give one, a folder "
            f"with model.safetensors (in one piece), or one of {', '.join(SIZES)}"
        )
    return path


def _require(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{module} is missing: pip install 'gpt-lightning[hub]'") from error


def _download(name: str) -> Path:
    hub = _require("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(f"openai-community/{name}", "model.safetensors"))
    except Exception as error:  # its own, its HTTP client's or the disk's: no base class in common
        raise UserError(
            f"cannot fetch {name} from huggingface.co ({_reason(error)}): "
            "give a folder with its model.safetensors as model.init_from instead"
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _read_safetensors(path: Path) -> Weights:
    library = _require("safetensors.torch")
    try:
        return library.load_file(path)  # type: ignore[no-any-return]
    except (_require("safetensors").SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or unreadable ({_reason(error)})") from error


def _read_checkpoint(path: Path) -> tuple[Weights, int]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        weights = {k.removeprefix("model."): v for k, v in checkpoint["state_dict"].items()}
        return weights, checkpoint["hyper_parameters"]["config"]["n_head"]
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        raise UserError(f"{path} is damaged or no checkpoint of ours ({_reason(error)})") from error


def _read_n_head(path: Path) -> int | None:
    """From the config.json of a folder that save_pretrained wrote, where there is one."""
    path = path.with_name("config.json") if path.name == "model.safetensors" else path
    if path.name != "config.json" or not path.exists():
        return None
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        other = [k for k, known in SETTINGS.items() if settings.get(k, known[0]) not in known]
        n_head = settings.get("n_head")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged or unreadable ({_reason(error)})") from error
    if other:
        raise UserError(f"{path}: no GPT-2 that we can run: {other[0]} is {settings[other[0]]}")
    return n_head


def _shape_of(source: str, weights: Weights, n_head: int | None) -> dict[str, Any]:
    if missing := {WTE, WPE} - weights.keys():
        raise UserError(f"{source} is not a GPT-2: it has no {min(missing)}")
    layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    shape: dict[str, Any] = {"n_layer": len(layers)} | ({"n_head": n_head} if n_head else {})
    shape |= {"n_embd": weights[WTE].size(-1), "vocab_size": weights[WTE].size(0)}
    shape |= {"bias": "transformer.ln_f.bias" in weights, "block_size": weights[WPE].size(0)}
    if HEAD in weights and not torch.equal(weights[HEAD], weights[WTE]):
        shape["tie_weights"] = False  # an untied head fits one parameter no more; a tied one fits two
    return shape


def _check_shape(source: str, config: GPTConfig, theirs: dict[str, Any]) -> None:
    ours = dataclasses.asdict(config)
    wrong = [k for k in theirs if ours[k] != theirs[k] and not (k == "block_size" and ours[k] < theirs[k])]
    if not wrong:
        return
    differences = ", ".join(f"{k} is {json.dumps(ours[k])}, not {json.dumps(theirs[k])}" for k in wrong)
    if "vocab_size" in wrong and (config.vocab_size or 0) > theirs["vocab_size"]:
        differences += " (there are no weights for padding rows)"
    sized = [k for k in wrong if k in SIZE_KEYS and source in SIZES]
    fixes = [f"--config configs/model/{source}.yaml"] if sized else []
    fixes += [f"--model.config.{k} {json.dumps(theirs[k])}" for k in wrong if k not in sized]
    raise UserError(f"model.config has not the shape of {source}: {differences}: add {' '.join(fixes)}")


def _check_tensors(source: str, config: GPTConfig, weights: Weights) -> None:
    with torch.device("meta"):  # names and shapes alone: no memory, no random numbers
        expected = {k: v.shape for k, v in GPT(config).state_dict().items()}
    found = {k: v.shape for k, v in weights.items()}
    if wrong := sorted(dict(expected.items() ^ found.items())):
        raise UserError(
            f"{source} is not a GPT-2: {len(wrong)} tensors are missing, unknown or of another shape; "
            f"the first is {wrong[0]}"
        )
