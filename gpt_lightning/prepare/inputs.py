"""Files behind SOURCE: documents, local or behind a URL, or one text."""

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal
from urllib.parse import urlsplit

from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.files import explained

Kind = Literal["text", "jsonl", "parquet"]

KINDS: dict[str, Kind] = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
HUB = "hf:"
HUB_ADDRESS = "hf://datasets/{name}@refs/convert/parquet/{config}"
DATA_EXTRA = "pip install 'gpt-lightning[data]'"
# Facts that change with a file; no store has all of them.
STAMPS = ("ETag", "etag", "sha256", "blob_id", "md5", "md5Hash", "checksum", "mtime", "created")


@dataclass(frozen=True)
class Input:
    """File of documents.

    Attributes:
        path: Local path or URL.
        name: Name in SOURCE, independent of the folder's place.
        kind: text (one document), jsonl or parquet.
        compression: .gz, .zst or "" (jsonl only).
        size: Bytes, None if the store does not return them.
        stamp: Time of the last change, or a digest; it changes with the content.
        seekable: True if the file can be read from the middle.
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
        """Name in messages."""
        return "standard input" if self.name == "stdin" else self.path


def kind_of(path: str) -> tuple[Kind, str] | None:
    """Return kind and compression by a file's name; None for files without documents."""
    name = PurePosixPath(_without_host(path)).name.lower()
    compression = next((end for end in COMPRESSIONS if name.endswith(end)), "")
    kind = KINDS.get(PurePosixPath(name.removesuffix(compression)).suffix)
    if kind is None or (compression and kind != "jsonl"):
        return None
    return kind, compression


def is_url(source: str) -> bool:
    """Return whether fsspec opens the source, not the operating system."""
    return "://" in source


def _without_host(source: str) -> str:
    """Return the part of a URL that names a file. Only http has queries; else a ? is a glob's."""
    if source.startswith(("http://", "https://")):
        return urlsplit(source).path
    return source.split("://", 1)[-1]


def source_name(source: str) -> str:
    """Return a dataset's name by its SOURCE: file, folder or dataset, without endings."""
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
    """Return whether find_inputs takes a SOURCE that is neither a corpus nor standard input."""
    if is_url(source) or source.startswith(HUB):
        return True
    if Path(source).is_dir():
        return True
    if Path(source).exists():
        found = kind_of(source)
        return found is not None and found[0] != "text"
    return any(character in source for character in "*?[")


def find_inputs(source: str) -> list[Input]:
    """Return the files of documents that SOURCE names, sorted by name.

    Args:
        source: JSONL or Parquet file, folder, glob, URL of these, or hf:NAME.

    Raises:
        UserError: There is no file, or none that holds documents.
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
    """Return a digest of the inputs' names, sizes and stamps."""
    entries = [[entry.name, entry.size, entry.stamp] for entry in inputs]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


# ---- on this machine -----------------------------------------------------------------------------


def _local(source: str) -> list[Input]:
    root = Path(source)
    if root.is_dir():
        found = root.rglob("*")
        base, paths = root, [path for path in found if "/." not in f"/{path.relative_to(root)}"]
    elif root.exists():
        base, paths = root.parent, [root]
    else:
        paths = [Path(found) for found in glob.glob(source, recursive=True)]
        if not paths:
            raise UserError(f"{source}: no file matches; check the pattern, and quote it")
        base = Path(os.path.commonpath([path.parent for path in paths]))
    inputs, skipped = [], []
    for path in filter(Path.is_file, paths):
        name, kind = path.relative_to(base).as_posix(), kind_of(str(path))
        if kind is None:
            skipped.append(name)
            continue
        stat = path.stat()
        stamp = str(stat.st_mtime_ns)
        inputs.append(Input(str(path.resolve()), name, *kind, stat.st_size, stamp))
    if skipped:
        shown = ", ".join(sorted(skipped)[:3]) + (", ..." if len(skipped) > 3 else "")
        print(f"skipped, neither JSONL nor Parquet nor .txt: {shown}", flush=True)
    return inputs


# ---- behind a URL --------------------------------------------------------------------------------


@contextlib.contextmanager
def explained_url(url: str) -> Iterator[None]:
    """Turn any exception of a store into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:  # fsspec's text names the package to install
        raise UserError(f"cannot open {url}: {error}") from error
    except Exception as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else reason_of(error)
        raise UserError(
            f"cannot read {url}: {reason}; check the address and the connection, and run the same "
            "command again: it continues from the completed parts"
        ) from error


def _remote(source: str) -> list[Input]:
    from gpt_lightning.data.remote import on_file_system  # needs fsspec, local files do not

    with explained_url(source):
        system, path = on_file_system(source)
        if any(character in path for character in "*["):  # a ? begins a URL's query
            paths = system.glob(path)
        elif kind_of(source):
            paths = [path]
        else:
            paths = system.find(path)
        urls = {system.unstrip_protocol(found): found for found in paths}
        return [
            _remote_input(system.info(found), url, *kind)
            for url, found in urls.items()
            if (kind := kind_of(url))
        ]


def _remote_input(info: Mapping[str, Any], url: str, kind: Kind, compression: str) -> Input:
    stamp = next((f"{key} {info[key]}" for key in STAMPS if info.get(key)), "")
    size = None if info.get("size") is None else int(info["size"])
    # Not every http server returns ranges of bytes.
    seekable = size is not None and (not url.startswith("http") or bool(info.get("partial")))
    return Input(url, url, kind, compression, size, stamp, seekable)


def _hub(source: str) -> list[Input]:
    """Return the Parquet files that the hub makes of every public dataset."""
    name, *rest = source.removeprefix(HUB).split(":")
    if name.count("/") != 1 or len(rest) > 2:
        raise UserError(
            f"{source}: expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME:CONFIG:SPLIT"
        )
    config, split = [*rest, *("default", "train")[len(rest) :]]
    folder = HUB_ADDRESS.format(name=name, config=config)
    inputs = _remote(f"{folder}/{split}/*.parquet")
    if inputs:
        return inputs
    # The hub converts only the beginning of a large dataset, as partial-SPLIT.
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
    """Open the bytes of an input, seekable if its size is known.

    Raises:
        UserError: The input is gone, or cannot be read.
    """
    with explained_input(entry):
        if not is_url(entry.path):
            return open(entry.path, "rb")
        import fsspec

        opened: BinaryIO = fsspec.open(entry.path, "rb").open()
        return opened


def explained_input(entry: Input) -> contextlib.AbstractContextManager[None]:
    """Turn an error of reading an input into a UserError of one line."""
    if is_url(entry.path):
        return explained_url(entry.path)
    return explained("read", entry.label, "check the path and its permissions")


def damaged(entry: Input, expected: str, error: Exception) -> UserError:
    """Return the error of an input that is not a whole file of its kind."""
    reason = " ".join(str(error).split())
    return UserError(
        f"{entry.label}: expected {expected}, found damage ({reason}); get the file again"
    )
