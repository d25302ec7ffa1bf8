"""Process of one row of a sweep: memory starts at nothing, and a crash is a row.

`python -m gpt_lightning.bench.core.worker MODULE:FUNCTION '{"argument": value}'` calls the
function and prints its result, a mapping of plain values, as the last line.
"""

import importlib
import json
import sys

from gpt_lightning.errors import is_out_of_memory

MARK = "RESULT "


class SkippedError(Exception):
    """A device cannot do this, for the given reason: a row of status `skipped`, not a failure."""


def failure(error: BaseException) -> dict[str, str]:
    """Return the row of a measurement that raised: status and reason."""
    text = " ".join(str(error).split())
    if type(error).__name__ == SkippedError.__name__:  # this module also runs as __main__
        return {"status": "skipped", "note": text}
    if is_out_of_memory(error):
        return {"status": "out of memory", "note": text[:160]}
    return {"status": "error", "note": f"{type(error).__name__}: {text[:160]}"}


def main(address: str, arguments: str) -> None:
    """Call MODULE:FUNCTION and print the result."""
    module, function = address.split(":")
    try:
        measured = getattr(importlib.import_module(module), function)(**json.loads(arguments))
        result = {"status": "ok", "note": "", **measured}
    except Exception as error:  # any failure is a row
        result = failure(error)
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
