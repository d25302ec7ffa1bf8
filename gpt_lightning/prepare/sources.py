"""Sources: the files behind SOURCE, on this machine or behind URLs, and how they are opened."""

import contextlib
import glob
import itertools
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal
from urllib.parse import urlsplit

from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256, json_digest, workspace
from gpt_lightning.remote.attempts import reason_for
from gpt_lightning.remote.files import facts, find, open_seekable

Kind = Literal["text", "jsonl", "parquet", "arrow", "csv", "tsv"]
KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
}
# descriptions that Hugging Face's save_to_disk writes beside .arrow
DESCRIPTIONS = {"dataset_dict.json", "dataset_info.json", "state.json"}
COMPRESSIONS = (".gz", ".zst")
BOM = b"\xef\xbb\xbf"
HUB = "hf:"
HUB_REVISION = "refs/convert/parquet"


@dataclass(frozen=True)
class Input:
    """File of documents.

    Attributes:
        path: Local path or URL.
        name: Name in SOURCE, independent of the folder's place.
        kind: text (one document), jsonl, parquet, arrow, csv or tsv.
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


# ---- names -------------------------------------------------------------------------------------


def kind_of(path: str) -> tuple[Kind, str] | None:
    """Return kind and compression by a file's name; None for files without documents."""
    name = PurePosixPath(without_host(path)).name.lower()
    compression = next(filter(name.endswith, COMPRESSIONS), "")
    kind = KINDS.get(PurePosixPath(name.removesuffix(compression)).suffix)
    return None if kind is None or (compression and kind != "jsonl") else (kind, compression)


def is_url(source: str) -> bool:
    """Return whether fsspec opens the source, not the operating system."""
    return "://" in source


def is_stream(source: str) -> bool:
    """Return whether a source can be read only once: standard input, or another pipe."""
    return source == "-" or Path(source).is_fifo()


def is_remote(source: str) -> bool:
    """Return whether a source is behind a URL or in the hub."""
    return is_url(source) or source.startswith(HUB)


def without_host(source: str) -> str:
    """Return the part of a URL that names a file. Only http has queries; else a ? is a glob's."""
    if source.startswith(("http://", "https://")):
        return urlsplit(source).path
    return source.split("://", 1)[-1]


def as_list(source: str | Sequence[str]) -> list[str]:
    """Return one or several sources as a list."""
    return [source] if isinstance(source, str) else list(source)


def source_name(source: str | Sequence[str]) -> str:
    """Return a dataset's name by its SOURCE: file, folder or dataset, without endings.

    Several sources are called as their common folder, or, with a URL, as the first.
    """
    sources = as_list(source)
    if len(sources) > 1 and not any(map(is_remote, sources)):
        paths = [Path(os.path.abspath(found)) for found in sources]
        sources = [os.path.commonpath([path if path.is_dir() else path.parent for path in paths])]
    source = sources[0]
    if is_stream(source):
        return "stdin"
    if source.startswith(HUB) and not is_url(source):
        return source.removeprefix(HUB).split(":")[0].split("/")[-1]
    path = PurePosixPath(without_host(source))
    while any(character in path.name for character in "*?["):  # a glob is called as its folder
        path = path.parent
    name = path.name or Path(source).resolve().name
    return name.removesuffix(next(filter(name.endswith, COMPRESSIONS), ""))


def is_one_text(source: str) -> bool:
    """Return whether a SOURCE that is no corpus is one text, not documents."""
    if is_remote(source):
        return is_url(source) and kind_of(source) == ("text", "") and not set("*[") & set(source)
    if Path(source).exists():
        return not Path(source).is_dir() and kind_of(source) in (None, ("text", ""))
    return not set("*?[") & set(source)


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
        print(f"skipped {len(skipped)}: {', '.join(sorted(skipped)[:3])}", flush=True)
    if not inputs:
        kinds = f"{', '.join(KINDS)}; JSONL also with {' and '.join(COMPRESSIONS)}"
        raise UserError(f"{as_list(source)[0]} holds no documents: expected {kinds}")
    once = {entry.path: entry for entry in reversed(inputs)}
    return sorted(once.values(), key=lambda entry: entry.name)


def fingerprint(inputs: Sequence[Input]) -> str:
    """Return a digest of the inputs' names, sizes and stamps."""
    return json_digest([[entry.name, entry.size, entry.stamp] for entry in inputs])


def contents(inputs: Sequence[Input]) -> str:
    """Return a digest of the inputs' names and contents; behind a URL the stamp stands for them.

    Raises:
        UserError: An input cannot be read.
    """
    facts = []
    for entry in inputs:
        if is_url(entry.path):
            facts.append([entry.name, entry.stamp])
        else:
            with explained_input(entry):
                facts.append([entry.name, file_sha256(Path(entry.path))])
    return json_digest(facts)


# ---- on this machine -----------------------------------------------------------------------------


def _local(sources: Sequence[str], skipped: list[str]) -> list[Input]:
    """Return the inputs of files, folders and globs, named by their place in the common folder."""
    bases: list[Path] = []
    paths: list[Path] = []
    for source in sources:
        if Path(source).exists():
            found = [Path(source)]
            if found[0].is_file() and not _is_lines(found[0]):
                raise no_lines(source)
        else:
            found = _matches(source)
        for path in found:
            if path.is_dir():
                bases.append(path)
                paths += _walk(path)
            else:
                bases.append(path.parent)
                paths.append(path)
    common = os.path.commonpath(map(os.path.abspath, bases)) if bases else ""
    if any(path.suffix == ".arrow" for path in paths):
        skipped += [path.name for path in paths if path.name in DESCRIPTIONS]
        paths = [path for path in paths if path.name not in DESCRIPTIONS]
    inputs: dict[str, Input] = {}
    # The shortest of several links wins, or the first by name: file systems list in any order.
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        name = Path(os.path.relpath(os.path.abspath(path), common)).as_posix()
        kind = kind_of(name)
        if not kind or not path.is_file() or not _is_lines(path):  # or a link to nowhere
            if path.suffix.lower() == ".json" and path.is_file() and is_array(path):
                raise no_lines(str(path))
            skipped.append(name)
            continue
        stat = path.stat()
        real = str(path.resolve())
        inputs.setdefault(real, Input(real, name, *kind, stat.st_size, str(stat.st_mtime_ns)))
    return list(inputs.values())


def _matches(pattern: str) -> list[Path]:
    """Return the files and folders that match a glob, as a shell passes them; ** are any folders.

    Raises:
        UserError: Nothing matches.
    """
    # or it is a name with a bracket
    for candidate in (pattern, pattern.replace("[", "[[]")):
        found = sorted(glob.glob(candidate, recursive=True))
        if found:
            return [Path(path) for path in found]
    fix = "quote a pattern, and prepare a corpus or standard input alone"
    raise UserError(f"{pattern}: no such file, and no file matches; {fix}")


def _walk(root: Path) -> list[Path]:
    """Return the files in a folder, below it and below links to folders, each folder once."""
    files: list[Path] = []
    seen: set[str] = set()
    tops = [root]
    for top in tops:  # which grows by links
        with explained("read", top, "check its permissions"):
            for place, folders, names in os.walk(top, onerror=_raise_lost):
                if (real := os.path.realpath(place)) in seen:
                    folders.clear()
                    continue
                seen.add(real)
                folder = Path(place)
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                tops += [folder / name for name in folders if (folder / name).is_symlink()]
                files += [folder / name for name in names if not name.startswith(".")]
    return files


def _raise_lost(error: Exception) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


# ---- JSON of one object a line -----------------------------------------------------------------


def is_object(line: bytes) -> bool:
    """Return whether a line is a JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def begins_with_object(path: Path) -> bool:
    """Return whether one of a file's first two lines is a JSON object, and the first begins one."""
    with open(path, "rb") as file:
        file.seek(len(BOM) if file.read(3) == BOM else 0)
        if not file.peek(64).lstrip().startswith(b"{"):  # do not read a long line for nothing
            return False
        return any(map(is_object, itertools.islice(filter(bytes.strip, file), 2)))


def is_array(path: Path) -> bool:
    """Return whether a file begins as a JSON array does."""
    with open(path, "rb") as file:
        return file.read(64).removeprefix(BOM).lstrip().startswith(b"[")


def _is_lines(path: Path) -> bool:
    """Return whether a file is not one JSON value in a .json of many lines."""
    return path.suffix.lower() != ".json" or begins_with_object(path)


def no_lines(label: str) -> UserError:
    """Return the error of a file that is one JSON value, with a command that converts an array."""
    return UserError(
        f"{label}: expected a JSON object on each line, found other JSON: unpack and convert it, "
        "for example an array with jq -c '.[]' FILE > documents.jsonl"
    )


def check_begin(label: str, line: bytes) -> None:
    """Raise a UserError if the first line of a file begins JSON of another layout than JSONL."""
    if re.match(rb"\s*(\[|{\s*$)", line):
        raise no_lines(label)


# ---- behind a URL --------------------------------------------------------------------------------


def _remote(source: str, skipped: list[str]) -> list[Input]:
    inputs: list[Input] = []
    urls = find(source, is_file=kind_of(source) is not None)
    has_arrow = any(url.endswith(".arrow") for url in urls)
    for url in urls:
        kind = kind_of(url)
        if has_arrow and PurePosixPath(url).name in DESCRIPTIONS:
            skipped.append(url)
        elif kind:
            inputs.append(remote_input(url, *kind, first=not inputs))
        elif not without_host(url).endswith("/"):  # the links that sort a server's listing
            skipped.append(url)
    return inputs


def remote_input(url: str, kind: Kind, compression: str, first: bool = False) -> Input:
    """Return the input behind a URL; `first` as in remote.attempts.

    Raises:
        UserError: The file cannot be read.
    """
    size, tag, ranges = facts(url, first=first)
    # each run compares contents if there is no tag
    return Input(url, url, kind, compression, size, tag or str(uuid.uuid4()), ranges)


def _hub(source: str) -> list[Input]:
    """Return the Parquet files that the hub makes of every public dataset."""
    name, *rest = source.removeprefix(HUB).split(":")
    if name.count("/") != 1 or len(rest) > 2:
        raise UserError(f"{source}: expected hf:OWNER/NAME, then :CONFIG or :CONFIG:SPLIT")
    config, split = [*rest, *("default", "train")[len(rest) :]]
    try:
        from huggingface_hub import HfApi

        listed = sorted(HfApi().list_repo_files(name, revision=HUB_REVISION, repo_type="dataset"))
    except Exception as error:  # the hub's package tries several times itself
        fix = "check the name, the connection, and `pip install 'gpt-lightning[hf]'`"
        raise UserError(f"cannot list {source}: {reason_for(error)}; {fix}") from error
    own = [path for path in listed if path.startswith(f"{config}/{split}/")]
    if not own:
        # The hub converts only the beginning of a large dataset, as partial-SPLIT.
        known = sorted({":".join(path.split("/")[:2]) for path in listed if path.count("/") == 2})
        fix = f"give hf:{name}: and one of {', '.join(known[:8])}"
        raise UserError(f"{source}: no split {split!r} in the configuration {config!r}: {fix}")
    address = f"hf://datasets/{name}@{HUB_REVISION}"
    return [remote_input(f"{address}/{path}", "parquet", "") for path in own]


# ---- reading an input ----------------------------------------------------------------------------


def open_input(entry: Input) -> BinaryIO:
    """Open the bytes of an input, seekable; of a server without ranges, a temporary copy of them.

    Raises:
        UserError: The input is gone, or cannot be read.
    """
    if not is_url(entry.path):
        with explained_input(entry):
            return open(entry.path, "rb")
    return open_seekable(entry.path, entry.size if entry.seekable else None)


def check_unchanged(entry: Input) -> None:
    """Raise a UserError if an input changed since it was found."""
    now = entry.size, entry.stamp
    if is_url(entry.path):
        size, tag, _ = facts(entry.path, fresh=True)
        now = size, tag or entry.stamp
    elif entry.stamp.isdigit():  # no copy of standard input
        with explained_input(entry):
            stat = Path(entry.path).stat()
        now = stat.st_size, str(stat.st_mtime_ns)
    if now != (entry.size, entry.stamp):
        raise UserError(f"{entry.path} changed while it was read: run the same command again")


def explained_input(entry: Input) -> contextlib.AbstractContextManager[None]:
    """Turn an error of reading an input into a UserError of one line."""
    return explained("read", entry.path, "check the path and its permissions")


@contextlib.contextmanager
def spooled(source: str, out: Path) -> Iterator[Input]:
    """Copy a pipe, or a text behind a URL, beside `out`; distinguish JSONL from one text.

    Args:
        source: -, a pipe or a URL.
        out: Folder of the dataset.

    Raises:
        UserError: The URL cannot be read, or the disk is full.
    """
    label = "standard input" if source == "-" else source
    entry = remote_input(source, "text", "", first=True) if is_url(source) else None
    place = out.resolve().with_name(f"{out.resolve().name}.spool")
    stdin = sys.stdin.buffer if source == "-" else None
    with (
        open_input(entry) if entry else stdin or open(source, "rb") as content,
        explained("write", out),
        workspace(place) as folder,
    ):
        path = folder / "text"
        with open(path, "wb") as file:
            shutil.copyfileobj(content, file, 2**20)
        if entry:
            check_unchanged(entry)
        kind: Kind = "jsonl" if not entry and begins_with_object(path) else "text"
        size, digest = path.stat().st_size, file_sha256(path)
        try:
            yield Input(str(path), source_name(source), kind, "", size, digest)
        except UserError as error:  # name the source instead of the copy
            raise UserError(str(error).replace(str(path), label)) from error
