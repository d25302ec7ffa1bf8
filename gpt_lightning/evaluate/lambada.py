"""LAMBADA: the last word of a passage, by the protocol of the lm-evaluation-harness.

Items: lambada_test.jsonl, OpenAI's version of the test split (Paperno et al. 2016). The task is
`lambada_openai` of the harness: the text up to the last space is the context, and the last word
with its space is scored. acc is the share of items whose last word is the greedy continuation;
perplexity is per word, exp of the mean negative log-likelihood.
"""

from collections.abc import Iterator

from gpt_lightning.evaluate.results import HARNESS, Item, Metric, accuracy, exp
from gpt_lightning.evaluate.scoring import Request, Score, Scorer


def requests(item: Item, scorer: Scorer) -> Iterator[Request]:
    """Yield the last word of an item."""
    context, _, word = item["text"].rpartition(" ")
    yield scorer.continuation(context, f" {word}")


def metrics(items: list[Item], scores: list[list[Score]]) -> list[Metric]:
    """Return accuracy and perplexity."""
    nats = -sum(score.log_prob for (score,) in scores)
    return [
        accuracy(HARNESS, "acc", [score.greedy for (score,) in scores]),
        Metric(HARNESS, "perplexity", exp(nats / len(scores))),
    ]
