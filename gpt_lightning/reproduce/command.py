"""The command `gpt-lightning reproduce`."""

import contextlib
from pathlib import Path

from gpt_lightning.errors import UserError
from gpt_lightning.files import numbered_folder
from gpt_lightning.parsing import OneLineParser, split_fit_options
from gpt_lightning.reproduce.cases import CASES, CURVES, REPORTS, Case, Options, Rung, pick
from gpt_lightning.tables.rows import Console, column, row_type

CORPUS = "tinyshakespeare"  # the text of every case
ROOT = Path("lightning_logs") / "reproduce"
CHIPS = {"cpu": "a CPU", "gpu": "an NVIDIA GPU", "mps": "a Mac with MPS"}


def make_parser() -> OneLineParser:
    """Return the parser of the command's own options."""
    parser = OneLineParser(
        prog="gpt-lightning reproduce",
        description="Run the settings of a published table and compare its numbers with ours. "
        "Options of `fit` (--model.learning_rate 3.0e-3, --seed_everything 1) change every rung.",
    )
    parser.add_argument("case", nargs="?", help=f"One of {', '.join([*CASES, *REPORTS])}.")
    about = "List the rungs, their needs, and which can run here."
    parser.add_argument("--list", action="store_true", help=about)
    about = "Names, separated by commas; null: all that can run here, or the best variant."
    parser.add_argument("--rungs", "--variant", type=str | None, help=about)
    about = "Optimizer steps; 0: evaluate only. null: all steps that were published."
    parser.add_argument("--steps", "--max-steps", type=int | None, help=about)
    about = "cpu, mps, gpu or auto; null: that of each rung's configuration."
    parser.add_argument("--accelerator", type=str | None, help=about)
    about = "Compare a run folder with a published curve, by tokens; --list names the curves."
    parser.add_argument("--against", nargs=2, metavar=("RUN", "CURVE"), help=about)
    about = (
        "Continue evaluations from the run's checkpoint. auto: in the newest folder that has one, "
        "or start a new run if there is none. Or a folder of results."
    )
    parser.add_argument("--resume", type=str | None, help=about)
    about = "Break each setting that a rung is about, in all cases or in one; train nothing."
    parser.add_argument("--selftest", action="store_true", help=about)
    return parser


def run(argv: list[str]) -> int:
    """Run `reproduce ...`.

    Returns:
        0: All losses are within their tolerance. 1: One is not. 2: A rung could not be run.
    """
    own, fit_options = split_fit_options(argv[1:])
    args = make_parser().parse_args(own)
    if args.list:
        for other in argv[1:]:
            if other != "--list":
                raise UserError(f"unknown argument {other!r}: --list takes none, remove it")
        print_list()
        return 0
    if args.against:
        from gpt_lightning.reproduce.against import compare_run

        if argv[1:] != ["--against", *args.against]:
            raise UserError("--against trains nothing: give `reproduce --against RUN CURVE` alone")
        path, curve = args.against
        compare_run(path, curve, ROOT / "against", argv)
        return 0
    if args.selftest:
        return selftest(args.case, args.rungs, fit_options)
    if args.case in REPORTS and argv[1:] == [args.case]:
        from gpt_lightning.reproduce.figures import run_report

        return run_report(args.case, ROOT / args.case, argv)
    case = find_case(args.case)
    if args.steps is not None and args.steps < (1 if case.kind == "steps" else 0):
        raise UserError(
            f"--steps is {args.steps}, which leaves {case.name} no loss to compare: raise --steps"
        )
    if args.resume is not None and case.kind == "steps":
        raise UserError(f"--resume: {case.name} saves no checkpoints, its rungs are of few steps")
    options = Options(args.steps, args.accelerator, tuple(fit_options))
    return run_case(case, options, args.rungs, args.resume, argv)


def run_case(
    case: Case, options: Options, names: str | None, resume: str | None, argv: list[str]
) -> int:
    """Run the named rungs of a case, or those that can run here; return the exit code of `run`."""
    if options.accelerator is not None:
        from gpt_lightning.hardware.precision import check_accelerator

        check_accelerator(options.accelerator, "--accelerator")
    chosen, root = choose_rungs(case, names, options), ROOT / case.name

    from gpt_lightning.reproduce.runner import CaseRun, find_folder  # imports torch
    from gpt_lightning.tables.verdicts import Verdict

    found = None if resume is None else find_folder(resume, root, chosen)
    folder = found or numbered_folder(root)
    case_run = CaseRun(case, options, folder, argv, found is not None)
    for rung in case.rungs:
        if rung in chosen:
            try:
                case_run.run(rung.on(target(rung, options)))
            except UserError:
                with contextlib.suppress(OSError):  # rungs that have run are in it
                    folder.rmdir()
                raise
        elif names is None and not case.alternatives:
            case_run.skip(rung, why_not(rung, options))
    case_run.write()
    print(*case_run.summary(), sep="\n")
    verdicts = {row.verdict for row in case_run.rungs}
    return 2 if Verdict.ERROR in verdicts else 1 if Verdict.FAILED in verdicts else 0


def selftest(name: str | None, rungs: str | None, fit_options: list[str]) -> int:
    """Break the settings of all cases, or those of one case or of its named rungs."""
    if fit_options or (rungs is not None and name is None):
        given = [*fit_options, "--rungs without a case"][0]
        raise UserError(f"--selftest has {given}: give `reproduce [CASE [--rungs R]] --selftest`")
    cases = list(CASES.values()) if name is None else [find_case(name)]
    named = None if rungs is None else [rung.name for rung in named_rungs(cases[0], rungs)]

    from gpt_lightning.reproduce.selftest import run_selftest  # not for --help

    return run_selftest(cases, named)


def find_case(name: str | None) -> Case:
    """Return the case of a name.

    Raises:
        UserError: There is no such case.
    """
    names = [*CASES, *REPORTS]
    if name is None:
        raise UserError(f"reproduce needs a table: give one of {', '.join(names)}, or --list")
    if name in REPORTS:
        raise UserError(f"{name} has figures and no rungs: give it without options")
    pick(name, names, "no published table")
    return CASES[name]


def choose_rungs(case: Case, names: str | None, options: Options) -> list[Rung]:
    """Return the rungs to run: the named ones, or all whose times this machine can compare.

    Raises:
        UserError: There is no such rung, or it cannot run here.
    """
    if names is None:
        able = [rung for rung in case.rungs if not why_not(rung, options)]
        if not able:
            raise UserError(f"{case.name}: {why_not(case.rungs[0], options)}")
        return able[:1] if case.alternatives else able
    chosen = named_rungs(case, names)
    for rung in chosen:
        if reason := why_not(rung, options, named=True):
            raise UserError(f"{case.name}, {rung.name}: {reason}")
    return chosen


def named_rungs(case: Case, names: str) -> list[Rung]:
    """Return the rungs with names that are separated by commas.

    Raises:
        UserError: There is no such rung.
    """
    rungs = {rung.name: rung for rung in case.rungs}
    return [rungs[pick(name, rungs, f"{case.name} has no rung")] for name in names.split(",")]


def target(rung: Rung, options: Options) -> str:
    """Return the device on which a rung would run here: cpu, mps or gpu."""
    there = available_devices()
    best = "gpu" if "gpu" in there else "mps" if "mps" in there else "cpu"
    if options.accelerator is not None:
        return {"cpu": "cpu", "mps": "mps", "cuda": "gpu"}.get(options.accelerator, best)
    return rung.device if rung.device in there - {"any"} else best


def why_not(rung: Rung, options: Options, named: bool = False) -> str:
    """Return the reason why a rung cannot run here; empty if it can.

    Args:
        rung: The rung.
        options: Changes of the command line.
        named: True if the rung is named: then its losses alone are worth a run.
    """
    from gpt_lightning.hardware.device import memory_gib

    here = target(rung, options)
    elsewhere = rung.device not in ("any", here)
    if elsewhere and not rung.losses_anywhere:
        if rung.device not in available_devices():
            return f"needs {CHIPS[rung.device]}, which this machine does not have"
        return f"runs on {CHIPS[rung.device]}, but --accelerator is {options.accelerator}"
    if here == rung.not_on:
        return f"its setting has another meaning on {CHIPS[here]}; try --accelerator cpu"
    if here == "cpu" and memory_gib() < rung.memory_gib:
        return f"needs {rung.memory_gib:.0f} GiB of memory, this machine has {memory_gib():.1f}"
    if elsewhere and not named:
        return f"its step times need {CHIPS[rung.device]}; losses alone: --rungs {rung.name}"
    return ""


def available_devices() -> set[str]:
    """Return those devices of rungs that this machine has."""
    from gpt_lightning.hardware.device import device_kind

    return {"any", "cpu", device_kind().replace("cuda", "gpu")}


# ---- the list ------------------------------------------------------------------------------------


def print_list() -> None:
    """Print every rung with its device, its data, and whether it can run here."""
    from gpt_lightning.data.texts import local_corpus

    fetched = "" if local_corpus(CORPUS, Path("data")) else "; the data will be fetched"
    time = column("how long, and what is missing")
    row_of = row_type("case rung device data here time", time=time)
    rows = []
    for name, rung in ((case.name, rung) for case in CASES.values() for rung in case.rungs):
        reason = why_not(rung, Options())
        here = "yes" if not reason else "no" if why_not(rung, Options(), named=True) else "part"
        time = f"{rung.time}{fetched}" + (f"; {reason}" if reason else "")
        rows.append(row_of(name, rung.name, rung.device, CORPUS, here, time))
    console = Console(row_of, rows=rows)
    print(console.header(), *map(console.line, rows), sep="\n")
    for name, (title, _) in REPORTS.items():
        print(f"{name:<16}  {title}")
    sources = {case.name: case.source for case in CASES.values()}
    sources |= {name: origin for name, (_, origin) in REPORTS.items()}
    print("\nSources:", *(f"{name:<24}{source}" for name, source in sources.items()), sep="\n")
    print("\nCurves that any run can be compared with, by tokens:")
    for name, curve in CURVES.items():
        print(f"reproduce --against RUN {name:<23}  {curve.title}")
