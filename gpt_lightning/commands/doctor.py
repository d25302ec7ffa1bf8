"""The command `gpt-lightning doctor`: check that this machine can train, in one line per check.

A line is a status, a name and a text. ok: it works. note: training works without it. FAIL: training
needs it. The text of the last two has the fix. A check that raises is a line, too (doctor.yaml).
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import platformdirs
import torch
from packaging.utils import canonicalize_name as plain

from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.files import yaml_beside
from gpt_lightning.hardware import device, peaks, precision
from gpt_lightning.model import gpt
from gpt_lightning.model.fast import compilation
from gpt_lightning.tables.worker import isolated

TABLE = yaml_beside(__file__)
Line = tuple[str, str, str]


def check_machine(as_json: bool) -> int:
    """Print the lines of all checks.

    Args:
        as_json: Print them as JSON, for a bug report.

    Returns:
        0: Training works here. 1: A line is FAIL.
    """
    lines = []
    for check in TABLE["checks"]:
        for status, name, text in guarded(check):
            lines.append({"status": status, "name": name, "text": private(text)})
            if not as_json:
                print(f"{status:<4}  {name:<16}  {private(text)}", flush=True)
    if as_json:
        print(json.dumps(lines, indent=1))
    return int(any(line["status"] == "FAIL" for line in lines))


def guarded(check: str) -> list[Line]:
    """Return the lines of a check, from a process of its own if it may crash or hang."""
    limit_s = TABLE["checks"][check].get("limit_s")
    if limit_s is None:
        return lines_of(check)
    if sys.stderr.isatty():
        print(f"trying {check}, at most {limit_s} s ...", file=sys.stderr)
    found = isolated(f"{__name__}:measure_check", {"check": check}, limit_s)
    return found.get("lines", [failure(check, f"{found['status']} {found['note']}")])


def measure_check(row: SimpleNamespace) -> dict[str, list[Line]]:
    """Return the lines of a check as a row."""
    return {"lines": lines_of(row.check)}


def lines_of(check: str) -> list[Line]:
    """Return the lines of a check; an exception is the last one."""
    lines: list[Line] = []
    try:
        lines.extend(globals()[check]())  # keeps the lines before an exception
    except Exception as error:  # whatever is broken on this machine
        lines.append(failure(check, f"{type(error).__name__}: {error}"))
    return lines


def failure(check: str, reason: str) -> Line:
    """Return the line of a check that has failed; a compiler's message is cut."""
    settings = TABLE["checks"][check]
    return settings["status"], check, f"{' '.join(reason.split())[:300]}; {settings['fix']}"


def private(text: str) -> str:
    """Return a text with ~ for the home folder, and without the passwords of addresses."""
    text = re.sub(rf"{re.escape(os.path.expanduser('~'))}(?=[/:;,\s]|$)", "~", text)
    return re.sub(r"://[^/@\s]+@", "://", text)


# ---- installation --------------------------------------------------------------------------------


def versions() -> Iterator[Line]:
    """Yield versions, processor, memory and best device."""
    yield from (("ok", *fact) for fact in device.machine_record(["doctor"]).items())
    yield from (("note", "not tried", line) for line in device.untried_versions())


def packages() -> Iterator[Line]:
    """Yield what extras lack."""
    here = {plain(found.name) for found in metadata.distributions()}
    missing: dict[str, list[str]] = {}
    for requirement in metadata.requires("gpt-lightning") or []:
        if found := re.match(r"([\w.-]+).*extra == .(\w+)", requirement):
            names = missing.setdefault(f"extra {found[2]}", [])
            names += [] if plain(found[1]) in here else [found[1]]
    for name, gap in missing.items():
        if gap:
            yield "note", name, f"pip install {' '.join(gap)}"
        else:
            yield "ok", name, "installed"


def folders() -> Iterator[Line]:
    """Yield the folders that a run writes to, with the free space of their disk."""
    temporary = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    places = {"cache": platformdirs.user_cache_dir("gpt-lightning"), "temporary": temporary}
    for name, unwritable in TABLE["folders"].items():
        path = Path(places.get(name, name))
        folder = next(f for f in (path, *path.absolute().parents) if f.is_dir())
        free_gb = shutil.disk_usage(folder).free / 1e9
        low = "; delete what is not needed" if free_gb < TABLE["free_gb"] else ""
        try:
            tempfile.TemporaryFile(dir=folder).close()
            yield "note" if low else "ok", "folder", f"{path}: {free_gb:,.1f} GB free{low}"
        except OSError as error:
            yield unwritable, "folder", f"{path}: {error.strerror}; change permissions of {folder}"


def network() -> Iterator[Line]:
    """Yield the answers of what a run may download from."""
    urlopen(TABLE["hub"], timeout=TABLE["hub_timeout_s"]).close()
    yield "ok", "network", f"{TABLE['hub']} answers"


# ---- devices -------------------------------------------------------------------------------------


def gpus() -> Iterator[Line]:
    """Yield the drivers and clocks of NVIDIA's GPUs."""
    header, *rows = device.output_of(*TABLE["nvidia_smi"].split()).splitlines() or [""]
    yield from (("ok", "GPU", f"{header}: {row}") for row in rows)
    if rows and not torch.cuda.is_available():
        raise UserError(f"torch {torch.__version__} does not see the GPU")


def compiler() -> Iterator[Line]:
    """Compile a layer and its backward without the files of earlier runs, and compare gradients."""
    kind = device.device_kind()
    able, why = compilation.should_compile(kind, "bf16-mixed")
    if able:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            layer = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()).to(kind)
            sums = [run(torch.ones(4, 16).to(kind)).sum() for run in (layer, torch.compile(layer))]
            grads = [torch.autograd.grad(loss, [*layer.parameters()]) for loss in sums]
            torch.testing.assert_close(*grads)
    status = "ok" if able else "note"
    yield status, "compiler", TABLE["compiler"][status].format(kind=kind, why=why)


def devices() -> Iterator[Line]:
    """Yield the precisions in which each device trains as the CPU does in float32, and its peak."""
    exact = loss_and_gradients(torch.device("cpu"), "32-true")
    cuda = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    names = ["cpu", *(["mps"] if device.device_kind() == "mps" else cuda)]
    for place in map(torch.device, names):
        auto, why = precision.fastest_precision(place.type)
        for name in TABLE["precisions"]:
            yield tried(place, name, exact, needed=name in ("32-true", auto))
        dtype = precision.product_dtype(auto, "highest", place)
        peak, line = peaks.resolve_peak("auto", place, dtype)
        line = line if peak else peaks.resolve_peak("measure", place, dtype)[1]
        yield "ok", str(place), f"precision auto is {auto}, {why}; {line}"
        if line := TABLE["never_run"].get(place.type):
            yield "note", str(place), line


def tried(place: torch.device, name: str, exact: list[torch.Tensor], needed: bool) -> Line:
    """Return the line of a precision: its error against the CPU, or the reason why it fails."""
    limit = TABLE["precisions"][name]
    try:
        pairs = zip(loss_and_gradients(place, name), exact, strict=True)
        error = torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()
    except Exception as reason:  # a device may fail in any way
        return "FAIL" if needed else "note", f"{place} {name}", reason_of(reason)
    # the comparison is False for nan
    fix = "" if error <= limit else f"; expected at most {limit:.0e}: update driver and PyTorch"
    text = f"loss and gradients differ by {error:.0e} from float32 on the CPU{fix}"
    return "FAIL" if fix else "ok", f"{place} {name}", text


def loss_and_gradients(place: torch.device, name: str) -> list[torch.Tensor]:
    """Return the scaled loss and gradients of a small GPT in a precision, as float64 on the CPU."""
    precision.check_precision(place.type, name)
    torch.manual_seed(0)
    batch = torch.randint(64, (2, 2, 32)).to(place)
    dtype = precision.product_dtype(name, "highest", place)
    weights = torch.float32 if name.endswith("-mixed") else precision.DTYPES[dtype].operands
    model = gpt.GPT(gpt.GPTConfig(**TABLE["model"])).to(place, weights)
    with precision.autocast(dtype, place):
        loss = model(*batch) * TABLE["scale"]
    found = (loss.detach(), *torch.autograd.grad(loss, [*model.parameters()]))
    return [tensor.cpu().double() for tensor in found]
