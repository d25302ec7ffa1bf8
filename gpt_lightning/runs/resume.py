"""Resume: which checkpoint a run continues, whether it may, and what has changed since.

`find` resolves `--resume` before anything is built. `check` compares the record in the checkpoint
with the record of this run, after the data and the model are known and before any state is
restored: it raises where the result would silently be another run, and returns a line for each
setting that this command changes. docs/resume.md states what a resumed run guarantees.
"""

import json
import shlex
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gpt_lightning.data.dataset import is_remote
from gpt_lightning.data.tokenizers import difference
from gpt_lightning.errors import UserError, warn
from gpt_lightning.files import Fields
from gpt_lightning.model.network import network_option
from gpt_lightning.parsing import shell_command
from gpt_lightning.runs.checkpoint import Checkpoint, RunRecord, read_checkpoint
from gpt_lightning.runs.folders import RunPaths, check_digest, run_folders, run_id, sidecar

# fields of GPTConfig that decide which tensors there are, or what they mean
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "tie_weights")
# fields of Settings that decide which tensors the optimizer has a state for, or what LoRA's mean
LORA = ("lora_rank", "lora_alpha", "lora_targets")
MICRO_BATCH = "sequences a micro-batch"  # over all ranks, in the data's identity
OPTIMIZED = ("optimizer", "decay", "freeze", "learning_rate_factors", *LORA)


def find(resume: str, run_name_folder: Path) -> tuple[Path | None, Path | None]:
    """Return the checkpoint that `--resume` continues, and its run folder.

    Args:
        resume: `auto`, a run folder, a folder of runs, or a checkpoint in its run folder.
        run_name_folder: Folder of the runs of this name, for `auto`.

    Returns:
        Path of the checkpoint, None if the run has not saved one; and the run folder, None if there
        is no run.

    Raises:
        UserError: A path has no undamaged checkpoint, or one that is in no run folder or of another
            run; the newest one has no readable digest; or all checkpoints of the run are damaged.
    """
    if is_remote(resume):
        raise UserError(
            f"--resume {resume} is a URL: give --resume auto, and --checkpoint.folder with what "
            "precedes the run's name in it"
        )
    auto = resume == "auto"
    path = run_name_folder if auto else Path(resume)
    if path.exists() and not path.is_dir():
        check_digest(path, required=False)  # the file is named: a warning is enough
        found_run = RunPaths.of_checkpoint(path.resolve())
        if not found_run:
            raise UserError(
                f"--resume {path} is in no run's folder checkpoints/: begin a run with --resume "
                f"never --ckpt_path {path}"
            )
        check_run(path, found_run.run)
        return path, found_run.run
    # the newest training run version_N, or the folder itself
    run = next((run for run in run_folders(path)[1:] if RunPaths(run).checkpoints.is_dir()), path)
    found = newest_checkpoint(run)
    if found:
        return found, run
    if not auto:
        raise UserError(f"--resume {path}: no whole checkpoint there; give a run folder, or auto")
    rank_zero_only(print)(f"resume      no checkpoint in {run}: starting at step 0")
    return None, run if run != path else None


def newest_checkpoint(run: Path) -> Path | None:
    """Return the undamaged checkpoint of the highest step of a run folder.

    A damaged file, and one of another run, is skipped with a warning on standard error.

    Returns:
        Path of the checkpoint; None if the folder has none.

    Raises:
        UserError: The checkpoint has no readable digest, or all are damaged or of another run.
    """
    skipped = []
    run_id(run)  # raises for a damaged run.json
    for saved in RunPaths(run).saved():
        try:
            has_digest = check_digest(saved.path, required=False)
            check_run(saved.path, run)
        except UserError as error:
            skipped.append(error)
            continue
        if not has_digest:
            network = network_option(read_checkpoint(saved.path, check=False).record.network)
            again = shell_command(["resume", str(saved.path), *network])
            raise UserError(
                f"{saved.path} has no readable digest in {sidecar(saved.path).name}: restore that "
                f"file, or go on without a check with --resume {saved.path}, or `{again}`"
            )
        for reason in skipped:
            rank_zero_only(warn)(f"{reason}; skipped")
        return saved.path
    if skipped:
        first = str(skipped[0]).partition("; ")[0]
        raise UserError(
            f"no checkpoint in {run} is whole and of this run ({first}): restore one, or begin a "
            f"new run, `{shell_command(['fit', '--config', str(RunPaths(run).config)])}`"
        ) from skipped[0]
    return None


def check_run(path: Path, run: Path) -> None:
    """Check that a checkpoint was saved by the run of a folder.

    Raises:
        UserError: Another run has saved the checkpoint, or it is not one of ours.
    """
    theirs, ours = read_checkpoint(path, check=False).record.run_id, run_id(run)
    if theirs != ours:
        why = f"not {ours}" if ours else f"{RunPaths(run).identity} is missing"
        again = ["fit", "--config", str(RunPaths(run).config), "--ckpt_path", str(path)]
        raise UserError(
            f"{path} is a checkpoint of run {theirs}, {why}: begin a new run from it, "
            f"`{shell_command(again)}`"
        )


def check(
    theirs: RunRecord, ours: RunRecord, address: str, fitting: bool, allow_changes: bool
) -> list[str]:
    """Compare the record of a checkpoint with the record of this run.

    Args:
        theirs: Record in the checkpoint.
        ours: Record of this run.
        address: Name of this run's data, for errors.
        fitting: True if training continues; an evaluation needs the model and the tokens alone.
        allow_changes: True if other data, another order and another seed are allowed.

    Returns:
        A line for each setting that differs: `key theirs -> ours`.

    Raises:
        UserError: A setting differs; the message has both values.
    """
    a, b = theirs.tokenizer, ours.tokenizer  # None: a run without a TokenDataModule
    if a and b and a != b:
        raise UserError(
            f"the checkpoint was trained on other tokens than those of {address} "
            f"({difference(a, b)}): use its own data, or a text without new characters, "
            "`gpt-lightning prepare SOURCE --tokenizer DATASET --out DIR` with its own dataset as "
            "DATASET; a resume then needs --data.allow_changes true, too"
        )
    check_model(theirs, ours, fitting)
    changed = differences(theirs.hyperparameters(), ours.hyperparameters(), "model.")
    if not fitting:
        precision = {"precision": ours.environment.get("precision")}
        return changed + differences(theirs.environment, precision)
    if theirs.micro_batches:
        raise UserError(
            f"the checkpoint was saved in the middle of a step, after {theirs.micro_batches} of "
            "its micro-batches: resume from one that was saved between two steps"
        )
    if allow_changes:
        changed += differences(theirs.data_identity, ours.data_identity)
    else:
        check_order(theirs, ours)
    changed += differences(theirs.run_identity, ours.run_identity)
    masks = ", with other dropout masks" if ours.config.dropout > 0 else ""
    inexact = differences(theirs.environment, ours.environment)
    return changed + [f"{d}: equal to rounding errors{masks}, not bit for bit" for d in inexact]


def check_model(theirs: RunRecord, ours: RunRecord, fitting: bool) -> None:
    """Raise if the weights or the optimizer's state would not fit."""
    a, b = fixed(theirs), fixed(ours)
    values = {key: value for key, value in a.items() if value != b[key]}
    if values:
        cannot = "resume from" if fitting else "evaluate"
        differ = [f"{key} is {b[key]}, the checkpoint's {v}" for key, v in values.items()]
        options = [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items()]
        raise UserError(
            f"cannot {cannot} the checkpoint: {'; '.join(differ)}: set {shlex.join(options)}, or "
            "give a checkpoint of this model"
        )


def fixed(record: RunRecord) -> Fields:
    """Return the settings that decide which weights and optimizer states there are, by key."""
    network = record.network and f"{record.network['class_path']} {record.network['init_args']}"
    return (
        {"model.network": network or "null"}
        | {f"model.config.{key}": getattr(record.config, key) for key in SHAPE}
        | {f"model.{key}": getattr(record.settings, key) for key in OPTIMIZED}
    )


def check_order(theirs: RunRecord, ours: RunRecord) -> None:
    """Raise if the seed or the coming batches differ; what one of the two lacks is not compared."""
    first = "data.order", "seed_everything"  # others follow from these
    a, b = ({"seed_everything": r.run_identity.get("seed_everything")} for r in (theirs, ours))
    if not theirs.run_identity:
        a = b
    if theirs.data_identity and ours.data_identity:
        a, b = a | theirs.data_identity, b | ours.data_identity
    for key in sorted({*a, *b}, key=lambda key: (key not in first, key)):
        if a.get(key) != b.get(key):
            what = f"{key} {a.get(key)}, this run has {b.get(key)}"
            raise UserError(
                f"the checkpoint has {'another dataset' if key == 'dataset' else what}: resume "
                "with what it was trained on, or allow the change with --data.allow_changes true"
            )


def batch_size_on(record: RunRecord, ranks: int) -> int | None:
    """Return data.batch_size with which other ranks share the micro-batches of a checkpoint.

    Args:
        record: Record in the checkpoint.
        ranks: Number of ranks of this run.

    Returns:
        Sequences a micro-batch and rank; None if the ranks, or the batches, are another author's or
        those of the checkpoint.

    Raises:
        UserError: The ranks cannot share them evenly.
    """
    before = record.environment.get("ranks")
    sequences = record.data_identity.get(MICRO_BATCH)
    if before in (None, ranks) or sequences is None:
        return None
    if sequences % ranks:
        fitting = [str(n) for n in range(1, sequences + 1) if sequences % n == 0]
        raise UserError(
            f"{ranks} ranks cannot share the {sequences} sequences of the checkpoint's "
            f"micro-batches evenly: start {', '.join(fitting[:-1])} or {fitting[-1]}"
        )
    batch_size = int(sequences // ranks)
    rank_zero_only(print)(f"ranks       {before} -> {ranks}: data.batch_size is {batch_size}")
    return batch_size


def differences(theirs: Fields, ours: Fields, prefix: str = "") -> list[str]:
    """Return `key theirs -> ours` for each key of both with another value, nested with dots."""
    lines = []
    for key in filter(theirs.__contains__, ours):
        a, b = theirs[key], ours[key]
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key} {a} -> {b}")
    return lines


def resumption(name: str, path: Path, checkpoint: Checkpoint, changed: list[str]) -> str:
    """Return the lines about the checkpoint that is loaded: its place, and what has changed."""
    where = [f"step {checkpoint.step:,}"]
    where += [] if checkpoint.tokens is None else [f"{checkpoint.tokens:,} tokens"]
    where += [f"{key} {value:,}" for key, value in checkpoint.record.data_position.items()]
    lines = [f"{name:<11} {path}: {', '.join(where)}"]
    return "\n".join(lines + [f"changed     {line}" for line in changed])
