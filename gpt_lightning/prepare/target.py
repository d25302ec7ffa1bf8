"""Output folder of prepare: its present contents, the lock on it, and a new dataset in it."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.formats import SHARD_FILE, capacity, extras, file_header
from gpt_lightning.data.manifest import MANIFEST, Manifest, TextOrigin, prepare_command
from gpt_lightning.data.shards import ShardWriter
from gpt_lightning.data.tokenizers import Tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, explained, locked, move_into_place, workspace, write_atomic
from gpt_lightning.prepare.settings import Settings, split_borders

# Not in the manifest, because it depends on the inputs' time stamps: equal texts give equal
# manifests, wherever and whenever they were copied.
INPUTS = ".inputs"
MIN_TOKENS = 2  # one to read and one to predict
Made = tuple[Manifest, bool]  # dataset, and whether it was made now


@dataclass(frozen=True)
class Target:
    """Output folder of a preparation.

    Attributes:
        out: Folder of the dataset.
        overwrite: True to replace the dataset in the folder.
        source: SOURCE of the command, for messages.
    """

    out: Path
    overwrite: bool = False
    source: str = "SOURCE"

    def make_once(
        self, settings: Settings, wanted: Fields, make: Callable[[Path], Manifest]
    ) -> Made:
        """Return the dataset in the folder, and whether it was made now.

        Args:
            settings: Settings of the dataset.
            wanted: Facts that decide the dataset's bytes.
            make: Function that writes shards to an empty folder, and returns their manifest.

        Raises:
            UserError: The folder holds something else, a split has fewer than two tokens, or the
                disk is full.
        """
        out = self.out.resolve()
        lock = out.with_name(f".{out.name}.lock")
        there = self._existing(settings, wanted)
        if there and not lock.exists():  # else a process works, or was killed at its end
            return there, False
        waiting = f"{out} is being prepared by another process: waiting for it"
        with (
            explained("write", self.out),
            locked(lock, partial(print, waiting, flush=True)),
            workspace(out) as folder,
        ):
            there = self._existing(settings, wanted)
            if there:
                return there, False
            new = folder / "new"
            new.mkdir()
            manifest = make(new)
            for split in split_borders(0, settings.val_fraction, settings.test_fraction):
                n_tokens = sum(shard.tokens for shard in manifest.splits.get(split, ()))
                if n_tokens < MIN_TOKENS:
                    found = f"the {split} split has {n_tokens} tokens, needs {MIN_TOKENS}"
                    fix = "give more text, or change val_fraction or test_fraction"
                    raise UserError(f"{self.source}: {found}: {fix}")
            if "inputs" in wanted:
                write_atomic(new / INPUTS, wanted["inputs"].encode())
            manifest.save(new)
            if not move_into_place(folder, out, self.overwrite):
                raise UserError(f"{out} was made by another process meanwhile")
        return manifest, True

    def _existing(self, settings: Settings, wanted: Fields) -> Manifest | None:
        """Return the dataset in the folder if it is the wanted one, None if it may be written.

        Raises:
            UserError: The folder holds something else, or a damaged dataset.
        """
        out = self.out
        if not os.path.lexists(out):
            return None
        if not out.is_dir():
            raise UserError(f"{out} is not a folder: choose another --out")
        with explained("read", out):
            names = set(os.listdir(out))
        if not names:
            return None
        if MANIFEST not in names:
            raise UserError(f"{out} holds {min(names)} but no {MANIFEST}: choose another --out")
        if self.overwrite:
            for name in sorted(names - {MANIFEST, INPUTS}):
                if not SHARD_FILE.fullmatch(name):
                    fix = "move it away, or choose another --out"
                    raise UserError(
                        f"{out}/{name} is not part of a dataset and would be deleted: {fix}"
                    )
            return None
        manifest = load_manifest(out)
        origin = {"SHA-256 of the text": manifest.source.sha256, "format": manifest.format}
        found = origin | manifest.settings
        if INPUTS in names:
            found["inputs"] = (out / INPUTS).read_text()
        differences = [
            f"{key} {found.get(key)}, not {value}"
            for key, value in wanted.items()
            if found.get(key) != value
        ]
        if differences:
            again = prepare_command(self.source, vars(settings), str(out))
            runs = "runs of the same tokens then resume with --data.allow_changes true"
            prepared = f"{out} was prepared with {'; '.join(differences)}"
            raise UserError(f"{prepared}: {again} replaces it, another folder keeps it; {runs}")
        return manifest


# ---- contents of a new dataset -------------------------------------------------------------------


def write_extras(folder: Path, tokenizer: Tokenizer, settings: Settings) -> None:
    """Write the files that a format needs besides the shards.

    Raises:
        UserError: The format does not know the tokenizer, or cannot hold its tokens.
    """
    file_header(settings.format, token_dtype(tokenizer.vocab_size).name, settings.shard_tokens)
    for name, content in extras(settings.format, tokenizer).items():
        write_atomic(folder / name, content)


def write_shards(
    folder: Path,
    tokenizer: Tokenizer,
    settings: Settings,
    pieces: Iterable[tuple[str, int, np.ndarray]],
) -> Manifest:
    """Write tokens to shards as they come, and return their manifest, which has no origin.

    Args:
        folder: Folder of the shards.
        tokenizer: Tokenizer of the tokens.
        settings: Settings of the dataset.
        pieces: Split, bytes of text, and tokens (n,) of each piece of text.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    limit = capacity(settings.format, settings.shard_tokens)
    text_bytes = Counter[str]()
    with closing(ShardWriter(folder, dtype, settings.format, limit)) as writer:
        for split, n_bytes, tokens in pieces:
            writer.write(split, tokens)
            text_bytes[split] += n_bytes
        splits = writer.finish()
    return Manifest(
        tokenizer=tokenizer.spec(),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype.name,
        source=TextOrigin("", text_bytes.total(), ""),
        settings={},
        splits=splits,
        format=settings.format,
        text_bytes=dict(text_bytes),
    )
