"""Documents to a dataset: plan units, make their parts, assemble the parts."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpt_lightning.data.formats import file_header
from gpt_lightning.data.manifest import Manifest, TextOrigin
from gpt_lightning.data.progress import Progress
from gpt_lightning.data.tokenizers import Tokenizer, build_tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, sync_folder, workspace
from gpt_lightning.prepare.assemble import assemble, begin_dataset
from gpt_lightning.prepare.executors import Execution, run_all
from gpt_lightning.prepare.inputs import Input, fingerprint
from gpt_lightning.prepare.parts import Part
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.target import (
    delete_parts,
    exclusive_lock,
    existing,
    replace,
    save_inputs,
    sweep_lock,
)
from gpt_lightning.prepare.units import (
    Job,
    Unit,
    describe_units,
    discard_parts,
    open_parts,
    plan_units,
    run_unit,
)

WORDS = {"char": "takes its vocabulary from one text", "byte": "has no end-of-text token"}


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
    wanted = {"inputs": fingerprint(inputs), "format": settings.format, **settings.of_documents()}
    there = existing(out, wanted, overwrite)
    if there is None and execution.shard_index is not None:
        _run_job(inputs, out, settings, execution)
        return None, True
    if there is None:
        with exclusive_lock(out.resolve()), explained("write", out):
            # The process that held the lock may have made it.
            there = existing(out, wanted, overwrite)
            if there is None:
                return _make(inputs, name, out, settings, execution, overwrite)
    # Parts that a process left that was killed just after it renamed the dataset.
    discard_parts(Job(_parts_of(out), settings), fingerprint(inputs))
    sweep_lock(out)
    return there, False


def _tokenizer_of_documents(settings: Settings) -> Tokenizer:
    if settings.tokenizer in WORDS:
        raise UserError(
            f"tokenizer {settings.tokenizer} {WORDS[settings.tokenizer]}, and documents are "
            "separated by end-of-text tokens: use --tokenizer gpt2, or prepare one text file"
        )
    tokenizer = build_tokenizer(settings.tokenizer)
    if tokenizer.eot_token is None:
        raise UserError(
            f"tokenizer {settings.tokenizer} has no end-of-text token to separate documents: use "
            "--tokenizer gpt2"
        )
    file_header(settings.format, token_dtype(tokenizer.vocab_size).name, 0)  # or it cannot hold it
    return tokenizer


def _parts_of(out: Path) -> Path:
    return out.resolve().with_name(f".{out.resolve().name}.parts")


# ---- parts ---------------------------------------------------------------------------------------


def _run_job(inputs: Sequence[Input], out: Path, settings: Settings, execution: Execution) -> None:
    """Make the parts of one job of an array."""
    units = plan_units(inputs, settings.text_field)
    job = Job(_parts_of(out), settings)
    with exclusive_lock(out.resolve()):  # only to open the folder; then all jobs work in it
        open_parts(job, fingerprint(inputs), len(units))
    _make_parts(job, [unit for unit in units if execution.own(unit.index)], execution)
    missing = _missing(job, units)
    rest = (
        f"missing are {_described(missing, execution)}"
        if missing
        else "none is missing: add --merge true"
    )
    print(
        f"job {execution.shard_index} of {execution.shard_count} is done, "
        f"{len(units) - len(missing)} of {len(units)} parts are complete, {rest}",
        flush=True,
    )


def _make_parts(job: Job, units: Sequence[Unit], execution: Execution) -> None:
    done = job.done(units)
    todo = [unit for unit in units if unit.index not in done]
    if done and todo:
        print(f"continuing: {len(done)} of {len(units)} parts are complete", flush=True)
    n_bytes = sum(unit.size for unit in units)
    done_bytes = n_bytes - sum(unit.size for unit in todo)
    with Progress(n_bytes, done_bytes) as progress:
        for unit, part in run_all(partial(run_unit, job), todo, execution):
            progress.add(unit.size, part.tokens)


def _missing(job: Job, units: Sequence[Unit]) -> list[int]:
    done = job.done(units)
    return [unit.index for unit in units if unit.index not in done]


def _described(missing: Sequence[int], execution: Execution) -> str:
    units = f"units {describe_units(missing)}"
    if execution.shard_count is None:
        return units
    jobs = {index % execution.shard_count for index in missing}
    return f"{units} (shard_index {describe_units(list(jobs))} of {execution.shard_count})"


# ---- the dataset ---------------------------------------------------------------------------------


def _make(
    inputs: Sequence[Input],
    name: str,
    out: Path,
    settings: Settings,
    execution: Execution,
    overwrite: bool,
) -> tuple[Manifest, bool]:
    units = plan_units(inputs, settings.text_field)
    job = Job(_parts_of(out), settings)
    begun = job.parts.exists()
    open_parts(job, fingerprint(inputs), len(units))
    try:
        if not execution.merge:
            _make_parts(job, units, execution)
        missing = _missing(job, units)
        if missing:
            raise UserError(
                f"{job.parts} lacks {len(missing)} of {len(units)} parts, "
                f"{_described(missing, execution)}: run these jobs, then merge again"
            )
        manifest, there = _put_together(job, units, inputs, name, out, overwrite)
    finally:
        if not begun and not job.done(units):
            shutil.rmtree(job.parts, ignore_errors=True)  # it holds no complete part
    delete_parts(job.parts)
    return there or manifest, there is None


def _put_together(
    job: Job, units: Sequence[Unit], inputs: Sequence[Input], name: str, out: Path, overwrite: bool
) -> tuple[Manifest, Manifest | None]:
    """Return the manifest that was made, and that of another process if it was faster."""
    done, settings = job.done(units), job.settings
    parts = [(job.part(unit), done[unit.index]) for unit in units]
    found = fingerprint(inputs)
    wanted = {"inputs": found, "format": settings.format, **settings.of_documents()}
    with workspace(out.resolve()) as folder:
        manifest = _write(folder / "new", parts, name, settings)
        save_inputs(folder / "new", found)
        sync_folder(folder / "new")
        there = replace(folder, out.resolve(), overwrite, wanted)
    _print_damage([part for _, part in parts], settings)
    return manifest, there


def _write(
    folder: Path, parts: Sequence[tuple[Path, Part]], name: str, settings: Settings
) -> Manifest:
    tokenizer = _tokenizer_of_documents(settings)
    dtype = token_dtype(tokenizer.vocab_size)
    begin_dataset(folder, tokenizer, settings)
    try:
        splits, sha256 = assemble(parts, folder, dtype, settings)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    counts = {
        "documents": sum(part.documents for _, part in parts),
        "skipped": sum(part.skipped for _, part in parts),
        "replaced": sum(part.replaced for _, part in parts),
    }
    manifest = Manifest(
        tokenizer=tokenizer.spec(),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype.name,
        source=TextOrigin(name, sum(part.text_bytes for _, part in parts), sha256),
        settings={**settings.of_documents(), **counts},
        splits=splits,
        format=settings.format,
    )
    manifest.save(folder)
    return manifest


def _print_damage(parts: Sequence[Part], settings: Settings) -> None:
    documents = sum(part.documents for part in parts)
    skipped, replaced = sum(part.skipped for part in parts), sum(part.replaced for part in parts)
    if skipped:
        print(f"left out {skipped:,} of {documents + skipped:,} documents (errors skip)")
    if replaced:
        print(f"put U+FFFD for {replaced:,} damaged bytes or characters (errors {settings.errors})")
