"""Ledger of a table: a file of rows by key that grows as they come, and resume from it.

A row is appended to `rows.jsonl` in the folder of its results as soon as it is known. A process
that was killed leaves at most its last line torn; the row of a torn line is measured again.
"""

import datetime
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, numbered_folder
from gpt_lightning.tables.rows import Values

ROWS = "rows.jsonl"


def identity(key: Values) -> str:
    """Return the text by which equal keys are recognized."""
    return json.dumps(key, sort_keys=True)


class Ledger:
    """Rows of one folder of results, by their keys.

    Args:
        folder: Folder of the results.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / ROWS

    def append(self, key: Values, row: Values) -> None:
        """Write a row."""
        line = json.dumps({"configuration": key, "measured": row})
        with self.path.open("a") as file:
            file.write(f"\n{line}")  # the row before may be torn, without an end of its line

    def read(self) -> list[tuple[Fields, Fields]]:
        """Return key and row of each line in the order of writing, without torn lines."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError):  # the writer was killed in mid-line
                row = json.loads(line)
                rows.append((row["configuration"], row["measured"]))
        return rows

    def by_key(self) -> dict[str, Fields]:
        """Return the last row of each key, by `identity`."""
        return {identity(key): row for key, row in self.read()}


def open_ledger(root: Path, keys: Iterable[Values], resume: bool) -> Ledger:
    """Return a new ledger below a folder, or the newest one with any of some rows.

    Raises:
        UserError: No ledger has any of the rows.
    """
    if not resume:
        stamp = datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
        return Ledger(numbered_folder(root, f"{stamp}-"))
    wanted = {identity(key) for key in keys}
    for path in sorted(root.glob(f"*/{ROWS}"), reverse=True):
        ledger = Ledger(path.parent)
        if wanted & ledger.by_key().keys():
            return ledger
    raise UserError(f"--resume: no sweep of these rows in {root}; start one without --resume")
