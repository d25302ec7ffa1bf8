"""Files of a tokenizer in Hugging Face's format, which AutoTokenizer of transformers loads."""

import itertools
import json
from typing import Any

from gpt_lightning.data.tokenizers import (
    END_OF_TEXT,
    LETTERS,
    ByteTokenizer,
    CharTokenizer,
    HuggingFaceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
)
from gpt_lightning.errors import UserError


def tokenizer_files(tokenizer: Tokenizer, block_size: int) -> dict[str, str]:
    """Return the files of a tokenizer, by name.

    Args:
        tokenizer: Tokenizer of a model.
        block_size: Context of the model.

    Raises:
        UserError: The tokenizer is another encoding of tiktoken, or the package tokenizers is
            missing.
    """
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"model_max_length": block_size, "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        if tokenizer.eot_token is not None:
            settings["eos_token"] = tokenizer.fast.id_to_token(tokenizer.eot_token)
        config = json.dumps(settings, indent=2) + "\n"
        return {"tokenizer.json": tokenizer.content, "tokenizer_config.json": config}
    if tokenizer.name not in ("char", "byte", "gpt2"):
        raise UserError(
            f"export writes char, byte, gpt2 and tokenizer.json, not the tokenizer {tokenizer.name}"
        )
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise UserError("tokenizers is missing: pip install 'gpt-lightning[hf]'") from error
    split = tokenizers.pre_tokenizers
    files = {}
    if isinstance(tokenizer, CharTokenizer):
        ids = {character: n for n, character in enumerate(tokenizer.characters)}
        fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
        fast.pre_tokenizer = split.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        fast.decoder = tokenizers.decoders.Fuse()
    else:
        merges: list[tuple[str, str]] = []
        if isinstance(tokenizer, TiktokenTokenizer):
            ranks = tokenizer.ranks()
            ids = {as_text(token): rank for token, rank in ranks.items()}
            merges = [merge_of(token, ranks) for token in ranks if len(token) > 1]
        else:
            assert isinstance(tokenizer, ByteTokenizer)
            ids = {as_text(bytes([byte])): byte for byte in range(256)}
        fast = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
        by_regex = isinstance(tokenizer, TiktokenTokenizer)  # GPT-2's, which ByteLevel has
        fast.pre_tokenizer = split.ByteLevel(add_prefix_space=False, use_regex=by_regex)
        fast.decoder = tokenizers.decoders.ByteLevel()
        if by_regex:
            fast.add_special_tokens([END_OF_TEXT])
            settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
            settings |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
            ids[END_OF_TEXT] = len(ids)
            files["vocab.json"] = json.dumps(ids, ensure_ascii=False)
            lines = "".join(f"{first} {second}\n" for first, second in merges)
            files["merges.txt"] = f"#version: 0.2\n{lines}"
    files["tokenizer.json"] = fast.to_str(pretty=True)
    files["tokenizer_config.json"] = json.dumps(settings, indent=2) + "\n"
    return files


def as_text(token: bytes) -> str:
    """Return bytes as GPT-2's vocabulary writes them, one character each."""
    return "".join(LETTERS[byte] for byte in token)


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[str, str]:
    """Return the two tokens that byte-pair encoding merges into a token.

    They are what remains of its bytes after all merges of a lower rank.
    """
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    first, second = parts
    return as_text(first), as_text(second)
