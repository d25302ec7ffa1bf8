"""Datasets behind a URL: their manifest, and streams whose shards are fetched and then local."""

import contextlib
import dataclasses
import shlex
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.formats import HEAD_BYTES
from gpt_lightning.data.manifest import MANIFEST, Manifest, Shard, remote_dataset
from gpt_lightning.data.shards import TokenStream, open_shard
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, explained, file_sha256, locked
from gpt_lightning.remote.attempts import attempts
from gpt_lightning.remote.files import fetch_file, listed, read_if_there


def read_remote_manifest(url: str) -> Manifest:
    """Return the manifest at a URL, or one made for the token shards of another program there.

    The Hugging Face hub lists the SHA-256 of each file; other listings have no digests.

    Raises:
        UserError: The URL does not answer, or has neither.
    """
    content = read_if_there(f"{url}/{MANIFEST}")
    if content is not None:
        return Manifest.parse(content, f"{url}/{MANIFEST}")
    entries = listed(url)
    sizes = {name: entry["size"] for name, entry in entries.items() if name}
    manifest = remote_dataset(url, sizes, lambda names: _heads(url, names))

    def with_digest(shard: Shard) -> Shard:
        lfs: Fields = entries[shard.file].get("lfs") or {}
        return dataclasses.replace(shard, sha256=lfs.get("sha256", ""))

    splits = {name: tuple(map(with_digest, shards)) for name, shards in manifest.splits.items()}
    return dataclasses.replace(manifest, splits=splits)


def _heads(url: str, names: Sequence[str]) -> list[bytes]:
    """Return the first 1,024 bytes of files."""

    def fetch(system: Any, path: str) -> list[bytes]:
        # a server without ranges would send all of a file
        options = {"block_size": 0} if url.startswith("http") else {}
        heads = []
        for name in names:
            with system.open(f"{path}/{name}", "rb", **options) as file:
                heads.append(file.read(HEAD_BYTES))
        return heads

    return attempts(url, fetch)


class RemoteStream(TokenStream):
    """Split whose shards are fetched from a URL when they are needed, or shortly before.

    The copies are in a folder that is named by the manifest's digest, so another dataset at the URL
    has other ones.

    Args:
        url: URL of the dataset's folder, on any file system of fsspec.
        cache: Folder for the copies of all datasets.
        patience_s: Time to wait for a shard in an outage.
        manifest: Manifest of the dataset.
        split: train, val or test.
    """

    is_remote = True
    stamp = ""  # the digests of the copies are compared

    def __init__(self, url: str, cache: Path, patience_s: float, manifest: Manifest, split: str):
        super().__init__(cache, manifest, split)
        self._folder = cache / self.digest[:16]
        self._where = url
        self._repair = f"check the files, and run `rm -r {shlex.quote(str(self._folder))}`"
        self._patience_s = patience_s
        self._fetched: set[int] = set()
        self._expected: set[int] = set()

    def check_stamp(self, before: str) -> None:
        """Do nothing: each copy is compared with its digest when it is opened."""

    def fetch(self, starts: np.ndarray, length: int) -> None:
        ends = starts + length - 1  # a window may cross into the next shard
        for index in np.unique(np.searchsorted(self._ends, [starts, ends], side="right")):
            self._tokens(int(index))

    def expect(self, start: int) -> None:
        index = self.shard_at(start)
        if index not in self._expected:
            self._expected.add(index)
            # a daemon: the end of a run does not wait for a shard
            threading.Thread(target=self._fetch_ahead, args=(index,), daemon=True).start()

    def _fetch_ahead(self, index: int) -> None:
        with contextlib.suppress(UserError):  # the reader of the shard tries again
            self._fetch(index)

    def _tokens(self, index: int) -> np.ndarray:
        if index not in self._fetched:
            self._fetch(index)
            self._fetched.add(index)
        return super()._tokens(index)

    def _fetch(self, index: int) -> None:
        """Copy a shard, which appears complete and checked or not at all, unless it is there."""
        shard = self._shards[index]
        path = self._folder / shard.file
        url = f"{self._where}/{shard.file}"
        until = time.monotonic() + self._patience_s

        def check(copy: Path) -> None:
            try:
                open_shard(copy.parent, dataclasses.replace(shard, file=copy.name), self._manifest)
            except UserError as error:
                raise UserError(f"{url}: {error.__cause__}: check the file there") from error

        with explained("write", path), locked(path.with_name(f".{shard.file}.lock")):
            # one process or thread fetches, the others wait for it at the lock
            if not path.exists() or shard.sha256 not in ("", file_sha256(path)):
                fetch_file(url, path, shard.sha256, until - time.monotonic(), check)
