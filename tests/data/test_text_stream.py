"""Text that grows by tokens is the text of all tokens, at every cut, and ends at a stop text."""

import random

import pytest

from gpt_lightning.data.text_stream import TextStream
from gpt_lightning.data.tokenizers import build_tokenizer

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
        text, stop = "".join(rng.choices("abc", k=20)), stops[case % len(stops)]
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
