"""WikiText-2: perplexity of Wikipedia's pages, by the protocol of the lm-evaluation-harness.

Items: the pages of the raw test split (Merity et al. 2016). The task is `wikitext` of the harness:
the tokenization of the corpus is undone by the rules of wikitext.yaml, the page's tokens follow an
end-of-text token, each is scored once, and words and bytes are counted in the page as it was before
these rules.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import yaml

from gpt_lightning.evaluate.results import HARNESS, Item, Metric, exp
from gpt_lightning.evaluate.scoring import Request, Score, Scorer

RULES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TITLE = re.compile(r"= (?!=).*(?<!=) =")  # of a page; its sections have = = NAME = =


def pages(text: str) -> list[str]:
    """Return the pages of a file such as wiki.test.raw; each begins with the line of its title."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if TITLE.fullmatch(line.strip()):
            found.append([])
        found[-1].append(line)
    return [page for page in map("\n".join, found) if page.strip()]


def requests(item: Item, scorer: Scorer) -> Iterator[Request]:
    """Yield a page, all of which is scored."""
    page = item["page"]
    for pattern, replacement in RULES:
        page = re.sub(pattern, replacement, page)
    yield scorer.after(np.array([], int), scorer.tokenizer.encode(page))


def metrics(items: list[Item], scores: list[list[Score]]) -> list[Metric]:
    """Return perplexities by word and byte."""
    nats = -sum(score.log_prob for (score,) in scores)
    per_word = nats / sum(len(re.split(r"\s+", item["page"])) for item in items)
    per_byte = nats / sum(len(item["page"].encode()) for item in items)
    return [
        Metric(HARNESS, "word_perplexity", exp(per_word)),
        Metric(HARNESS, "byte_perplexity", exp(per_byte)),
        Metric(HARNESS, "bits_per_byte", per_byte / math.log(2)),
    ]
