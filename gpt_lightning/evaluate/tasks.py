"""Tasks by name: read their items, score them, and sum up.

Each task is a module with `requests`, what a model scores for an item, and `metrics`, the numbers.
"""

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.evaluate import hellaswag, lambada, perplexity, wikitext
from gpt_lightning.evaluate.files import FILES, find_file, read_items
from gpt_lightning.evaluate.results import Result
from gpt_lightning.evaluate.scoring import Scorer
from gpt_lightning.files import file_sha256
from gpt_lightning.parsing import nearest

TASKS: dict[str, Any] = {
    "hellaswag": hellaswag,
    "lambada": lambada,
    "wikitext": wikitext,
    "perplexity": perplexity,
}


def task_names(text: str, known: Iterable[str] = TASKS) -> list[str]:
    """Return names of tasks that are separated by commas.

    Raises:
        UserError: There is no such task.
    """
    for name in text.split(","):
        if name not in known:
            raise UserError(f"no task {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    return list(dict.fromkeys(text.split(",")))


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

    def __init__(
        self,
        name: str,
        scorer: Scorer,
        data: str | None = None,
        limit: int | None = None,
        text: str = "",
        split: str = "val",
        stride: int | None = None,
    ) -> None:
        self.name, self._scorer, self.notes = name, scorer, []
        if name in FILES:
            path = find_file(name, data)
            items = read_items(path)
            n = len(items)
            part = f"the first {limit:,} of {n:,} items" if limit and limit < n else ""
            if file_sha256(path) != FILES[name]["sha256"]:
                self.notes.append(f"{path} is not the file of the published figures")
            if not items:
                raise UserError(f"{path} has no items: get it again")
        else:
            item, part = perplexity.read(scorer, text, split, stride, limit, data or "data")
            items = [(text, item)]
        self.notes += [f"partial: {part}"] if part else []
        self._items, self._requests = [item for _, item in items[:limit]], []
        for where, item in items[:limit]:
            try:
                self._requests.append(list(TASKS[name].requests(item, scorer)))
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise UserError(f"{where}, an item of {name}: {reason_of(error)}") from error

    def run(self) -> Result:
        """Return the result, on all ranks."""
        scores = iter(self._scorer.score(list(chain(*self._requests))))
        groups = [list(islice(scores, len(requests))) for requests in self._requests]
        return Result(self.name, TASKS[self.name].metrics(self._items, groups), self.notes, groups)
