"""Process of one row: memory starts at nothing, and a crash is a row.

`python -m gpt_lightning.tables.worker MODULE:FUNCTION '{"field": value}'` calls the function with a
namespace of the fields and prints its result, a mapping of plain values, as the last line.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pkgutil import resolve_name
from types import SimpleNamespace

from gpt_lightning.errors import is_out_of_memory, one_line
from gpt_lightning.files import Fields
from gpt_lightning.tables.rows import Values, implausible

MARK = "RESULT "


class SkippedError(Exception):
    """A device cannot do this, for the given reason: a row of status `skipped`, not a failure."""


def isolated(address: str, configuration: Values, timeout_s: float) -> Fields:
    """Measure a configuration in a process of its own; a failure is a status.

    Args:
        address: MODULE:FUNCTION, see `call`.
        configuration: Fields of the configuration.
        timeout_s: Time limit in seconds.

    Returns:
        Measured fields with `status` (ok, skipped, out of memory, error, crashed, timed out) and
        `note`.
    """
    with subprocess.Popen(
        [sys.executable, "-m", __name__, address, json.dumps(configuration)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        process_group=0,  # the compilers and loaders that it starts belong to it
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"status": "timed out", "note": f"after {timeout_s:g} s"}
        finally:  # Ctrl-C, too: no process is left, and none holds the pipes open
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if MARK in out:
        line = out.rpartition(MARK)[2].partition("\n")[0]
        return json.loads(line, parse_constant=lambda name: None)  # nan and inf are no JSON
    return crash(process.returncode, errors)


def crash(returncode: int, errors: str) -> Fields:
    """Return the row of a process that ended without a result."""
    if returncode == -signal.SIGKILL:
        return {"status": "out of memory", "note": "killed, as Linux does when memory runs out"}
    last = one_line(errors)[-160:]
    status = "out of memory" if is_out_of_memory(RuntimeError(last)) else "crashed"
    names = {-number: f" ({number.name})" for number in signal.Signals}
    return {"status": status, "note": f"exit code {returncode}{names.get(returncode, '')}: {last}"}


# ---- in the row's own process --------------------------------------------------------------------


def call(measure: Callable[[SimpleNamespace], Values], configuration: Values) -> Values:
    """Call a measure function with a row: a namespace of a configuration and `folder`."""
    return measure(SimpleNamespace(**configuration))


def failure(error: BaseException) -> Values:
    """Return the row of a measurement that raised: status and reason."""
    text = one_line(error)
    if isinstance(error, SkippedError):
        return {"status": "skipped", "note": text}
    if is_out_of_memory(error):
        return {"status": "out of memory", "note": text[:160]}
    return {"status": "error", "note": f"{type(error).__name__}: {text[:160]}"}


def measured(address: str, configuration: Values) -> Values:
    """Call MODULE:FUNCTION in this process; a failure and impossible numbers are a status."""
    try:
        found = {"status": "ok", "note": ""} | call(resolve_name(address), configuration)
    except Exception as error:  # also a module that cannot be imported
        return failure(error)
    if found["status"] == "ok" and (wrong := implausible(found)):
        found |= {"status": "implausible", "note": wrong}
    return found


if __name__ == "__main__":
    from gpt_lightning.tables import worker  # benches raise its SkippedError, not that of __main__

    result = worker.measured(sys.argv[1], json.loads(sys.argv[2]))
    print(MARK + json.dumps(result), flush=True)
