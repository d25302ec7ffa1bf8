"""`gpt-lightning bench ladder`: what each of the usual accelerations brings, one after the other.

Every rung is `fit` with the settings of all rungs up to it, on random tokens: nothing is measured
that a run would not do. Times are SpeedMonitor's, so the device is not held up between steps.
"""

from dataclasses import dataclass

from gpt_lightning.bench.core.options import check_bounds
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser, nearest, split_fit_options
from gpt_lightning.reports.tables import Console, column

# sequences that suit a device; options of fit on the command line win
SHAPES = {
    "cuda": ("--data.batch_size=16", "--data.block_size=1024"),
    "mps": ("--data.batch_size=4", "--data.block_size=1024"),
    "cpu": ("--data.batch_size=2", "--data.block_size=256"),
}


@dataclass(frozen=True)
class Rung:
    """One more setting.

    Attributes:
        name: On the command line and in the table.
        settings: Options of `fit` that it adds to those before.
        devices: Where it means anything.
    """

    name: str
    settings: tuple[str, ...]
    devices: tuple[str, ...] = ("cuda", "mps", "cpu")


RUNGS = (
    Rung(
        "fp32",
        (
            "--trainer.precision=32-true",
            "--model.matmul_precision=highest",
            "--model.compile=false",
            "--model.config.attention=naive",
            "--model.fused=false",
        ),
    ),
    Rung("tf32", ("--model.matmul_precision=high",), devices=("cuda",)),
    Rung("bf16", ("--trainer.precision=bf16-mixed",)),
    Rung("compile", ("--model.compile=true",)),
    Rung("flash", ("--model.config.attention=sdpa",)),
    Rung("padded-vocabulary", ("--model.config.vocab_size={padded}",)),
    Rung("fused-optimizer", ("--model.fused=true",)),
)


@dataclass(frozen=True)
class LadderRow:
    """A rung as it was measured."""

    rung: str = column("rung", width=17)
    status: str = column("status", width=7)
    step_ms: float | None = column("step ms", ",.1f", 9)
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    mfu: float | None = column("MFU", ".1%", 6)
    speedup: float | None = column("speed-up", ".2f")
    speedup_in_all: float | None = column("in all", ".2f")
    warmup_s: float | None = column("warm-up s", ".1f")
    note: str = column("note", default="")


def make_parser() -> OneLineParser:
    """The parser of the command's own options."""
    parser = OneLineParser(
        prog="gpt-lightning bench ladder",
        allow_abbrev=False,
        description="Measure tokens/s and MFU while one thing after the other makes training "
        "faster. Options of `fit` (--data.batch_size 8) change all rungs.",
    )
    parser.add_argument(
        "--config",
        type=str | None,
        default=None,
        help="A configuration of `fit` whose model is measured; null: GPT-2 124M.",
    )
    parser.add_argument("--steps", type=int, default=10, help="Optimizer steps measured a rung.")
    parser.add_argument(
        "--rungs",
        type=str | None,
        default=None,
        help=f"Names with commas, of {', '.join(rung.name for rung in RUNGS)}; null: all. "
        "A rung has the settings of all before it, measured or not.",
    )
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench ladder ...`.

    Returns:
        0: every rung that this device has was measured; 1: one failed.
    """
    own, fit_options = split_fit_options(argv[2:])
    args = make_parser().parse_args(own)
    check_bounds(args, steps=1)
    chosen = choose(args.rungs)

    from gpt_lightning.bench.ladder_run import Ladder  # not for --help: torch takes seconds

    ladder = Ladder(args.config, args.steps, fit_options, argv)
    console = Console(LadderRow)
    print("\n".join([*ladder.facts(), "", console.header()]), flush=True)
    for rung in RUNGS:
        if rung.name in chosen:
            print(console.line(ladder.measure(rung)), flush=True)
        else:
            ladder.pass_over(rung)
    print(f"\n{ladder.folder}: results.md, results.json, ladder.csv, ladder.png")
    return int(any(row.status == "failed" for row in ladder.rows))


def choose(names: str | None) -> list[str]:
    """Names of the rungs to measure.

    Raises:
        UserError: there is no such rung.
    """
    known = [rung.name for rung in RUNGS]
    chosen = known if names is None else names.split(",")
    for name in chosen:
        if name not in known:
            raise UserError(f"no rung {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    return chosen
