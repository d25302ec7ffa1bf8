"""Sums of a thousand times 0.01 in float32 and float16, against a published table.

Published: report.md of https://github.com/elbiczel/cs336g-a2-systems at 769ef21.

Status ok: the sum has the published four digits after the point; mismatch: it has not. A float16
accumulator near 8 has steps of 2^-7, so that 0.01 is added as 0.0078 there. A float16 addend is
0.010002, also after a cast to float32: the cast comes too late.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated

import torch
from jsonargparse import Namespace

from gpt_lightning.files import yaml_beside
from gpt_lightning.tables.options import DEVICE, device, listed
from gpt_lightning.tables.rows import Column, Flag, Measured, TenThousandths, Text, Values
from gpt_lightning.tables.sweep import Bench

ADDEND, TIMES = 0.01, 1000
PUBLISHED = yaml_beside(__file__)


@dataclass
class SumRow(Measured):
    """Sum, and the published one."""

    device: Text
    accumulator: Text
    addend: Text
    upcast: Flag
    sum: TenThousandths
    published: TenThousandths
    error: Annotated[float | None, Column("+.2e")]


def read_sums(args: Namespace) -> list[Values]:
    """Return every published sum on every device."""
    return [{"device": name} | row for name in listed(args, "device", device) for row in PUBLISHED]


BENCH = Bench(
    measure="gpt_lightning.bench.accumulation:measure_sum",
    tables={"rows": SumRow},
    options=(replace(DEVICE, read=read_sums),),
    timeout_s=120.0,
)


def measure_sum(row: SimpleNamespace) -> Values:
    """Compute the sum and compare four digits after the point, as many as were published."""
    total = torch.tensor(0.0, dtype=getattr(torch, row.accumulator), device=row.device)
    for _ in range(TIMES):
        x = torch.tensor(ADDEND, dtype=getattr(torch, row.addend), device=row.device)
        total += x.type(total.dtype) if row.upcast else x
    found = total.item()
    status = "ok" if f"{found:.4f}" == f"{row.published:.4f}" else "mismatch"
    return {
        "sum": found,
        "error": found - ADDEND * TIMES,
        "status": status,
    }
