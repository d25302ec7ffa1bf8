"""One row of a sweep in a process of its own: memory starts at nothing, and a crash is a row.

`python -m gpt_lightning.bench.core.worker MODULE:FUNCTION '{"argument": value}'` calls the
function and prints what it returns, a mapping of plain values, as the last line.
"""

import importlib
import json
import sys

from gpt_lightning.errors import is_out_of_memory

MARK = "RESULT "


class SkippedError(Exception):
    """What a device cannot do, and why: a row that says so, not a failure."""


def failure(error: BaseException) -> dict[str, str]:
    """The row of a measurement that did not end: status and reason."""
    text = " ".join(str(error).split())
    if type(error).__name__ == SkippedError.__name__:  # this module also runs as __main__
        return {"status": "skipped", "note": text}
    if is_out_of_memory(error):
        return {"status": "out of memory", "note": text[:160]}
    return {"status": "error", "note": f"{type(error).__name__}: {text[:160]}"}


def main(address: str, arguments: str) -> None:
    """Calls MODULE:FUNCTION and prints the result."""
    module, function = address.split(":")
    try:
        measured = getattr(importlib.import_module(module), function)(**json.loads(arguments))
        result = {"status": "ok", "note": "", **measured}
    except Exception as error:  # whatever it is: it is the row
        result = failure(error)
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
