"""Documents to a dataset: plan units, make their parts, assemble the parts."""

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpt_lightning.data.formats import file_header
from gpt_lightning.data.manifest import Manifest, TextOrigin
from gpt_lightning.data.progress import Progress
from gpt_lightning.data.tokenizers import Tokenizer, build_tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.assemble import assemble, begin_dataset, finish_dataset
from gpt_lightning.prepare.executors import Execution, run_all
from gpt_lightning.prepare.inputs import Input, fingerprint
from gpt_lightning.prepare.parts import Part
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.target import Target, delete_parts, exclusive_lock, save_inputs
from gpt_lightning.prepare.units import (
    Job,
    Unit,
    describe_units,
    discard_parts,
    open_parts,
    plan_units,
    run_unit,
)


def prepare_documents(
    inputs: Sequence[Input],
    name: str,
    out: Path,
    settings: Settings,
    execution: Execution,
    overwrite: bool,
) -> tuple[Manifest | None, bool]:
    """Return the dataset of documents in `out`, and whether it was made now; None for one job.

    Parts of the work are in `.NAME.parts` beside `out` until the dataset is complete. A run that
    was killed at any moment continues from the complete parts, with the same bytes as a result.

    Raises:
        UserError: The inputs or settings make no dataset, the folder holds something else, the disk
            is full, or parts are missing for a merge.
    """
    _tokenizer_of_documents(settings)
    place = out.resolve()
    job = Job(place.with_name(f".{place.name}.parts"), settings, fingerprint(inputs))
    wanted = {"inputs": job.inputs, "format": settings.format, **settings.of_documents()}
    target = Target(out, wanted, overwrite)
    if execution.shard_index is not None and target.existing() is None:
        units = plan_units(inputs, settings.text_field)
        with exclusive_lock(place):  # only to open the folder; then all jobs work in it
            open_parts(job, len(units))
        _run_job(job, units, execution)
        return None, True
    manifest, made = target.make_once(partial(_make, job, inputs, name, target, execution))
    if not made:
        # Parts that a process left that was killed just after it renamed the dataset.
        discard_parts(job)
    return manifest, made


def _tokenizer_of_documents(settings: Settings) -> Tokenizer:
    name = settings.tokenizer
    tokenizer = None if name == "char" else build_tokenizer(name)
    if tokenizer is None or tokenizer.eot_token is None:
        reason = "has no end-of-text token" if tokenizer else "takes its vocabulary from one text"
        raise UserError(
            f"tokenizer {name} {reason}, and documents are separated by end-of-text tokens: use "
            "the tokenizer gpt2, or give one text file"
        )
    file_header(settings.format, token_dtype(tokenizer.vocab_size).name, 0)  # or it cannot hold it
    return tokenizer


# ---- parts ---------------------------------------------------------------------------------------


def _run_job(job: Job, units: Sequence[Unit], execution: Execution) -> None:
    """Make the parts of one job of an array."""
    _make_parts(job, [unit for unit in units if execution.own(unit.index)], execution)
    missing = _missing(job, units)
    rest = "none is missing: add --merge true"
    if missing:
        rest = f"missing are {_described(missing, execution)}"
    print(
        f"job {execution.shard_index} of {execution.shard_count} is done, "
        f"{len(units) - len(missing)} of {len(units)} parts are complete, {rest}",
        flush=True,
    )


def _make_parts(job: Job, units: Sequence[Unit], execution: Execution) -> None:
    todo = _missing(job, units)
    if 0 < len(todo) < len(units):
        n_done = len(units) - len(todo)
        print(f"continuing: {n_done} of {len(units)} parts are complete", flush=True)
    n_bytes = sum(unit.size for unit in units)
    done_bytes = n_bytes - sum(unit.size for unit in todo)
    with Progress(n_bytes, done_bytes) as progress:
        for unit, part in run_all(partial(run_unit, job), todo, execution):
            progress.add(unit.size, part.tokens)


def _missing(job: Job, units: Sequence[Unit]) -> list[Unit]:
    done = job.done(units)
    return [unit for unit in units if unit.index not in done]


def _described(missing: Sequence[Unit], execution: Execution) -> str:
    indices = [unit.index for unit in missing]
    units = f"units {describe_units(indices)}"
    if execution.shard_count is None:
        return units
    jobs = {index % execution.shard_count for index in indices}
    return f"{units} (shard_index {describe_units(list(jobs))} of {execution.shard_count})"


# ---- the dataset ---------------------------------------------------------------------------------


def _make(
    job: Job, inputs: Sequence[Input], name: str, target: Target, execution: Execution
) -> tuple[Manifest, bool]:
    """Make the missing parts, and publish the dataset that they assemble to."""
    units = plan_units(inputs, job.settings.text_field)
    begun = job.parts.exists()
    open_parts(job, len(units))
    try:
        if not execution.merge:
            _make_parts(job, units, execution)
        missing = _missing(job, units)
        if missing:
            raise UserError(
                f"{job.parts} lacks {len(missing)} of {len(units)} parts, "
                f"{_described(missing, execution)}: run these jobs, then merge again"
            )
        done = job.done(units)
        parts = [(job.part(unit), done[unit.index]) for unit in units]
        manifest, made = target.publish(partial(_write, parts, name, job))
        _print_damage(manifest.settings)
    finally:
        if not begun and not job.done(units):
            shutil.rmtree(job.parts, ignore_errors=True)  # it holds no complete part
    delete_parts(job.parts)
    return manifest, made


def _write(parts: Sequence[tuple[Path, Part]], name: str, job: Job, folder: Path) -> Manifest:
    settings, tokenizer = job.settings, _tokenizer_of_documents(job.settings)
    begin_dataset(folder, tokenizer, settings)
    try:
        splits, sha256 = assemble(parts, folder, token_dtype(tokenizer.vocab_size), settings)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    keys = ("documents", "skipped", "replaced")
    counts = {key: sum(getattr(part, key) for _, part in parts) for key in keys}
    origin = TextOrigin(name, sum(part.text_bytes for _, part in parts), sha256)
    save_inputs(folder, job.inputs)
    recorded = {**settings.of_documents(), **counts}
    return finish_dataset(folder, tokenizer, settings, origin, recorded, splits)


def _print_damage(settings: Mapping[str, Any]) -> None:
    skipped, replaced = settings["skipped"], settings["replaced"]
    if skipped:
        n_documents = settings["documents"] + skipped
        print(f"left out {skipped:,} of {n_documents:,} documents (errors skip)")
    if replaced:
        print(
            f"put U+FFFD for {replaced:,} damaged bytes or characters (errors {settings['errors']})"
        )
