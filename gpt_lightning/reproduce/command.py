"""The command `gpt-lightning reproduce`."""

import shlex
from pathlib import Path
from typing import Any

from jsonargparse.typing import NonNegativeInt

from gpt_lightning.errors import UserError
from gpt_lightning.files import numbered_folder, yaml_beside
from gpt_lightning.parsing import OneLineParser, pick, split_fit_options
from gpt_lightning.reproduce.cases import CASES, CURVES, REPORTS, Case, Rung, Verdict

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
    helps = yaml_beside(__file__)
    tables = ", ".join([*CASES, *REPORTS])
    parser.add_argument("case", nargs="?", help=helps["case"].format(tables))
    parser.add_argument("--list", action="store_true", help=helps["list"])
    parser.add_argument("--rungs", "--variant", type=str | None, help=helps["rungs"])
    parser.add_argument("--steps", "--max_steps", type=NonNegativeInt | None, help=helps["steps"])
    parser.add_argument("--accelerator", type=str | None, help=helps["accelerator"])
    parser.add_argument("--against", nargs=2, metavar=("RUN", "CURVE"), help=helps["against"])
    parser.add_argument("--resume", type=str | None, help=helps["resume"])
    return parser


def run(argv: list[str]) -> int:
    """Run `reproduce ...`.

    Returns:
        0: All losses are within their tolerance. 1: One is not. 2: A rung could not be run.
    """
    own, fit_options = split_fit_options(argv[1:])
    args = make_parser().parse_args(own)
    alone = [args.case] if args.case in REPORTS else []
    alone = ["--list"] if args.list else ["--against", *args.against] if args.against else alone
    if alone and alone != argv[1:]:
        raise UserError(f"{alone[0]} takes no more options: give `reproduce {shlex.join(alone)}`")
    if args.list:
        print_list()
        return 0
    if args.against:
        from gpt_lightning.reproduce.against import compare_run

        path, curve = args.against
        compare_run(path, curve, ROOT / "against", argv)
        return 0
    if args.case in REPORTS:
        from gpt_lightning.reproduce.figures import run_report

        return run_report(args.case, ROOT / args.case, argv)
    changes = [] if args.steps is None else [f"--trainer.max_steps={args.steps}"]
    changes += [f"--trainer.accelerator={args.accelerator}"] if args.accelerator else []
    return run_case(find_case(args.case), args, [*changes, *fit_options], argv)


def run_case(case: Case, args: Any, changes: list[str], argv: list[str]) -> int:
    """Run the named rungs of a case, or those that can run here; return the exit code of `run`.

    Args:
        case: Published table.
        args: Parsed arguments.
        changes: Options of `fit` for every rung.
        argv: Command line, for the report.
    """
    from gpt_lightning.hardware.precision import check_accelerator
    from gpt_lightning.reproduce.runner import CaseRun, find_folder

    if args.accelerator is not None:
        check_accelerator(args.accelerator, "--accelerator")
    chosen, root = choose_rungs(case, args.rungs, args.accelerator), ROOT / case.name
    found = None if args.resume is None else find_folder(args.resume, root, chosen)
    case_run = CaseRun(case, changes, found or numbered_folder(root), argv, found is not None)
    for rung in case.rungs:
        if rung in chosen:
            case_run.run(rung.on(target(rung, args.accelerator)))
        elif args.rungs is None and not case.alternatives:
            case_run.skip(rung, why_not(rung, args.accelerator))
    case_run.write()
    print(*case_run.summary(), sep="\n")
    verdicts = {row.verdict for row in case_run.rungs}
    return 2 if Verdict.ERROR in verdicts else 1 if Verdict.FAILED in verdicts else 0


def find_case(name: str | None) -> Case:
    """Return the case of a name.

    Raises:
        UserError: There is no such case.
    """
    if name is None:
        raise UserError(f"reproduce needs a table: give one of {', '.join(CASES)}, or --list")
    return CASES[pick(name, [*CASES, *REPORTS], "no published table")]


def choose_rungs(case: Case, names: str | None, accelerator: str | None = None) -> list[Rung]:
    """Return the rungs to run: the named ones, or all whose times this machine can compare.

    Raises:
        UserError: There is no such rung, or it cannot run here.
    """
    rungs, named = named_rungs(case, names), names is not None
    reasons = {rung.name: why_not(rung, accelerator, named) for rung in rungs}
    able = [rung for rung in rungs if not reasons[rung.name]]
    if len(able) < (len(rungs) if named else 1):
        name, reason = next(item for item in reasons.items() if item[1])
        raise UserError(f"{case.name}, {name}: {reason}")
    return able[:1] if case.alternatives and not named else able


def named_rungs(case: Case, names: str | None) -> list[Rung]:
    """Return the rungs with names that are separated by commas; None: all.

    Raises:
        UserError: There is no such rung.
    """
    rungs = {rung.name: rung for rung in case.rungs}
    if names is None:
        return [*case.rungs]
    return [rungs[pick(name, rungs, f"{case.name} has no rung")] for name in names.split(",")]


def target(rung: Rung, accelerator: str | None) -> str:
    """Return the device on which a rung would run here: cpu, mps or gpu."""
    return "cpu" if (accelerator or rung.device) == "cpu" else best_device()


def why_not(rung: Rung, accelerator: str | None = None, named: bool = False) -> str:
    """Return the reason why a rung cannot run here; empty if it can.

    Args:
        rung: The rung.
        accelerator: Accelerator of the command line; None: that of the rung.
        named: True if the rung is named: then its losses alone are worth a run.
    """
    from gpt_lightning.hardware.device import memory_gib

    here = target(rung, accelerator)
    elsewhere = rung.device not in ("any", here)
    if elsewhere and not rung.losses_anywhere:
        return f"needs {CHIPS[rung.device]}, and would run on {CHIPS[here]}"
    if here == rung.not_on:
        return f"its setting has another meaning on {CHIPS[here]}; try --accelerator cpu"
    if here == "cpu" and memory_gib() < rung.memory_gib:
        return f"needs {rung.memory_gib:.0f} GiB of memory, this machine has {memory_gib():.1f}"
    if elsewhere and not named:
        return f"its step times need {CHIPS[rung.device]}; losses alone: --rungs {rung.name}"
    return ""


def best_device() -> str:
    """Return the fastest device of this machine: cpu, mps or gpu."""
    from gpt_lightning.hardware.device import device_kind

    return device_kind().replace("cuda", "gpu")


def print_list() -> None:
    """Print every rung with its device, its data, and whether it can run here."""
    for case in CASES.values():
        print(f"{case.name}: {case.title}\n  {case.source}")
        for rung in case.rungs:
            reason = why_not(rung)
            here = f"not by default: {reason}" if reason else "runs here"
            print(f"  {rung.name:<18}{rung.device:<5}{CORPUS}  {rung.time}; {here}")
    for name, report in REPORTS.items():
        print(f"{name}: {'; '.join(report)}")
    print("\nCurves that any run can be compared with, by tokens:")
    for name, curve in CURVES.items():
        print(f"reproduce --against RUN {name:<23}  {curve.title}")
