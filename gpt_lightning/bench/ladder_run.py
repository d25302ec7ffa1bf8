"""How `bench ladder` measures a rung."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.bench.core.results import keep, make_folder
from gpt_lightning.bench.ladder import SHAPES, LadderRow, Rung
from gpt_lightning.data.synthetic import random_dataset
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import default_device, free_memory
from gpt_lightning.hardware.machine import machine_record
from gpt_lightning.hardware.peaks import Peak, device_name, lookup, measured_peak
from gpt_lightning.hardware.precision import resolve_precision
from gpt_lightning.parsing import resolve_configs
from gpt_lightning.reports.plots import plot_bars
from gpt_lightning.reports.tables import write_report
from gpt_lightning.runs.logger import RunLogger
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.recorder import RunRecorder

PICTURE = "ladder.png"
WARMUP_STEPS = 3


class Ladder:
    """Measures rung after rung, and writes all results again after each.

    Args:
        config: Of `fit`; None: configs/bench_ladder.yaml.
        steps: Measured a rung, after the warm-up.
        fit_options: For all rungs.
        argv: The command, for the report.
    """

    def __init__(
        self, config: str | None, steps: int, fit_options: list[str], argv: list[str]
    ) -> None:
        self.argv = argv
        self.rows: list[LadderRow] = []
        self._settings: list[str] = []  # of the rungs so far
        base = [f"--config={config or 'bench_ladder'}"]
        parsed = parse_fit([*base, *fit_options])
        kind = device_kind(str(parsed.trainer.accelerator))
        if config is None:
            base += SHAPES[kind]
        self.device = torch.device(kind)
        self.vocab_size = known_vocabulary(parsed.model.config.vocab_size)
        self.peak = best_peak(self.device)
        dataset = random_dataset(Path("data"), self.vocab_size)
        self._arguments = [
            *base,
            *fit_options,
            f"--data.dataset={dataset}",
            "--data.corpus=null",
            "--data.text_file=null",
            f"--trainer.max_steps={WARMUP_STEPS + steps}",
            "--trainer.limit_val_batches=0",
            "--trainer.enable_checkpointing=false",
            "--samples.max_new_tokens=0",
            "--progress.plain_every_n_steps=1000000",  # a bar on a terminal, and no lines elsewhere
            f"--speed.warmup_steps={WARMUP_STEPS}",
            f"--speed.peak_flops={self.peak.flops}",
        ]
        self.machine = machine_record(argv, self.device)
        self.folder = make_folder("ladder")

    def facts(self) -> list[str]:
        """What is measured, a line each."""
        facts = self.machine | {
            "MFU": f"of {self.peak.flops / 1e12:.4g} TFLOP/s, {self.peak.label}"
        }
        return [f"{name:<9} {fact}" for name, fact in facts.items()]

    def pass_over(self, rung: Rung) -> None:
        """Takes a rung's settings without measuring it."""
        if self.device.type in rung.devices:
            padded = -(-self.vocab_size // 128) * 128
            self._settings += [setting.format(padded=padded) for setting in rung.settings]

    def measure(self, rung: Rung) -> LadderRow:
        """Measures a rung; a failure is a row too."""
        if self.device.type not in rung.devices:
            row = LadderRow(rung.name, "skipped", note=f"means nothing on {self.device.type}")
        else:
            self.pass_over(rung)
            row = self._measured(rung)
        self.rows.append(row)
        keep(self.folder, {"rung": row.rung}, dataclasses.asdict(row))
        self._write()
        return row

    def _measured(self, rung: Rung) -> LadderRow:
        watch = RunRecorder(lambda seen: None, each_step=False)
        logger = RunLogger(str(self.folder.parent), self.folder.name, version=rung.name)
        arguments = ["fit", *self._arguments, *self._settings]  # what a rung sets, wins
        try:
            training.run(arguments, callbacks=[watch], logger=logger)
        except UserError:
            raise
        except Exception as error:  # out of memory, no compiler: a row, and the ladder goes on
            text = " ".join(str(error).split())
            return LadderRow(rung.name, "failed", note=f"{type(error).__name__}: {text[:200]}")
        finally:
            free_memory()
        speed = watch.speed
        assert speed is not None
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
            f"{speed.stalls} stalls left out" if speed.stalls else "",
        )

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        plot_bars(
            self.folder / PICTURE,
            f"bench ladder, {self.machine['device']}",
            [row.rung for row in self.rows],
            {
                "tokens/s": [row.tokens_per_sec for row in self.rows],
                "MFU (%)": [None if row.mfu is None else 100 * row.mfu for row in self.rows],
            },
        )
        write_report(
            self.folder,
            title="bench ladder",
            machine=self.machine,
            tables={"ladder": self.rows},
            notes=[self.facts()[-1], f"`fit` of every rung: {' '.join(self._arguments)}"],
            pictures=[PICTURE],
        )


def parse_fit(options: list[str]) -> Any:
    """The configuration that `fit` would make of options."""
    options = resolve_configs(options)
    training.quiet_lightning()
    config = training.training_parser().parse_args(["fit", *options]).fit
    resolve_precision(config.trainer)
    return config


def device_kind(accelerator: str) -> str:
    """cuda, mps or cpu: what Trainer makes of an accelerator."""
    return default_device() if accelerator in ("auto", "gpu") else accelerator


def known_vocabulary(vocab_size: int | None) -> int:
    """The vocabulary of the model.

    Raises:
        UserError: it is left to the data.
    """
    if vocab_size is None:
        raise UserError(
            "model.config.vocab_size is null, but bench ladder reads random tokens: "
            "give a number, e.g. --model.config.vocab_size 65"
        )
    return vocab_size


def best_peak(device: torch.device) -> Peak:
    """One denominator for all rungs: the bf16 peak, measured where none is published.

    A CPU without bf16 units is faster in float32; then that is its peak.
    """
    published = lookup(device_name(device), "bf16")
    if published is not None:
        return published
    return max((measured_peak(device, dtype) for dtype in ("bf16", "fp32")), key=lambda p: p.flops)
