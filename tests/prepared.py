"""Datasets and files of tokens for tests, made without the command line."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.manifest import Manifest, TextOrigin
from gpt_lightning.data.shards import TokenStream, write_stream
from gpt_lightning.data.tokenizers import build_tokenizer, token_dtype
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.sources import text_input
from gpt_lightning.prepare.target import Target
from gpt_lightning.prepare.text import prepare_one_text


def prepare_text(
    source: Path,
    out: Path,
    tokenizer: str,
    val_fraction: float = 0.1,
    test_fraction: float = 0.0,
    shard_tokens: int = 100_000_000,
    overwrite: bool = False,
) -> Manifest:
    """Prepare one text in `out`, as `gpt-lightning prepare` does, and return the manifest."""
    settings = Settings(tokenizer, val_fraction, test_fraction, shard_tokens)
    entry = text_input(source, source.name)
    return prepare_one_text(entry, Target(out, overwrite), settings)[0]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tokens_of(folder: Path, *splits: str) -> list[int]:
    """Return the tokens of the splits of a dataset, or of all."""
    manifest = load_manifest(folder)
    streams = [TokenStream(folder, manifest, split) for split in splits or manifest.splits]
    found = [stream.windows(np.array([0]), len(stream))[0] for stream in streams]
    TokenStream._map.cache_clear()  # each mapped shard is an open file
    return np.concatenate(found).tolist()  # type: ignore[no-any-return]


def naive(texts: Iterable[str]) -> list[int]:
    """Return the tokens of gpt2 for documents, each behind the end-of-text token."""
    gpt2 = build_tokenizer("gpt2")
    return [token for text in texts for token in (gpt2.eot_token, *gpt2.encode(text).tolist())]


def random_tokens(n: int, seed: int = 0, vocab: int = 50257) -> np.ndarray:
    """Return random tokens, uint16 (n,)."""
    return np.random.default_rng(seed).integers(0, vocab, n).astype(np.uint16)


def llmc_bytes(tokens: np.ndarray, **header: int) -> bytes:
    """Return a file of llm.c, whose header has other numbers where they are given."""
    fields = np.zeros(256, dtype=np.int32)
    fields[0] = header.get("magic", 20240520)
    fields[1] = header.get("version", 1)
    fields[2] = header.get("count", len(tokens))
    return fields.tobytes() + tokens.astype(np.uint16).tobytes()


def write_dataset(
    folder: Path, parts: Iterable[np.ndarray], vocab_size: int = 50257, **spec: str
) -> Path:
    """Write a dataset with a shard of each part in its train split; return its folder."""
    folder.mkdir(exist_ok=True)
    named = enumerate(parts)
    shards = tuple(
        write_stream(folder / f"train-{i:05d}.npy", [part], part.dtype) for i, part in named
    )
    dtype, source = token_dtype(vocab_size).name, TextOrigin("books", 123, "0")
    spec, splits = {"name": "x"} | spec, {"train": shards}
    Manifest(spec, vocab_size, dtype, source, {"seed": 7}, splits).save(folder)
    return folder


class Numbers:
    """A split whose token i is first + i: a batch tells where it was read."""

    digest = "numbers"
    is_remote = False

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = n, first

    def __len__(self) -> int:
        return self.n

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        assert not len(starts) or starts.max() + length <= self.n
        return self.first + starts[:, None] + np.arange(length)
