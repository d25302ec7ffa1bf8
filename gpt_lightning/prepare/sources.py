"""Sources: the files behind SOURCE, on this machine or behind URLs."""

import contextlib
import glob
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256, json_digest, workspace
from gpt_lightning.remote.attempts import PATIENCE_S, attempts
from gpt_lightning.remote.files import fetch_file

JSONL = (".jsonl", ".ndjson", ".json")
# endings of names -> kinds; packed: compressed JSONL
KINDS = {f"{ending}{packed}": "packed" for ending in JSONL for packed in (".gz", ".zst")}
KINDS |= dict.fromkeys(JSONL, "jsonl")
KINDS |= {".txt": "text", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"}
HEAD_BYTES = 4096  # bytes that are examined
BOM = b"\xef\xbb\xbf"
OBJECT = re.compile(rb'\s*{[ \t]*"')  # the begin of JSONL
ARRAY = re.compile(rb"\s*\[\s*{")
HUB = "hf:"


@dataclass(frozen=True)
class Input:
    """File of documents, or a part of one.

    Attributes:
        path: Local path or URL.
        name: Name in SOURCE, independent of the folder's place.
        kind: text (one document), jsonl, packed (compressed JSONL), parquet, csv or tsv.
        size: Approximate bytes of text; 0 if the store does not return them.
        stamp: Time of the last change, or a digest; it changes with the content.
        label: Name for messages.
        start: First byte (JSONL) or row group (Parquet) of the part.
        stop: First byte or row group after the part; None: the end of the file.
    """

    path: str
    name: str
    kind: str
    size: int
    stamp: str
    label: str
    start: int = 0
    stop: int | None = None


# ---- names -------------------------------------------------------------------------------------


def kind_of(source: str) -> str:
    """Return the kind of a file by its name; "" for files without documents."""
    return KINDS.get(ending_of(source), "")


def ending_of(source: str) -> str:
    """Return the ending of a file's name that tells its kind; "" if it has none."""
    return next(filter(without_query(source).lower().endswith, KINDS), "")


def is_url(source: str) -> bool:
    """Return whether fsspec opens the source, not the operating system."""
    return "://" in source


def is_stream(source: str) -> bool:
    """Return whether a source can be read only once: standard input, or another pipe."""
    return source == "-" or Path(source).is_fifo()


def is_glob(source: str) -> bool:
    """Return whether a source is a pattern; a ? begins the query of a URL."""
    return bool(set("*[" if is_url(source) else "*?[") & set(source))


def without_query(source: str) -> str:
    """Return a source without the query of an address of http."""
    if source.startswith(("http://", "https://")):
        return urlsplit(source).path
    return source


def source_name(sources: Sequence[str]) -> str:
    """Return a dataset's name by its SOURCE: file, folder, or dataset of the hub.

    Several sources are called as the folder of the first.
    """
    source = sources[0]
    if is_stream(source):
        return "stdin"
    if source.startswith(HUB):
        source = source.split(":")[1]
    path = PurePosixPath(without_query(source))
    if len(sources) > 1:
        path = path.parent
    while is_glob(path.name):  # a glob is called as its folder
        path = path.parent
    return path.name or Path(source).resolve().name


def is_one_text(source: str) -> bool:
    """Return whether a SOURCE that is no corpus is one text, not documents."""
    kind = kind_of(source)
    if os.path.isfile(source):
        return kind in ("", "text")
    if is_glob(source) or source.startswith(HUB) or os.path.isdir(source):
        return False
    return kind == "text" if is_url(source) else kind in ("", "text")


def text_input(path: Path, name: str) -> Input:
    """Return one text on this machine."""
    return Input(str(path), name, "text", path.stat().st_size, "", str(path))


def fingerprint(inputs: Sequence[Input]) -> str:
    """Return a digest of the names, sizes and stamps of files or parts."""
    facts = [[part.name, part.size, part.stamp, part.start, part.stop] for part in inputs]
    return json_digest(facts)


# ---- files ---------------------------------------------------------------------------------------


def find_inputs(sources: Sequence[str]) -> list[Input]:
    """Return the files of documents that SOURCE names, sorted by name.

    Args:
        sources: Files, folders, globs, URLs of these, or hf:NAME.

    Raises:
        UserError: There is no file, or none that holds documents.
    """
    skipped: list[str] = []
    inputs: list[Input] = []
    paths: list[str] = []
    for source in sources:
        if is_url(source):
            inputs += _remote(source, skipped)
        elif source.startswith(HUB):
            inputs += _remote(_hub_address(source), skipped)
        else:
            with explained("read", source, "check its permissions"):
                paths += _files(source)
    inputs += _local(paths, skipped)
    if skipped:
        print(f"skipped {len(skipped)}: {', '.join(sorted(skipped)[:3])}", flush=True)
    if not inputs:
        expected = "expected .txt, .csv, .tsv, .parquet, or .jsonl, .ndjson, .json (.gz, .zst)"
        lines = (
            "with a JSON object on each line (jq -c '.[]' FILE converts an array), or "
            "hf:NAME:CONFIG:SPLIT with a folder CONFIG/SPLIT in the hub's branch "
            "refs/convert/parquet"
        )
        raise UserError(f"{sources[0]} holds no documents: {expected} {lines}")
    return sorted(inputs, key=lambda entry: entry.name)


def _files(source: str) -> Iterator[str]:
    """Yield the files of a name, a folder or a glob; ** are any folders.

    Links to folders are followed, each folder once; hidden files and folders are left out.
    """
    found = [source]
    if not os.path.exists(source):
        bracketed = source.replace("[", "[[]")  # or a name has a bracket
        found = sorted(glob.glob(source, recursive=True) or glob.glob(bracketed, recursive=True))
    if not found:
        fix = "quote a pattern, and prepare a corpus or standard input alone"
        raise UserError(f"{source}: no such file, and no file matches; {fix}")
    seen: set[str] = set()
    for root in found:
        if not os.path.isdir(root):
            yield root
            continue
        for folder, folders, names in os.walk(root, onerror=_raise, followlinks=True):
            real = os.path.realpath(folder)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if real in seen:
                folders.clear()
            else:
                seen.add(real)
                yield from (f"{folder}/{name}" for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _local(paths: Sequence[str], skipped: list[str]) -> Iterator[Input]:
    """Yield the inputs among files, each file once, named by their place in the common folder."""
    once: dict[str, str] = {}
    for path in sorted(paths):
        # a .json may be a description
        is_lines = not path.lower().endswith(".json") or OBJECT.match(head_of(path))
        if kind_of(path) and os.path.isfile(path) and is_lines:
            once.setdefault(os.path.realpath(path), os.path.abspath(path))
        else:
            skipped.append(os.path.basename(path))
    common = os.path.commonpath(map(os.path.dirname, once.values())) if once else ""
    for real, path in once.items():
        stat = os.stat(path)
        name = os.path.relpath(path, common)
        yield Input(real, name, kind_of(path), stat.st_size, str(stat.st_mtime_ns), path)


def head_of(path: Path | str) -> bytes:
    """Return the first bytes of a file, without a byte order mark; b"" if it is not a file."""
    if not os.path.isfile(path):
        return b""
    with explained("read", path, "check its permissions"), open(path, "rb") as file:
        return file.read(HEAD_BYTES).removeprefix(BOM)


# ---- behind a URL --------------------------------------------------------------------------------


def _remote(source: str, skipped: list[str]) -> list[Input]:
    """Return the inputs of a URL: a file, a folder or a glob."""

    def listed(system: Any, path: str) -> list[Input]:
        # else a folder of a web server is left out that could not be listed
        strict = {"on_error": "raise"} if source.startswith("http") else {}
        if is_glob(source):
            names = system.glob(path, **strict)
        elif kind_of(source):
            names = [path]
        else:
            names = system.find(path, **strict)
        inputs = []
        for url in map(system.unstrip_protocol, names):
            if not kind_of(url):
                skipped.append(url)
                continue
            facts = system.info(url)  # a store's own: size, and ETag, digest or time
            stamp = json_digest(facts, default=str)
            inputs.append(Input(url, url, kind_of(url), facts.get("size") or 0, stamp, url))
        return inputs

    return attempts(source, listed, "read", first=True)


def _hub_address(source: str) -> str:
    """Return the address of the Parquet files that the hub makes of every public dataset."""
    name, *rest = source.removeprefix(HUB).split(":")
    if name.count("/") != 1 or len(rest) > 2:
        raise UserError(f"{source}: expected hf:OWNER/NAME, then :CONFIG or :CONFIG:SPLIT")
    config, split = [*rest, *("default", "train")[len(rest) :]]
    return f"hf://datasets/{name}@refs/convert/parquet/{config}/{split}/*.parquet"


def local_path(entry: Input, folder: Path) -> str:
    """Return the path of an input, after copying a file behind a URL to a folder."""
    if not is_url(entry.path):
        return entry.path
    copy = folder / "input"
    fetch_file(entry.path, copy, "", patience_s=PATIENCE_S)
    return str(copy)


def check_unchanged(entry: Input) -> None:
    """Raise a UserError if a file on this machine changed since it was found."""
    is_time = entry.stamp.isdigit()
    if is_time and entry.stamp != str(os.stat(entry.path).st_mtime_ns):
        raise UserError(f"{entry.label} changed while it was read: run the same command again")


@contextlib.contextmanager
def copied(source: str, out: Path) -> Iterator[Input]:
    """Copy standard input, another pipe, or a text behind a URL; yield it as JSONL or as one text.

    Args:
        source: -, a pipe or a URL.
        out: Folder of the dataset, beside which the copy is.

    Raises:
        UserError: The URL cannot be read, or the disk is full.
    """
    label = "standard input" if source == "-" else source
    place = out.resolve().with_name(f"{out.resolve().name}.copy")
    with explained("write", out), workspace(place) as folder:
        path = folder / "text"
        if is_url(source):
            _remote(source, [])  # an address that is wrong is not tried for long
            fetch_file(source, path, "", patience_s=PATIENCE_S)
        else:
            pipe = sys.stdin.buffer if source == "-" else open(source, "rb")  # noqa: SIM115
            with pipe, path.open("wb") as file:
                shutil.copyfileobj(pipe, file, 2**20)
        is_jsonl = not is_url(source) and OBJECT.match(head_of(path))
        kind = "jsonl" if is_jsonl else "text"
        name = source_name([source])
        yield Input(str(path), name, kind, path.stat().st_size, file_sha256(path), label)
