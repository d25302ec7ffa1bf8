"""Files behind SOURCE: documents, local or behind a URL, or one text."""

import contextlib
import fnmatch
import glob
import hashlib
import io
import json
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, TypeVar
from urllib.parse import urlsplit

from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.files import explained

Kind = Literal["text", "jsonl", "parquet"]
T = TypeVar("T")

KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".zst")
HUB = "hf:"
HUB_ADDRESS = "hf://datasets/{name}@refs/convert/parquet/{config}"
DATA_EXTRA = "pip install 'gpt-lightning[data]'"
# first bytes of files that no setting turns into text: name of the format, and what to do
UNPACK = "unpack it, or, if it holds JSONL, let its name end in "
RECODE = "convert it with iconv -f {} -t utf-8"
MAGICS = {
    b"\xff\xfe\x00\x00": ("UTF-32", RECODE.format("utf-32")),
    b"\x00\x00\xfe\xff": ("UTF-32", RECODE.format("utf-32")),
    b"\xff\xfe": ("UTF-16", RECODE.format("utf-16")),
    b"\xfe\xff": ("UTF-16", RECODE.format("utf-16")),
    b"\x1f\x8b": ("gzip", f"{UNPACK}.jsonl.gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", f"{UNPACK}.jsonl.zst"),
    b"PAR1": ("Parquet", "let its name end in .parquet"),
    b"%PDF": ("PDF", "convert it, for example with pdftotext"),
    b"PK\x03\x04": ("zip", "unpack it"),
    b"BZh91AY": ("bzip2", "unpack it"),
    b"\xfd7zXZ\x00": ("xz", "unpack it"),
}
READ_BYTES = 2**20  # of a URL at a time
HEAD_BYTES = 4096  # of a text that are examined
# Facts that change with a file; no store has all of them.
STAMPS = ("ETag", "etag", "sha256", "blob_id", "md5", "md5Hash", "checksum", "mtime", "created")
HTTP_STAMPS = ("Content-MD5", "Last-Modified")
NO_STAMP = "none "


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


def source_name(source: str | Sequence[str]) -> str:
    """Return a dataset's name by its SOURCE: file, folder or dataset, without endings.

    Several sources are called as their common folder, or, with a URL, as the first.
    """
    sources = as_list(source)
    if len(sources) > 1 and not any(map(is_remote, sources)):
        paths = [Path(os.path.abspath(found)) for found in sources]
        sources = [os.path.commonpath([path if path.is_dir() else path.parent for path in paths])]
    source = sources[0]
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


def as_list(source: str | Sequence[str]) -> list[str]:
    """Return one or several sources as a list."""
    return [source] if isinstance(source, str) else list(source)


def is_remote(source: str) -> bool:
    """Return whether a source is behind a URL or in the hub."""
    return is_url(source) or source.startswith(HUB)


def has_documents(source: str) -> bool:
    """Return whether find_inputs takes a SOURCE that is neither a corpus nor standard input."""
    if is_remote(source):
        return True
    if Path(source).is_dir():
        return True
    if Path(source).exists():
        found = kind_of(source)
        return found is not None and found[0] != "text"
    return any(character in source for character in "*?[")


def find_inputs(source: str | Sequence[str]) -> list[Input]:
    """Return the files of documents that SOURCE names, sorted by name.

    Args:
        source: JSONL or Parquet file, folder, glob, URL of these, or hf:NAME; or several of them.

    Raises:
        UserError: There is no file, or none that holds documents.
    """
    skipped: list[str] = []
    inputs = _local([found for found in as_list(source) if not is_remote(found)], skipped)
    for found in filter(is_remote, as_list(source)):
        inputs += _remote(found, skipped) if is_url(found) else _hub(found)
    if skipped:
        shown = ", ".join(sorted(skipped)[:3]) + (", ..." if len(skipped) > 3 else "")
        print(f"skipped {len(skipped)}: {shown}", flush=True)
    if not inputs:
        raise UserError(
            f"{', '.join(as_list(source)[:3])} holds no documents: expected files that end in "
            ".jsonl, .jsonl.gz, .jsonl.zst (also .ndjson and .json), .parquet or .txt"
        )
    once = {entry.path: entry for entry in reversed(inputs)}
    return sorted(once.values(), key=lambda entry: entry.name)


def fingerprint(inputs: Sequence[Input], times: bool = True) -> str:
    """Return a digest of the inputs' names and sizes, and of their stamps with `times`."""
    entries = [[entry.name, entry.size, entry.stamp][: 2 + times] for entry in inputs]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def check_text(head: bytes, label: str) -> None:
    """Raise a UserError if the first bytes of a text or JSONL are those of another format.

    In UTF-16 without a byte order mark, half of the bytes of English are NUL.
    """
    for magic, (name, fix) in MAGICS.items():
        if head.startswith(magic):
            raise UserError(f"{label} is no text, it begins as {name}: {fix}")
    head = head[:HEAD_BYTES]
    if 4 * head.count(0) >= len(head) > 0:
        order = RECODE.format("utf-16be" if head.startswith(b"\0") else "utf-16le")
        raise UserError(f"{label} is no UTF-8, it has many NUL bytes: if it is UTF-16, {order}")


def check_lines(line: bytes, entry: Input) -> None:
    """Raise a UserError if the first line of a JSONL file begins a JSON value of many lines."""
    if line.lstrip().startswith(b"[") or line.strip() == b"{":
        raise _no_lines(entry.label, entry.compression)


def _no_lines(label: str, compression: str) -> UserError:
    path, first = shlex.quote(label), ""
    if is_url(label):
        path, first = shlex.quote(PurePosixPath(_without_host(label)).name), "download it, and "
    unpack = {".gz": f"gzip -dc {path} | ", ".zst": f"zstd -dc {path} | "}.get(compression)
    command = f"{unpack}jq -c '.[]'" if unpack else f"jq -c '.[]' {path}"
    return UserError(
        f"{label}: expected a JSON object on each line, found other JSON: {first}convert it, for "
        f"example an array with {command} > documents.jsonl"
    )


# ---- on this machine -----------------------------------------------------------------------------


def _local(sources: Sequence[str], skipped: list[str]) -> list[Input]:
    """Return the inputs of files, folders and globs, named by their place in the common folder."""
    bases: list[Path] = []
    paths: list[Path] = []
    for source in sources:
        root = Path(source)
        if root.is_dir():
            found, base = _walk(root, skipped), root
        elif root.exists():
            found, base = [root], root.parent
            if not _is_lines(root):
                raise _no_lines(source, "")
        else:
            # a bracket of a name, if it is no pattern
            matches = _matches(source, skipped) or _matches(source.replace("[", "[[]"), skipped)
            if not matches:
                raise UserError(f"{source}: no file matches; check the pattern, and quote it")
            base = Path(os.path.commonpath([os.path.abspath(match.parent) for match in matches]))
            found = [path for match in matches for path in matches[match]]
        paths += filter(Path.is_file, found)
        bases.append(base)
    common = os.path.commonpath(map(os.path.abspath, bases)) if bases else ""
    inputs: dict[str, Input] = {}
    for path in sorted(paths, key=lambda path: len(path.parts)):  # of links the shortest name
        name, kind = (
            Path(os.path.relpath(os.path.abspath(path), common)).as_posix(),
            kind_of(str(path)),
        )
        if kind is None or not _is_lines(path):
            skipped.append(f"{name} (neither JSONL nor Parquet nor .txt)")
            continue
        stat, real = path.stat(), str(path.resolve())
        stamp = str(stat.st_mtime_ns)
        inputs.setdefault(real, Input(real, name, *kind, stat.st_size, stamp))
    return list(inputs.values())


def _matches(pattern: str, skipped: list[str]) -> dict[Path, list[Path]]:
    """Return the files and folders that match a glob, each with its files, as a shell passes them.

    Args:
        pattern: Glob; ** are any folders, each of which is read once, also below links.
        skipped: List to which links are added as by `_walk`.
    """
    parts = Path(pattern).parts
    if "**" not in parts:
        found: dict[Path, list[Path]] = {}
        for path in map(Path, sorted(glob.glob(pattern))):
            found[path] = _walk(path, skipped) if path.is_dir() else [path]
            if not path.exists():
                skipped.append(f"{path} (a link that leads nowhere)")
        return found
    depth = parts.index("**")
    groups: dict[Path, list[Path]] = {}
    top = str(Path(*parts[:depth]))
    for root in map(Path, sorted(glob.glob(top))):
        for path in _walk(root, skipped) if root.is_dir() else []:
            names = path.relative_to(root).parts
            for n in range(len(names) + 1):
                if _fits(names[:n], parts[depth:]):
                    groups.setdefault(root.joinpath(*names[:n]), []).append(path)
                    break
    return groups


def _fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether the folders and the file of a path match the parts of a glob."""
    if not patterns:
        return not names
    if patterns[0] == "**" and _fits(names, patterns[1:]):
        return True
    rest = patterns if patterns[0] == "**" else patterns[1:]
    fits = bool(names) and (patterns[0] == "**" or fnmatch.fnmatchcase(names[0], patterns[0]))
    return fits and _fits(names[1:], rest)


def _walk(root: Path, skipped: list[str]) -> list[Path]:
    """Return the files in a folder, below it and below links to folders, each folder once.

    Args:
        root: Folder.
        skipped: List to which links are added that lead nowhere or to a folder that was read.
    """
    files: list[Path] = []
    seen: set[tuple[int, int]] = set()
    tops = [root]
    while tops:
        top = tops.pop(0)
        with explained("read", top, "check its permissions"):
            for place, folders, names in os.walk(top, onerror=_raise):
                folder, stat = Path(place), os.stat(place)
                if (stat.st_dev, stat.st_ino) in seen:
                    skipped.append(f"{folder} (a link to a folder that is read already)")
                    folders.clear()
                    continue
                seen.add((stat.st_dev, stat.st_ino))
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                tops += [folder / name for name in folders if (folder / name).is_symlink()]
                visible = [folder / name for name in names if not name.startswith(".")]
                files += filter(Path.exists, visible)
                broken = [path for path in visible if not path.exists()]
                skipped += [f"{path} (a link that leads nowhere)" for path in broken]
    return files


def _raise(error: OSError) -> None:
    raise error


def _is_lines(path: Path) -> bool:
    """Return whether a file is not one JSON value in a .json of many lines."""
    return path.suffix.lower() != ".json" or begins_with_object(path)


def begins_with_object(path: Path) -> bool:
    """Return whether the first line of a file is a JSON object."""
    with open(path, "rb") as file:
        file.seek(3 if file.read(3) == b"\xef\xbb\xbf" else 0)  # a byte order mark
        start = file.tell()
        if not file.read(64).lstrip().startswith(b"{"):  # do not read a long line for nothing
            return False
        file.seek(start)
        line = next((line for line in file if line.strip()), b"")
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


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
        origin = _origin(error)
        missing = isinstance(origin, FileNotFoundError) or _status(origin) in (404, 410)
        reason = "no such file" if missing else reason_of(origin)
        raise UserError(
            f"cannot read {url}: {reason}; check the address and the connection, and run the same "
            "command again: it continues from the completed parts"
        ) from error


def _origin(error: Exception) -> BaseException:
    """Return the error behind fsspec's FileNotFoundError, which it raises for any of http."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    is_http = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    return cause if cause is not None and is_http else error


def _status(error: BaseException) -> int | None:
    """Return the status of an answer by http that is an error of aiohttp or of the hub."""
    response = getattr(error, "response", None)
    found = getattr(error, "status", None) or getattr(response, "status_code", None)
    return found if isinstance(found, int) else None


def _is_passing(error: Exception, reached: bool) -> bool:
    """Return whether a lost connection or a busy server is the reason of an error."""
    origin = _origin(error)
    status = _status(origin)
    if status is not None:
        return status in (408, 429) or status >= 500
    if not reached and isinstance(origin, OSError):
        return False
    paths = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
    return not isinstance(origin, (*paths, ImportError, ValueError, NotImplementedError))


def patiently(url: str, work: Callable[[Any, str], T], reached: bool = True) -> T:
    """Call a function with a URL's file system and path, again after errors that may pass.

    The last error is the file system's; explained_url turns it into a UserError.

    Args:
        url: Address on any file system of fsspec.
        work: Function of the file system and the path.
        reached: False if this is the first request: without a connection the address is wrong.
    """
    from gpt_lightning.data.transfer import ATTEMPTS, BACKOFF_S, on_file_system  # needs fsspec

    for attempt in range(ATTEMPTS):
        try:
            return work(*on_file_system(url))
        except Exception as error:
            if attempt == ATTEMPTS - 1 or not _is_passing(error, reached):
                raise
            if not attempt:
                print(
                    f"cannot read {url} ({reason_of(_origin(error))}): trying "
                    f"{ATTEMPTS - 1} times more",
                    flush=True,
                )
        time.sleep(BACKOFF_S * 2**attempt)
    raise AssertionError(url)


class RemoteFile(io.RawIOBase):
    """File behind a URL; after a lost connection it is opened again at the same place.

    Args:
        entry: Input behind a URL.
    """

    def __init__(self, entry: Input) -> None:
        self._entry = entry
        self._at = 0
        self._file: Any = None
        self._is_http = entry.path.startswith(("http://", "https://"))
        self._is_stream = self._is_http and entry.kind != "parquet" and not entry.seekable

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return not self._is_stream

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if self._is_stream:
            raise io.UnsupportedOperation("seek")
        if whence == os.SEEK_END and self._entry.size is None:
            raise self._without_ranges()
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.size or 0}
        at = start[whence] + offset
        if at != self._at and self._file is not None:
            try:
                self._file.seek(at)
            except ValueError as error:
                raise self._without_ranges() from error
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        with explained_url(self._entry.path):
            content = patiently(self._entry.path, partial(self._read, buffer))
        self._at += len(content)
        return len(content)

    def _read(self, buffer: Any, system: Any, path: str) -> bytes:
        try:
            if self._file is None:
                self._file = self._opened(system, path)
            content: bytes = self._file.read(len(buffer))
            if not content and self._at < (self._entry.size or 0):
                raise ConnectionError(f"it ended after {self._at:,} of {self._entry.size:,} bytes")
        except BaseException as error:
            self._close()
            if self._is_http and isinstance(error, ValueError):
                raise self._without_ranges() from error
            raise
        buffer[: len(content)] = content
        return content

    def _opened(self, system: Any, path: str) -> Any:
        """Return the file, opened where this one is."""
        if not self._is_stream:
            file = system.open(path, "rb")
            file.seek(self._at)
            return file
        headers = {"Range": f"bytes={self._at}-"} if self._at else {}
        file = system.open(path, "rb", block_size=0, size=self._entry.size, headers=headers)
        skip = self._at if file.r.status != 206 else 0
        while skip:
            content = file.read(min(skip, READ_BYTES))
            if not content:
                raise ConnectionError(f"it ended {skip:,} bytes before {self._at:,}")
            skip -= len(content)
        return file

    def _without_ranges(self) -> UserError:
        return UserError(
            f"{self._entry.path}: the server does not return ranges of bytes, which Parquet needs: "
            "download the file, and give its path"
        )

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        self._close()
        super().close()


def _remote(source: str, skipped: list[str]) -> list[Input]:
    inputs: list[Input] = []
    with explained_url(source):
        for url in patiently(source, partial(_urls, source), reached=False):
            if kind := kind_of(url):
                reached = bool(inputs) or not kind_of(source)
                inputs.append(remote_input(url, *kind, reached=reached))
            elif not _without_host(url).endswith("/"):  # the links that sort a server's listing
                skipped.append(f"{url} (neither JSONL nor Parquet nor .txt)")
    return inputs


def _urls(source: str, system: Any, path: str) -> list[str]:
    """Return the addresses of the files of a URL, which is a file, folder or glob."""
    # else a folder is left out that could not be listed
    strict = {"on_error": _raise_lost} if source.startswith(("http://", "https://")) else {}
    if any(character in path for character in "*["):  # a ? begins a URL's query
        found = system.glob(path, detail=True, **strict)
        paths = [name for name in found if found[name]["type"] != "directory"]
        if "**" not in path:  # as a shell passes them
            folders = sorted(set(found) - set(paths))
            paths += [name for folder in folders for name in system.find(folder, **strict)]
    elif kind_of(source):
        paths = [path]
    else:
        paths = system.find(path, **strict)
    return list(dict.fromkeys(system.unstrip_protocol(found) for found in paths))


def _raise_lost(error: Exception) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def remote_input(
    url: str, kind: Kind, compression: str, again: bool = False, reached: bool = True
) -> Input:
    """Return the input behind a URL; any error of its file system is raised.

    Args:
        url: Address of the file.
        kind: text, jsonl or parquet.
        compression: .gz, .zst or "".
        again: True to ask the store, although this process may have listed it before.
        reached: False if this is the first request.
    """

    def info(system: Any, path: str) -> Mapping[str, Any]:
        if again and not url.startswith("hf://"):  # the hub limits the number of requests
            system.invalidate_cache()
        found: Mapping[str, Any] = system.info(path)
        return found

    return _remote_input(patiently(url, info, reached), url, kind, compression)


def _remote_input(info: Mapping[str, Any], url: str, kind: Kind, compression: str) -> Input:
    # without a stamp every run compares the contents
    none = f"{NO_STAMP}{uuid.uuid4()}"
    stamp = next((f"{key} {info[key]}" for key in STAMPS + HTTP_STAMPS if info.get(key)), none)
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
    inputs = _remote(f"{folder}/{split}/*.parquet", [])
    if inputs:
        return inputs
    # The hub converts only the beginning of a large dataset, as partial-SPLIT.
    if _remote(f"{folder}/partial-{split}/*.parquet", []):
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
        if is_url(entry.path):
            return io.BufferedReader(RemoteFile(entry), READ_BYTES)
        return open(entry.path, "rb")


def check_unchanged(entry: Input) -> None:
    """Raise a UserError if an input changed since it was found."""
    if is_url(entry.path):
        now = remote_input(entry.path, entry.kind, entry.compression, again=True)
        size, stamp = now.size, now.stamp
        if entry.stamp.startswith(NO_STAMP):
            stamp = entry.stamp
    elif entry.stamp.isdigit():
        stat = Path(entry.path).stat()
        size, stamp = stat.st_size, str(stat.st_mtime_ns)
    else:
        return
    if (size, stamp) != (entry.size, entry.stamp):
        raise UserError(f"{entry.label} changed while it was read: run the same command again")


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
