"""Folders of results, and how --resume finds an interrupted sweep.

A sweep has a folder of its own. Its rows are appended to `rows.jsonl` as they come. A sweep that
was killed leaves at most its last line torn; the row of a torn line is measured again.
"""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpt_lightning.errors import UserError
from gpt_lightning.files import numbered_folder

ROOT = Path("lightning_logs") / "bench"
ROWS = "rows.jsonl"
KEPT = ("ok", "out of memory")  # statuses of rows that --resume does not measure again
Values = dict[str, Any]


def make_folder(name: str) -> Path:
    """Make a folder that no other sweep has.

    Args:
        name: Name of the benchmark.

    Returns:
        ROOT/NAME/TIME-N; N is 0, unless other results began in the same second.
    """
    stamp = datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    return numbered_folder(ROOT / name, f"{stamp}-")


def key(configuration: Values) -> str:
    """Return the identity of a row."""
    return json.dumps(configuration, sort_keys=True)


def keep(folder: Path, configuration: Values, measured: Values) -> None:
    """Append a row to the sweep's file, on a new line if the last line is torn."""
    line = json.dumps({"configuration": configuration, "measured": measured}) + "\n"
    with (folder / ROWS).open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            line = line if file.read() == b"\n" else "\n" + line
        file.write(line.encode())


def read_rows(path: Path) -> list[tuple[Values, Values]]:
    """Return configuration and measurement of each row of a sweep's file, without torn lines."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            rows.append((row["configuration"], row["measured"]))
        except (ValueError, TypeError, KeyError):  # the writer was killed in the middle of the line
            continue
    return rows


def recorded(folder: Path) -> dict[str, Values]:
    """Return the rows of a sweep's folder by `key`; none if the folder is new."""
    rows = read_rows(folder / ROWS) if (folder / ROWS).exists() else []
    return {key(row): measured for row, measured in rows}


def find_folder(name: str, configurations: Iterable[Values]) -> tuple[Path, dict[str, Values]]:
    """Return the newest sweep with any of these rows, and its rows by `key`.

    Raises:
        UserError: No sweep has any of them.
    """
    wanted = {key(configuration) for configuration in configurations}
    for path in sorted((ROOT / name).glob(f"*/{ROWS}"), reverse=True):
        if wanted & {key(configuration) for configuration, _ in read_rows(path)}:
            return path.parent, recorded(path.parent)
    raise UserError(
        f"--resume: no sweep of these rows in {ROOT / name}; start one without --resume"
    )
