"""Tokens/s and MFU from plain float32 on, with one more optimization on each rung.

Every rung is `fit` on random tokens, with the settings of all rungs up to it, measured or not.
Times are SpeedMonitor's, so that nothing synchronizes the device between steps.

MFU: of the device's bf16 peak on every rung; where none is published, of the peak that the first
row measured, on a CPU the faster one of bf16 and float32.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gpt_lightning.bench import fits
from gpt_lightning.files import yaml_beside
from gpt_lightning.hardware.device import device_kind, device_name
from gpt_lightning.hardware.peaks import lookup, measured_peak
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option
from gpt_lightning.tables.rows import Row, Values
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.tables.worker import SkippedError

WARMUP_STEPS = 3
TABLE = yaml_beside(__file__, "ladder.yaml")
RUNGS = TABLE["rungs"]


def beside_others(row: Row, before: Sequence[Row]) -> Row:
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


def read_config(args: Any) -> list[Values]:
    """Return --config, and the device that it and the options of `fit` choose.

    Raises:
        UserError: A setting of `fit` is wrong.
    """
    device, _ = arguments_of("fp32", args.config, args.steps, args.fit_options)
    return [{"config": args.config, "device": device}]


BENCH = Bench(
    measure="gpt_lightning.bench.ladder:measure_rung",
    options=(
        options.words("rungs", "rung", RUNGS),
        options.steps(10),
        Option(
            "config", None, "Configuration of `fit`; null: GPT-2 124M.", read_config, str | None
        ),
    ),
    takes_fit_options=True,
    relate=beside_others,
)


def arguments_of(
    rung: str, config: str | None, steps: int, fit_options: list[str]
) -> tuple[str, list[str]]:
    """Return the device and the options of `fit` of a rung, with those of the rungs before it.

    Raises:
        UserError: A setting is wrong.
    """
    arguments = [f"--config={config or 'bench_ladder'}"]
    parsed = fits.parse_fit([*arguments, *fit_options])
    device = device_kind(str(parsed.trainer.accelerator))
    vocab_size = parsed.model.config.vocab_size
    if config is None:
        arguments += TABLE["batches"][device]
    random_tokens = fits.random_token_options("ladder", vocab_size, steps, WARMUP_STEPS)
    arguments += [*fit_options, *random_tokens]
    names = list(RUNGS)
    for name in names[: names.index(rung) + 1]:
        if device in RUNGS[name].get("devices", [device]):
            arguments += RUNGS[name]["settings"]  # the last of two equal options wins: a rung's
    padded = str(-(-vocab_size // 128) * 128)
    return device, [argument.replace("{padded}", padded) for argument in arguments]


def measure_rung(row: Row) -> Values:
    """Train with the settings of a rung.

    Raises:
        SkippedError: The rung has no effect on the device.
    """
    if row.device not in RUNGS[row.rung].get("devices", [row.device]):
        raise SkippedError(f"no effect on {row.device}")
    _, arguments = arguments_of(row.rung, row.config, row.steps, row.fit_options)
    peak = best_peak(torch.device(row.device))
    found = fits.timed_fit([*arguments, f"--speed.peak_flops={peak}"])
    return found | {"peak_tflops_per_sec": peak / 1e12}


def best_peak(device: torch.device) -> float:
    """Return the bf16 peak, measured where none is published, on a CPU the faster of two dtypes."""
    if published := lookup(device_name(device), "bf16"):
        return published.flops
    return max(measured_peak(device, dtype).flops for dtype in ("bf16", "fp32"))
