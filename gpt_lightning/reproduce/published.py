"""Read the published numbers and settings from reference/."""

import csv
import functools
import statistics
from dataclasses import dataclass
from typing import Any

import torch
import yaml

from gpt_lightning.files import reference_text
from gpt_lightning.hardware.peaks import lookup
from gpt_lightning.hardware.precision import product_dtype
from gpt_lightning.model import flops
from gpt_lightning.reproduce.rungs import Case, Rung

Settings = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """Published numbers of a rung.

    Attributes:
        losses: (step, split) -> loss in nats; split is `batch` for the loss of a training step,
            `train` or `val` for an evaluation. Training steps beside evaluations are among them if
            the rung has a tolerance for them.
        step_ms: Median of the step times without the first; None: no times were published.
        tokens_per_sec: Median of the same steps.
        first_step_ms: Time of the first step, which includes compilation.
        early_ms: Mean of the printed steps 10 to 50, the figure of the Shakespeare runs' author.
        process_s: Wall, user and system seconds of the process; empty: not published.
        batches: Batches of each split in an evaluation; None for losses of steps.
    """

    losses: dict[tuple[int, str], float]
    step_ms: float | None
    tokens_per_sec: float | None
    first_step_ms: float | None = None
    batches: int | None = None
    early_ms: float | None = None
    process_s: tuple[float, ...] = ()


def read_published(case: Case, rung: Rung) -> Published:
    """Return the published numbers of a rung."""
    losses_of = rung.name if rung.published is None else rung.published
    times_of = losses_of if rung.published_times is None else rung.published_times
    losses: dict[tuple[int, str], float] = {}
    for row in read_rows(case.reference, losses_of):
        step = int(row["step"])
        if case.kind == "steps":
            losses[step, "batch"] = float(row["loss"])
        else:
            losses[step, "train"] = float(row["train_loss"])
            losses[step, "val"] = float(row["val_loss"])
    assert losses, f"no rows {losses_of!r} in {case.reference}"
    times = read_rows(case.times or case.reference, times_of)
    if rung.iterations and case.times:
        rows = read_rows(case.times, losses_of)
        losses |= {(int(row["iter"]), "batch"): float(row["train_loss"]) for row in rows}
    early = [float(row["dt_ms"]) for row in times if 10 <= int(row.get("iter", 0)) <= 50]
    process = read_rows("shakespeare_char_times.csv", times_of)
    step_ms = [float(row["dt_ms"]) for row in times if row["dt_ms"]]
    rates = [float(row["tokens_per_sec"]) for row in times if row.get("tokens_per_sec")]
    return Published(
        losses,
        _median(step_ms[1:]),
        _median(rates[1:]),
        step_ms[0] if step_ms else None,
        case.eval_batches,
        statistics.fmean(early) if early else None,
        tuple(float(text) for row in process for text in list(row.values())[1:]),
    )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def read_rows(file_name: str, name: str) -> list[dict[str, str]]:
    """Return the rows whose first column is `name`, in their order."""
    lines = csv.DictReader(reference_text(file_name).splitlines())
    return [row for row in lines if next(iter(row.values())) == name]


# ---- settings and speed --------------------------------------------------------------------------


@functools.cache
def _tables() -> dict[str, dict[str, Settings]]:
    tables: dict[str, dict[str, Settings]] = yaml.safe_load(reference_text("settings.yaml"))
    return tables


def published_settings(case: Case, rung: Rung) -> Settings:
    """Return the settings of a published run, with its device if no other will do."""
    settings = _tables()[case.name][rung.name]
    if all(f"--model.config.{k}={v}" in rung.settings for k, v in rung.on_cpu.items()):  # Rung.on
        settings = {**settings, **rung.on_cpu}
    anywhere = rung.device == "any" or rung.losses_anywhere
    return settings if anywhere else {**settings, "accelerator": rung.device}


def published_speed(
    case: Case, rung: Rung, published: Published
) -> tuple[float | None, float | None, str]:
    """Return tokens/s and MFU of the published run, and a note on the peak of the MFU."""
    theirs = published_settings(case, rung)
    (B, T), C = theirs["batch"], theirs["n_embd"]
    rate = published.tokens_per_sec
    if rate is None and published.step_ms is not None:
        rate = B * T / published.step_ms * 1e3
    if rate is None:
        return None, None, ""
    arithmetic = theirs["precision"], theirs["matmul_precision"]
    dtype = product_dtype(*arithmetic, torch.device("cuda"))  # no Mac in the tables has TF32 set
    peak = lookup(theirs.get("chip", ""), dtype)
    if peak is None:
        return rate, None, "their MFU: chip's peak not known"
    tables = theirs["block_size"] + (0 if theirs["tie_weights"] else theirs["vocab_size"])
    n_params = theirs["parameters"] - tables * C
    work = flops.flops_per_token(n_params, theirs["n_layer"], C, T)
    note = f"their MFU relative to {peak.flops / 1e12:.4g} TFLOP/s: {peak.label}"
    return rate, flops.mfu(rate, work, peak.flops), note


def float32_rung(case: Case, rung: Rung) -> list[Rung]:
    """Return the first rung in float32 with the device and the batch of a rung in less; or none."""
    theirs = published_settings(case, rung)
    if is_float32(theirs):
        return []
    rungs = [other for other in case.rungs if other.device == rung.device]
    others = [(other, published_settings(case, other)) for other in rungs]
    same = [o for o, s in others if is_float32(s) and s["batch"] == theirs["batch"]]
    return same[:1]


def is_float32(theirs: Settings) -> bool:
    """Return whether products are in float32, not in TF32 either."""
    return (theirs["precision"], theirs["matmul_precision"]) == ("32-true", "highest")
