"""Evaluate or continue a run: validate RUN, test RUN, predict RUN, resume RUN [options].

RUN is a run folder, a folder of runs (its newest run with a checkpoint), or a checkpoint in its run
folder. All settings are those of its config.yaml; further options replace them. resume continues
the run in its folder, from its newest checkpoint. The other commands take its checkpoint of the
lowest validation loss (--ckpt_path best), or its newest one (--ckpt_path last).

  gpt-lightning validate lightning_logs/quickstart
  gpt-lightning validate lightning_logs/quickstart --data.val_text_file my.txt
  gpt-lightning predict lightning_logs/quickstart --ckpt_path last
  gpt-lightning resume lightning_logs/quickstart --trainer.max_steps 4800
"""

import os
from pathlib import Path
from typing import Any

from gpt_lightning.data.dataset import is_remote
from gpt_lightning.data.settings import SOURCES
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import joined, program, read_config, shell_command, typed_values
from gpt_lightning.runs.folders import RunPaths, find_checkpoint, run_folders

OR_BOTH = "give --config with the settings, and --ckpt_path with the checkpoint"
WORDS = ("--ckpt_path=best", "--ckpt_path=last")
# settings with a path, which may be relative to the folder in which the run was started
DATA = ("data.text_file", "data.val_text_file", "data.data_dir", "data.dataset")
PATHS = (*DATA, "checkpoint.folder", "model.init_from")


def with_run(argv: list[str]) -> list[str]:
    """Return the arguments of `COMMAND RUN [options]` with the run's settings in place of RUN.

    An evaluation with neither RUN nor settings nor data is that of the run of its --ckpt_path. With
    --ckpt_path best or last, --config of a run's config.yaml is that run.

    Args:
        argv: Arguments, the command first: validate, test or predict, with or without RUN; resume,
            which becomes fit.

    Raises:
        UserError: RUN has no checkpoint or no settings, or is a URL; resume has no RUN.
    """
    command, words = argv[0], joined(argv[1:])
    # RunReport prints the loss; Lightning's table is for validate and test
    quiet = [] if command in ("predict", "resume") else ["--verbose=false"]
    if not {*WORDS}.isdisjoint(words):  # --config of a run means that run
        for i, word in enumerate(words):
            path = Path(word.removeprefix("--config="))
            if path.name == "config.yaml" and RunPaths(path.parent).saved():
                words[i] = str(path.parent)
    name, typed = next((word for word in words if word[:1] != "-"), ""), typed_values(words)
    if command != "resume":
        if not name and not any(key == "config" or key.startswith("data.") for key in typed):
            name = typed.get("ckpt_path", "")
        if not name:
            return [command, *quiet, *argv[1:]]
    if name in ("", "best", "last"):
        raise UserError(f"{command} has no run: `{program()} {command} lightning_logs/NAME`")
    address = Path(name)
    if is_remote(name):
        raise UserError(f"{name} is a URL: copy the run folder here, or {OR_BOTH}")
    begun = [run for run in run_folders(address) if RunPaths(run).config.is_file()]
    if begun and not any(RunPaths(run).saved() for run in begun):
        again = shell_command(["fit", "--config", str(RunPaths(begun[0]).config)])
        raise UserError(f"{begun[0]} ended before its first checkpoint: begin again, `{again}`")
    chosen = find_checkpoint(address, last=WORDS[1] in words)
    found_run = RunPaths.of_checkpoint(chosen)
    if not found_run:
        begin = f"begin with its weights, `{program()} fit --config NAME --model.init_from {name}`"
        fix = begin if command == "resume" else OR_BOTH
        raise UserError(f"{name} is in no run's folder checkpoints/: {fix}")
    run = Path(os.path.relpath(found_run.run))
    path = RunPaths(run).config
    settings = read_config(path)
    network = (settings.get("model") or {}).get("network")
    if network and not any(word.startswith("--model.network") for word in words):
        from gpt_lightning.model.network import missing_network  # such models only

        raise missing_network(str(run), network)
    options = [f"--config={path}", *relocated(run, settings)]
    others = [f"data.{source}" for source in SOURCES if f"data.{source}" not in typed]
    if len(others) < len(SOURCES):  # the data given replaces the run's
        options += [f"--{key}=null" for key in others]
    if name in words:
        words.remove(name)  # the first one: another is an error
    rest = [word for word in words if word not in WORDS]
    if command == "resume":
        for word in rest:
            if word.startswith(("--resume=", "--run_name=")):
                again = shell_command(["fit", "--config", str(path), word])
                raise UserError(
                    f"resume goes on in {run}, and {word} does not: leave it out, or type `{again}`"
                )
        one = address.is_file() or WORDS[0] in words
        return ["fit", *options, f"--resume={chosen if one else run}", *rest]
    options += [f"--ckpt_path={chosen}", "--model.init_from=null"]  # the checkpoint has all weights
    return [command, *quiet, *options, *rest]


def logs_parent(run: Path) -> Path | None:
    """Return FOLDER of a run FOLDER/lightning_logs/NAME/version_N; None if the run was moved."""
    logs = Path(os.path.abspath(run)).parents[1]
    return logs.parent if logs.name == "lightning_logs" else None


def relocated(run: Path, config: dict[str, Any]) -> list[str]:
    """Return options with the run's relative paths, if it was started in another folder than this.

    The folder is known by the place of the run: FOLDER/default_root_dir/lightning_logs/NAME/
    version_N.
    """
    started = logs_parent(run)
    root = Path(str((config.get("trainer") or {}).get("default_root_dir") or ""))
    for name in reversed(root.parts):
        started = started.parent if started and started.name == name else None
    if not started or started.resolve() == Path.cwd().resolve():
        return []
    folder = started.resolve()

    options = []
    for key in PATHS:
        section, _, name = key.partition(".")
        value = (config.get(section) or {}).get(name)
        # others are names, such as gpt2 or a folder under data_dir, URLs, and absolute paths
        if value and str(folder / value) != value and (folder / value).exists():
            options.append(f"--{key}={folder / value}")
    return options
