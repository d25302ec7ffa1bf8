"""The command `gpt-lightning reproduce`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser, nearest, split_fit_options
from gpt_lightning.reports.tables import Console, column
from gpt_lightning.reproduce.cases import CASES, Case, Rung
from gpt_lightning.reproduce.rows import DRIFT, ERROR, FAILED, Options, RungRow

if TYPE_CHECKING:
    from gpt_lightning.reproduce.runner import CaseRun

ROOT = Path("lightning_logs") / "reproduce"
CHIPS = {"cpu": "a CPU", "gpu": "an NVIDIA GPU", "mps": "a Mac with MPS"}


def make_parser() -> OneLineParser:
    """The parser of the command's own options."""
    parser = OneLineParser(
        prog="gpt-lightning reproduce",
        allow_abbrev=False,
        description="Run a published table's settings and show its numbers beside ours. Options of "
        "`fit` (--model.learning_rate 3.0e-3, --seed_everything 1) change every rung: see it fail.",
    )
    parser.add_argument("case", nargs="?", help=f"One of {', '.join(CASES)}.")
    parser.add_argument(
        "--list", action="store_true", help="What there is, what it needs, whether it can run here."
    )
    parser.add_argument(
        "--rungs",
        "--variant",
        type=str | None,
        default=None,
        help="Names with commas; null: all that this machine can run, or the best variant.",
    )
    parser.add_argument(
        "--steps",
        "--max-steps",
        type=int | None,
        default=None,
        help="Optimizer steps; 0 evaluates only. null: all that were published.",
    )
    parser.add_argument(
        "--accelerator",
        type=str | None,
        default=None,
        help="cpu, mps, gpu or auto; null: as each rung's configuration says.",
    )
    return parser


def run(argv: list[str]) -> int:
    """Runs `reproduce ...`.

    Returns:
        0: all losses within their tolerance; 1: one is not; 2: a rung could not be run.
    """
    own, fit_options = split_fit_options(argv[1:])
    args = make_parser().parse_args(own)
    if args.list:
        print_list()
        return 0
    case = find_case(args.case)
    if args.steps is not None and args.steps < (1 if case.kind == "steps" else 0):
        raise UserError(f"--steps is {args.steps}; {case.name} has nothing to compare then")
    options = Options(args.steps, args.accelerator, tuple(fit_options))
    chosen = choose_rungs(case, args.rungs, options)

    from gpt_lightning.hardware.machine import machine_record  # not for --help: torch takes seconds
    from gpt_lightning.reproduce.runner import CaseRun

    case_run = CaseRun(case, options, next_folder(ROOT / case.name), argv)
    print(case.title)
    for name, fact in machine_record(argv).items():
        print(f"{name:<9} {fact}")
    for rung in case.rungs:
        if rung in chosen:
            case_run.run(rung)
        elif args.rungs is None and not case.alternatives:
            case_run.skip(rung, why_not(rung, options))
    case_run.write()
    print_summary(case_run)
    verdicts = {row.verdict for row in case_run.rungs}
    return 2 if ERROR in verdicts else 1 if FAILED in verdicts else 0


def find_case(name: str | None) -> Case:
    """The case of a name.

    Raises:
        UserError: there is none.
    """
    if name is None:
        raise UserError(f"reproduce what? give one of {', '.join(CASES)}, or --list")
    if name not in CASES:
        raise UserError(f"no published table {name!r}{nearest(name, CASES)}; --list shows all")
    return CASES[name]


def choose_rungs(case: Case, names: str | None, options: Options) -> list[Rung]:
    """The rungs to run: those named, else all that this machine can time.

    Raises:
        UserError: there is no such rung, or it cannot run here.
    """
    by_name = {rung.name: rung for rung in case.rungs}
    if names is None:
        able = [rung for rung in case.rungs if not why_not(rung, options)]
        if not able:
            raise UserError(f"{case.name}: {why_not(case.rungs[0], options)}")
        return able[:1] if case.alternatives else able
    chosen = []
    for name in names.split(","):
        if name not in by_name:
            raise UserError(
                f"{case.name} has no rung {name!r}{nearest(name, by_name)}; "
                f"it has {', '.join(by_name)}"
            )
        reason = impossible(by_name[name], options)
        if reason:
            raise UserError(f"{case.name}, {name}: {reason}")
        chosen.append(by_name[name])
    return chosen


def target(rung: Rung, options: Options) -> str:
    """What a rung would run on here: cpu, mps or gpu."""
    there = available_devices()
    best = "gpu" if "gpu" in there else "mps" if "mps" in there else "cpu"
    asked = {"cpu": "cpu", "mps": "mps", "cuda": "gpu", "gpu": best, "auto": best}
    if options.accelerator is not None:
        return asked.get(options.accelerator, best)
    return rung.device if rung.device in there - {"any"} else best


def impossible(rung: Rung, options: Options) -> str:
    """Why a rung cannot run here at all; empty if it can."""
    from gpt_lightning.hardware.memory import memory_gib

    here = target(rung, options)
    if rung.device not in ("any", here) and not rung.losses_anywhere:
        if rung.device not in available_devices():
            return f"needs {CHIPS[rung.device]}, which this machine has not"
        return f"is about {CHIPS[rung.device]}, not {options.accelerator}"
    if here == rung.not_on:
        return f"its setting means something else on {CHIPS[here]}; try --accelerator cpu"
    if here == "cpu" and memory_gib() < rung.memory_gib:
        return f"needs {rung.memory_gib:.0f} GiB of memory, this machine has {memory_gib():.1f}"
    return ""


def why_not(rung: Rung, options: Options) -> str:
    """Why a rung does not run unless it is named; empty if it does."""
    reason = impossible(rung, options)
    if not reason and rung.device not in ("any", target(rung, options)):
        reason = f"its times are of {CHIPS[rung.device]}; for the losses alone: --rungs {rung.name}"
    return reason


def available_devices() -> set[str]:
    """Which of the rungs' devices this machine has."""
    import torch

    there = {"any": True, "cpu": True}
    there |= {"gpu": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return {name for name, found in there.items() if found}


def next_folder(root: Path) -> Path:
    """root/version_N for the first N that is free."""
    taken = [int(p.name[8:]) for p in root.glob("version_*") if p.name[8:].isdigit()]
    return root / f"version_{max(taken, default=-1) + 1}"


# ---- what is printed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ListRow:
    """A rung in `reproduce --list`."""

    case: str = column("case", width=16)
    rung: str = column("rung", width=17)
    device: str = column("device", width=6)
    data: str = column("data", width=16)
    here: str = column("here", width=4)
    time: str = column("how long, and what is missing")


def print_list() -> None:
    """Prints every rung, what it needs and whether it can run here."""
    from gpt_lightning.data.texts import local_corpus

    console = Console(ListRow)
    print(console.header())
    for case in CASES.values():
        fetched = "" if local_corpus(case.corpus, Path("data")) else "; the data will be fetched"
        for rung in case.rungs:
            reason = why_not(rung, Options())
            here = "yes" if not reason else "no" if impossible(rung, Options()) else "part"
            time = f"{rung.time}{fetched}" + (f"; {reason}" if reason else "")
            print(console.line(ListRow(case.name, rung.name, rung.device, case.corpus, here, time)))


def print_summary(case_run: "CaseRun") -> None:
    """Prints a row a rung, where the time went, and where the results are."""
    console = Console(RungRow, without=("note",))
    print(f"\n{console.header()}")
    for row in case_run.rungs:
        print(console.line(row))
    for row in case_run.rungs:
        if row.note:
            print(f"{row.rung}: {row.note}")
    if case_run.case.kind == "evaluations":
        for phase in case_run.phases:
            print(f"{phase.rung}: {phase.phase} {phase.seconds:,.1f} s")
    print(f"\n{case_run.folder}: results.md, results.json, losses.png, a CSV a table")
    for row in case_run.rungs:
        if row.verdict in (FAILED, ERROR):
            print(f"{row.verdict}: {row.rung}{first_miss(case_run, row.rung)}")
    drifted = sum(row.verdict == DRIFT for row in case_run.losses)
    misses = sum(row.verdict == FAILED for row in case_run.losses)
    total = sum(row.theirs is not None for row in case_run.losses)
    line = f"{total - misses - drifted} of {total} losses within their tolerance"
    print(line + (f", {drifted} beyond it by what rounding explains" if drifted else ""))


def first_miss(case_run: "CaseRun", rung: str) -> str:
    """The first loss of a rung that misses, in words."""
    misses = [row for row in case_run.losses if row.rung == rung and row.verdict == FAILED]
    if not misses:
        return ""
    first = misses[0]
    text = f"{first.ours:.6f} against {first.theirs:.6f}"
    return f", {len(misses)} losses miss, the first at step {first.step}: {text}"
