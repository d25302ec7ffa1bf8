"""One text in pieces: nothing lost at any border, and the same pieces however it is read."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prepared import prepare_text, tokens_of

from gpt_lightning.data.tokenizers import tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.prepare import text as text_module
from gpt_lightning.prepare.command import prepare
from gpt_lightning.prepare.text import pieces

TEXT = (
    "The quick \u00e9t\u00e9 \U0001f600\r\n jumps\n\nover <|endoftext|>\ufeff\x00 the lazy dog" * 30
)


def chunks(text: str, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(text)), 20))
    return iter([text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)])


@pytest.mark.parametrize("limit", [1, 2, 7, 30, 300, 10**6])
def test_pieces_tile_the_splits_however_the_text_comes(limit: int) -> None:
    lengths = {"none": 0, "one": 1, "train": 500, "val": 37, "test": len(TEXT) - 538}
    expected = list(pieces(iter([TEXT]), lengths, limit))
    begin = 0
    for split, n in lengths.items():
        own = [piece for name, piece in expected if name == split]
        assert "".join(own) == TEXT[begin : begin + n]
        begin += n
    assert max(len(piece) for _, piece in expected) <= limit
    for seed in range(5):
        assert list(pieces(chunks(TEXT, seed), lengths, limit)) == expected


def test_pieces_end_at_newlines_or_before_spaces() -> None:
    for text, limit, expected in [
        ("one two\nthree four five six", 12, ["one two\n", "three four", " five six"]),
        ("abcdefgh", 3, ["abc", "def", "gh"]),
        (" bcdefgh", 3, [" bc", "def", "gh"]),  # never an empty one
        ("", 3, []),
    ]:
        found = pieces(iter([text]), {"train": len(text)}, limit)
        assert [piece for _, piece in found] == expected


@pytest.mark.parametrize("tokenizer", ["char", "byte", "gpt2"])
def test_a_text_of_many_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(TEXT.encode())
    whole = prepare_text(source, tmp_path / "whole", tokenizer, 0.2, 0.1)
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(text_module, "CHUNK_BYTES", 17)
    made = prepare_text(source, tmp_path / "cut", tokenizer, 0.2, 0.1)
    if tokenizer != "gpt2":  # whose tokens may cross the border of a piece
        assert made == whole
    tokens = np.array(tokens_of(tmp_path / "cut"))
    assert tokenizer_from_spec(made.tokenizer).decode(tokens) == TEXT


def test_a_mark_at_the_begin_is_no_text(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text(TEXT, "utf-8-sig", newline="")
    made = prepare_text(source, tmp_path / "out", "byte")
    tokens = np.array(tokens_of(tmp_path / "out"))
    assert tokenizer_from_spec(made.tokenizer).decode(tokens) == TEXT


def test_damage_is_named_by_its_line(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"good text\n" * 200_000 + b"caf\xe9\n")
    with pytest.raises(
        UserError, match=r"a\.txt, line 200,001 is not UTF-8: convert it with iconv"
    ):
        prepare(str(source), "byte", out=str(tmp_path / "out"))
    with pytest.raises(UserError, match="errors is for documents"):
        prepare(str(source), "byte", out=str(tmp_path / "out"), errors="skip")


def test_a_text_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.txt"
    source.write_text("before " * 50)
    real = text_module.write_extras

    def write_and_change(*given: object) -> None:
        real(*given)  # type: ignore[arg-type]
        source.write_text("behind " * 50)

    monkeypatch.setattr(text_module, "write_extras", write_and_change)
    with pytest.raises(UserError, match=r"a\.txt: the file changed while it was read"):
        prepare_text(source, tmp_path / "out", "byte")
    assert list(tmp_path.iterdir()) == [source]
