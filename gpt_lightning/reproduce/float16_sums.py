"""`gpt-lightning bench accumulation`: a sum of a thousand addends in several precisions."""

from dataclasses import dataclass
from typing import Any

from gpt_lightning.bench.core.options import devices
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.reports.tables import column

ADDEND, TIMES = 0.01, 1000
# accumulator, addend, whether the addend is cast to the accumulator's dtype before, and the sum as
# the systems course's handout prints it
PUBLISHED = (
    ("float32", "float32", False, "10.0001"),
    ("float16", "float16", False, "9.9531"),
    ("float32", "float16", False, "10.0021"),
    ("float32", "float16", True, "10.0021"),
)


@dataclass(frozen=True)
class SumRow:
    """A sum, and what was published for it."""

    device: str = column("device")
    accumulator: str = column("accumulator")
    addend: str = column("addend", width=8)
    upcast: bool = column("addend cast before")
    sum: float | None = column("sum", ".4f", 9)
    published: float | None = column("published", ".4f")
    error: float | None = column("off 10 by", "+.2e", 10)
    status: str = column("status", default="")
    note: str = column("note", default="")


BENCH = Bench(
    name="accumulation",
    title=f"{ADDEND} added {TIMES:,} times",
    row=SumRow,
    measure="gpt_lightning.reproduce.float16_sums:measure_sum",
    notes=(
        "Status ok: the sum has the published digits, four after the point; mismatch: it has not. "
        "A float16 accumulator near 8 has steps of 2^-7, so that 0.01 is added as 0.0078 there. "
        "A float16 addend is 0.010002 whatever it is cast to: the cast comes too late.",
    ),
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench accumulation", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto; with commas.")
    add_sweep_arguments(parser, timeout_s=120.0)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench accumulation ...`; 1 if a digit differs."""
    args = make_parser().parse_args(underscored(argv[2:]))
    configurations = [
        {
            "device": device,
            "accumulator": accumulator,
            "addend": addend,
            "upcast": upcast,
            "published": float(published),
        }
        for device in devices(args)
        for accumulator, addend, upcast, published in PUBLISHED
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


# ---- in the row's own process --------------------------------------------------------------------


def measure_sum(
    device: str, accumulator: str, addend: str, upcast: bool, published: float
) -> dict[str, Any]:
    """Adds, and compares four digits after the point: as many as were published."""
    import torch

    where = torch.device(device)
    total = torch.tensor(0.0, dtype=getattr(torch, accumulator), device=where)
    for _ in range(TIMES):
        x = torch.tensor(ADDEND, dtype=getattr(torch, addend), device=where)
        total += x.type(total.dtype) if upcast else x
    found = total.item()
    same = f"{found:.4f}" == f"{published:.4f}"
    return {
        "sum": found,
        "error": found - ADDEND * TIMES,
        "status": "ok" if same else "mismatch",
        "note": "" if same else f"{found:.4f} is not the published {published:.4f}",
    }
