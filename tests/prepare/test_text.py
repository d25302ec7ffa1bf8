"""One text in pieces: nothing lost at any border, and the same pieces however it is read."""

import random
from pathlib import Path

import numpy as np
import pytest
from prepared import prepare_text, tokens_of

from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.tokenizers import tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.prepare import text as text_module
from gpt_lightning.prepare.command import prepare
from gpt_lightning.prepare.text import Stream, Survey, decoded, pieces

TEXT = (
    "The quick \u00e9t\u00e9 \U0001f600\r\n jumps\n\nover <|endoftext|>\ufeff\x00 the lazy dog" * 30
)


def chunks(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(text)), 20))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]


@pytest.mark.parametrize("limit", [1, 2, 7, 30, 300, 10**6])
def test_pieces_tile_the_text_however_it_comes(limit: int) -> None:
    expected = list(pieces(iter([TEXT]), limit))
    assert "".join(expected) == TEXT
    assert max(map(len, expected)) <= limit
    for seed in range(5):
        assert list(pieces(iter(chunks(TEXT, seed)), limit)) == expected


def test_pieces_end_at_newlines_or_before_spaces() -> None:
    assert list(pieces(iter(["one two\nthree four five six"]), 12)) == [
        "one two\n",
        "three four",
        " five six",
    ]
    assert list(pieces(iter(["abcdefgh"]), 3)) == ["abc", "def", "gh"]
    assert list(pieces(iter([" bcdefgh"]), 3)) == [" bc", "def", "gh"]  # never an empty one
    assert list(pieces(iter([]), 3)) == []


def test_characters_are_taken_in_order() -> None:
    for seed in range(5):
        source = Stream(iter(chunks(TEXT, seed)))
        taken = ["".join(source.take(n)) for n in (0, 1, 500, 0, 37, len(TEXT))]
        assert [len(part) for part in taken[:-1]] == [0, 1, 500, 0, 37]
        assert "".join(taken) == TEXT


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 5, 64, 10**6])
def test_decoding_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(text_module, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "a.txt"
    path.write_text(TEXT, "utf-8-sig", newline="")
    assert "".join(decoded(path, "strict", Survey())) == TEXT
    path.write_bytes(TEXT.encode())
    survey = Survey()
    assert "".join(decoded(path, "strict", survey)) == TEXT
    assert (survey.n_bytes, survey.n_characters) == (len(TEXT.encode()), len(TEXT))
    # Where the damage is does not depend on the chunks either.
    damaged = b"caf\xc3\xa9 \xf0\x9f\x98 \xff\xef\xbf\xbd end\xc3"
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"byte 0xf0 at offset 6; .*--errors replace"):
        list(decoded(path, "strict", Survey()))
    survey = Survey()
    assert "".join(decoded(path, "replace", survey)) == damaged.decode(errors="replace")
    assert survey.replaced == 3  # one U+FFFD was in the text


@pytest.mark.parametrize("tokenizer", ["char", "byte", "gpt2"])
def test_a_text_of_many_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(TEXT.encode())
    whole = prepare_text(source, tmp_path / "whole", tokenizer, 0.2, 0.1)
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(text_module.pieces, "__defaults__", (50,))
    monkeypatch.setattr(text_module, "CHUNK_BYTES", 17)
    cut = prepare_text(source, tmp_path / "cut", tokenizer, 0.2, 0.1)
    if tokenizer != "gpt2":  # whose tokens may cross the border of a piece
        assert cut == whole
    tokens = np.array(tokens_of(tmp_path / "cut"))
    assert tokenizer_from_spec(cut.tokenizer).decode(tokens) == TEXT


def test_damage_is_replaced_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"good \xff bad \xfe text\n" * 20)
    prepare(str(source), "byte", out=str(tmp_path / "out"), errors="replace")
    assert "a.txt: 40 times bytes that are not UTF-8 became U+FFFD" in capsys.readouterr().out
    assert load_manifest(tmp_path / "out").settings["errors"] == "replace"
    with pytest.raises(UserError, match="errors skip is for documents"):
        prepare(str(source), "byte", out=str(tmp_path / "other"), errors="skip")


def test_a_text_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.txt"
    source.write_text("before " * 50)
    survey = text_module.survey_text

    def survey_and_change(*args: object) -> Survey:
        found = survey(*args)  # type: ignore[arg-type]
        source.write_text("behind " * 50)
        return found

    monkeypatch.setattr(text_module, "survey_text", survey_and_change)
    with pytest.raises(UserError, match=r"a\.txt: the file changed while it was read"):
        prepare_text(source, tmp_path / "out", "byte")
    assert list(tmp_path.iterdir()) == [source]
