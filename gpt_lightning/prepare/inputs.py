"""Files behind SOURCE: documents, local or behind a URL, or one text that can be read only once."""

import contextlib
import fnmatch
import glob
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256, workspace
from gpt_lightning.prepare.input_file import (
    COMPRESSIONS,
    Input,
    Kind,
    is_object,
    is_url,
    kind_of,
    no_lines,
    without_host,
)

HUB = "hf:"
HUB_REVISION = "refs/convert/parquet"
AGAIN = "run the same command again: it continues from the completed parts"
NO_STAMP = "none "  # stamp of a file whose store has no facts about it


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
    path = PurePosixPath(without_host(source))
    while any(character in path.name for character in "*?["):  # a glob is called as its folder
        path = path.parent
    name = path.name or Path(source).resolve().name
    return name.removesuffix(next(filter(name.endswith, COMPRESSIONS), ""))


def as_list(source: str | Sequence[str]) -> list[str]:
    """Return one or several sources as a list."""
    return [source] if isinstance(source, str) else list(source)


def is_remote(source: str) -> bool:
    """Return whether a source is behind a URL or in the hub."""
    return is_url(source) or source.startswith(HUB)


def has_documents(source: str) -> bool:
    """Return whether find_inputs takes a SOURCE that is neither a corpus nor standard input."""
    if is_remote(source) or Path(source).is_dir():
        return True
    if Path(source).exists():
        return (kind_of(source) or ("text", ""))[0] != "text"
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
                raise no_lines(source, "")
        else:
            # a bracket of a name, if it is no pattern
            matches = _matches(source, skipped) or _matches(source.replace("[", "[[]"), skipped)
            if not matches:
                raise UserError(
                    f"{source}: no such file, and no file matches; quote a pattern, and prepare a "
                    "corpus or standard input alone"
                )
            base = Path(os.path.commonpath([os.path.abspath(match.parent) for match in matches]))
            found = [path for match in matches for path in matches[match]]
        paths += filter(Path.is_file, found)
        bases.append(base)
    common = os.path.commonpath(map(os.path.abspath, bases)) if bases else ""
    inputs: dict[str, Input] = {}
    # The shortest of several links wins.
    for path in sorted(paths, key=lambda path: len(path.parts)):
        name = Path(os.path.relpath(os.path.abspath(path), common)).as_posix()
        kind, stat, real = kind_of(str(path)), path.stat(), str(path.resolve())
        if kind is None or not _is_lines(path):
            skipped.append(f"{name} (neither JSONL nor Parquet nor .txt)")
            continue
        inputs.setdefault(real, Input(real, name, *kind, stat.st_size, str(stat.st_mtime_ns)))
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
            for place, folders, names in os.walk(top, onerror=_raise_lost):
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


def _is_lines(path: Path) -> bool:
    """Return whether a file is not one JSON value in a .json of many lines."""
    return path.suffix.lower() != ".json" or begins_with_object(path)


def begins_with_object(path: Path) -> bool:
    """Return whether one of a file's first two lines is a JSON object, and the first begins one."""
    with open(path, "rb") as file:
        file.seek(3 if file.read(3) == b"\xef\xbb\xbf" else 0)  # a byte order mark
        start = file.tell()
        if not file.read(64).lstrip().startswith(b"{"):  # do not read a long line for nothing
            return False
        file.seek(start)
        return any(map(is_object, itertools.islice(filter(bytes.strip, file), 2)))


# ---- behind a URL --------------------------------------------------------------------------------


def remote_input(
    url: str, kind: Kind, compression: str, fresh: bool = False, first: bool = False
) -> Input:
    """Return the input behind a URL.

    Args:
        url: Address of the file.
        kind: text, jsonl or parquet.
        compression: .gz, .zst or "".
        fresh: True to ask the store, although this process may have listed it before.
        first: True for the first request to the address.

    Raises:
        UserError: The file cannot be read.
    """
    from gpt_lightning.remote.reading import facts  # needs fsspec

    found = facts(url, fresh, first, AGAIN)
    stamp = found.tag or f"{NO_STAMP}{uuid.uuid4()}"  # each run then compares contents
    return Input(url, url, kind, compression, found.size, stamp, found.ranges)


def _remote(source: str, skipped: list[str]) -> list[Input]:
    from gpt_lightning.remote.attempts import attempts  # needs fsspec

    inputs: list[Input] = []
    for url in attempts(source, partial(_urls, source), "read", first=True, again=AGAIN):
        if kind := kind_of(url):
            inputs.append(remote_input(url, *kind, first=not inputs and bool(kind_of(source))))
        elif not without_host(url).endswith("/"):  # the links that sort a server's listing
            skipped.append(f"{url} (neither JSONL nor Parquet nor .txt)")
    return inputs


def _urls(source: str, system: Any, path: str) -> list[str]:
    """Return the addresses of the files of a URL, which is a file, folder or glob."""
    # else a folder is left out that could not be listed
    strict = {"on_error": _raise_lost} if source.startswith(("http://", "https://")) else {}
    if any(character in path for character in "*["):  # a ? begins a URL's query
        found = system.glob(path, detail=True, **strict)
        paths = [name for name in found if found[name]["type"] != "directory"]
        if "**" not in path:  # a shell passes them so
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


def _hub(source: str) -> list[Input]:
    """Return the Parquet files that the hub makes of every public dataset."""
    from gpt_lightning.remote.attempts import reason_for  # needs fsspec

    name, *rest = source.removeprefix(HUB).split(":")
    if name.count("/") != 1 or len(rest) > 2:
        raise UserError(
            f"{source}: expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME:CONFIG:SPLIT"
        )
    config, split = [*rest, *("default", "train")[len(rest) :]]

    address = f"hf://datasets/{name}@{HUB_REVISION}"
    try:
        from huggingface_hub import HfApi

        listed = sorted(HfApi().list_repo_files(name, revision=HUB_REVISION, repo_type="dataset"))
    except Exception as error:  # the hub's package tries several times itself
        raise UserError(
            f"cannot list {source}: {reason_for(error)}; check the name, the connection, and "
            "`pip install 'gpt-lightning[hf]'`"
        ) from error
    if own := [path for path in listed if path.startswith(f"{config}/{split}/")]:
        return [remote_input(f"{address}/{path}", "parquet", "") for path in own]
    # The hub converts only the beginning of a large dataset, as partial-SPLIT.
    known = sorted({":".join(path.split("/")[:2]) for path in listed if path.count("/") == 2})
    raise UserError(
        f"{source}: no split {split!r} in the configuration {config!r}: give hf:{name}: and one of "
        f"{', '.join(known[:8]) or 'CONFIG:SPLIT'}"
    )


# ---- reading an input ----------------------------------------------------------------------------


def open_input(entry: Input) -> BinaryIO:
    """Open the bytes of an input, seekable if its size is known.

    Raises:
        UserError: The input is gone, or cannot be read.
    """
    with explained_input(entry):
        if not is_url(entry.path):
            return open(entry.path, "rb")
    from gpt_lightning.remote.reading import READ_BYTES, RemoteFile  # needs fsspec

    seekable = entry.seekable or entry.kind == "parquet"
    return io.BufferedReader(RemoteFile(entry.path, entry.size, seekable, AGAIN), READ_BYTES)


def check_unchanged(entry: Input) -> None:
    """Raise a UserError if an input changed since it was found."""
    size, stamp = entry.size, entry.stamp
    with explained_input(entry):
        if is_url(entry.path):
            now = remote_input(entry.path, entry.kind, entry.compression, fresh=True)
            size, stamp = now.size, stamp if stamp.startswith(NO_STAMP) else now.stamp
        elif stamp.isdigit():
            stat = Path(entry.path).stat()
            size, stamp = stat.st_size, str(stat.st_mtime_ns)
    if (size, stamp) != (entry.size, entry.stamp):
        raise UserError(f"{entry.path} changed while it was read: run the same command again")


def explained_input(entry: Input) -> contextlib.AbstractContextManager[None]:
    """Turn an error of reading an input into a UserError of one line."""
    return explained("read", entry.path, "check the path and its permissions")


# ---- sources that can be read only once ----------------------------------------------------------


def is_one_text(source: str) -> bool:
    """Return whether a URL is that of one text."""
    is_glob = any(character in source for character in "*[")
    return is_url(source) and not is_glob and kind_of(source) == ("text", "")


@contextlib.contextmanager
def spooled(source: str, out: Path) -> Iterator[Input]:
    """Copy standard input, or a text behind a URL, beside `out`; distinguish JSONL from one text.

    Args:
        source: - or a URL.
        out: Folder of the dataset.

    Raises:
        UserError: The URL cannot be read, or the disk is full.
    """
    label, stdin, entry = source, contextlib.nullcontext(sys.stdin.buffer), None
    if source == "-":
        label = "standard input"
        if sys.stdin.isatty():
            print("reading the text from the terminal; Ctrl-D ends it", flush=True)
    else:
        entry = remote_input(source, "text", "", first=True)
    place = out.resolve().with_name(f"{out.resolve().name}.spool")
    with explained("write", out), workspace(place) as folder:
        path = folder / "text"
        with open(path, "wb") as file, open_input(entry) if entry else stdin as stream:
            shutil.copyfileobj(stream, file, 2**20)
        if entry:
            check_unchanged(entry)
        kind: Kind = "jsonl" if source == "-" and begins_with_object(path) else "text"
        facts = path.stat().st_size, file_sha256(path)
        try:
            yield Input(str(path), source_name(source), kind, "", *facts)
        except UserError as error:  # name the source instead of the copy
            raise UserError(str(error).replace(str(path), label)) from error
