"""Shards are a split's tokens, however they came, and parts go to splits whole and in order."""

import hashlib
import itertools
import os
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from gpt_lightning.data.formats import Format, mapped
from gpt_lightning.data.manifest import Shard
from gpt_lightning.data.shards import write_shard
from gpt_lightning.data.tokenizers import build_tokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.files import file_sha256
from gpt_lightning.prepare import assemble as module
from gpt_lightning.prepare import document_index, sorted_runs
from gpt_lightning.prepare.assemble import Assembly
from gpt_lightning.prepare.document_index import shuffle_keys, split_of
from gpt_lightning.prepare.parts import PartWriter
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.shard_writer import SplitWriter, begin_dataset

UINT16 = np.dtype(np.uint16)


@pytest.mark.parametrize(
    ("file_format", "dtype"),
    [("npy", np.uint16), ("npy", np.uint32), ("llmc", np.uint16), ("nanogpt", np.uint16)],
)
@pytest.mark.parametrize("shard_tokens", [1, 7, 64, 100, 1000])
def test_shards_tile_what_was_appended(
    tmp_path: Path, file_format: str, shard_tokens: int, dtype: type
) -> None:
    tokens = np.arange(100, dtype=dtype)
    settings = Settings("gpt2", shard_tokens=shard_tokens, format=file_format)  # type: ignore[arg-type]
    writer = SplitWriter(tmp_path, "train", np.dtype(dtype), settings)
    for first, last in ((0, 0), (0, 1), (1, 30), (30, 95), (95, 100)):
        writer.append(tokens[first:last])
    shards = writer.close("")
    found = [mapped(tmp_path / shard.file, np.dtype(dtype).name, file_format) for shard in shards]
    assert np.concatenate(found).tolist() == tokens.tolist()
    assert [len(array) for array in found] == [shard.tokens for shard in shards]
    expected = [100] if file_format == "nanogpt" else [shard_tokens] * (100 // shard_tokens)
    assert [shard.tokens for shard in shards][: len(expected)] == expected[:100]
    for shard in shards:
        content = (tmp_path / shard.file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == shard.sha256
    assert len(list(tmp_path.iterdir())) == len(shards)


def test_a_streamed_shard_is_a_written_one(tmp_path: Path) -> None:
    (tmp_path / "streamed").mkdir()
    tokens = np.arange(1000, dtype=np.uint16)
    writer = SplitWriter(tmp_path / "streamed", "val", UINT16, Settings("gpt2"))
    writer.append(tokens)
    (streamed,) = writer.close("")
    assert streamed == write_shard(tmp_path / "val-00000.npy", tokens)
    assert (tmp_path / "streamed" / "val-00000.npy").read_bytes() == (
        tmp_path / "val-00000.npy"
    ).read_bytes()


# By the number of their split, with three tenths held out for val and for test.
TEXTS = {
    number: [
        text
        for text in map(str, range(100))
        if split_of(np.frombuffer(sha256(text.encode()).digest(), np.uint8)[None], 0.3, 0.3)[0]
        == number
    ]
    for number in range(3)
}


def part(path: Path, documents: list[tuple[list[int], int]]) -> str:
    """A part of documents, each with its tokens and the number of its split."""
    with path.open("wb") as file:
        writer = PartWriter(file)
        for tokens, split in documents:
            writer.add(TEXTS[split][0].encode(), np.array(tokens, UINT16))
        writer.complete(0, 0)
    return path.name


def assemble(
    parts: list[str], out: Path, settings: Settings, reverse: bool = False
) -> dict[str, list[Shard]]:
    """Assemble parts beside `out` into out/new, the shards in any order."""
    assembly = Assembly(out, out.parent, UINT16, settings)
    (out / "new").mkdir(parents=True)
    (out / "parts.txt").write_text("".join(f"{name}\n" for name in parts))
    plan = assembly.make_plan(parts, "identity")
    for run in assembly.missing_runs(plan):
        assembly.write_run(run)
    tasks, made = assembly.tasks(plan), {}
    for task in tasks[:: -1 if reverse else 1]:
        made[task] = assembly.write_shard(task)
        assembly.cut_runs(plan, made)
    assert [assembly.finished(task) for task in tasks] == [made[task] for task in tasks]
    assert assembly.replaced(plan, made, assembly.ends()) == len(parts)
    return assembly.shards(plan, made)


@pytest.mark.parametrize("file_format", ["npy", "nanogpt"])
@pytest.mark.parametrize("cuts", [[], [1], [3, 3, 7], list(range(1, 12))])
def test_documents_go_whole_and_in_order(
    tmp_path: Path, cuts: list[int], file_format: Format
) -> None:
    documents = [([i] * (1 + i % 4), i % 3) for i in range(12)]
    borders = [0, *cuts, 12]
    parts = [
        part(tmp_path / f"{k}.part", documents[first:last])
        for k, (first, last) in enumerate(itertools.pairwise(borders))
    ]
    out = tmp_path / "out"
    settings = Settings("gpt2", 0.3, 0.3, shard_tokens=5, format=file_format)
    splits = assemble(parts, out, settings, reverse=True)
    for number, split in enumerate(("train", "val", "test")):
        paths = [out / "new" / shard.file for shard in splits[split]]
        assert [file_sha256(path) for path in paths] == [shard.sha256 for shard in splits[split]]
        files = [mapped(path, "uint16", file_format) for path in paths]
        expected = [token for tokens, of in documents if of == number for token in tokens]
        assert np.concatenate(files).tolist() == expected


@pytest.mark.parametrize("val", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("test", [0.0, 0.2])
def test_the_last_share_at_a_border_of_documents(tmp_path: Path, val: float, test: float) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 40, 200)
    documents = [([i] * int(n), 0) for i, n in enumerate(lengths)]
    settings = Settings("gpt2", val, test, split_by="fraction")
    parts = [part(tmp_path / "a", documents[:77]), part(tmp_path / "b", documents[77:])]
    out = tmp_path / "out" / "new"
    splits = assemble(parts, out.parent, settings)
    found = {
        name: np.concatenate([mapped(out / shard.file, "uint16", "npy") for shard in shards])
        for name, shards in splits.items()
    }
    order = np.concatenate([found[name] for name in ("train", "val", "test") if name in found])
    assert order.tolist() == [token for tokens, _ in documents for token in tokens]
    sets = [set(tokens.tolist()) for tokens in found.values()]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 200  # no document is in two
    total = int(lengths.sum())
    assert abs(len(found["val"]) - val * total) < 40
    assert abs(len(found.get("test", [])) - test * total) < 40


def test_a_document_at_the_border_is_held_out(tmp_path: Path) -> None:
    # The border is at token 6 of 12: the document that begins there is the first of val, the one
    # that only reaches over it stays in train.
    for lengths, train in (([6, 6], 6), ([5, 3, 4], 8), ([7, 5], 7)):
        out = tmp_path / f"out{train}"
        settings = Settings("gpt2", 0.5, split_by="fraction")
        parts = [part(tmp_path / "a", [([1] * length, 0) for length in lengths])]
        splits = assemble(parts, out, settings)
        assert [shards[0].tokens for shards in splits.values()] == [train, 12 - train]


def test_a_split_without_documents(tmp_path: Path) -> None:
    parts = [part(tmp_path / "a", [([1, 2, 3], 0)])]
    with pytest.raises(UserError, match="the val split has 0 documents, 0 tokens, and needs 2"):
        assemble(parts, tmp_path / "out", Settings("gpt2", 0.3, 0.3))
    with pytest.raises(UserError, match="the train split has 0 documents"):
        assemble([], tmp_path / "none", Settings("gpt2"))


@pytest.mark.parametrize(
    ("tokenizer", "file_format", "said"),
    [
        ("cl100k_base", "llmc", "uint16"),
        ("byte", "nanogpt", "nanoGPT has the tokenizers char and gpt2"),
    ],
)
def test_formats_refuse_before_the_first_token(
    tmp_path: Path, tokenizer: str, file_format: str, said: str
) -> None:
    class Large:
        name, vocab_size, eot_token = "cl100k_base", 100_277, 100_257

    found = Large() if tokenizer == "cl100k_base" else build_tokenizer(tokenizer)
    settings = Settings(tokenizer, format=file_format)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=said):
        begin_dataset(tmp_path / "new", found, settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffle", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: int | None
) -> None:
    # Measured in what Python and numpy allocate: 24 parts of 2 MB need no more than six.
    import tracemalloc

    def peak(count: int) -> int:
        parts = [
            part(tmp_path / f"{i}.part", [([7] * 1000, 0)] * 500 + [([8] * 1000, 1)] * 500)
            for i in range(2)
        ]
        out = tmp_path / f"out{count}{shuffle}"
        settings = Settings("gpt2", 0.3, shard_tokens=10**7, shuffle=shuffle)
        tracemalloc.start()
        assemble(parts * (count // 2), out, settings)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sum(os.path.getsize(path) for path in (out / "new").iterdir()) > 2e6 * count
        return found

    monkeypatch.setattr(document_index, "RUN_DOCUMENTS", 2**11)
    monkeypatch.setattr(module, "CHUNK_TOKENS", 2**18)
    monkeypatch.setattr(sorted_runs, "CHUNK_TOKENS", 2**18)
    monkeypatch.setattr(document_index, "BUCKET_TOKENS", 2**18)
    few = peak(6)
    assert peak(24) < 1.3 * few  # the largest of more buckets is a little larger


# ---- shuffled documents --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "run", "runs"),
    [("RUN_DOCUMENTS", 10**6, 1), ("RUN_DOCUMENTS", 20, 3), ("RUN_TOKENS", 20, 3)],
)
@pytest.mark.parametrize("bucket", [10**6, 30])
def test_shuffled_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, run: int, runs: int, bucket: int
) -> None:
    monkeypatch.setattr(document_index, limit, run)
    monkeypatch.setattr(document_index, "BUCKET_TOKENS", bucket)
    documents = [([i] * (1 + i % 4), i % 2) for i in range(120)]
    parts = [part(tmp_path / "a", documents[:50]), part(tmp_path / "b", documents[50:])]
    order = np.argsort(shuffle_keys(7, 0, 120)).tolist()
    out, settings = tmp_path / "out", Settings("gpt2", 0.3, shard_tokens=11, shuffle=7)
    splits = assemble(parts, out, settings, reverse=True)
    assert len(list(out.glob("train-*.rows.npy"))) == runs
    assert (
        sum(path.stat().st_size for path in out.glob("*.tokens")) <= 5 * bucket
    )  # the first one is left
    for number, split in enumerate(("train", "val")):
        files = [mapped(tmp_path / "out" / "new" / s.file, "uint16", "npy") for s in splits[split]]
        own = [documents[i][0] for i in order if documents[i][1] == number]
        assert np.concatenate(files).tolist() == list(itertools.chain(*own))


def test_keys_of_a_shuffle() -> None:
    keys = shuffle_keys(1, 0, 100_000)
    assert len(np.unique(keys)) == 100_000
    assert shuffle_keys(1, 500, 10).tolist() == keys[500:510].tolist()
    assert shuffle_keys(2, 0, 10).tolist() != keys[:10].tolist()
    # Another sequence would change datasets that are half made.
    assert keys[0] == 18100690220309532888
    ranks = np.argsort(np.argsort(keys))
    # A permutation without memory: the correlation with the own order has a deviation of 0.003.
    assert abs(np.corrcoef(ranks, np.arange(100_000))[0, 1]) < 0.015


# ---- who is held out -----------------------------------------------------------------------------


def digests(texts: list[str]) -> np.ndarray:
    content = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    return np.frombuffer(content, np.uint8).reshape(-1, 32)


def test_shares_of_the_hash() -> None:
    found = split_of(digests([str(i) for i in range(20_000)]), 0.2, 0.1)
    shares = np.bincount(found) / len(found)
    # Standard deviations are 0.0028 and 0.0021.
    assert abs(shares[1] - 0.2) < 0.012
    assert abs(shares[2] - 0.1) < 0.009


def test_the_hash_is_known() -> None:
    # Another hash would move documents between the splits of datasets that are in use.
    known = [0, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1]
    texts = [f"document {i}" for i in range(12)]
    assert split_of(digests(texts), 0.5, 0.0).tolist() == known


def test_more_held_out_keeps_what_was_held_out() -> None:
    found = digests([str(i) for i in range(2000)])
    few, many = (split_of(found, share, 0.0) == 1 for share in (0.01, 0.1))
    assert few.any()
    assert many[few].all()


def test_nothing_held_out() -> None:
    lowest_and_highest = np.array([[0] * 32, [255] * 32], np.uint8)
    assert split_of(lowest_and_highest, 0.0, 0.0).tolist() == [0, 0]
    assert split_of(lowest_and_highest, 0.5, 0.499).tolist() == [1, 0]


def test_a_full_disk_is_named_as_the_reason(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            document_index.save_array(tmp_path / "a.npy", np.arange(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
