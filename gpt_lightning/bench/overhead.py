"""`gpt-lightning bench overhead`: what Lightning's Trainer and our callbacks cost a step."""

import itertools
from dataclasses import dataclass

from gpt_lightning.bench.core.options import (
    SIZES,
    at_least,
    check_bounds,
    devices,
    listed,
    one_of,
    switch,
)
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.bench.core.training_step import VOCABULARY
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.reports.tables import column


@dataclass(frozen=True)
class Work:
    """What a step trains."""

    shape: tuple[int, int, int]  # layers, heads, width
    batch: int = 4
    context: int = 64
    vocab_size: int = VOCABULARY
    steps: int = 10  # measured a block
    rounds: int = 20  # blocks of each loop


WORK = {
    "tiny": Work((2, 2, 64)),
    # nanoGPT's baby GPT and its preset for CPUs, by shape; without dropout, which would make the
    # losses differ from loop to loop
    "char": Work((6, 6, 384), batch=64, context=256, vocab_size=65, steps=3, rounds=5),
    "char-cpu": Work((4, 4, 128), batch=12, context=64, vocab_size=65),
} | {name: Work(shape) for name, shape in SIZES.items()}
DTYPES = ("fp32", "tf32", "bf16")  # fp16 needs a GradScaler, which is another loop
LOOPS = {
    "raw": "forward, backward, AdamW, nothing else",
    "norm": "raw, and the gradient's norm, checked to be finite, as GPTModule does each step",
    "trainer": "Trainer and GPTModule, no callback, no logger",
    "callbacks": "the same with the callbacks of `fit`",
}
PAIRS = ("raw:raw", "raw:trainer", "norm:trainer", "trainer:callbacks")


@dataclass(frozen=True)
class OverheadRow:
    """Two loops over the same steps, B against A."""

    device: str = column("device")
    dtype: str = column("dtype")
    compile: bool = column("compile")
    size: str = column("size", width=8)
    batch: int = column("batch", "d")
    context: int = column("context", "d")
    a: str = column("A", width=9)
    b: str = column("B", width=9)
    a_ms: float | None = column("A ms", ",.3f", 9)
    b_ms: float | None = column("B ms", ",.3f", 9)
    difference_ms: float | None = column("B - A ms", ",.3f")
    ratio: float | None = column("B/A", ".3f", 6)
    ratio_std: float | None = column("std", ".3f", 6)
    ratio_min: float | None = column("min", ".3f", 6)
    ratio_max: float | None = column("max", ".3f", 6)
    graphs: int | None = column("graphs", "d")
    a_loss: float | None = column("A loss", ".5f", 8)
    b_loss: float | None = column("B loss", ".5f", 8)
    status: str = column("status", default="")
    note: str = column("note", default="")


BENCH = Bench(
    name="overhead",
    title="Lightning's Trainer against a raw PyTorch loop",
    row=OverheadRow,
    measure="gpt_lightning.bench.overhead_run:measure_overhead",
    notes=(
        "The same model, batch and optimizer in one process, in blocks A B A B. A step lasts from "
        "the moment its batch is asked for to the next such moment, in every loop; ms: median over "
        "the rounds of a block's mean step, so that what happens at every tenth step, as logging, "
        "counts. B - A and B/A: medians over the rounds; raw against raw is the noise.",
        "; ".join(f"{name}: {what}" for name, what in LOOPS.items()) + ". Callbacks: SpeedMonitor, "
        "StepProgress, SampleText and RunCheckpoint between two validations: nothing is sampled "
        "or saved.",
        "loss: after a block, every block from the same weights: equal losses mean equal work.",
    ),
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench overhead", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto; with commas.")
    parser.add_argument("--pairs", default=",".join(PAIRS), help=f"A:B, of {', '.join(LOOPS)}.")
    parser.add_argument("--sizes", default="tiny", help=f"With commas, of {', '.join(WORK)}.")
    parser.add_argument(
        "--contexts", default=None, help="Tokens a sequence, with commas; by default the size's."
    )
    parser.add_argument(
        "--batches", default=None, help="Sequences, with commas; by default the size's."
    )
    parser.add_argument("--dtypes", default="fp32", help=f"Of {', '.join(DTYPES)}.")
    parser.add_argument("--compile", default="false", help="true, false, or both with a comma.")
    parser.add_argument(
        "--steps", type=int, default=None, help="Steps measured a block; 10, for char 3."
    )
    parser.add_argument("--warmup", type=int, default=2, help="Steps before, in each block.")
    parser.add_argument(
        "--rounds", type=int, default=None, help="Blocks of each loop; 20, for char 5."
    )
    add_sweep_arguments(parser)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench overhead ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    check_bounds(args, steps=1, warmup=1, rounds=1)
    configurations = [
        {
            "device": device,
            "dtype": dtype,
            "compile": compiled,
            "size": size,
            "shape": list(WORK[size].shape),
            "vocab_size": WORK[size].vocab_size,
            "batch": batch or WORK[size].batch,
            "context": context or WORK[size].context,
            "a": a,
            "b": b,
            "steps": args.steps or WORK[size].steps,
            "warmup": args.warmup,
            "rounds": args.rounds or WORK[size].rounds,
        }
        for device, size, context, batch, dtype, compiled, (a, b) in itertools.product(
            devices(args),
            listed(args, "sizes", one_of(list(WORK))),
            listed(args, "contexts", at_least(1)) if args.contexts is not None else [None],
            listed(args, "batches", at_least(1)) if args.batches is not None else [None],
            listed(args, "dtypes", one_of(DTYPES)),
            listed(args, "compile", switch),
            listed(args, "pairs", pair),
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


def pair(text: str) -> tuple[str, str]:
    """A kind for `listed`: two loops."""
    a, colon, b = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is no pair such as raw:trainer")
    loop = one_of(list(LOOPS))
    return loop(a), loop(b)
