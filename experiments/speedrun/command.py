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

from benchmarks import nanogpt
from experiments.speedrun.tracks import NANOGPT, RECORDS, RULES, TRACKS, Result, SeedRow, Track
from gpt_lightning.data.texts import corpus_file
from gpt_lightning.errors import UserError
from gpt_lightning.files import numbered_folder, write_atomic
from gpt_lightning.parsing import OneLineParser, resolve_configs
from gpt_lightning.prepare.settings import split_borders
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.runs.history import find_runs, read_curves, read_events, read_settings
from gpt_lightning.tables.ledger import Ledger
from gpt_lightning.tables.rows import Console

PROGRAM = "python -m experiments.speedrun"
ROOT = Path("lightning_logs") / "speedrun"
NANOGPT_STEPS = 20
PAUSE = "validation"  # the phase that is left out of the time


def make_parser() -> OneLineParser:
    """Return the parser of the command."""
    about = "Train a record's configuration over seeds, check the rules, and write its page."
    parser = OneLineParser(prog=PROGRAM, description=about)
    parser.add_argument("--track", choices=[*TRACKS], required=True, help="Aim of the runs.")
    parser.add_argument("--device", default="cpu", help="cpu, mps, cuda or auto.")
    about = "Configuration, by path or name, instead of the track's own: a trial."
    parser.add_argument("--config", type=str | None, help=about)
    about = "Seeds, separated by commas. A record has 101 to 105 or more, at most to 110."
    parser.add_argument("--seeds", default="101,102,103,104,105", help=about)
    about = "Train on nine tenths of the training text, and validate on its last tenth: a trial."
    parser.add_argument("--third_split", action="store_true", help=about)
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
        raise UserError(f"--seeds is {args.seeds!r}; expected numbers with commas: 101,102,103")
    seeds = list(dict.fromkeys(map(int, args.seeds.split(","))))
    theirs = None if args.nanogpt is None else Path(args.nanogpt)
    if theirs is not None:
        check_nanogpt(theirs)
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
    config += third_split(root) if args.third_split else []
    times = [nanogpt_steps_s(theirs, track, device)]
    for seed in seeds:
        if seed in {row.seed for row in rows}:
            continue
        folder = root / f"seed_{seed}"
        rows.append(run_seed(config, seed, device, folder))
        Ledger(root).append({"seed": seed}, dataclasses.asdict(rows[-1]))
        console = Console(SeedRow, rows[-1:])
        print(f"\n{console.header}\n{console.line(rows[-1])}\n", flush=True)
    times.append(nanogpt_steps_s(theirs, track, device))
    runs = [find_run(root / f"seed_{row.seed}") for row in rows]
    breaches = [text for run, row in zip(runs, rows, strict=True) for text in problems(run, row)]
    breaches += differences(runs)
    if args.config is not None:
        breaches.append(f"the configuration is {args.config}, not the track's")
    step_s = {way: statistics.median(times[0][way] + times[1][way]) for way in times[0]}
    result = Result(track, device, rows, step_s, list(dict.fromkeys(breaches)))
    write(result, args.change, Path(args.out), root, shlex.join([*PROGRAM.split(), *argv]))
    return int(result.figures()["loss"] > track.target)


# ---- runs ----------------------------------------------------------------------------------------


def third_split(root: Path) -> list[str]:
    """Write the training text to a folder, and return the arguments of `fit` that split it."""
    corpus, val_fraction = (RULES["settings"][f"data.{x}"] for x in ("corpus", "val_fraction"))
    text = corpus_file(corpus, Path("data")).read_text("utf-8")
    begin, end = split_borders(len(text), val_fraction, 0.0)["train"]
    path = root / "training_text.txt"
    write_atomic(path, text[begin:end].encode())
    return ["--data.corpus=null", f"--data.text_file={path}"]


def run_seed(config: list[str], seed: int, accelerator: str, folder: Path) -> SeedRow:
    """Train with a seed in a process of its own, and return its figures.

    Inductor's cache is empty at first, and so is the temporary folder, where it keeps precompiled
    headers, so that the time includes the whole compilation.

    Args:
        config: Option --config, and further arguments.
        seed: Seed of the run.
        accelerator: Accelerator of the Trainer.
        folder: Folder for the run's `lightning_logs`.

    Raises:
        UserError: The run failed.
    """
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted call
    arguments = [*config, f"--seed_everything={seed}", f"--run_name=seed_{seed}"]
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
        (start_s + at - sum(s for name, b, s in curves["phases"] if name == PAUSE and b < at), loss)
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
        precision=read_settings(run).get("trainer.precision"),
    )


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


# ---- nanoGPT -------------------------------------------------------------------------------------


def check_nanogpt(folder: Path) -> None:
    """Raise a UserError unless the folder has nanoGPT's program and its prepared data."""
    program = folder / "train.py"
    if not program.is_file() or nanogpt.CPU_CONTEXT not in program.read_text("utf-8"):
        raise UserError(
            f"--nanogpt {folder} has no train.py, or one without `{nanogpt.CPU_CONTEXT}`: "
            "git clone https://github.com/karpathy/nanoGPT"
        )
    data = folder / "data/shakespeare_char"
    if not (data / "train.bin").is_file():
        raise UserError(f"{data} has no train.bin: python {data / 'prepare.py'}")


def nanogpt_steps_s(folder: Path | None, track: Track, device: str) -> dict[str, list[float]]:
    """Return the seconds of nanoGPT's steps by way, without the first two; none without its folder.

    Its program has no autocast on a CPU: bfloat16 is for a copy of which one line is changed.

    Raises:
        UserError: The program failed.
    """
    found: dict[str, list[float]] = {}
    if folder is None:
        return found
    for way, options in NANOGPT[device].items():
        words = [*track.nanogpt.split(), f"--device={device}", f"--max_iters={NANOGPT_STEPS}"]
        try:
            printed = nanogpt.train(folder, [*words, *options.split()], "bfloat16" in options)
        except subprocess.CalledProcessError as error:
            raise UserError(f"nanoGPT failed: {' '.join(error.stderr.split())[-500:]}") from error
        found[way] = [ms / 1e3 for ms in nanogpt.step_ms(printed)][2:]
        print(f"nanoGPT     median step {statistics.median(found[way]):,.4f} s, {way}", flush=True)
    return found
