"""Tokens/s and MFU from plain float32 on, with one more optimization on each rung.

Every rung is `fit` on random tokens, with the settings of all rungs up to it. Times are
SpeedMonitor's, so that nothing synchronizes the device between steps.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml
from jsonargparse.typing import PositiveInt

from gpt_lightning.bench.core import fit_run, options
from gpt_lightning.bench.core.options import Option, optional
from gpt_lightning.bench.core.results import keep, make_folder
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import device_kind, free_memory
from gpt_lightning.hardware.machine import machine_record
from gpt_lightning.hardware.peaks import Peak, device_name, lookup, measured_peak
from gpt_lightning.parsing import split_fit_options
from gpt_lightning.reports.plots import plot_bars
from gpt_lightning.reports.tables import Console, column, write_report

PICTURE = "ladder.png"
WARMUP_STEPS = 3
TABLE = yaml.safe_load(Path(__file__).with_name("ladder.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class LadderRung:
    """One more acceleration.

    Attributes:
        name: Name on the command line and in the table.
        settings: Options of `fit` that it adds to those of the rungs before.
        devices: Devices on which it has an effect.
    """

    name: str
    settings: Sequence[str]
    devices: Sequence[str] = ("cuda", "mps", "cpu")


RUNGS = [LadderRung(**entry) for entry in TABLE["rungs"]]


@dataclass(frozen=True)
class LadderRow:
    """Measured rung."""

    rung: str = column("rung", width=17)
    status: str = column("status", width=7)
    step_ms: float | None = column("step ms", ",.1f", 9)
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    mfu: float | None = column("MFU", ".1%", 6)
    speedup: float | None = column("speed-up", ".2f")
    speedup_in_all: float | None = column("in all", ".2f")
    warmup_s: float | None = column("warm-up s", ".1f")
    note: str = column("note", default="")


OPTIONS = (
    optional("config", "Configuration of `fit` whose model is measured; null: GPT-2 124M.", str),
    Option("steps", 10, "Measured optimizer steps of a rung.", type=PositiveInt),
    optional(
        "rungs",
        f"Any of {', '.join(rung.name for rung in RUNGS)}, separated by commas; null: all. A rung "
        "has the settings of all rungs before it, measured or not.",
        str,
    ),
)


def run(argv: list[str]) -> int:
    """Run `bench ladder ...`.

    Returns:
        0: Every rung that this device has was measured; 1: one failed.
    """
    own, fit_options = split_fit_options(argv[2:])
    description = (
        "Measure tokens/s and MFU while one setting after the other makes training faster. "
        "Options of `fit` (--data.batch_size 8) change all rungs."
    )
    args = options.parse("ladder", description, OPTIONS, own)
    names = [rung.name for rung in RUNGS]
    chosen = names if args.rungs is None else options.listed(args, "rungs", options.one_of(names))
    ladder = Ladder(args.config, args.steps, fit_options, argv)
    console = Console(LadderRow)
    facts = [f"{name:<9} {fact}" for name, fact in ladder.machine.items()]
    print("\n".join([*facts, "", console.header()]), flush=True)
    for rung in RUNGS:
        if rung.name in chosen:
            print(console.line(ladder.measure(rung)), flush=True)
    print(f"\n{ladder.folder}: results.md, results.json, ladder.csv, ladder.png")
    return int(any(row.status == "failed" for row in ladder.rows))


class Ladder:
    """Measures rung after rung, and writes all results again after each.

    Args:
        config: Configuration of `fit`; None: configs/bench_ladder.yaml.
        steps: Measured optimizer steps of a rung, after the warm-up.
        fit_options: Options of `fit` for all rungs.
        argv: The command, for the report.
    """

    def __init__(
        self, config: str | None, steps: int, fit_options: list[str], argv: list[str]
    ) -> None:
        self.rows: list[LadderRow] = []
        base = [f"--config={config or 'bench_ladder'}"]
        parsed = fit_run.parse_fit([*base, *fit_options])
        kind = device_kind(str(parsed.trainer.accelerator))
        if config is None:
            base += TABLE["batches"][kind]
        self.device = torch.device(kind)
        self.vocab_size = parsed.model.config.vocab_size
        random_tokens = fit_run.random_token_options("ladder", self.vocab_size, steps, WARMUP_STEPS)
        peak = best_peak(self.device)
        self._arguments = [*base, *fit_options, *random_tokens, f"--speed.peak_flops={peak.flops}"]
        # no lines where there is no bar
        self._arguments.append("--progress.plain_every_n_steps=1000000")
        mfu = f"of {peak.flops / 1e12:.4g} TFLOP/s, {peak.label}"
        self.machine = machine_record(argv, self.device) | {"MFU": mfu}
        self.folder = make_folder("ladder")

    def settings(self, rung: LadderRung) -> list[str]:
        """Return the settings of a rung and of all rungs before it that this device has."""
        padded = -(-self.vocab_size // 128) * 128
        rungs = [r for r in RUNGS[: RUNGS.index(rung) + 1] if self.device.type in r.devices]
        return [setting.format(padded=padded) for r in rungs for setting in r.settings]

    def measure(self, rung: LadderRung) -> LadderRow:
        """Measure a rung; a failure is a row too."""
        row = self._measured(rung)
        self.rows.append(row)
        keep(self.folder, {"rung": row.rung}, asdict(row))
        self._write()
        return row

    def _measured(self, rung: LadderRung) -> LadderRow:
        if self.device.type not in rung.devices:
            return LadderRow(rung.name, "skipped", note=f"no effect on {self.device.type}")
        try:
            # the last of two equal options wins: a rung's
            arguments = [*self._arguments, *self.settings(rung)]
            speed = fit_run.timed_fit(arguments, self.folder / rung.name)
        except UserError:
            raise
        except Exception as error:  # out of memory, no compiler: a row, and the ladder continues
            text = " ".join(str(error).split())
            return LadderRow(rung.name, "failed", note=f"{type(error).__name__}: {text[:200]}")
        finally:
            free_memory()
        assert speed.tokens_per_sec is not None
        rates = [row.tokens_per_sec for row in self.rows if row.tokens_per_sec]
        return LadderRow(
            rung.name,
            "ok",
            speed.step_ms,
            speed.tokens_per_sec,
            speed.mfu,
            speed.tokens_per_sec / rates[-1] if rates else None,
            speed.tokens_per_sec / rates[0] if rates else None,
            speed.seconds.get("compile and warm-up"),
            fit_run.stall_note(speed),
        )

    def _write(self) -> None:
        title = f"bench ladder, {self.machine['device']}"
        panels: dict[str, Sequence[float | None]] = {
            "tokens/s": [row.tokens_per_sec for row in self.rows],
            "MFU (%)": [None if row.mfu is None else 100 * row.mfu for row in self.rows],
        }
        plot_bars(self.folder / PICTURE, title, [row.rung for row in self.rows], panels)
        notes = [f"`fit` of every rung: {' '.join(self._arguments)}"]
        write_report(
            self.folder, "bench ladder", self.machine, {"ladder": self.rows}, notes, [PICTURE]
        )


def best_peak(device: torch.device) -> Peak:
    """Return one denominator for all rungs: the bf16 peak, measured where none is published.

    The peak of a CPU is that of the faster of bf16 and float32.
    """
    published = lookup(device_name(device), "bf16")
    if published is not None:
        return published
    return max((measured_peak(device, dtype) for dtype in ("bf16", "fp32")), key=lambda p: p.flops)
