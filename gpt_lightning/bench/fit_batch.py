"""`gpt-lightning bench fit-batch`: the largest micro-batch of a configuration that fits.

A trial is what `fit` does: GPTModule under a Trainer in the run's precision, with its optimizer,
clipping, compilation and accumulation, on random tokens, in a process of its own that may run out
of memory alone.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpt_lightning.bench.core import results as folders
from gpt_lightning.bench.core import sweep
from gpt_lightning.bench.core.options import check_bounds, check_positive
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, make_row
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser, split_fit_options, underscored
from gpt_lightning.reports.tables import Console, Row, column
from gpt_lightning.training.step_shape import StepShape, accumulation, largest_divisor, options_for

SHARE = 0.8  # of a machine's available memory, where nobody says what a trial may take


@dataclass(frozen=True)
class FitBatchRow:
    """A micro-batch, and what a step of it took."""

    device: str = column("device")
    precision: str = column("precision")
    batch: int = column("batch", "d")
    context: int = column("context", "d")
    accumulate: int = column("accumulated", "d")
    peak_memory_gib: float | None = column("memory GiB", ",.2f")
    limit_gib: float | None = column("limit GiB", ",.2f")
    micro_batch_ms: float | None = column("micro-batch ms", ",.1f")
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    status: str = column("status", width=13, default="")
    note: str = column("note", default="")


BENCH = Bench(
    name="fit-batch",
    title="The largest micro-batch that fits",
    row=FitBatchRow,
    measure="gpt_lightning.bench.fit_batch:measure_batch",
    notes=(
        "batch: sequences a micro-batch and rank. A trial is optimizer steps of `fit` on random "
        "tokens, of two micro-batches where the configuration accumulates, because gradients are "
        "there then while the next activations are made. One device: what several devices add, "
        "such as DDP's buckets of the gradients' size, is not in it.",
        "memory: torch.cuda.max_memory_allocated on a GPU; the highest resident memory of the "
        "trial's own process on a CPU. limit: what a trial on a CPU may take.",
        "Powers of two, then halves of the gap until it is an eighth; the settings have the tokens "
        "a step of the configuration, so their batch divides its sequences a step.",
    ),
    hidden=("limit_gib", "note"),
)


def make_parser() -> OneLineParser:
    """The parser of the command's own options."""
    parser = OneLineParser(
        prog="gpt-lightning bench fit-batch",
        allow_abbrev=False,
        description=f"{BENCH.title}. Options of `fit` follow: --model.config.loss_chunk 4096.",
    )
    parser.add_argument("--config", type=str | None, default=None, help="A configuration of `fit`.")
    parser.add_argument(
        "--limit_gib",
        type=float | None,
        default=None,
        help=f"What a trial on a CPU may take; null: {SHARE:.0%} of the memory that is free.",
    )
    parser.add_argument(
        "--max_batch", type=int | None, default=None, help="null: the sequences of a step."
    )
    parser.add_argument("--steps", type=int, default=2, help="Measured a trial, after the first.")
    add_sweep_arguments(parser)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench fit-batch ...`.

    Returns:
        0: settings were found; 1: not one sequence fits.

    Raises:
        UserError: options that contradict each other.
    """
    own, fit_options = split_fit_options(argv[2:])
    args = make_parser().parse_args(underscored(own))
    if args.config is None:
        raise UserError("give bench fit-batch --config FILE: the configuration to fit")
    check_bounds(args, steps=1)
    for name in ("max_batch", "limit_gib", "timeout_s"):
        check_positive(args, name)

    from gpt_lightning.bench.ladder_run import parse_fit  # not for --help: torch takes seconds

    config = parse_fit([f"--config={args.config}", *fit_options])
    step = step_of(config)
    trial = trial_of(config, step) | {"steps": args.steps, "limit_gib": args.limit_gib}
    trials = Trials(trial, argv, args.resume, args.timeout_s)
    largest, refused = search(trials.fits, args.max_batch or step.sequences)
    lines = findings(trials.rows, largest, refused, step, config)
    print("\n" + "\n".join(lines))
    trials.write(lines)
    print(f"\n{trials.folder}: results.md, results.json, rows.csv")
    return int(largest == 0)


def search(fits: Callable[[int], bool], most: int) -> tuple[int, int | None]:
    """Powers of two up to `most`, then halves of the gap until it is an eighth.

    Args:
        fits: Whether a batch does; it is asked once a batch.
        most: The largest batch that is of any use.

    Returns:
        The largest batch that fits, 0 if none does, and the smallest that did not, if one did not.
    """
    good, bad, batch = 0, None, 1
    while bad is None and good < most:
        if fits(batch):
            good, batch = batch, min(2 * batch, most)
        else:
            bad = batch
    while bad is not None and bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, bad


class Trials:
    """Batches that are tried one by one; rows are kept and reported as a sweep's.

    Args:
        trial: Arguments of `measure_batch` but for `batch`.
        argv: The command, for the report.
        resume: Take what the newest search of the same configuration has measured.
        timeout_s: Of a trial.
    """

    def __init__(
        self, trial: dict[str, Any], argv: list[str], resume: bool, timeout_s: float
    ) -> None:
        from gpt_lightning.hardware.machine import machine_record

        self.trial, self.timeout_s = trial, timeout_s
        self.folder, self._done = (
            folders.find_folder(BENCH.name, [trial | {"batch": 1}])
            if resume
            else (folders.make_folder(BENCH.name), {})
        )
        self.machine = machine_record(argv)
        self.rows: list[Row] = []
        self._console = Console(FitBatchRow, without=BENCH.hidden)
        for name, fact in self.machine.items():
            print(f"{name:<9} {fact}")
        print(f"\n{self._console.header()}", flush=True)

    def fits(self, batch: int) -> bool:
        """Tries a batch; whatever goes wrong, it does not fit."""
        configuration = self.trial | {"batch": batch}
        measured = self._done.get(folders.key(configuration))
        if measured is None:
            measured = sweep.isolated(BENCH.measure, configuration, self.timeout_s)
            folders.keep(self.folder, configuration, measured)
        self.rows.append(make_row(FitBatchRow, configuration | measured))
        print(self._console.line(self.rows[-1]), flush=True)
        self.write([])
        return bool(self.rows[-1].status == "ok")

    def write(self, lines: list[str]) -> None:
        """Writes the report of the rows so far, with lines about them."""
        bench = dataclasses.replace(BENCH, notes=(*BENCH.notes, *lines))
        sweep.report(bench, self.folder, self.machine, self.rows)


# ---- the configuration ---------------------------------------------------------------------------


def step_of(config: Any) -> StepShape:
    """The optimizer step of a parsed configuration of `fit`.

    Raises:
        UserError: the configuration asks for a device or a step that there is not.
    """
    import lightning as L

    from gpt_lightning.hardware.precision import check_accelerator

    trainer, data = config.trainer, config.data
    precision = str(trainer.precision or "32-true")
    check_accelerator(str(trainer.accelerator), precision, "--trainer.accelerator")
    probe = L.Trainer(
        accelerator=trainer.accelerator,
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        logger=False,
        enable_checkpointing=False,
    )
    ranks = probe.num_devices * probe.num_nodes
    T = data.block_size or config.model.config.block_size
    k = trainer.accumulate_grad_batches
    if data.tokens_per_step is not None:
        k = accumulation(data.tokens_per_step, data.batch_size, T, ranks)
    return StepShape(data.batch_size, T, k, ranks)


def trial_of(config: Any, step: StepShape) -> dict[str, Any]:
    """What a trial needs to know of a configuration, as plain values.

    Raises:
        UserError: the model contradicts itself.
    """
    from gpt_lightning.bench.ladder_run import device_kind
    from gpt_lightning.training.module import GPTModule

    model = config.model.as_dict()
    if model["config"]["vocab_size"] is None:
        model["config"]["vocab_size"] = vocabulary_of(config)
    # memory knows neither weights nor rates, and a trial is shorter than a warm-up
    model |= {"init_from": None, "warmup_steps": 0}
    GPTModule(**model)  # refused here, not in a row
    return {
        "device": device_kind(str(config.trainer.accelerator)),
        "precision": str(config.trainer.precision or "32-true"),
        "model": model | {"betas": list(model["betas"])},
        "clip": [config.trainer.gradient_clip_val, config.trainer.gradient_clip_algorithm],
        "context": step.block_size,
        "accumulate": min(2, step.accumulate),
    }


def vocabulary_of(config: Any) -> int:
    """The vocabulary of a configuration that leaves it to its data."""
    from gpt_lightning.training.datamodule import TokenDataModule

    data = TokenDataModule(**config.data.as_dict())
    data.prepare_data()
    return data.vocab_size


def findings(
    rows: list[Row], largest: int, refused: int | None, step: StepShape, config: Any
) -> list[str]:
    """What was found, a line each: the largest batch, the fastest, and the settings."""
    from gpt_lightning.model.gpt import GPTConfig
    from gpt_lightning.training.memory_advice import memory_options

    if largest == 0:
        switches = memory_options(GPTConfig(**config.model.config.as_dict()), step.block_size)
        advice = " ".join(switches) or "a shorter data.block_size, or a smaller model"
        way_out = f": try {advice}" if rows[0].status == "out of memory" else ""
        return [f"not one sequence fits ({rows[0].status}, {rows[0].note}){way_out}"]
    why = next((row.status for row in rows if row.batch == refused), "")
    refusal = f"; {refused} does not ({why})" if refused else ""
    fastest = max((row for row in rows if row.status == "ok"), key=lambda r: r.tokens_per_sec)
    batch = largest_divisor(step.sequences, largest)
    options = options_for(
        step,
        batch,
        follows=config.data.tokens_per_step is not None,
        eval_batch_size=config.data.eval_batch_size or step.batch_size,
        val_check_interval=config.trainer.val_check_interval,
        limit_val_batches=config.trainer.limit_val_batches,
    )
    return [
        f"largest     {largest} sequences x {step.block_size} tokens a micro-batch fit{refusal}",
        f"fastest     {fastest.batch} sequences: {fastest.tokens_per_sec:,.0f} tokens/s",
        f"settings    {' '.join(options)}",
        f"step        {step.with_batch_size(batch)}",
    ]


# ---- in the trial's own process ------------------------------------------------------------------


def measure_batch(
    device: str,
    precision: str,
    model: dict[str, Any],
    clip: list[Any],
    batch: int,
    context: int,
    accumulate: int,
    steps: int,
    limit_gib: float | None,
) -> dict[str, Any]:
    """Trains some optimizer steps of a micro-batch on random tokens."""
    import lightning as L
    import torch

    from gpt_lightning.bench.core.training_step import peak_memory_gib
    from gpt_lightning.bench.overhead_run import AskedBatches
    from gpt_lightning.training.fit import quiet_lightning
    from gpt_lightning.training.module import GPTModule

    quiet_lightning()
    where = torch.device(device)
    limit = limit_trial(device, limit_gib)
    L.seed_everything(0, verbose=False)
    x, y = torch.randint(model["config"]["vocab_size"], (2, batch, context), device=where)
    # the first step compiles; the last, which no request for a batch ends, is not measured
    batches = AskedBatches((x, y), (steps + 2) * accumulate)
    trainer = L.Trainer(
        accelerator=device,
        devices=1,
        precision=precision,  # type: ignore[arg-type]  # the configuration's
        max_steps=steps + 2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip[0],
        gradient_clip_algorithm=clip[1],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    trainer.fit(GPTModule(**model), train_dataloaders=batches)
    measured = batches.milliseconds()[accumulate : (steps + 1) * accumulate]
    milliseconds = sum(measured) / len(measured)
    return {
        "peak_memory_gib": peak_memory_gib(where),
        "limit_gib": limit,
        "micro_batch_ms": milliseconds,
        "tokens_per_sec": batch * context / milliseconds * 1e3,
    }


def limit_trial(device: str, gib: float | None) -> float | None:
    """Lets a trial on a CPU end before the machine's memory does; returns its limit in GiB."""
    import sys

    import torch

    from gpt_lightning.bench.core.memory_meter import available_bytes, limit_memory
    from gpt_lightning.hardware.memory import memory_gib

    if device != "cpu":
        return None
    if gib is None:
        there = available_bytes()
        gib = SHARE * (memory_gib() if there is None else there / 2**30)
    if sys.platform == "linux":
        limit_memory(torch.device(device), gib)
    else:  # no limit that the system heeds
        watch_resident(gib)
    return gib


def watch_resident(gib: float) -> None:
    """Ends this process, with a row that says so, once it has held more than so much."""
    import json
    import os
    import threading
    import time

    import torch

    from gpt_lightning.bench.core.training_step import peak_memory_gib
    from gpt_lightning.bench.core.worker import MARK

    def watch() -> None:
        while peak_memory_gib(torch.device("cpu")) <= gib:
            time.sleep(0.01)
        row = {"status": "out of memory", "note": f"more than {gib:.2f} GiB"}
        print(MARK + json.dumps(row), flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
