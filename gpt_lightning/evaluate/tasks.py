"""Tasks by name: find and read their items, score them, and sum up.

tasks.yaml has the file of each task's items, which is found in a folder, or downloaded once and
checked by its digest, and the published figures.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import platformdirs
import yaml

from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.evaluate.protocols import TASKS, Metric, pages, read_text
from gpt_lightning.evaluate.scoring import Scorer
from gpt_lightning.files import explained, file_sha256, locked
from gpt_lightning.parsing import nearest

# names, url, sha256 of the items' file, and published figures, by task
FILES: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


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
            item, part = read_text(scorer, text, split, stride, limit, data or "data")
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
    for name in names:
        if (place / name).is_file():
            return place / name
    if folder is not None:
        raise UserError(
            f"{task}: {place} has no {' or '.join(names)}: put the file there (from "
            f"{address(task)}), or leave the folder out to download it"
        )
    from gpt_lightning.remote.files import fetch_file  # not for files that are there

    path = cache / names[0]
    print(f"fetching {address(task)} to {path}", flush=True)
    try:
        with explained("write", path):
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / f".{path.name}.lock"):
                if not path.exists():  # another rank may have fetched it
                    fetch_file(url, path, FILES[task]["sha256"])
    except UserError as error:
        raise UserError(
            f"{task} needs {names[0]} ({error.__cause__ or error}): put the file into {cache}, or "
            "into a folder, and give the folder as --data"
        ) from error
    return path


def address(task: str) -> str:
    """Return the address of a task's file, or of the archive that has it."""
    url: str = FILES[task]["url"]
    return url.rpartition("::")[2]


def read_items(path: Path) -> list[tuple[str, Any]]:
    """Return the place and the content of each item: a JSON value, a row, or a page of a text.

    Raises:
        UserError: The file is damaged; the message has the line.
    """
    with explained("read", path, "check its permissions"):
        content = path.read_bytes()
    where, items = "", []
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows = enumerate(pq.read_table(path).to_pylist(), 1)
            return [(f"{path}, row {n}", row) for n, row in rows]
        if path.suffix != ".jsonl":
            found = enumerate(pages(content.decode()), 1)
            return [(f"{path}, page {n}", {"page": page}) for n, page in found]
        for n, line in enumerate(content.split(b"\n"), 1):
            where = f", line {n}"
            if line.strip():
                items.append((f"{path}{where}", json.loads(line)))
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow: pip install 'gpt-lightning[eval]'") from error
    except (ValueError, RecursionError, OSError) as error:  # pyarrow's errors are of these kinds
        raise UserError(f"{path}{where} is damaged ({reason_of(error)}): get it again") from error
    return items
