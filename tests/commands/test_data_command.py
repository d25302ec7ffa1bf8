import re
from pathlib import Path

import numpy as np
import pytest
from prepared import write_dataset

from gpt_lightning.cli import main
from gpt_lightning.commands.data import data, visible
from gpt_lightning.data.dataset import document_lengths, load_manifest
from gpt_lightning.data.manifest import Manifest
from gpt_lightning.data.tokenizers import CharTokenizer, build_tokenizer

EOT = 50256


def save(folder: Path, tokens: np.ndarray, cuts: list[int], spec: dict[str, str]) -> Manifest:
    vocab_size = 50257 if spec["name"] == "gpt2" else len(spec.get("characters", "x" * 99))
    parts = np.split(tokens.astype(np.uint16), cuts)
    return load_manifest(write_dataset(folder, parts, vocab_size, **spec))


def corpus(lengths: list[int], before: bool) -> np.ndarray:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, EOT, n) for n in lengths]
    order = ([EOT], None) if before else (None, [EOT])
    return np.concatenate([p for d in documents for p in (order[0], d, order[1]) if p is not None])


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("n_shards", "piece_tokens"), [(1, 2), (2, 2**21), (7, 50)])
def test_lengths_are_the_documents_whatever_the_shards_and_pieces(
    tmp_path, monkeypatch, before, n_shards, piece_tokens
):
    monkeypatch.setattr("gpt_lightning.data.shards.PIECE_TOKENS", piece_tokens)
    rng = np.random.default_rng(n_shards)
    lengths = [1, 0, 63, 64, 65, *rng.integers(0, 200, 30).tolist()]
    tokens = corpus(lengths, before)
    cuts = np.sort(rng.choice(np.arange(1, len(tokens)), n_shards - 1, replace=False)).tolist()
    manifest = save(tmp_path, tokens, cuts, {"name": "gpt2"})
    found = document_lengths(tmp_path, manifest, "train", EOT, lambda _: None)
    expected = sorted(n for n in lengths if n)  # an empty document is none
    assert sorted(found.elements()) == expected
    assert found.mean() == pytest.approx(np.mean(expected))
    assert found.median() == np.quantile(expected, 0.5, method="inverted_cdf")


def test_table_and_peek(tmp_path, monkeypatch, capsys):
    tokenizer = build_tokenizer("gpt2")
    texts = ["The first document.", "And a second one, which is longer.", "Third."]
    documents = [tokenizer.encode(text) for text in texts]
    tokens = np.concatenate([part for d in documents for part in ([EOT], d)])
    manifest = save(tmp_path / "books", tokens, [5, 9], {"name": "gpt2"})
    monkeypatch.chdir(tmp_path)
    assert main(["data", "inspect", "books"]) == 0
    said = capsys.readouterr().out
    for part in ("npy", "gpt2, 50,257 tokens", "uint16", "books, 123 bytes", "seed 7"):
        assert part in said
    longest = max(map(len, documents))
    assert re.search(rf"^train +3 +{len(tokens)} +3 .* {longest}$", said, re.MULTILINE)
    for shard in manifest.shards():
        assert re.search(rf"^{shard.file} +{shard.tokens} +{shard.sha256}$", said, re.MULTILINE)
    assert "".join(f"<|endoftext|>{text}" for text in texts) in said


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (3, 7), (40, 1000)])
def test_a_peek_is_the_text_at_the_offset(tmp_path, capsys, offset, length):
    text = "to be, or not to be: that is the question"
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    save(tmp_path, tokenizer.encode(text), [2, 20], tokenizer.spec())
    data("inspect", str(tmp_path), offset=offset, length=length, split="train")
    said = capsys.readouterr().out
    assert said.endswith(f":\n{text[offset : offset + length]}\n")
    assert "has no end-of-text token: documents are unknown" in said


def test_without_a_tokenizer_tokens_are_shown_as_numbers(tmp_path, capsys):
    save(tmp_path, np.arange(90), [], {"name": "none"})
    data("inspect", str(tmp_path), offset=5, length=3)
    said = capsys.readouterr().out
    assert said.endswith(":\n5 6 7\n")
    assert "tokens as numbers only" in said


def test_another_programs_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus([5, 6, 7], before=False).astype(np.uint16).tofile(tmp_path / "train.bin")
    data("inspect", str(tmp_path), length=0)
    said = capsys.readouterr().out
    assert "nanogpt" in said
    assert re.search(r"^train +1 +21 +3 +6\.0 +6 +7$", said, re.MULTILINE)


def test_many_shards_are_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, np.zeros(50), list(range(2, 50, 2)), {"name": "none"})
    data("inspect", str(tmp_path))
    said = capsys.readouterr().out
    assert "train-00019.npy" in said
    assert "train-00020.npy" not in said
    assert "and 5 more" in said


def test_a_terminal_does_not_obey_a_dataset() -> None:
    assert visible("a\n\tb \u00e9 \x1b[2J\x07\x9b") == "a\n\tb \u00e9 \\x1b[2J\\x07\\x9b"
