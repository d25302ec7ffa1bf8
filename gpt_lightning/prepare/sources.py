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
# facts that change with a file behind a URL; no store has all of them
TAGS = "ETag etag sha256 blob_id md5 md5Hash checksum mtime created Content-MD5 Last-Modified"


@dataclass(frozen=True)
class Input:
    """File of documents.

    Attributes:
        path: Local path or URL.
        name: Name in SOURCE, independent of the folder's place.
        kind: text (one document), jsonl, packed (compressed JSONL), parquet, csv or tsv.
        size: Bytes; 0 if the store does not return them.
        stamp: Time of the last change, or a digest; it changes with the content.
        label: Name for messages.
    """

    path: str
    name: str
    kind: str
    size: int
    stamp: str
    label: str


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


def is_remote(source: str) -> bool:
    """Return whether a source is behind a URL or in the hub."""
    return is_url(source) or source.startswith(HUB)


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
    if is_remote(source):
        return is_url(source) and kind_of(source) == "text" and not is_glob(source)
    if Path(source).exists():
        return not Path(source).is_dir() and kind_of(source) in ("", "text")
    return not is_glob(source)


def fingerprint(inputs: Sequence[Input]) -> str:
    """Return a digest of the inputs' names, sizes and stamps."""
    return json_digest([[entry.name, entry.size, entry.stamp] for entry in inputs])


# ---- files ---------------------------------------------------------------------------------------


def find_inputs(sources: Sequence[str]) -> list[Input]:
    """Return the files of documents that SOURCE names, sorted by name.

    Args:
        sources: Files, folders, globs, URLs of these, or hf:NAME.

    Raises:
        UserError: There is no file, or none that holds documents.
    """
    skipped: list[str] = []
    inputs = _local([source for source in sources if not is_remote(source)], skipped)
    for source in filter(is_remote, sources):
        inputs += _remote(source if is_url(source) else _hub_address(source), skipped)
    if skipped:
        print(f"skipped {len(skipped)}: {', '.join(sorted(skipped)[:3])}", flush=True)
    if not inputs:
        expected = "expected .txt, .csv, .tsv, .parquet, or .jsonl, .ndjson, .json (.gz, .zst)"
        lines = "with a JSON object on each line (jq -c '.[]' FILE converts an array)"
        if sources[0].startswith(HUB):
            name = sources[0].split(":")[1]
            expected = f"https://huggingface.co/datasets/{name}/tree/refs%2Fconvert%2Fparquet lists"
            lines = "the configurations and splits"
        raise UserError(f"{sources[0]} holds no documents: {expected} {lines}")
    return sorted(inputs, key=lambda entry: entry.name)


def _local(sources: Sequence[str], skipped: list[str]) -> list[Input]:
    """Return the inputs of files, folders and globs, each file once, by their common folder."""
    paths: list[Path] = []
    for source in sources:
        for found in _matches(source):
            paths += _walk(found) if found.is_dir() else [found]
    once: dict[str, Path] = {}
    for path in sorted(paths):
        # a .json may be a description
        is_lines = path.suffix.lower() != ".json" or bool(OBJECT.match(head_of(path)))
        if kind_of(path.name) and path.is_file() and is_lines:
            once.setdefault(os.path.realpath(path), Path(os.path.abspath(path)))
        else:
            skipped.append(path.name)
    common = os.path.commonpath([path.parent for path in once.values()]) if once else ""
    inputs = []
    for real, path in once.items():
        name = path.relative_to(common).as_posix()
        stat = path.stat()
        stamp = str(stat.st_mtime_ns)
        inputs.append(Input(real, name, kind_of(name), stat.st_size, stamp, str(path)))
    return inputs


def _matches(source: str) -> list[Path]:
    """Return the file or folder of a name, or those that match a glob; ** are any folders."""
    if os.path.exists(source):
        return [Path(source)]
    # or it is a name with a bracket
    found = glob.glob(source, recursive=True) or glob.glob(source.replace("[", "[[]"))
    if not found:
        fix = "quote a pattern, and prepare a corpus or standard input alone"
        raise UserError(f"{source}: no such file, and no file matches; {fix}")
    return [Path(path) for path in sorted(found)]


def _walk(root: Path) -> list[Path]:
    """Return the files in a folder, below it and below links to folders, each folder once."""
    files: list[Path] = []
    seen: set[str] = set()
    with explained("read", root, "check its permissions"):
        for folder, folders, names in os.walk(root, onerror=_raise, followlinks=True):
            real = os.path.realpath(folder)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            files += [Path(folder, name) for name in names if not name.startswith(".")]
    return files


def _raise(error: OSError) -> None:
    raise error


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
            facts = system.info(url)
            tag = next((f"{key} {facts[key]}" for key in TAGS.split() if facts.get(key)), "")
            inputs.append(Input(url, url, kind_of(url), facts.get("size") or 0, tag, url))
        return inputs

    return attempts(source, listed, "read", first=True)


def _hub_address(source: str) -> str:
    """Return the address of the Parquet files that the hub makes of every public dataset."""
    name, *rest = source.removeprefix(HUB).split(":")
    if name.count("/") != 1 or len(rest) > 2:
        raise UserError(f"{source}: expected hf:OWNER/NAME, then :CONFIG or :CONFIG:SPLIT")
    config, split = [*rest, *("default", "train")[len(rest) :]]
    return f"hf://datasets/{name}@refs/convert/parquet/{config}/{split}/*.parquet"


@contextlib.contextmanager
def local_copy(entry: Input, folder: Path) -> Iterator[str]:
    """Yield the path of an input; a file behind a URL is copied to a folder for this time.

    Raises:
        UserError: The file cannot be fetched, or it changed while it was read.
    """
    if is_url(entry.path):
        copy = folder / "input"
        fetch_file(entry.path, copy, "", patience_s=PATIENCE_S)
        yield str(copy)
        copy.unlink()
        return
    yield entry.path
    with explained("read", entry.label):
        stat = os.stat(entry.path)
    if entry.stamp.isdigit() and entry.stamp != str(stat.st_mtime_ns):
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
