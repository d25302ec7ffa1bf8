"""Tasks by name: their protocols, items and results, beside the published figures of GPT-2.

A task is a class here with `requests`, the texts that a model scores for an item, and `metrics`, an
entry of TASKS, and one of tasks.yaml: the file of the items, which is found in a folder, or
downloaded once and checked by its digest, and published figures. Lambada is the shortest example.
"""

import dataclasses
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch.distributed as dist

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.evaluate.scoring import Request, Score, Scorer
from gpt_lightning.files import Fields, explained, file_sha256, locked, write_atomic, yaml_beside
from gpt_lightning.model.gpt import SIZES, GPTConfig
from gpt_lightning.parsing import pick
from gpt_lightning.remote.files import fetch_file
from gpt_lightning.tables.rows import Console, row_type

HARNESS = "lm-evaluation-harness"
TITLE = re.compile(r"= (?!=).*(?<!=) =")  # title of a page; its sections have = = NAME = =
# names, url, sha256 of the items' file, and published figures, by task
FILES: Fields = yaml_beside(__file__)
Scores = list[list[Score]]  # scores of the requests, for each item


@dataclass(frozen=True)
class Metric:
    """One number of a task.

    Attributes:
        protocol: Name of the rules that it was computed by.
        name: Name of the number under these rules.
        value: The number; an accuracy is a fraction.
        stderr: Standard error; None where the protocol has none.
    """

    protocol: str
    name: str
    value: float
    stderr: float | None = None


def accuracy(protocol: str, name: str, hits: Sequence[bool]) -> Metric:
    """Return the share of hits, and its standard error from the sample's standard deviation."""
    stderr = None
    if len(hits) > 1:
        stderr = statistics.stdev(map(float, hits)) / math.sqrt(len(hits))
    return Metric(protocol, name, statistics.fmean(hits), stderr)


def exp(nats: float) -> float:
    """Return the perplexity of a mean loss; infinite where a float cannot hold it."""
    return math.exp(nats) if nats < 700 else math.inf


class HellaSwag:
    """Choose the ending of a text among four, by two protocols in one pass.

    Items: hellaswag_val.jsonl of https://github.com/rowanz/hellaswag (Zellers et al. 2019).

    build-nanogpt (https://github.com/karpathy/build-nanogpt, hellaswag.py): the text is `ctx`, a
    space and the ending, tokenized apart. acc chooses the ending with the lowest sum of its tokens'
    losses, acc_norm the one with the lowest mean.

    lm-evaluation-harness (lm_eval/tasks/hellaswag): the text is `activity_label: ctx_a Ctx_b` and
    the ending, both without the marks in brackets of WikiHow. acc chooses the ending with the
    highest log-likelihood, acc_norm divides it by the number of the ending's characters.
    """

    def requests(self, item: Fields, scorer: Scorer) -> Iterator[Request]:
        """Yield the endings by build-nanogpt's protocol, then those by the harness's."""
        endings, context = item["endings"], scorer.tokenizer.encode(item["ctx"])
        if not isinstance(endings, list) or int(item["label"]) not in range(len(endings)):
            raise UserError("expected a list of endings, and the index of one as label")
        for ending in endings:
            yield scorer.after(context, scorer.tokenizer.encode(f" {ending}"))
        query = item["activity_label"] + ": " + item["ctx_a"] + " " + item["ctx_b"].capitalize()
        for ending in endings:
            yield scorer.continuation(without_marks(query), f" {without_marks(ending)}")

    def metrics(self, items: list[Fields], scores: Scores) -> list[Metric]:
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
                    hits[protocol, name].append(part.argmax() == int(item["label"]))
        return [accuracy(*key, found) for key, found in hits.items()]


def without_marks(text: str) -> str:
    """Return a text without WikiHow's marks, such as [header]; [title] ends a sentence."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


class Lambada:
    """Predict the last word of a passage, by the protocol of the lm-evaluation-harness.

    Items: lambada_test.jsonl, OpenAI's version of the test split (Paperno et al. 2016). The task is
    `lambada_openai` of the harness: the text up to the last space is the context, and the last word
    with its space is scored. acc is the share of items whose last word is the greedy continuation;
    perplexity is per word, exp of the mean negative log-likelihood.
    """

    def requests(self, item: Fields, scorer: Scorer) -> Iterator[Request]:
        """Yield the last word of an item."""
        context, _, word = item["text"].rpartition(" ")
        yield scorer.continuation(context, f" {word}")

    def metrics(self, items: list[Fields], scores: Scores) -> list[Metric]:
        """Return accuracy and perplexity."""
        nats = -sum(score.log_prob for (score,) in scores)
        return [
            accuracy(HARNESS, "acc", [score.greedy for (score,) in scores]),
            Metric(HARNESS, "perplexity", exp(nats / len(scores))),
        ]


class WikiText:
    """Perplexity of Wikipedia's pages, by the protocol of the lm-evaluation-harness.

    Items: the pages of the raw test split of WikiText-2 (Merity et al. 2016). The task is
    `wikitext` of the harness: the tokenization of the corpus is undone by the rules of
    tasks.yaml, the page's tokens follow an end-of-text token, each is scored once, and words
    and bytes are counted in the page as it was before these rules.
    """

    def requests(self, item: Fields, scorer: Scorer) -> Iterator[Request]:
        """Yield a page, all of which is scored."""
        page = item["page"]
        for pattern, replacement in FILES["wikitext"]["rules"]:
            page = re.sub(pattern, replacement, page)
        yield scorer.after((), scorer.tokenizer.encode(page))

    def metrics(self, items: list[Fields], scores: Scores) -> list[Metric]:
        """Return perplexities by word and byte."""
        nats = -sum(score.log_prob for (score,) in scores)
        per_word = nats / sum(len(re.split(r"\s+", item["page"])) for item in items)
        per_byte = nats / sum(len(item["page"].encode()) for item in items)
        return [
            Metric(HARNESS, "word_perplexity", exp(per_word)),
            Metric(HARNESS, "byte_perplexity", exp(per_byte)),
            Metric(HARNESS, "bits_per_byte", per_byte / math.log(2)),
        ]


def pages(text: str) -> list[str]:
    """Return the pages of a file such as wiki.test.raw; each begins with the line of its title."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if TITLE.fullmatch(line.strip()):
            found.append([])
        found[-1].append(line)
    return [page for page in map("\n".join, found) if page.strip()]


class Perplexity:
    """Perplexity of any text or prepared dataset, each token scored once.

    Windows follow each other without overlap; or a window slides by `stride` tokens, so that each
    token after the first block_size ones has at least block_size - stride tokens of context. A text
    follows the tokenizer's start of a text. A dataset's split is a part of a longer text: its first
    token is context only, as in `gpt-lightning validate`.
    """

    def requests(self, item: Fields, scorer: Scorer) -> Iterator[Request]:
        """Yield the tokens, all but the first of which are scored."""
        yield Request(item["tokens"], 1, item["stride"])

    def metrics(self, items: list[Fields], scores: Scores) -> list[Metric]:
        """Return loss, perplexity, and bits per byte and character of a text without separators."""
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


TASKS: dict[str, HellaSwag | Lambada | WikiText | Perplexity] = {
    "hellaswag": HellaSwag(),
    "lambada": Lambada(),
    "wikitext": WikiText(),
    "perplexity": Perplexity(),
}


# ---- a task ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Metrics of a task and what they were computed from.

    Attributes:
        task: Name of the task.
        metrics: Numbers of all protocols, the headline first.
        notes: Facts about the items that readers of the numbers need.
        scores: Scores of the requests of each item: log-likelihood, scored tokens, greedy.
    """

    task: str
    metrics: list[Metric]
    notes: list[str]
    scores: list[Any]


def task_names(text: str, known: Iterable[str] = TASKS) -> list[str]:
    """Return names of tasks that are separated by commas.

    Raises:
        UserError: There is no such task.
    """
    return list(dict.fromkeys(pick(name.strip(), known, "no task") for name in text.split(",")))


@dataclass(eq=False)
class Task:
    """Task with its items and the requests that they make of a model.

    Args:
        name: Name of the task.
        scorer: Scorer of the model.
        data: Folder with the files of the tasks; None: they are downloaded once.
        limit: Number of items, of windows for perplexity; None: all.
        text: Text file or prepared dataset, for perplexity.
        split: Split of the prepared dataset.
        stride: Tokens by which the window of perplexity moves; None: its whole length.

    Raises:
        UserError: The items are missing or of another form, or have a character that the tokenizer
            lacks; the message has the item's place.

    Attributes:
        notes: Facts about the items that readers of the numbers need.
    """

    name: str
    scorer: Scorer
    data: str | None = None
    limit: int | None = None
    text: str = ""
    split: str = "val"
    stride: int | None = None

    def __post_init__(self) -> None:
        self.notes = []
        if self.name in FILES:
            path = find_file(self.name, self.data)
            items, part = read_items(path), ""
            if self.limit and self.limit < len(items):
                part = f"the first {self.limit:,} of {len(items):,} items"
            if file_sha256(path) != FILES[self.name]["sha256"]:
                self.notes.append(f"{path} is not the file of the published figures")
            if not items:
                raise UserError(f"{path} has no items: get it again")
        else:
            item, part = self._read_text()
            items = [(self.text, item)]
        self.notes += [f"partial: {part}"] if part else []
        self._items, self._requests = [item for _, item in items[: self.limit]], []
        for where, item in items[: self.limit]:
            try:
                self._requests.append(list(TASKS[self.name].requests(item, self.scorer)))
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise UserError(f"{where}, an item of {self.name}: {reason_of(error)}") from error

    def _read_text(self) -> tuple[Fields, str]:
        """Return the item of perplexity, tokens and their text, and the part of the source."""
        source, scorer, tokenizer = self.text, self.scorer, self.scorer.tokenizer
        T, step = scorer.block_size, self.stride or scorer.block_size
        if step > T:
            raise UserError(f"--stride {step} is above the model's block_size: give 1 to {T}")
        if whole := Path(source).is_file() or source.endswith(".txt"):
            with explained("read", source, "give the path of a text file"):
                content = Path(source).read_bytes()
            try:
                tokens = scorer.after((), tokenizer.encode(content.decode())).tokens
            except ValueError as error:  # not UTF-8, or a character outside the vocabulary
                fix = f"give UTF-8 that {tokenizer.name} can encode"
                raise UserError(f"{source}: {fix} ({error})") from error
            n_tokens = len(tokens)
        else:
            dataset = TokenDataset(source, Path(self.data or "data"), cache_limit_gb=20.0)
            if dataset.manifest.tokenizer != (spec := tokenizer.spec()):
                theirs = dataset.manifest.tokenizer["name"]
                found = f"was made with {theirs}, the model's tokens are those of {spec['name']}"
                raise UserError(f"{source} {found} (or another vocabulary of it): give a text file")
            stream = dataset.stream(self.split, 1, "--text DIR")
            n_tokens = len(stream)
        longest = min(n_tokens, 1 + T + (self.limit - 1) * step) if self.limit else n_tokens
        tokens = tokens[:longest] if whole else stream.windows(np.zeros(1), longest)[0]
        text = tokenizer.decode(tokens[1:][tokens[1:] != tokenizer.eot_token])
        if not text:
            raise UserError(f"{source} is empty: give it some text")
        part = f"the first {longest - 1:,} of {n_tokens - 1:,} tokens" if longest < n_tokens else ""
        return {"tokens": tokens, "text": text, "stride": self.stride}, part

    def run(self) -> Result:
        """Return the result, on all ranks."""
        scores = iter(self.scorer.score(list(chain(*self._requests))))
        groups = [list(islice(scores, len(requests))) for requests in self._requests]
        return Result(self.name, TASKS[self.name].metrics(self._items, groups), self.notes, groups)


# ---- items -------------------------------------------------------------------------------------


def find_file(task: str, folder: str | None) -> Path:
    """Return the file of a task's items.

    Args:
        task: Name of the task.
        folder: Folder with the file; None: the user's cache, into which it is downloaded once.

    Raises:
        UserError: The folder has no such file, or it cannot be downloaded.
    """
    names, url = FILES[task]["names"], FILES[task]["url"]
    cache = Path(platformdirs.user_cache_dir("gpt-lightning")) / "evaluate"
    place = cache if folder is None else Path(folder)
    address = url.rpartition("::")[2]
    for name in names:
        if (place / name).is_file():
            return place / name
    path = cache / names[0]
    try:
        if folder is not None:
            raise UserError("no such file")
        print(f"fetching {address} to {path}", flush=True)
        with explained("write", path), locked(cache / f".{path.name}.lock"):
            if not path.exists():  # another rank may have fetched it
                fetch_file(url, path, FILES[task]["sha256"])
    except UserError as error:
        raise UserError(
            f"{task} needs {' or '.join(names)} in {place} ({error.__cause__ or error}): get it "
            f"from {address}, put it into a folder, and give the folder as --data"
        ) from error
    return path


def read_items(path: Path) -> list[tuple[str, Any]]:
    """Return the place and the content of each item: a JSON value, or a page of a text.

    Raises:
        UserError: The file is damaged; the message has the line.
    """
    with explained("read", path, "check its permissions"):
        content = path.read_bytes()
    where, items = "", []
    try:
        if path.suffix != ".jsonl":
            found = enumerate(pages(content.decode()), 1)
            return [(f"{path}, page {n}", {"page": page}) for n, page in found]
        for n, line in enumerate(content.split(b"\n"), 1):
            where = f", line {n}"
            if line.strip():
                items.append((f"{path}{where}", json.loads(line)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}{where} is damaged ({reason_of(error)}): get it again") from error
    return items


# ---- the report --------------------------------------------------------------------------------


# a metric, ours beside the published figures of the four sizes of GPT-2
Row = row_type(
    "task:/11 protocol:/21 metric:/18 ours:.4f stderr:.4f gpt2:.4f gpt2_medium:.4f gpt2_large:.4f "
    "gpt2_xl:.4f"
)


def rows(result: Result) -> Iterator[Any]:
    """Yield a row for each metric, then one for each published figure of another protocol."""
    entries = FILES.get(result.task, {"published": []})["published"]
    published = {(p["protocol"], p["metric"]): p for p in entries}
    ours = {(m.protocol, m.name): (m.value, m.stderr) for m in result.metrics}
    for key in {**ours, **published}:
        theirs = {size.replace("-", "_"): published.get(key, {}).get(size) for size in SIZES}
        yield Row(result.task, *key, *ours.get(key, (None, None)), **theirs)


def report(tasks: list[Task], model: str, config: GPTConfig, out: Path | None) -> None:
    """Score tasks one after the other; print each result, and write all results so far.

    Args:
        tasks: The tasks.
        model: Origin and precision of the model.
        config: Shape of the model.
        out: JSON file; None: none is written.
    """
    shape, results = f"{config.n_layer}/{config.n_head}/{config.n_embd}", {}
    shows, console = not dist.is_initialized() or dist.get_rank() == 0, Console(Row)
    if shows:
        print(f"# {model}, shape {shape}\n{console.header()}", flush=True)
    for task in tasks:
        result = task.run()
        results[task.name] = dataclasses.asdict(result)
        if shows:
            notes = (f"{task.name}: {note}" for note in result.notes)
            print(*map(console.line, rows(result)), *notes, sep="\n", flush=True)
        if shows and out is not None:
            facts = {"model": model, "shape": shape, "tasks": results}
            write_atomic(out, json.dumps(facts).encode())
