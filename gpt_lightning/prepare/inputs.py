"""What SOURCE names: files of documents here or behind a URL, or one text."""

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal
from urllib.parse import urlsplit

from gpt_lightning.errors import UserError

Kind = Literal["text", "jsonl", "parquet"]

KINDS: dict[str, Kind] = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
HUB = "hf:"
HUB_ADDRESS = "hf://datasets/{name}@refs/convert/parquet/{config}"
DATA_EXTRA = "pip install 'gpt-lightning[data]'"
# By which of these a store tells that a file changed; no store has all.
STAMPS = ("ETag", "etag", "sha256", "blob_id", "md5", "md5Hash", "checksum", "mtime", "created")


@dataclass(frozen=True)
class Input:
    """A file of documents.

    Attributes:
        path: to open it: a local path or a URL.
        name: as it is called in SOURCE; the same wherever the folder lies.
        kind: text (one document), jsonl or parquet.
        compression: .gz, .zst or "" (jsonl only).
        size: bytes, None where the store does not say.
        stamp: changes with the content: time of the last change, or a digest.
        seekable: whether it can be read from somewhere in the middle.
    """

    path: str
    name: str
    kind: Kind
    compression: str
    size: int | None
    stamp: str
    seekable: bool = True

    @property
    def label(self) -> str:
        """What a message calls it."""
        return "standard input" if self.name == "stdin" else self.path


def kind_of(path: str) -> tuple[Kind, str] | None:
    """Kind and compression by a file's name; None: no documents."""
    name = PurePosixPath(_without_host(path)).name.lower()
    compression = next((end for end in COMPRESSIONS if name.endswith(end)), "")
    kind = KINDS.get(PurePosixPath(name.removesuffix(compression)).suffix)
    if kind is None or (compression and kind != "jsonl"):
        return None
    return kind, compression


def is_url(source: str) -> bool:
    """Whether fsspec opens it and not the operating system."""
    return "://" in source


def _without_host(source: str) -> str:
    """The part of a URL that names a file. Only http has queries; elsewhere a ? is a glob's."""
    if source.startswith(("http://", "https://")):
        return urlsplit(source).path
    return source.split("://", 1)[-1]


def source_name(source: str) -> str:
    """What a dataset made of SOURCE is called: file, folder or dataset, without its endings."""
    if source == "-":
        return "stdin"
    if source.startswith(HUB) and not is_url(source):
        return source.removeprefix(HUB).split(":")[0].split("/")[-1]
    path = PurePosixPath(_without_host(source))
    while any(character in path.name for character in "*?["):  # a glob is called as its folder
        path = path.parent
    name = path.name or Path(source).resolve().name
    compression = next((end for end in COMPRESSIONS if name.endswith(end)), "")
    return name.removesuffix(compression)


def has_documents(source: str) -> bool:
    """Whether a SOURCE that is neither a corpus nor standard input is for find_inputs."""
    if is_url(source) or source.startswith(HUB):
        return True
    if Path(source).is_dir():
        return True
    if Path(source).exists():
        found = kind_of(source)
        return found is not None and found[0] != "text"
    return any(character in source for character in "*?[")


def find_inputs(source: str) -> list[Input]:
    """The files of documents that SOURCE names, sorted by name.

    Args:
        source: a JSONL or Parquet file, a folder, a glob, a URL of these, or hf:NAME.

    Raises:
        UserError: nothing is there, or nothing that holds documents.
    """
    if source.startswith(HUB) and not is_url(source):
        inputs = _hub(source)
    elif is_url(source):
        inputs = _remote(source)
    else:
        inputs = _local(source)
    if not inputs:
        raise UserError(
            f"{source} holds no documents: expected files that end in .jsonl, .jsonl.gz, "
            ".jsonl.zst, .parquet or .txt"
        )
    return sorted(inputs, key=lambda entry: entry.name)


def fingerprint(inputs: Sequence[Input]) -> str:
    """A digest of the inputs' names, sizes and stamps."""
    entries = [[entry.name, entry.size, entry.stamp] for entry in inputs]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


# ---- on this machine -----------------------------------------------------------------------------


def _local(source: str) -> list[Input]:
    root = Path(source)
    if root.is_dir():
        paths = [path for path in root.rglob("*") if _is_open(path.relative_to(root))]
        names = {path: path.relative_to(root).as_posix() for path in paths}
    elif root.exists():
        names = {root: root.name}
    else:
        paths = [Path(found) for found in glob.glob(source, recursive=True)]
        if not paths:
            raise UserError(f"{source}: no file matches; check the pattern, and quote it")
        common = Path(os.path.commonpath([path.parent for path in paths]))
        names = {path: path.relative_to(common).as_posix() for path in paths}
    files = {path: name for path, name in names.items() if path.is_file()}
    known = {path: name for path, name in files.items() if kind_of(str(path))}
    _say_left_out(sorted(files[path] for path in files if path not in known))
    return [_local_input(path, name) for path, name in known.items()]


def _is_open(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)


def _say_left_out(names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        print(f"left out, being neither JSONL nor Parquet nor .txt: {shown}", flush=True)


def _local_input(path: Path, name: str) -> Input:
    found = kind_of(str(path))
    assert found, path
    stat = path.stat()
    return Input(str(path.resolve()), name, *found, stat.st_size, str(stat.st_mtime_ns))


# ---- behind a URL --------------------------------------------------------------------------------


@contextlib.contextmanager
def explained_url(url: str) -> Iterator[None]:
    """Turns what a store raises into a line. Each store has errors of its own, so it is any."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:  # fsspec's text says what to install
        raise UserError(f"cannot open {url}: {error}") from error
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"cannot read {url}: {type(error).__name__}: {reason}; check the address and the "
            "connection, and run the same command again, which goes on where it was"
        ) from error


def _remote(source: str) -> list[Input]:
    import fsspec  # type: ignore[import-untyped, unused-ignore]

    with explained_url(source):
        system, path = fsspec.core.url_to_fs(source)
        if any(character in path for character in "*["):  # a ? begins a URL's query
            paths = system.glob(path)
        elif kind_of(source):
            paths = [path]
        else:
            paths = system.find(path)
        known = [found for found in paths if kind_of(system.unstrip_protocol(found))]
        return [_remote_input(system, found, source) for found in known]


def _remote_input(system: Any, path: str, source: str) -> Input:
    url = system.unstrip_protocol(path)
    info = system.info(path)
    stamp = next((f"{key} {info[key]}" for key in STAMPS if info.get(key)), "")
    found = kind_of(url)
    assert found, url
    size = info.get("size")
    # Not every server of http answers for a range of bytes.
    seekable = size is not None and (not url.startswith("http") or bool(info.get("partial")))
    return Input(url, url, *found, int(size) if size is not None else None, stamp, seekable)


def _hub(source: str) -> list[Input]:
    """The Parquet files that the hub makes of every public dataset."""
    name, *rest = source.removeprefix(HUB).split(":")
    if not name or len(rest) > 2:
        raise UserError(f"{source}: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    config, split = [*rest, *("default", "train")[len(rest) :]]
    folder = HUB_ADDRESS.format(name=name, config=config)
    inputs = _remote(f"{folder}/{split}/*.parquet")
    if inputs:
        return inputs
    # Of a large dataset the hub converts the beginning only, and calls it so.
    if _remote(f"{folder}/partial-{split}/*.parquet"):
        raise UserError(
            f"{source}: the hub's Parquet files hold only the beginning of {split}: give the "
            f"dataset's own files instead, such as 'hf://datasets/{name}/**/*.parquet'"
        )
    raise UserError(
        f"{source}: no split {split!r} in the configuration {config!r}: look at "
        f"https://huggingface.co/datasets/{name} and give hf:{name}:CONFIG:SPLIT"
    )


def open_input(entry: Input) -> BinaryIO:
    """Opens an input's bytes as they lie there, seekable where its size is known.

    Raises:
        UserError: it is gone, or cannot be read.
    """
    if not is_url(entry.path):
        try:
            return open(entry.path, "rb")
        except OSError as error:
            raise UserError(
                f"cannot read {entry.label}: {error.strerror}; check the path and its permissions"
            ) from error
    import fsspec

    with explained_url(entry.path):
        opened: BinaryIO = fsspec.open(entry.path, "rb").open()
        return opened
