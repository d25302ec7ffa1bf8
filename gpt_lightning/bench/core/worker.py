"""Process of one row of a sweep: memory starts at nothing, and a crash is a row.

`python -m gpt_lightning.bench.core.worker MODULE:FUNCTION '{"argument": value}'` calls the
function and prints its result, a mapping of plain values, as the last line.
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

from gpt_lightning.errors import is_out_of_memory
from gpt_lightning.reports.tables import Row

MARK = "RESULT "
Values = dict[str, Any]  # field -> value


class SkippedError(Exception):
    """A device cannot do this, for the given reason: a row of status `skipped`, not a failure."""


def make_row(row_type: type[Row], values: Values) -> Row:
    """Make a row of the values that are its fields; other fields keep their defaults."""
    names = {field.name for field in dataclasses.fields(row_type)}
    return row_type(**{name: value for name, value in values.items() if name in names})


def call(measure: Callable[..., Values], configuration: Values) -> Values:
    """Call a measure function with a configuration.

    Args:
        measure: Function of the fields of a configuration, by name. Instead of the fields that are
            columns of the bench it may take `row`: a row with these columns alone.
        configuration: Fields of a configuration.

    Returns:
        Measured fields.
    """
    row_type = get_type_hints(measure).get("row")
    if row_type is None:
        return measure(**configuration)
    row = make_row(row_type, configuration)
    return measure(row=row, **{k: v for k, v in configuration.items() if not hasattr(row, k)})


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
        measure = getattr(importlib.import_module(module), function)
        result = {"status": "ok", "note": "", **call(measure, json.loads(arguments))}
    except Exception as error:  # any failure is a row
        result = failure(error)
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
