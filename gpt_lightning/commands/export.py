"""The commands `gpt-lightning export` and `import`: trained models in other formats and in ours."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt

from gpt_lightning.data.formats import META, extras, read_meta
from gpt_lightning.data.tokenizers import (
    BYTES,
    END_OF_TEXT,
    CharTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    gpt2_file,
)
from gpt_lightning.errors import UserError, optional
from gpt_lightning.files import (
    Fields,
    explained,
    move_into_place,
    new_path,
    replacement,
    workspace,
    write_atomic,
)
from gpt_lightning.parsing import plain_number


def export(source: str, to: str | None = None) -> None:
    """Write a trained model as a folder for transformers, and for all that reads its format.

    Rows of the vocabulary beyond the tokenizer's, which are padding, are left out.

    Args:
        source: Checkpoint, run folder, or any other source of `sample`.
        to: Folder to make; it must be named. A file .pt, such as data/NAME/ckpt.pt, is made for
            nanoGPT's sample.py and for its train.py with --init_from=resume.
    """
    out = new_path("--to", to)
    if out.suffix in (".ckpt", ".safetensors", ".bin", ".pth", ".gguf", ".onnx", ".PT"):
        raise UserError(f"--to {out} is the name of a file: give a new folder, or a file .pt")

    from gpt_lightning.runs.sources import read_source, tokenizer_of

    found = read_source(source, gpt_for="export")
    tokenizer = tokenizer_of(found)
    if out.suffix == ".pt":
        return write_nanogpt(found, tokenizer, out)
    names = write_model(found, tokenizer, out)
    print(f"wrote       {out}: {', '.join(names)}")
    print(f"use         transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")


def write_model(found: Any, tokenizer: Tokenizer, out: Path) -> list[str]:
    """Write a model and its tokenizer as a folder of Hugging Face, and return the files' names.

    Args:
        found: Weights, as Pretrained.
        tokenizer: Tokenizer of the model.
        out: Folder to make.

    Raises:
        UserError: The format has no such model or tokenizer, or the folder cannot be written.
    """
    from gpt_lightning.model import huggingface
    from gpt_lightning.model.weights import user_errors

    config = found.config()
    weights = {name: tensor.float() for name, tensor in found.state_dict(config).items()}
    theirs = huggingface.to_huggingface(weights, config, tokenizer.vocab_size)
    n_params = sum(t.numel() for k, t in theirs.items() if config.bias or not k.endswith(".bias"))
    ours = {"tokenizer": tokenizer.spec(), "bias": config.bias, "figures": found.figures}
    settings = huggingface.settings_of(config, tokenizer.vocab_size, tokenizer.eot_token, ours)
    files = tokenizer_files(tokenizer, config.block_size)
    files["config.json"] = json.dumps(settings, indent=2) + "\n"
    eot = {"bos_token_id": tokenizer.eot_token, "eos_token_id": tokenizer.eot_token}
    files["generation_config.json"] = json.dumps(eot, indent=2) + "\n"
    card = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    figures = ", ".join(f"{name} {figure}" for name, figure in found.figures.items())
    shape = {"config": config, "n_params": n_params, "tokenizer": tokenizer.name}
    files["README.md"] = card.format(**shape, figures=figures or "not known")
    with explained("write", out), workspace(out) as folder:
        (folder / "new").mkdir()
        for name, text in files.items():
            (folder / "new" / name).write_text(text, encoding="utf-8")
        with user_errors(f"cannot write {out}"):
            from safetensors.torch import save_file

            path = folder / "new" / huggingface.FILES[0]
            save_file(theirs, path, metadata={"format": "pt"})  # its mode is 0600
            shutil.copymode(folder / "new" / "config.json", path)
        if not move_into_place(folder, out, overwrite=False):
            raise UserError(f"--to {out} exists: give the name of a new folder")
    return sorted([*files, huggingface.FILES[0]])


def write_nanogpt(found: Any, tokenizer: Tokenizer, out: Path) -> None:
    """Write nanoGPT's ckpt.pt, and for a vocabulary of characters meta.pkl beside it.

    Args:
        found: Weights, as Pretrained.
        tokenizer: Tokenizer of the model.
        out: File to make.

    Raises:
        UserError: nanoGPT has no such model or tokenizer, or meta.pkl has other characters.
    """
    import torch  # not for --help

    from gpt_lightning.model.weights import to_nanogpt, user_errors
    from gpt_lightning.runs.checkpoint import read_content

    meta, files = out.with_name(META), extras("nanogpt", tokenizer)
    if files and meta.exists() and read_meta(meta) != tokenizer.spec()["characters"]:
        raise UserError(f"{meta} has other characters: give --to in another folder")
    path, folder = Path(found.source), out.absolute().parent
    training = read_content(path, check=False) if path.suffix == ".ckpt" else {}
    content = to_nanogpt(found, tokenizer.vocab_size, folder.name, training)
    with explained("write", out), user_errors(f"cannot write {out}"), replacement(out) as temporary:
        torch.save(content, temporary)
    for characters in [] if meta.exists() else files.values():
        write_atomic(meta, characters)
    state = "AdamW's state" if content["optimizer"]["state"] else "a new AdamW"
    print(f"wrote       {', '.join([str(out), *files])}: step {content['iter_num']}, {state}")
    print(f"use         as ckpt.pt, in nanoGPT's folder: python sample.py --out_dir={folder}")
    for name in files:
        print(f"note        sample.py reads data/{folder.name}/{name} there: copy {meta} to it")
    if found.config().activation != "gelu":
        print("note        nanoGPT's GELU is exact, the model's the tanh approximation")


def tokenizer_files(tokenizer: Tokenizer, block_size: int) -> dict[str, str]:
    """Return the files of a tokenizer in Hugging Face's format, by name.

    Args:
        tokenizer: Tokenizer of a model.
        block_size: Context of the model.

    Raises:
        UserError: The tokenizer is another encoding of tiktoken, or the package tokenizers is
            missing.
    """
    files = {}
    settings: Fields = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"model_max_length": block_size, "clean_up_tokenization_spaces": False}
    if tokenizer.name == "gpt2":
        files["vocab.json"] = gpt2_file("encoder.json").read_text("utf-8")
        files["merges.txt"] = gpt2_file("vocab.bpe").read_text("utf-8")
        settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        settings |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        files["tokenizer.json"] = tokenizer.content
        if tokenizer.eot_token is not None:
            settings["eos_token"] = tokenizer.fast.id_to_token(tokenizer.eot_token)
    else:
        files["tokenizer.json"] = _made(tokenizer).to_str(pretty=True)
    return files | {"tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def _made(tokenizer: Tokenizer) -> Any:
    """Return a Tokenizer of the package tokenizers with the tokens of char, byte or gpt2."""
    if tokenizer.name not in ("char", "byte", "gpt2"):
        raise UserError(
            f"export writes char, byte, gpt2 and tokenizer.json, not the tokenizer {tokenizer.name}"
        )
    package = optional("tokenizers", "hf")
    models, split, decoders = package.models, package.pre_tokenizers, package.decoders
    if isinstance(tokenizer, CharTokenizer):
        ids = {character: n for n, character in enumerate(tokenizer.characters)}
        fast = package.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
        fast.pre_tokenizer = split.Split(package.Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
        return fast
    by_regex = tokenizer.name == "gpt2"  # GPT-2's, which ByteLevel has
    if by_regex:
        model = models.BPE.from_file(str(gpt2_file("encoder.json")), str(gpt2_file("vocab.bpe")))
    else:
        model = models.BPE(BYTES, [])
    fast = package.Tokenizer(model)
    fast.pre_tokenizer = split.ByteLevel(add_prefix_space=False, use_regex=by_regex)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([END_OF_TEXT] if by_regex else [])
    return fast


def import_model(
    source: str,
    out: str | None = None,
    block_size: PositiveInt | None = None,
    vocab_size: PositiveInt | None = None,
    dropout: float | None = None,
) -> None:
    """Write a trained GPT-2 as a checkpoint: to sample from, to evaluate, or for model.init_from.

    Args:
        source: gpt2, gpt2-medium, gpt2-large or gpt2-xl; a folder of Hugging Face, or a file
            .safetensors or .bin; ckpt.pt of nanoGPT; a checkpoint or run folder of `fit`.
        out: File to write, FILE.ckpt; it must be named.
        block_size: Context; null: the source's. A smaller one takes its first positions.
        vocab_size: Rows of the vocabulary; null: the source's. More rows, such as 50304, are the
            mean of the others.
        dropout: Dropout for a training; null: the source's.
    """
    path = new_path("--out", out, ".ckpt")

    from gpt_lightning.runs.checkpoint import RunRecord
    from gpt_lightning.runs.checkpoint_io import write_durable_checkpoint
    from gpt_lightning.runs.settings import Settings
    from gpt_lightning.runs.sources import read_source

    found = read_source(source, gpt_for="import")
    changes = {"block_size": block_size, "vocab_size": vocab_size, "dropout": dropout}
    given = {key: plain_number(value) for key, value in changes.items() if value is not None}
    shape = found.shape()
    T, V = shape["block_size"], shape["vocab_size"]
    if (block_size or T) > T or (vocab_size or V) < V:
        raise UserError(
            f"{source} takes --block_size up to {T}, and --vocab_size from {V}: not "
            f"{block_size or T} and {vocab_size or V}"
        )
    model = found.model(**given)
    record = RunRecord(
        config=model.config, settings=Settings(), tokenizer=found.tokenizer, figures=found.figures
    )
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoint = {"state_dict": weights, "global_step": found.figures.get("step", 0)}
    checkpoint["pytorch-lightning_version"] = version("lightning")
    record.write(checkpoint)
    write_durable_checkpoint(checkpoint, path)
    print(f"wrote       {path}: {model.num_params():,} parameters from {found.source}")
