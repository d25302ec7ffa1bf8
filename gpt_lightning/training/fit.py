"""fit, validate, test and predict: run a configuration from the command line or from Python."""

import json
import math
import re
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import capture_parser

from gpt_lightning import parsing
from gpt_lightning.errors import UserError, one_line
from gpt_lightning.output import wrapped
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.speed import SpeedMonitor, tokens_per_sec
from gpt_lightning.training.command import TrainingCLI, default_callbacks
from gpt_lightning.training.run_state import find_callback, run_folder
from gpt_lightning.training.trainer import as_list

# keys without a section, as --help has them
GENERAL = ("config", "run_name", "resume", "ckpt_path", "seed_everything", "print_config")
CONFIG = "A name that `gpt-lightning configs` lists, or a YAML file; a later one has precedence."
MODEL = "a checkpoint, or the best one of a run folder; a path or a URL"
BEGIN = f"Begin a new run with the weights, optimizer and step of {MODEL}."


# ---- from the command line ----------------------------------------------------------------------


def run_cli(
    argv: list[str], callbacks: list[L.Callback] | None = None, folder: Path | None = None
) -> TrainingCLI:
    """Run a training command and return its CLI, with the trainer, the model and the data.

    Arguments and errors are TrainingCLI's.
    """
    return TrainingCLI(args=argv, callbacks=callbacks, folder=folder)


def training_parser(start: Callable[[list[str]], object] = run_cli) -> Any:
    """Return the parser of the four training commands, without running one."""
    return capture_parser(lambda: start(["fit", "--help"]))


def run(argv: list[str], start: Callable[[list[str]], object] = run_cli) -> None:
    """Run `fit ...`, `validate ...`, `test ...`, `predict ...` or `resume ...`.

    Args:
        argv: Arguments as they were typed.
        start: Function that runs fit, validate, test or predict.
    """
    wanted = [arg for arg in argv if arg in ("-h", "--help") or arg.startswith("--help=")]
    if argv[0] == "fit" and argv[1:] and argv[1] in parsing.config_names():
        raise UserError(f"unknown argument {argv[1]!r}: did you mean '--config {argv[1]}'?")
    argv = [argv[0], *parsing.files_first(argv[1:])]
    if argv[0] != "fit":
        from gpt_lightning.training import rerun  # not for fit

        if wanted:
            paragraphs = re.sub(r"(?<=\S)\n(?=\S)", " ", rerun.__doc__ or "")
            print(*(wrapped(p, 4 * p.startswith(" ")) for p in paragraphs.splitlines()), sep="\n")
        argv = ["fit"] if wanted and argv[0] == "resume" else rerun.with_run(argv)
    if wanted:
        print(help_text(training_parser(start), argv[0], wanted[0].partition("=")[2]))
    else:
        start(argv)


def help_text(parser: Any, command: str, section: str) -> str:
    """Return the help of a command.

    Args:
        parser: Parser of the four training commands.
        command: fit, validate, test or predict.
        section: First word of keys, whose whole help is returned. Empty: a line for each key.

    Raises:
        UserError: There is no such section.
    """
    (parser,) = (a.choices[command] for a in parsing.actions_of(parser) if a.dest == "subcommand")
    actions = {a.dest: a for a in parsing.actions_of(parser) if not a.dest.endswith(".help")}
    actions["ckpt_path"].help = BEGIN if command == "fit" else f"Evaluate {MODEL}."
    actions["config"].help = CONFIG
    actions["seed_everything"].help = "Seed of weights, dropout and data; false: none is set."
    groups = {name: group for name, group in parser.groups.items() if name != command}
    trainer, *others = [name for name in groups if "." not in name]
    names = [*others, trainer]
    if section and section not in names:
        hint = parsing.nearest(section, names)
        raise UserError(f"--help={section}: expected {', '.join(names)}{hint}")
    what = "--config quickstart --run_name a" if command == "fit" else "lightning_logs/quickstart"
    program = parsing.script or "gpt-lightning"
    lines = [
        f"usage: {program} {command} [--config NAME]... [--KEY VALUE]...",
        f"       {program} {command} --help=SECTION",
        f"example: {program} {command} {what}",
    ]
    for name in [section] if section else ["", *names]:
        heading = name and wrapped(f"--{name}.KEY: {groups[name].title} (--help={name})")
        lines += ["", heading] if heading else [""]
        below = [key for key in actions if key.startswith(f"{name}.") and key not in groups]
        for key in below if name else GENERAL:
            default = actions[key].default
            default = "null" if default in (None, SUPPRESS) else default
            text = one_line(actions[key].help or "")
            row = f"  --{key:<28} {default!s:<9} {text}"
            lines.append(wrapped(row, max_lines=None if section or not name else 1))
    return "\n".join(lines)


# ---- from Python -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitResult:
    """Outcome of a run.

    Attributes:
        steps: Optimizer steps, those before a resume included.
        run_folder: Folder of config.yaml, metrics.jsonl and checkpoints/; None with fast_dev_run.
        best_loss: Lowest validation loss of the run, in nats; None without a validation.
        validation_loss: Validation loss at the end, in nats; None without a validation.
        tokens_per_sec: Rate over all ranks, without warm-up and stalls; None for a shorter run.
    """

    steps: int
    run_folder: Path | None
    best_loss: float | None
    validation_loss: float | None
    tokens_per_sec: float | None


def fit(
    *configs: str | Path | Mapping[str, Any],
    callbacks: L.Callback | Sequence[L.Callback] = (),
    **overrides: Any,
) -> FitResult:
    """Train as `gpt-lightning fit` does, and return the outcome.

    Example:
        ```python
        result = fit("quickstart", {"trainer.max_steps": 100}, run_name="short")
        print(result.best_loss, result.run_folder)
        ```

    Args:
        configs: Configurations, by path or by name, and mappings from keys of the command line to
            values. A later one wins.
        callbacks: Objects in addition to the callbacks of every run; config.yaml does not have
            them.
        overrides: Keys and values that win over all configs: run_name, seed_everything, resume,
            ckpt_path, and keys with a dot as `**{"data.batch_size": 8}`.

    Raises:
        UserError: Settings or data are wrong.
        MemoryExhaustedError: The run needs more memory than there is.
    """
    argv = ["fit"]
    callbacks = as_list(callbacks)
    if wrong := [each for each in callbacks if not isinstance(each, L.Callback)]:
        raise UserError(f"callbacks has {wrong[0]!r}; give an object: EarlyStopping('val/loss')")
    for config in (*configs, overrides):
        if isinstance(config, Mapping):
            argv += [f"--{key}={_argument(value)}" for key, value in config.items()]
        else:
            argv.append(f"--config={config}")
    trainer = run_cli(argv, [*default_callbacks("fit"), *callbacks]).trainer
    checkpoint: Any = find_callback(trainer, RunCheckpoint)
    speed: Any = find_callback(trainer, SpeedMonitor)
    steps, _ = speed.steps()
    loss = trainer.callback_metrics.get("val/loss")
    return FitResult(
        steps=trainer.global_step,
        run_folder=run_folder(trainer),
        best_loss=checkpoint.best_loss if math.isfinite(checkpoint.best_loss) else None,
        validation_loss=None if loss is None else float(loss),
        tokens_per_sec=tokens_per_sec(steps) if steps else None,
    )


def _argument(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    text = json.dumps(value, default=_plain)
    return str(json.loads(text)) if text.startswith('"') else text


def _plain(value: Any) -> Any:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)  # arrays have it
