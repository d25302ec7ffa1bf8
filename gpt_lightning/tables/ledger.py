"""Ledger of a table: a file of rows by key that grows as they come, and resume from it.

A row is appended to `rows.jsonl` in the folder of its results as soon as it is known. A process
that was killed leaves at most its last line torn; the row of a torn line is measured again.
"""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path

from gpt_lightning.errors import UserError
from gpt_lightning.files import numbered_folder
from gpt_lightning.tables.rows import Values, read_report

ROWS = "rows.jsonl"
EARLIER = "earlier"  # machine fact of a resumed sweep: machine of the first rows


def identity(key: Values) -> str:
    """Return the text by which equal keys are recognized."""
    return json.dumps(key, sort_keys=True)


class Ledger:
    """Rows of one folder of results, by their keys.

    Args:
        folder: Folder of the results; it is made with the first row.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / ROWS

    def append(self, key: Values, row: Values) -> None:
        """Write a row, on a new line if the last line is torn."""
        line = json.dumps({"configuration": key, "measured": row}) + "\n"
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                line = line if file.read() == b"\n" else "\n" + line
            file.write(line.encode())

    def read(self) -> list[tuple[Values, Values]]:
        """Return key and row of each line in the order of writing, without torn lines."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                rows.append((row["configuration"], row["measured"]))
            except (ValueError, TypeError, KeyError):  # the writer was killed in mid-line
                continue
        return rows

    def by_key(self) -> dict[str, Values]:
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


def earlier_machine(folder: Path, machine: dict[str, str]) -> dict[str, str]:
    """Return facts of the machine of an interrupted sweep's rows, where they differ."""
    before = read_report(folder).get("machine", {})
    facts = (name for name in ("device", "CPU", "memory", "software") if name in before)
    other = [f"{name} {before[name]}" for name in facts if before[name] != machine.get(name)]
    rows = f"rows of {before.get('date')}: {', '.join(other)}" if other else ""
    known = "; ".join(filter(None, (before.get(EARLIER), rows)))
    return {EARLIER: known} if known else {}
