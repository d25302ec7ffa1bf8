"""Perplexity of any text or prepared dataset, each token scored once.

Windows follow each other without overlap; or a window slides by `stride` tokens, so that each token
after the first block_size ones has at least block_size - stride tokens of context. A text follows
the tokenizer's start of a text. A dataset's split is a part of a longer text: its first token is
context only, as in `gpt-lightning validate`.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.errors import UserError
from gpt_lightning.evaluate.results import Item, Metric, exp
from gpt_lightning.evaluate.scoring import Request, Score, Scorer
from gpt_lightning.files import explained


def read(
    scorer: Scorer, source: str, split: str, stride: int | None, limit: int | None, data: str
) -> tuple[Item, str]:
    """Return the item of the task, tokens and their text, and the part that it is of the source.

    Args:
        scorer: Scorer of the model.
        source: Text file in UTF-8; or a prepared dataset: its folder, its name in `data`, or a URL.
        split: Split of a dataset.
        stride: Tokens that each window but the first one scores; None: block_size.
        limit: Number of windows; None: all.
        data: Folder of prepared datasets.

    Raises:
        UserError: The text is missing, empty, not UTF-8 or outside the tokenizer's vocabulary, the
            dataset was made with another tokenizer, or the stride is above block_size.
    """
    T, tokenizer = scorer.model.config.block_size, scorer.tokenizer
    if (stride or 1) > T:
        raise UserError(f"--stride {stride} is above the model's block_size: give 1 to {T}")
    if Path(source).is_file():
        with explained("read", source, "give the path of a text file"):
            content = Path(source).read_bytes()
        try:
            tokens = scorer.after(np.array([], int), tokenizer.encode(content.decode())).tokens
        except ValueError as error:  # not UTF-8, or a character outside the vocabulary
            raise UserError(f"{source} is no text for {tokenizer.name}: {error}") from error
        n_tokens = len(tokens)
    else:
        dataset = TokenDataset(source, Path(data), cache_limit_gb=20.0)
        if dataset.manifest.tokenizer != (spec := tokenizer.spec()):
            raise UserError(
                f"{source} was made with {dataset.manifest.tokenizer['name']}, the model's tokens "
                f"are those of {spec['name']} (or another vocabulary of it): give a text file"
            )
        stream = dataset.stream(split, 1)
        n_tokens = len(stream)
    longest = n_tokens if limit is None else min(n_tokens, 1 + T + (limit - 1) * (stride or T))
    tokens = tokens[:longest] if Path(source).is_file() else stream.windows(np.zeros(1), longest)[0]
    text = tokenizer.decode(tokens[1:][tokens[1:] != tokenizer.eot_token])
    if not text:
        raise UserError(f"{source} is empty: give it some text")
    part = f"the first {longest - 1:,} of {n_tokens - 1:,} tokens" if longest < n_tokens else ""
    return {"tokens": tokens, "text": text, "stride": stride}, part


def requests(item: Item, scorer: Scorer) -> Iterator[Request]:
    """Yield the tokens, all but the first of which are scored."""
    yield Request(item["tokens"], 1, item["stride"])


def metrics(items: list[Item], scores: list[list[Score]]) -> list[Metric]:
    """Return loss, perplexity, and bits per byte and character of the text without separators."""
    (item,), ((score,),) = items, scores
    rule = "no overlap" if item["stride"] is None else f"stride {item['stride']}"
    per_token = -score.log_prob / score.n_tokens
    bits = -score.log_prob / math.log(2)
    return [
        Metric(rule, "perplexity", exp(per_token)),
        Metric(rule, "nats_per_token", per_token),
        Metric(rule, "bits_per_byte", bits / len(item["text"].encode())),
        Metric(rule, "bits_per_character", bits / len(item["text"])),
    ]
