"""The command `python -m experiments.speedrun`: train a record, check its rules, write its page.

The rules are in README.md, their numbers and the tracks in tracks.yaml.
"""

import dataclasses
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from experiments.speedrun.tracks import RULES, TRACKS, Result, SeedRow, Track
from gpt_lightning.errors import UserError
from gpt_lightning.files import numbered_folder
from gpt_lightning.parsing import OneLineParser, resolve_configs
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.runs.history import find_runs, read_curves, read_events, read_settings
from gpt_lightning.tables.ledger import Ledger
from gpt_lightning.tables.rows import Console

PROGRAM = "python -m experiments.speedrun"
ROOT = Path("lightning_logs") / "speedrun"
NANOGPT_STEPS = 20
RECORDS = Path("experiments") / "speedrun" / "records"
PAUSE = "validation"  # the phase that is left out of the time
UNSEEN = "--eval_iters=1 --log_interval=1 --eval_interval=1000000"  # one evaluation, of one batch


def make_parser() -> OneLineParser:
    """Return the parser of the command."""
    about = "Train a record's configuration over seeds, check the rules, and write its page."
    parser = OneLineParser(prog=PROGRAM, description=about)
    parser.add_argument("--track", choices=[*TRACKS], required=True, help="Aim of the runs.")
    parser.add_argument("--device", default="cpu", help="cpu, mps, cuda or auto.")
    about = "Configuration, by path or name, instead of the track's own."
    parser.add_argument("--config", type=str | None, help=about)
    about = "Seeds, separated by commas. A record has 5, or 3 if it takes more than 5 minutes."
    parser.add_argument("--seeds", default="1,2,3,4,5", help=about)
    about = f"Folder of nanoGPT with its data, to measure {NANOGPT_STEPS} of its steps in turn."
    parser.add_argument("--nanogpt", type=str | None, help=about)
    about = "Folder of an interrupted call, in lightning_logs/speedrun: its finished seeds count."
    parser.add_argument("--resume", type=str | None, help=about)
    about = "What the record changes, for the ledger; null: the page goes to lightning_logs."
    parser.add_argument("--change", type=str | None, help=about)
    about = "Folder of the record pages and of the ledger."
    parser.add_argument("--out", default=str(RECORDS), help=about)
    return parser


def run(argv: list[str]) -> int:
    """Run the command with these arguments.

    Returns:
        0: The runs are a record, or a trial that reached the target. 1: They did not reach it.

    Raises:
        UserError: An argument is wrong, or a run failed.
    """
    args = make_parser().parse_args(argv)
    if not re.fullmatch(r"\d+(,\d+)*", args.seeds):
        raise UserError(f"--seeds is {args.seeds!r}; expected numbers with commas: 1,2,3,4,5")
    seeds = list(dict.fromkeys(map(int, args.seeds.split(","))))
    nanogpt = None if args.nanogpt is None else Path(args.nanogpt)
    if nanogpt is not None:
        check_nanogpt(nanogpt)
    from experiments.speedrun.page import write
    from gpt_lightning.hardware.device import device_kind  # not for --help: torch takes seconds
    from gpt_lightning.hardware.precision import check_accelerator

    track = TRACKS[args.track]
    check_accelerator(args.device, "--device")
    device = device_kind(args.device)
    file = args.config or str(Path(__file__).with_name(f"{track.config}.yaml"))
    resolve_configs(config := [f"--config={file}"])  # raises early
    root = numbered_folder(ROOT / args.track) if args.resume is None else Path(args.resume)
    rows = [] if args.resume is None else read_rows(root)
    times = nanogpt_steps_s(nanogpt, track, device)
    for seed in seeds:
        if seed in {row.seed for row in rows}:
            continue
        folder = root / f"seed_{seed}"
        rows.append(run_seed(config[0], seed, device, folder))
        Ledger(root).append({"seed": seed}, dataclasses.asdict(rows[-1]))
        console = Console(SeedRow, rows=rows[-1:])
        print(f"\n{console.header()}\n{console.line(rows[-1])}\n", flush=True)
    times += nanogpt_steps_s(nanogpt, track, device)
    runs = [find_run(root / f"seed_{row.seed}") for row in rows]
    breaches = [text for run, row in zip(runs, rows, strict=True) for text in problems(run, row)]
    breaches += differences(runs) + shortfalls(track, rows, bool(times))
    step_s = statistics.median(times) if times else None
    result = Result(track, device, rows, step_s, list(dict.fromkeys(breaches)))
    write(result, args.change, Path(args.out), root, shlex.join([*PROGRAM.split(), *argv]))
    return int(result.figures()["loss"] > track.target)


# ---- runs ----------------------------------------------------------------------------------------


def run_seed(config: str, seed: int, accelerator: str, folder: Path) -> SeedRow:
    """Train with a seed in a process of its own, and return its figures.

    Inductor's cache is empty at first, and so is the temporary folder, where it keeps precompiled
    headers, so that the time includes the whole compilation.

    Args:
        config: Option --config.
        seed: Seed of the run.
        accelerator: Accelerator of the Trainer.
        folder: Folder for the run's `lightning_logs`.

    Raises:
        UserError: The run failed.
    """
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted call
    arguments = [config, f"--seed_everything={seed}", f"--run_name=seed_{seed}"]
    arguments += [f"--trainer.accelerator={accelerator}", f"--trainer.default_root_dir={folder}"]
    command = [sys.executable, "-m", "gpt_lightning", "fit", *arguments, "--resume=never"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/compiled", "TMPDIR": cache}
        ended = subprocess.run(command, env=os.environ | own)
    if ended.returncode:
        raise UserError(f"the run of seed {seed} ended with exit code {ended.returncode}")
    return read_run(seed, find_run(folder), time.monotonic() - began)


def read_rows(root: Path) -> list[SeedRow]:
    """Return the figures of an interrupted call.

    Raises:
        UserError: The folder has none.
    """
    rows = [SeedRow(**row) for row in Ledger(root).by_key().values()]
    if not rows:
        raise UserError(
            f"--resume {root} has no finished seed: give a folder such as {ROOT}/best/version_0"
        )
    return rows


def find_run(folder: Path) -> Path:
    """Return the folder of the only run in a folder."""
    (run,) = find_runs(folder)
    return run


def read_run(seed: int, run: Path, process_s: float) -> SeedRow:
    """Return the figures of a finished run.

    Args:
        seed: Seed of the run.
        run: Run folder.
        process_s: Seconds of its process.
    """
    curves, end = read_curves(run), read_events(run)[-1]
    seconds: dict[str, float] = end["seconds"]
    start_s = seconds["start-up"]
    # validations are left out of the time, as on nanoGPT's side
    losses = [
        (start_s + at - sum(s for name, b, s in curves["phases"] if is_pause(name, b, at)), loss)
        for _, _, at, loss in curves["val"]
    ]
    step, tokens, _, loss = curves["val"][-1]
    return SeedRow(
        seed,
        loss,
        time_s=sum(s for name, s in seconds.items() if name != PAUSE),
        compile_s=seconds.get("compile and warm-up", 0.0),
        process_s=process_s,
        steps=int(step),
        tokens=tokens,
        parameters=n_parameters(run),
        curve=losses,
    )


def is_pause(name: str, begin: float, at: float) -> bool:
    """Return whether a phase is a validation that has begun before a moment."""
    return name == PAUSE and begin < at


def n_parameters(run: Path) -> int:
    """Return the number of parameters of a run's model."""
    import torch  # not for --help

    from gpt_lightning.model.gpt import GPTConfig
    from gpt_lightning.model.network import Network, build

    settings = yaml.safe_load(RunPaths(run).config.read_text(encoding="utf-8"))["model"]
    config = GPTConfig(**settings["config"] | {"vocab_size": RULES["vocabulary"]})
    with torch.device("meta"):  # shapes without memory
        model = build(Network.of(settings.get("network")), config)
    return sum(parameter.numel() for parameter in model.parameters())


# ---- rules ---------------------------------------------------------------------------------------


def problems(run: Path, row: SeedRow) -> list[str]:
    """Return the rules that a run does not keep, apart from those of all seeds together.

    Args:
        run: Run folder.
        row: Figures of the run.
    """
    settings, found = read_settings(run), []
    for key, value in RULES["settings"].items():
        if (own := settings.get(key)) != value:
            found.append(f"{key} is {own}; the rules have {value}")
    names = [row["class_path"] for row in settings.get("trainer.callbacks") or []]
    for name in names:
        if name.rpartition(".")[2] not in RULES["callbacks"]:
            found.append(f"the callback {name} is not among {', '.join(RULES['callbacks'])}")
    if row.parameters > RULES["parameters"]:
        found.append(f"{row.parameters:,} parameters; at most {RULES['parameters']:,}")
    if row.steps != settings["trainer.max_steps"]:
        found.append(f"the last validation was at step {row.steps:,}, not at the end")
    return found


def differences(runs: Sequence[Path]) -> list[str]:
    """Return the settings in which runs differ, apart from the seed and the folder."""
    own = ("seed_everything", "run_name", "trainer.default_root_dir")
    settings = [
        {key: value for key, value in read_settings(run).items() if key not in own} for run in runs
    ]
    keys = {key for found in settings for key in found if found[key] != settings[0].get(key)}
    return [f"{key} is not the same for all seeds" for key in sorted(keys)]


def shortfalls(track: Track, rows: Sequence[SeedRow], nanogpt: bool) -> list[str]:
    """Return the rules that all seeds together do not keep.

    Args:
        track: The track.
        rows: Runs by seed.
        nanogpt: True if nanoGPT was measured beside them.
    """
    loss = statistics.mean(row.loss for row in rows)
    short = statistics.mean(row.time_s for row in rows) < RULES["short_s"]
    needed = RULES["seeds" if short else "seeds_long"]
    found = [] if nanogpt else ["nanoGPT was not measured: give --nanogpt DIR"]
    if len(rows) < needed:
        found.append(f"{len(rows)} seeds; a record has {needed}: give --seeds")
    if loss > track.target:
        found.append(f"the mean loss is {loss:.4f}; the target is {track.target}")
    return found


# ---- nanoGPT -------------------------------------------------------------------------------------


def check_nanogpt(folder: Path) -> None:
    """Raise a UserError unless the folder has nanoGPT's program and its prepared data."""
    if not (folder / "train.py").is_file():
        raise UserError(
            f"--nanogpt {folder} has no train.py: git clone https://github.com/karpathy/nanoGPT"
        )
    data = folder / "data/shakespeare_char"
    if not (data / "train.bin").is_file():
        raise UserError(f"{data} has no train.bin: python {data / 'prepare.py'}")


def nanogpt_steps_s(folder: Path | None, track: Track, device: str) -> list[float]:
    """Return the seconds of nanoGPT's steps, without the first two; none without its folder.

    On a GPU its program compiles, as it does by default; on other devices it does not.

    Raises:
        UserError: The program failed.
    """
    if folder is None:
        return []
    with tempfile.TemporaryDirectory() as out:
        words = ["train.py", *track.nanogpt.split(), *UNSEEN.split(), f"--out_dir={out}"]
        words += [f"--device={device}", f"--compile={device == 'cuda'}"]
        words += [f"--max_iters={NANOGPT_STEPS}"]
        done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"nanoGPT failed: {' '.join(done.stderr.split())[-500:]}")
    found = re.findall(r"^iter \d+: .* time ([\d.]+)ms", done.stdout, re.MULTILINE)
    times = [float(ms) / 1e3 for ms in found][2:]
    print(f"nanoGPT     median step {statistics.median(times) * 1e3:,.1f} ms", flush=True)
    return times
