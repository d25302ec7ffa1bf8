"""HellaSwag: choose the ending of a text among four, by two protocols in one pass.

Items: hellaswag_val.jsonl of https://github.com/rowanz/hellaswag (Zellers et al. 2019).

build-nanogpt (https://github.com/karpathy/build-nanogpt, hellaswag.py): the text is `ctx`, a space
and the ending, tokenized apart. acc chooses the ending with the lowest sum of its tokens' losses,
acc_norm the one with the lowest mean.

lm-evaluation-harness (lm_eval/tasks/hellaswag): the text is `activity_label: ctx_a Ctx_b` and the
ending, both without the marks in brackets of WikiHow. acc chooses the ending with the highest
log-likelihood, acc_norm divides it by the number of the ending's characters.
"""

import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from gpt_lightning.errors import UserError
from gpt_lightning.evaluate.results import HARNESS, Item, Metric, accuracy
from gpt_lightning.evaluate.scoring import Request, Score, Scorer


def requests(item: Item, scorer: Scorer) -> Iterator[Request]:
    """Yield the endings by build-nanogpt's protocol, then those by the harness's."""
    endings, context = item["endings"], scorer.tokenizer.encode(item["ctx"])
    if not isinstance(endings, list) or int(item["label"]) not in range(len(endings)):
        raise UserError("expected a list of endings, and the index of one as label")
    for ending in endings:
        yield scorer.after(context, scorer.tokenizer.encode(f" {ending}"))
    query = item["activity_label"] + ": " + item["ctx_a"] + " " + item["ctx_b"].capitalize()
    for ending in endings:
        yield scorer.continuation(without_marks(query), f" {without_marks(ending)}")


def without_marks(text: str) -> str:
    """Return a text without WikiHow's marks, such as [header]; [title] ends a sentence."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def metrics(items: list[Item], scores: list[list[Score]]) -> list[Metric]:
    """Return the accuracies of both protocols."""
    hits = defaultdict(list)
    for item, found in zip(items, scores, strict=True):
        n = len(item["endings"])
        lengths = [score.n_tokens for score in found[:n]]
        lengths += [len(without_marks(ending)) for ending in item["endings"]]
        sums = np.array([score.log_prob for score in found])
        means = sums / np.maximum(lengths, 1e-9)  # an ending of marks alone is never chosen
        for name, values in ("acc_norm", means), ("acc", sums):
            for protocol, part in ("build-nanogpt", values[:n]), (HARNESS, values[n:]):
                hits[protocol, name].append(int(part.argmax()) == int(item["label"]))
    return [accuracy(*key, found) for key, found in hits.items()]
