"""`gpt-lightning prepare`: texts become a folder of shards and a manifest, or nothing at all."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from gpt_lightning.data.shards import Manifest
from gpt_lightning.data.texts import CORPORA, corpus_file
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, workspace
from gpt_lightning.parsing import most_similar
from gpt_lightning.prepare.executors import Execution
from gpt_lightning.prepare.inputs import (
    HUB,
    Input,
    find_inputs,
    has_documents,
    source_name,
)
from gpt_lightning.prepare.pipeline import prepare_documents
from gpt_lightning.prepare.settings import Errors, Format, Settings, SplitBy
from gpt_lightning.prepare.spool import is_one_text, spool
from gpt_lightning.prepare.text import prepare_one_text


def prepare(
    source: str,
    tokenizer: str = "gpt2",
    out: str | None = None,
    data_dir: str = "data",
    val_fraction: float = 0.1,
    test_fraction: float = 0.0,
    shard_tokens: int = 100_000_000,
    overwrite: bool = False,
    text_field: str = "text",
    split_by: SplitBy | None = None,
    errors: Errors = "strict",
    format: Format = "npy",  # noqa: A002 - the word of the command line
    workers: int | None = None,
    executor: Literal["process", "ray"] = "process",
    shard_index: int | None = None,
    shard_count: int | None = None,
    merge: bool = False,
) -> None:
    """Turns text into a dataset: shards of tokens and a manifest.

    Args:
        source: One UTF-8 text file or a corpus (tinyshakespeare, shakespeare-plays,
            shakespeare-plays-all); or documents: a JSONL file (.jsonl, .jsonl.gz, .jsonl.zst), a
            Parquet file, a folder or a glob of these and of .txt files, a URL of one (https://,
            s3://, hf://), a dataset of the Hugging Face hub (hf:NAME[:CONFIG][:SPLIT]); or - for
            standard input, JSONL or one text.
        tokenizer: char, byte, or an encoding of tiktoken such as gpt2. Documents need one with an
            end-of-text token, which stands before each of them.
        out: Folder of the dataset; null: <data_dir>/<corpus or file's stem>-<tokenizer>.
        data_dir: Where corpora and datasets lie.
        val_fraction: Share that is held out for validation: of one text's characters, at the end;
            of documents as split_by says.
        test_fraction: Share that is held out for testing, after the one for validation.
        shard_tokens: Most tokens that a file holds.
        overwrite: Replace a dataset that was made from another text or with other settings.
        text_field: Field of a JSON object, or column of a Parquet file, that holds the text.
        split_by: Which documents are held out: hash, by a hash of their text, or fraction, the last
            ones. null: hash.
        errors: A damaged document: strict refuses it, skip leaves it out and counts it, replace
            puts U+FFFD where bytes are not UTF-8.
        format: npy; nanogpt for nanoGPT's train.bin and val.bin; llmc for llm.c's .bin.
        workers: Processes; null: one a core.
        executor: process, or ray for an existing Ray cluster (RAY_ADDRESS).
        shard_index: This job's number in an array of jobs, from 0; it makes its share of the parts.
        shard_count: Number of jobs in the array.
        merge: Put the parts of all jobs together.
    """
    settings = Settings(
        tokenizer,
        val_fraction,
        test_fraction,
        shard_tokens,
        text_field,
        split_by,
        errors,
        format,
    )
    execution = Execution(workers, executor, shard_index, shard_count, merge)
    folder = Path(out) if out else dataset_folder(source, tokenizer, data_dir, val_fraction)
    begun_s = time.perf_counter()
    manifest, made = _prepare(source, Path(data_dir), folder, settings, execution, overwrite)
    if manifest is None:
        return
    if not made:
        print(f"{folder} is already prepared from this text with these settings")
    _print_summary(folder, manifest, time.perf_counter() - begun_s if made else None)


def prepare_source(
    source: str,
    tokenizer: str = "gpt2",
    data_dir: str | Path = "data",
    val_fraction: float = 0.1,
    test_fraction: float = 0.0,
    shard_tokens: int = 100_000_000,
) -> Manifest:
    """As `prepare`, into dataset_folder(source, tokenizer, data_dir); prints no table.

    Raises:
        UserError: There is no file and no corpus of that name, or the text makes no dataset.
    """
    settings = Settings(tokenizer, val_fraction, test_fraction, shard_tokens)
    folder = dataset_folder(source, tokenizer, data_dir, val_fraction)
    manifest, _ = _prepare(source, Path(data_dir), folder, settings, Execution(), overwrite=False)
    assert manifest is not None  # that is for one job of many
    return manifest


def dataset_folder(
    source: str, tokenizer: str, data_dir: str | Path = "data", val_fraction: float = 0.1
) -> Path:
    """Where a corpus, a text or documents lie when they are prepared and no folder is named.

    Another share than a tenth for validation is another folder, `...-val0` for none.
    """
    split = "" if val_fraction == 0.1 else f"-val{val_fraction:g}"
    name = source_name(source)
    whole = source in CORPORA or source.startswith(HUB) or Path(source).is_dir()
    name = name if whole else Path(name).stem
    return Path(data_dir) / f"{name}-{tokenizer}{split}"


def _prepare(
    source: str,
    data_dir: Path,
    out: Path,
    settings: Settings,
    execution: Execution,
    overwrite: bool,
) -> tuple[Manifest | None, bool]:
    """The dataset in `out`, and whether it was made now; None for one job of many."""
    if source in CORPORA:
        return _one_text(corpus_file(source, data_dir), source, out, settings, execution, overwrite)
    if source == "-" or is_one_text(source):
        with _spooled(source, out) as entry:
            if entry.kind == "text":
                path = Path(entry.path)
                return _one_text(path, entry.name, out, settings, execution, overwrite)
            _refuse_array(execution, "standard input")
            return prepare_documents([entry], entry.name, out, settings, execution, overwrite)
    if has_documents(source):
        inputs, name = find_inputs(source), source_name(source)
        return prepare_documents(inputs, name, out, settings, execution, overwrite)
    path = Path(source)
    if not path.exists():
        raise UserError(
            f"{source}: no such file, and no corpus of that name; "
            f"give a text file's path or one of {', '.join(most_similar(source, CORPORA))}"
        )
    return _one_text(path, path.name, out, settings, execution, overwrite)


def _one_text(
    path: Path, name: str, out: Path, settings: Settings, execution: Execution, overwrite: bool
) -> tuple[Manifest, bool]:
    _refuse_array(execution, str(path))
    return prepare_one_text(path, name, out, settings, overwrite)


def _refuse_array(execution: Execution, source: str) -> None:
    """One text is one job: its splits are borders in the whole of it."""
    if execution.shard_count is not None or execution.merge or execution.executor != "process":
        raise UserError(
            f"{source} is read as a whole by one process: leave out shard_index, shard_count, "
            "merge and executor, or give documents (JSONL, Parquet, a folder)"
        )


@contextmanager
def _spooled(source: str, out: Path) -> Iterator[Input]:
    """What can be read only once, as a file beside `out`, where its tokens must find room too."""
    if source == "-" and sys.stdin.isatty():
        print("reading the text from the terminal; Ctrl-D ends it", flush=True)
    place = out.resolve().with_name(f"{out.resolve().name}.spool")
    with explained("write", out), workspace(place) as folder:
        entry = spool(source, folder)
        try:
            yield entry
        except UserError as error:  # the file's name would tell nobody anything
            label = "standard input" if source == "-" else source
            raise UserError(str(error).replace(entry.path, label)) from error


def _print_summary(folder: Path, manifest: Manifest, seconds: float | None) -> None:
    tokens = sum(manifest.tokens(split) for split in manifest.splits)
    n_bytes = manifest.source.bytes
    rows = {
        "folder": str(folder),
        "tokenizer": f"{manifest.tokenizer['name']}, {manifest.vocab_size:,} tokens",
    }
    for split, shards in manifest.splits.items():
        rows[split] = f"{manifest.tokens(split):,} tokens, shards: {len(shards)}"
    rows["text"] = f"{n_bytes:,} bytes, {n_bytes / tokens:.2f} bytes per token"
    if seconds is not None:
        rows["time"] = f"{seconds:.1f} s, {n_bytes / 1e6 / seconds:.1f} MB/s"
    for name, value in rows.items():
        print(f"{name:<10} {value}")
