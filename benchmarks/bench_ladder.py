"""Tokens/s and MFU from plain float32 on, with one more optimization on each rung.

Every rung is `fit` on random tokens, with the settings of all rungs up to it, measured or not.
Times are SpeedMonitor's, so that nothing synchronizes the device between steps.

MFU: of the device's bf16 peak on every rung; where none is published, of the peak that the first
row measured, on a CPU the faster one of bf16 and float32.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from gpt_lightning.bench import fits
from gpt_lightning.hardware.device import device_name
from gpt_lightning.hardware.peaks import lookup, measured_peak
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import (
    Hidden,
    HiddenHundredths,
    Hundredths,
    Measured,
    Share,
    Text,
    Values,
    Whole,
)
from gpt_lightning.tables.sweep import Bench, run_bench
from gpt_lightning.tables.worker import SkippedError

VOCAB_SIZE = 50_257
WARMUP_STEPS = 3
RUNGS = {
    "fp32": (
        "--trainer.precision=32-true",
        "--model.matmul_precision=highest",
        "--model.compile=false",
        "--model.config.attention=naive",
        "--model.fused=false",
    ),
    "tf32": ("--model.matmul_precision=high",),
    "bf16": ("--trainer.precision=bf16-mixed",),
    "compile": ("--model.compile=true",),
    "flash": ("--model.config.attention=sdpa",),
    "padded-vocabulary": ("--model.config.vocab_size=50304",),  # a multiple of 128
    "fused-optimizer": ("--model.fused=true",),
}
BATCHES = {
    "cuda": ("--data.batch_size=16", "--data.block_size=1024"),
    "mps": ("--data.batch_size=4", "--data.block_size=1024"),
    "cpu": ("--data.batch_size=2", "--data.block_size=256"),
}


@dataclass
class LadderRow(Measured):
    """Speed on one rung."""

    device: Text
    rung: Text
    step_ms: Hundredths
    tokens_per_sec: Whole
    mfu: Share
    peak_tflops_per_sec: HiddenHundredths
    speedup: Hundredths
    speedup_in_all: Hundredths
    warmup_s: Hundredths
    attention: Hidden


def beside_others(row: LadderRow, before: Sequence[LadderRow]) -> LadderRow:
    """Return a row with its speed-ups over the rows before it, and MFU of the first row's peak."""
    others = [other for other in before if other.tokens_per_sec]
    if not row.tokens_per_sec or not others:
        return row
    peak = others[0].peak_tflops_per_sec
    return replace(
        row,
        mfu=row.mfu * row.peak_tflops_per_sec / peak,
        peak_tflops_per_sec=peak,
        speedup=row.tokens_per_sec / others[-1].tokens_per_sec,
        speedup_in_all=row.tokens_per_sec / others[0].tokens_per_sec,
    )


BENCH = Bench(
    measure="benchmarks.bench_ladder:measure_rung",
    tables={"rows": LadderRow},
    options=(options.DEVICE, options.words("rungs", "rung", RUNGS), options.steps(10)),
    takes_fit_options=True,
    relate=beside_others,
)


def arguments_of(row: SimpleNamespace) -> list[str]:
    """Return the options of `fit` of a rung, with those of the rungs before it."""
    arguments = ["--config=bench_ladder", *BATCHES[row.device], *row.fit_options]
    arguments += fits.random_token_options(VOCAB_SIZE, row.steps, WARMUP_STEPS)
    names = list(RUNGS)
    for name in names[: names.index(row.rung) + 1]:
        if name != "tf32" or row.device == "cuda":
            arguments += RUNGS[name]  # the last of two equal options wins: a rung's
    return [*arguments, f"--trainer.accelerator={row.device}"]


def measure_rung(row: SimpleNamespace) -> Values:
    """Train with the settings of a rung.

    Raises:
        SkippedError: The rung has no effect on the device.
    """
    if row.rung == "tf32" and row.device != "cuda":
        raise SkippedError(f"no effect on {row.device}")
    peak = best_peak(torch.device(row.device))
    found = fits.timed_fit([*arguments_of(row), f"--speed.peak_flops={peak}"])
    return found | {"peak_tflops_per_sec": peak / 1e12}


def best_peak(device: torch.device) -> float:
    """Return the bf16 peak, measured where none is published, on a CPU the faster of two dtypes."""
    if published := lookup(device_name(device), "bf16"):
        return published.flops
    return max(measured_peak(device, dtype).flops for dtype in ("bf16", "fp32"))


if __name__ == "__main__":
    sys.exit(run_bench(BENCH, ["-m", "benchmarks.bench_ladder", *sys.argv[1:]]))
