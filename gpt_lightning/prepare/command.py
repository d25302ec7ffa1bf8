"""`gpt-lightning prepare`: choose the route of a source, and print a summary."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import NonNegativeInt, PositiveInt

from gpt_lightning.data.manifest import Manifest
from gpt_lightning.data.texts import CORPORA, corpus_file
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, workspace
from gpt_lightning.parsing import most_similar
from gpt_lightning.prepare.executors import Execution
from gpt_lightning.prepare.inputs import HUB, Input, find_inputs, has_documents, source_name
from gpt_lightning.prepare.pipeline import prepare_documents
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.spool import is_one_text, spool
from gpt_lightning.prepare.text import prepare_one_text


def prepare(
    source: str,
    tokenizer: str = "gpt2",
    out: str | None = None,
    data_dir: str = "data",
    overwrite: bool = False,
    workers: PositiveInt | None = None,
    executor: Literal["process", "ray"] = "process",
    shard_index: NonNegativeInt | None = None,
    shard_count: PositiveInt | None = None,
    merge: bool = False,
    **settings: Any,
) -> None:
    """Turn text into a dataset: shards of tokens and a manifest.

    Args:
        source: One UTF-8 text file or a corpus (tinyshakespeare, shakespeare-plays,
            shakespeare-plays-all); or documents: a JSONL file (.jsonl, .jsonl.gz, .jsonl.zst), a
            Parquet file, a folder or a glob of these and of .txt files, a URL of such a file
            (https://, s3://, hf://), a dataset of the Hugging Face hub (hf:NAME[:CONFIG][:SPLIT]);
            or - for standard input, JSONL or one text.
        tokenizer: char, byte, or an encoding of tiktoken such as gpt2. Documents need an encoding
            with an end-of-text token, which is written before each document.
        out: Folder of the dataset; null: <data_dir>/<corpus or file's stem>-<tokenizer>.
        data_dir: Folder of corpora and datasets.
        overwrite: Replace a dataset that was made from another text or with other settings.
        workers: Number of processes; null: one per core.
        executor: process, or ray for an existing Ray cluster (RAY_ADDRESS).
        shard_index: Number of this job in an array of jobs, from 0. The job makes its share of the
            parts.
        shard_count: Number of jobs in the array.
        merge: Assemble the parts of all jobs.
        settings: Further settings of the dataset, the fields of prepare.settings.Settings.
    """
    chosen = Settings(tokenizer, **settings)
    execution = Execution(workers, executor, shard_index, shard_count, merge)
    folder = Path(out) if out else dataset_folder(source, tokenizer, data_dir, chosen.val_fraction)
    begun_s = time.perf_counter()
    manifest, made = _prepare(source, Path(data_dir), folder, chosen, execution, overwrite)
    if manifest is None:
        return
    if not made:
        print(f"{folder} is already prepared from this text with these settings")
    _print_summary(folder, manifest, time.perf_counter() - begun_s if made else None)


def prepare_source(
    source: str, tokenizer: str = "gpt2", data_dir: str | Path = "data", val_fraction: float = 0.1
) -> Manifest:
    """Prepare a source in dataset_folder(source, tokenizer, data_dir), without printing a summary.

    Raises:
        UserError: There is no file and no corpus of that name, or the text makes no dataset.
    """
    settings = Settings(tokenizer, val_fraction)
    folder = dataset_folder(source, tokenizer, data_dir, val_fraction)
    manifest, _ = _prepare(source, Path(data_dir), folder, settings, Execution(), overwrite=False)
    assert manifest is not None  # None is for one job of an array
    return manifest


def dataset_folder(
    source: str, tokenizer: str, data_dir: str | Path = "data", val_fraction: float = 0.1
) -> Path:
    """Return the folder of a prepared corpus, text or set of documents if none is named.

    A val_fraction other than a tenth is part of the name, `...-val0` for none.
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
    """Return the dataset in `out`, and whether it was made now; None for one job of an array."""
    once = source == "-" or is_one_text(source)  # it can be read only once
    if source not in CORPORA and not once and has_documents(source):
        inputs, name = find_inputs(source), source_name(source)
        return prepare_documents(inputs, name, out, settings, execution, overwrite)
    if execution.shard_count is not None or execution.merge or execution.executor != "process":
        # The splits of one text are borders in the whole text.
        raise UserError(
            f"{'standard input' if source == '-' else source} is read as a whole by one process: "
            "leave out shard_index, shard_count, merge and executor, or give documents (JSONL, "
            "Parquet, a folder)"
        )
    if once:
        with _spooled(source, out) as entry:
            if entry.kind == "text":
                return prepare_one_text(Path(entry.path), entry.name, out, settings, overwrite)
            return prepare_documents([entry], entry.name, out, settings, execution, overwrite)
    if source in CORPORA:
        path = corpus_file(source, data_dir)
        return prepare_one_text(path, source, out, settings, overwrite)
    path = Path(source)
    if not path.exists():
        raise UserError(
            f"{source}: no such file, and no corpus of that name; "
            f"give a text file's path or one of {', '.join(most_similar(source, CORPORA))}"
        )
    return prepare_one_text(path, path.name, out, settings, overwrite)


@contextmanager
def _spooled(source: str, out: Path) -> Iterator[Input]:
    """Copy a source that can be read only once to a file beside `out`."""
    if source == "-" and sys.stdin.isatty():
        print("reading the text from the terminal; Ctrl-D ends it", flush=True)
    place = out.resolve().with_name(f"{out.resolve().name}.spool")
    with explained("write", out), workspace(place) as folder:
        entry = spool(source, folder)
        try:
            yield entry
        except UserError as error:  # name the source instead of the copy
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
