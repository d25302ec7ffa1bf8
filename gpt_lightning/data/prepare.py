"""`gpt-lightning prepare`: a text becomes a folder of shards and a manifest, or nothing at all."""

import dataclasses
import hashlib
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.corpora import CORPORA, corpus_file, nearest
from gpt_lightning.data.files import explained, move_into_place, sync_folder, workspace
from gpt_lightning.data.shards import MANIFEST, Manifest, Shard, Source, write_shard
from gpt_lightning.data.tokenizers import Tokenizer, build_tokenizer, token_dtype
from gpt_lightning.errors import UserError

MIN_TOKENS = 2  # one to read and one to predict


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of a dataset beside the text.

    Raises:
        UserError: fractions that leave no training text, or shards of no token.
    """

    tokenizer: str
    val_fraction: float = 0.1
    test_fraction: float = 0.0
    shard_tokens: int = 100_000_000

    def __post_init__(self) -> None:
        for key in ("val_fraction", "test_fraction"):
            if not 0 <= getattr(self, key) < 1:  # also refuses nan
                raise UserError(f"{key} is {getattr(self, key)}: it must be at least 0 and below 1")
        if _exact(self.val_fraction) + _exact(self.test_fraction) >= 1:
            raise UserError(
                f"val_fraction {self.val_fraction} and test_fraction {self.test_fraction} leave "
                "nothing to train on: their sum must be below 1"
            )
        if self.shard_tokens < 1:
            raise UserError(f"shard_tokens is {self.shard_tokens}: it must be at least 1")


def prepare(
    source: str,
    tokenizer: str = "gpt2",
    out: str | None = None,
    data_dir: str = "data",
    val_fraction: float = 0.1,
    test_fraction: float = 0.0,
    shard_tokens: int = 100_000_000,
    overwrite: bool = False,
) -> None:
    """Turns a text into a dataset: shards of tokens and a manifest.

    Args:
        source: A UTF-8 text file, or a corpus: tinyshakespeare, shakespeare-plays or
            shakespeare-plays-all.
        tokenizer: char, byte, or an encoding of tiktoken such as gpt2.
        out: Folder of the dataset; null: <data_dir>/<corpus or file's stem>-<tokenizer>.
        data_dir: Where corpora and datasets lie.
        val_fraction: Share of the characters, at the end, that is held out for validation.
        test_fraction: Share of the characters, after those for validation, that is held out for
            testing.
        shard_tokens: Most tokens that a file holds.
        overwrite: Replace a dataset that was made from another text or with other settings.
    """
    settings = Settings(tokenizer, val_fraction, test_fraction, shard_tokens)
    folder = Path(out) if out else dataset_folder(source, tokenizer, data_dir, val_fraction)
    text_file = _source_file(source, Path(data_dir))
    begun_s = time.perf_counter()
    manifest, made = _prepare(text_file, _name(source), folder, settings, overwrite)
    if not made:
        print(f"{folder} is already prepared from this text with these settings")
    _print_summary(folder, manifest, time.perf_counter() - begun_s if made else None)


def prepare_source(
    source: str,
    tokenizer: str = "gpt2",
    data_dir: str | Path = "data",
    val_fraction: float = 0.1,
    test_fraction: float = 0.0,
    shard_tokens: int = 100_000_000,
) -> Manifest:
    """As `prepare`, into dataset_folder(source, tokenizer, data_dir); prints no table.

    Raises:
        UserError: as prepare_text, or no file and no corpus of that name.
    """
    settings = Settings(tokenizer, val_fraction, test_fraction, shard_tokens)
    folder = dataset_folder(source, tokenizer, data_dir, val_fraction)
    text_file = _source_file(source, Path(data_dir))
    return _prepare(text_file, _name(source), folder, settings, overwrite=False)[0]


def prepare_text(
    source: Path,
    out: Path,
    tokenizer: str,
    val_fraction: float = 0.1,
    test_fraction: float = 0.0,
    shard_tokens: int = 100_000_000,
    overwrite: bool = False,
) -> Manifest:
    """Tokenizes a text file into a folder that appears complete or not at all.

    The text is read as bytes and kept as it is: no newline is translated, a byte order mark is a
    character, and text that looks like a special token is text. It is held in memory as a whole,
    at ten bytes a character for ASCII text and char, less for the others (measured).

    Borders of the splits are counted in characters, as nanoGPT does: training text first, then
    validation, then test. A folder that was made from the same text with the same settings is left
    as it is.

    Args:
        source: the text, UTF-8.
        out: the dataset's folder.
        tokenizer: char, byte, or an encoding of tiktoken.
        val_fraction: share of the characters for validation.
        test_fraction: share of the characters for testing, at the end.
        shard_tokens: most tokens a shard.
        overwrite: replace another dataset in `out`.

    Raises:
        UserError: a text or settings that make no dataset, a folder that holds something else, or
            a disk that does not take it.
    """
    settings = Settings(tokenizer, val_fraction, test_fraction, shard_tokens)
    return _prepare(source, source.name, out, settings, overwrite)[0]


def dataset_folder(
    source: str, tokenizer: str, data_dir: str | Path = "data", val_fraction: float = 0.1
) -> Path:
    """Where a corpus or text file lies when it is prepared and no folder is named.

    Another share than a tenth for validation is another folder, `...-val0` for none.
    """
    split = "" if val_fraction == 0.1 else f"-val{val_fraction:g}"
    return Path(data_dir) / f"{Path(_name(source)).stem}-{tokenizer}{split}"


def _name(source: str) -> str:
    return source if source in CORPORA else Path(source).name


def _source_file(source: str, data_dir: Path) -> Path:
    if source in CORPORA:
        return corpus_file(source, data_dir)
    if not Path(source).exists():
        raise UserError(
            f"{source}: no such file, and no corpus of that name; "
            f"give a text file's path or one of {', '.join(nearest(source))}"
        )
    return Path(source)


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


# ---- what there is already ---------------------------------------------------------------------


def _prepare(
    source: Path, name: str, out: Path, settings: Settings, overwrite: bool
) -> tuple[Manifest, bool]:
    """The dataset in `out`, and whether it was made now."""
    text, origin = _read(source, name)
    if out.exists():
        there = _existing(out, origin, settings, overwrite)
        if there is not None:
            return there, False
    with explained("write", out), workspace(out.resolve()) as folder:
        manifest = _write(folder / "new", text, source, origin, settings)
        if not move_into_place(folder, out.resolve(), overwrite):
            # Another process was faster: its dataset must be the one that we made.
            there = _existing(out, origin, settings, overwrite=False)
            assert there is not None
            return there, False
    return manifest, True


def _existing(out: Path, origin: Source, settings: Settings, overwrite: bool) -> Manifest | None:
    """The dataset in `out` if it is the wanted one, None if it may be replaced."""
    if not out.is_dir():
        raise UserError(f"{out} is a file: choose another --out")
    entries = sorted(path.name for path in out.iterdir())
    if not entries:
        return None
    if MANIFEST not in entries:
        raise UserError(f"{out} holds {entries[0]} but no {MANIFEST}: choose another --out")
    try:
        manifest = Manifest.load(out)
    except UserError:
        if not overwrite:
            raise
        differences = ["damage"]
    else:
        differences = _differences(manifest, origin, settings)
    if not differences:
        return manifest
    if not overwrite:
        raise UserError(
            f"{out} was prepared with {'; '.join(differences)}: "
            f"replace it with `gpt-lightning prepare SOURCE --out {out} --overwrite true`, "
            "or choose another folder"
        )
    _refuse_foreign(out, entries)
    return None


def _refuse_foreign(out: Path, entries: list[str]) -> None:
    """What `prepare` did not make, it does not delete."""
    foreign = [name for name in entries if name != MANIFEST and not name.endswith(".npy")]
    if foreign:
        raise UserError(
            f"{out / foreign[0]} is no part of a dataset and would be deleted with {out}: "
            "move it away, or choose another --out"
        )


def _differences(manifest: Manifest, origin: Source, settings: Settings) -> list[str]:
    found: dict[str, Any] = {"SHA-256 of the text": manifest.source.sha256, **manifest.settings}
    wanted = {"SHA-256 of the text": origin.sha256, **dataclasses.asdict(settings)}
    return [
        f"{key} {found.get(key)}, not {value}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]


# ---- from text to shards -----------------------------------------------------------------------


def _read(source: Path, name: str) -> tuple[str, Source]:
    try:
        content = source.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {source}: {error.strerror}; give the path of a text file"
        ) from error
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source} is not UTF-8: byte 0x{content[error.start]:02x} at offset "
            f"{error.start:,}; convert it, for example with iconv -t utf-8"
        ) from error
    if not text.strip():
        raise UserError(f"{source} is {'only white space' if text else 'empty'}: give it some text")
    return text, Source(name, len(content), hashlib.sha256(content).hexdigest())


def split_borders(n: int, val_fraction: float, test_fraction: float) -> dict[str, tuple[int, int]]:
    """First and last + 1 character of each split that n characters fall into.

    The fractions are taken as the decimals that were written, so that no rounding moves a border:
    nanoGPT's int(n * 0.9) comes out, and 1 - 0.9 of ten characters is one.
    """
    val, test = _exact(val_fraction), _exact(test_fraction)
    train_end, val_end = int(n * (1 - val - test)), int(n * (1 - test))
    borders = {"train": (0, train_end), "val": (train_end, val_end), "test": (val_end, n)}
    wanted = {"train": True, "val": val > 0, "test": test > 0}
    return {split: border for split, border in borders.items() if wanted[split]}


def _exact(fraction: float) -> Fraction:
    return Fraction(str(fraction))


def _write(folder: Path, text: str, source: Path, origin: Source, settings: Settings) -> Manifest:
    tokenizer = build_tokenizer(settings.tokenizer, text)
    if tokenizer.vocab_size < 2:
        raise UserError(
            f"{source} is made of one character, {text[0]!r}, which leaves nothing to predict: "
            "give another text"
        )
    folder.mkdir()
    splits = {}
    try:
        borders = split_borders(len(text), settings.val_fraction, settings.test_fraction)
        for split, (first, last) in borders.items():
            tokens = _tokens(tokenizer, text[first:last], split)
            splits[split] = _write_split(folder, split, tokens, settings.shard_tokens)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    manifest = Manifest(
        tokenizer=tokenizer.spec(),
        vocab_size=tokenizer.vocab_size,
        dtype=token_dtype(tokenizer.vocab_size).name,
        source=origin,
        settings=dataclasses.asdict(settings),
        splits=splits,
    )
    manifest.save(folder)
    sync_folder(folder)
    return manifest


def _tokens(tokenizer: Tokenizer, text: str, split: str) -> np.ndarray:
    tokens = tokenizer.encode(text)
    if len(tokens) < MIN_TOKENS:
        raise UserError(
            f"the {split} split has {len(text)} characters, {len(tokens)} tokens, and needs "
            f"{MIN_TOKENS}: give more text or change val_fraction and test_fraction"
        )
    assert int(tokens.max()) < tokenizer.vocab_size, tokenizer.name
    return tokens


def _write_split(
    folder: Path, split: str, tokens: np.ndarray, shard_tokens: int
) -> tuple[Shard, ...]:
    starts = range(0, len(tokens), shard_tokens)
    return tuple(
        write_shard(folder / f"{split}-{index:05d}.npy", tokens[start : start + shard_tokens])
        for index, start in enumerate(starts)
    )
