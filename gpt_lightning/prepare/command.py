"""`gpt-lightning prepare`: choose the route of a source, and print a summary."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt_lightning.data.manifest import Manifest
from gpt_lightning.data.texts import CORPORA, corpus_file
from gpt_lightning.data.tokenizers import tokenizer_name
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.documents import prepare_documents
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.sources import (
    copied,
    ending_of,
    find_inputs,
    is_one_text,
    is_stream,
    is_url,
    source_name,
    text_input,
)
from gpt_lightning.prepare.target import Made, Target
from gpt_lightning.prepare.text import prepare_one_text


def prepare(
    source: list[str] | str,
    tokenizer: str = "gpt2",
    out: str | None = None,
    data_dir: str = "data",
    overwrite: bool = False,
    **settings: Any,
) -> None:
    """Turn text into a dataset: shards of tokens and a manifest.

    Args:
        source: One UTF-8 text file or a corpus (tinyshakespeare, shakespeare-plays,
            shakespeare-plays-all); or documents: JSONL files (.jsonl, .ndjson, .json, also .gz and
            .zst), Parquet or Arrow files, tables (.csv, .tsv), folders or globs of these and of
            .txt files, URLs of such files (https://, s3://, hf://), datasets of the Hugging Face
            hub (hf:NAME[:CONFIG][:SPLIT]);
            or - for standard input, JSONL or one text.
        tokenizer: char, byte, an encoding of tiktoken such as gpt2, a file tokenizer.json of
            Hugging Face, a dataset such as data/mine-char, whose tokens are taken, or bpe:8192: as
            many tokens, trained on the training split. Documents need an end-of-text token, which
            is written before each document.
        out: Folder of the dataset; null: <data_dir>/<corpus or file's stem>-<tokenizer>.
        data_dir: Folder of corpora and datasets.
        overwrite: Replace a dataset that was made from another text or with other settings.
        settings: Further settings of the dataset, the fields of prepare.settings.Settings.
    """
    chosen = Settings(tokenizer, **settings)
    sources = [source] if isinstance(source, str) else source
    if not sources or not all(found.strip() for found in sources):
        raise UserError("source is empty; give a value, or leave it out")
    if out and is_url(out):
        raise UserError(f"--out {out} is an address: give a local name, and upload that")
    folder = Path(out) if out else dataset_folder(sources, tokenizer, data_dir, chosen.val_fraction)
    target = Target(folder, overwrite, shlex.join(sources))
    manifest, made = _prepare(sources, Path(data_dir), target, chosen)
    if not made:
        print(f"{folder} is already prepared from this text with these settings")
    _print_summary(str(folder), manifest)


def prepare_source(
    source: str, tokenizer: str = "gpt2", data_dir: str | Path = "data", val_fraction: float = 0.1
) -> Manifest:
    """Prepare a source in dataset_folder(source, tokenizer, data_dir), without printing a summary.

    Raises:
        UserError: There is no file and no corpus of that name, or the text makes no dataset.
    """
    settings = Settings(tokenizer, val_fraction)
    folder = dataset_folder(source, tokenizer, data_dir, val_fraction)
    target = Target(folder, source=shlex.quote(source))
    manifest, _ = _prepare([source], Path(data_dir), target, settings)
    return manifest


def dataset_folder(
    source: str | Sequence[str],
    tokenizer: str,
    data_dir: str | Path = "data",
    val_fraction: float = 0.1,
) -> Path:
    """Return the folder of a prepared corpus, text or set of documents if none is named.

    A val_fraction other than a tenth is part of the name, `...-val0` for none.
    """
    split = "" if val_fraction == 0.1 else f"-val{val_fraction:g}"
    name = source_name([source] if isinstance(source, str) else source)
    stem = name[: len(name) - len(ending_of(name))]
    tokens = Path(tokenizer_name(tokenizer)).name.replace(":", "")  # bpe:8192
    return Path(data_dir) / f"{stem}-{tokens}{split}"


def _prepare(sources: Sequence[str], data_dir: Path, target: Target, settings: Settings) -> Made:
    """Return the dataset of a target, and whether it was made now."""
    source = sources[0]
    alone = len(sources) == 1
    if alone and source in CORPORA:
        path = corpus_file(source, data_dir)
        return prepare_one_text(text_input(path, source), target, settings)
    if alone and (is_stream(source) or (is_url(source) and is_one_text(source))):
        with copied(source, target.out) as entry:  # it can be read only once
            if entry.kind == "jsonl":
                return prepare_documents([entry], entry.name, target, settings)
            return prepare_one_text(entry, target, settings)
    if alone and is_one_text(source):
        if not Path(source).is_file():  # a device may never end
            known = ", ".join(CORPORA)
            raise UserError(f"{source}: no such file; give the path of a text, or one of {known}")
        return prepare_one_text(text_input(Path(source), Path(source).name), target, settings)
    return prepare_documents(find_inputs(sources), source_name(sources), target, settings)


def _print_summary(folder: str, manifest: Manifest) -> None:
    print(f"folder     {folder}")
    print(f"tokenizer  {manifest.tokenizer['name']}, {manifest.vocab_size:,} tokens")
    for split, shards in manifest.splits.items():
        print(f"{split:<10} {manifest.tokens(split):,} tokens, shards: {len(shards)}")
    n_bytes = manifest.source.bytes
    per_token = n_bytes / sum(map(manifest.tokens, manifest.splits))
    print(f"text       {n_bytes:,} bytes, {per_token:.2f} bytes per token")
    if n_skipped := manifest.settings.get("skipped"):
        n_documents = manifest.settings["documents"] + n_skipped
        print(f"left out   {n_skipped:,} of {n_documents:,} documents")
