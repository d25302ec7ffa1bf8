"""Items of the tasks: found in a folder, or downloaded once and checked by digest."""

import json
from pathlib import Path
from typing import Any

import platformdirs
import yaml

from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.evaluate.wikitext import pages
from gpt_lightning.files import explained, locked

FILES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


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
