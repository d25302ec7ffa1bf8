"""Trained models: runs and checkpoints of this program, Hugging Face's formats, and nanoGPT's."""

import dataclasses
from pathlib import Path
from typing import Any

from gpt_lightning.data.dataset import is_remote
from gpt_lightning.data.formats import read_meta
from gpt_lightning.data.tokenizers import Tokenizer, difference, tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.hardware.device import device_kind
from gpt_lightning.hardware.precision import check_accelerator
from gpt_lightning.model import huggingface
from gpt_lightning.model.gpt import SIZES, GPTConfig
from gpt_lightning.model.network import Network, missing_network
from gpt_lightning.model.weights import (
    SHAPE_KEYS,
    Pretrained,
    Weights,
    check_shape,
    nanogpt_meta_files,
    read_nanogpt,
)
from gpt_lightning.runs.checkpoint import Checkpoint, read_content
from gpt_lightning.runs.folders import find_checkpoint, sort_saved
from gpt_lightning.runs.mirror import fetch_checkpoint

GPT2_VOCABULARIES = (50257, 50304)  # published files, and padded to a multiple of 64


def read_source(
    source: str | Path, network: Network | None = None, gpt_for: str = ""
) -> Pretrained:
    """Return the weights of a trained GPT-2; nothing in a file is run.

    Args:
        source: A checkpoint; a run folder, whose best checkpoint is taken; a folder of runs, whose
            newest is taken; the URL of one of these; ckpt.pt of nanoGPT; a folder in Hugging Face's
            format, or a file .safetensors or .bin; or gpt2, gpt2-medium, gpt2-large, gpt2-xl, which
            are downloaded once (write ./gpt2 for a folder of that name).
        network: Network of one's own that has these weights; None: GPT.
        gpt_for: Command or key that takes the weights of a GPT alone.

    Raises:
        UserError: The source is not found, damaged, would run code, or is not a GPT-2.
    """
    if not isinstance(source, str | Path) or not str(source):
        raise UserError(f"the model's path is {source or 'empty'}: give a run, lightning_logs/NAME")
    published = str(source) in SIZES
    try:
        path = Path(source) if published else find_model(source)
    except UserError as error:
        hint = f"; GPT-2 is {', '.join(SIZES)}" if "gpt" in str(source).lower() else ""
        raise UserError(f"{error}{hint}") from error
    if published or path.is_dir() or path.suffix in (".safetensors", ".bin"):
        return with_tokenizer(huggingface.read(str(path)), [])
    content = read_content(path)
    if isinstance(content, dict) and content.keys() >= {"model", "model_args"}:
        return with_tokenizer(read_nanogpt(path, content), nanogpt_meta_files(path, content))
    checkpoint = Checkpoint.of(content, path)
    found = of_checkpoint(checkpoint, path)
    theirs = checkpoint.record.network
    if theirs and gpt_for:
        raise UserError(
            f"{source} has the weights of a network of its own, {theirs['class_path']}: {gpt_for} "
            "takes those of a GPT alone"
        )
    if theirs and not network:
        raise missing_network(str(source), theirs)
    return dataclasses.replace(found, network=network)


def find_model(source: str | Path) -> Path:
    """Return the checkpoint of the best model behind a path or URL.

    Args:
        source: Argument of find_checkpoint or, for a URL, of fetch_checkpoint; or a folder in
            Hugging Face's format, which is returned.

    Raises:
        UserError: There is none.
    """
    if is_remote(str(source)):
        return fetch_checkpoint(str(source))
    path = Path(source)
    return path if huggingface.is_folder(path) else find_checkpoint(path)


def with_tokenizer(found: Pretrained, meta_files: list[Path]) -> Pretrained:
    """Return the weights with the tokenizer of their program, if it is known.

    Args:
        found: Weights of another program.
        meta_files: Paths at which nanoGPT's vocabulary of characters may be.

    Raises:
        UserError: A vocabulary of characters is damaged, or would run code.
    """
    if found.tokenizer:
        return found
    fits = found.shape()["vocab_size"] in GPT2_VOCABULARIES
    path = Path(found.source)
    folder = path if path.is_dir() else path.parent
    known = found.source in SIZES or huggingface.has_gpt2_tokens(folder)
    spec = {"name": "gpt2"} if fits and known else None
    meta = next(filter(Path.exists, meta_files), None)
    if not spec and meta:
        spec = {"name": "char", "characters": read_meta(meta)}
    return dataclasses.replace(found, tokenizer=spec)


def of_checkpoint(checkpoint: Checkpoint, path: Path) -> Pretrained:
    """Return the weights of a checkpoint of this program."""
    record = checkpoint.record
    loss = next((saved.loss for saved in sort_saved([path])), None)
    figures = {"step": checkpoint.step, "tokens": checkpoint.tokens, "val_loss": loss}
    known = {key: value for key, value in figures.items() if value is not None}
    weights = checkpoint.weights
    if rank := record.settings.lora_rank:
        from gpt_lightning.model.lora import merged  # few models have it

        weights = merged(weights, record.settings.lora_alpha / rank)
    return Pretrained(
        str(path),
        weights,
        vars(record.config) | {"attention": "auto"},  # another device may lack the run's kernel
        record.tokenizer,
        record.figures | known,
    )


def open_model(source: str, device: str, network: Any) -> tuple[str, Any, Tokenizer, str]:
    """Return the name of a source, its model on the CPU, its tokenizer, and the kind of device.

    Args:
        source: Argument of `read_source`.
        device: Value of --device: auto, cpu, cuda or mps.
        network: Value of --network.

    Raises:
        UserError: As `load_model`, or the machine has no such device.
    """
    check_accelerator(device, "--device")
    found = read_source(source, Network.of(network))
    return found.source, found.model(), tokenizer_of(found), device_kind(device)


def load_model(source: str | Path, network: Any = None) -> tuple[Any, Tokenizer]:
    """Return a trained model, on the CPU and in evaluation mode, and the tokenizer of its data.

    Example:
        ```python
        model, tokenizer = load_model("lightning_logs/quickstart")
        prompt = torch.tensor([tokenizer.encode("Once upon a time").tolist()])
        print(tokenizer.decode(generate(model, prompt, 100)[0].tolist()))
        ```

    Args:
        source: Run folder, checkpoint, folder in Hugging Face's format, ckpt.pt of nanoGPT, or a
            name such as gpt2; `read_source` has the others.
        network: Argument of GPTModule, for the weights of a network of one's own.

    Raises:
        UserError: As `read_source`, or the source names no tokenizer.
    """
    found = read_source(source, Network.of(network))
    return found.model(), tokenizer_of(found)


def tokenizer_of(found: Pretrained) -> Tokenizer:
    """Return the tokenizer of a model.

    Raises:
        UserError: The source names none, or one with more tokens than the model has.
    """
    if not found.tokenizer:
        raise UserError(
            f"{found.source} names no tokenizer: for a checkpoint of nanoGPT put its dataset's "
            "meta.pkl beside it; a model of fit needs one that was trained on data.dataset"
        )
    tokenizer, rows = tokenizer_from_spec(found.tokenizer), found.shape()["vocab_size"]
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"{found.source}: tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, the "
            f"model {rows}: put the meta.pkl or the config.json of its own training beside it"
        )
    return tokenizer


def initial_weights(
    source: str,
    config: GPTConfig,
    network: Network | None = None,
    tokenizer: Fields | None = None,
) -> Weights:
    """Return the weights of `model.init_from` for `GPT(config).load_state_dict`, on the CPU.

    Args:
        source: Argument of `read_source`.
        config: Shape of the model to fill.
        network: Network of one's own to fill; None: GPT.
        tokenizer: Spec of the data's tokenizer; None: it is not known.

    Raises:
        UserError: As `read_source`, or the shapes or the tokens differ.
    """
    if not network and source in SIZES:  # fails before a download of gigabytes
        check_shape(source, config, {key: getattr(SIZES[source], key) for key in SHAPE_KEYS})
    found = read_source(source, network, "" if network else "model.init_from")
    check_tokens(found, tokenizer)
    return found.weights if network else found.state_dict(config)


def check_tokens(found: Pretrained, tokenizer: Fields | None) -> None:
    """Raise a UserError if weights to train further are of other tokens than the data."""
    theirs = found.tokenizer
    if not theirs or not tokenizer or theirs == tokenizer:
        return
    fix = (
        "make data of its tokens, `gpt-lightning prepare SOURCE --tokenizer DATASET --out DIR` "
        "with its own dataset as DATASET, and give --data.dataset DIR --data.text_file null"
    )
    if theirs["name"] != tokenizer["name"] and "json" not in theirs:
        fix = f"set data.tokenizer to {theirs['name']}, or {fix}"
    raise UserError(
        f"model.init_from {found.source} was trained on other tokens than the data's "
        f"({difference(theirs, tokenizer)}): {fix}, or leave model.init_from out"
    )
