"""`gpt-lightning bench peers`: our GPT-2 against transformers', the same weights and batch."""

import itertools
from dataclasses import dataclass

from gpt_lightning.bench.core.options import (
    DTYPES,
    SIZES,
    at_least,
    check_bounds,
    devices,
    listed,
    one_of,
    switch,
)
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.reports.tables import column

SHAPES = {"tiny": (2, 2, 64)} | SIZES  # layers, heads, width


@dataclass(frozen=True)
class PeerRow:
    """A configuration and the steps of both models."""

    device: str = column("device")
    dtype: str = column("dtype")
    compile: bool = column("compile")
    size: str = column("size", width=8)
    batch: int = column("batch", "d")
    context: int = column("context", "d")
    ours_ms: float | None = column("ours ms", ",.2f", 9)
    theirs_ms: float | None = column("theirs ms", ",.2f", 9)
    ours_forward_ms: float | None = column("ours forward ms", ",.2f")
    theirs_forward_ms: float | None = column("theirs forward ms", ",.2f")
    ours_backward_ms: float | None = column("ours backward ms", ",.2f")
    theirs_backward_ms: float | None = column("theirs backward ms", ",.2f")
    ours_tokens_per_sec: float | None = column("ours tokens/s", ",.0f")
    theirs_tokens_per_sec: float | None = column("theirs tokens/s", ",.0f")
    ratio: float | None = column("theirs/ours", ".3f")
    ratio_std: float | None = column("std", ".3f", 6)
    ratio_min: float | None = column("min", ".3f", 6)
    ratio_max: float | None = column("max", ".3f", 6)
    ours_first_step_s: float | None = column("ours first s", ",.1f")
    theirs_first_step_s: float | None = column("theirs first s", ",.1f")
    ours_graphs: int | None = column("our graphs", "d")
    theirs_graphs: int | None = column("their graphs", "d")
    ours_loss: float | None = column("our loss", ".5f")
    theirs_loss: float | None = column("their loss", ".5f")
    attention: str = column("their attention", default="")
    transformers: str = column("transformers", default="")
    status: str = column("status", default="")
    note: str = column("note", default="")


BENCH = Bench(
    name="peers",
    title="The same GPT-2 through transformers' GPT2LMHeadModel and ours",
    row=PeerRow,
    measure="gpt_lightning.bench.peers_run:measure_peers",
    notes=(
        "Both models have the same weights, batch, loss function and AdamW and no dropout; theirs "
        "keeps no cache of keys and values. Training steps in blocks of ours, theirs, ours, ... in "
        "one process; ms: median over the rounds of a block's mean step, of forward and backward "
        "the median of all steps. theirs/ours: median over the rounds, with its spread; above 1 "
        "ours is faster.",
        "loss: of the first step, before any update: equal losses mean equal models. first: the "
        "first step, with compilation. graphs: compiled by torch.compile.",
    ),
    hidden=(
        "ours_forward_ms",
        "theirs_forward_ms",
        "ours_backward_ms",
        "theirs_backward_ms",
        "ratio_min",
        "ratio_max",
        "ours_first_step_s",
        "theirs_first_step_s",
        "attention",
        "transformers",
        "note",
    ),
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench peers", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto; with commas.")
    parser.add_argument("--sizes", default="small", help=f"With commas, of {', '.join(SHAPES)}.")
    parser.add_argument("--contexts", default="256", help="Tokens a sequence, with commas.")
    parser.add_argument("--batches", default="4", help="Sequences, with commas.")
    parser.add_argument("--dtypes", default="fp32,bf16", help=f"Of {', '.join(DTYPES)}.")
    parser.add_argument("--compile", default="false,true", help="true, false, or both.")
    parser.add_argument("--steps", type=int, default=3, help="Steps measured a block.")
    parser.add_argument("--warmup", type=int, default=1, help="Steps before, in each block.")
    parser.add_argument("--rounds", type=int, default=5, help="Blocks of each model.")
    add_sweep_arguments(parser, timeout_s=1200.0)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench peers ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    check_bounds(args, steps=1, rounds=1, warmup=0)
    configurations = [
        {
            "device": device,
            "dtype": dtype,
            "compile": compiled,
            "size": size,
            "shape": list(SHAPES[size]),
            "batch": batch,
            "context": context,
            "steps": args.steps,
            "warmup": args.warmup,
            "rounds": args.rounds,
        }
        for device, size, context, batch, dtype, compiled in itertools.product(
            devices(args),
            listed(args, "sizes", one_of(list(SHAPES))),
            listed(args, "contexts", at_least(1)),
            listed(args, "batches", at_least(1)),
            listed(args, "dtypes", one_of(DTYPES)),
            listed(args, "compile", switch),
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)
