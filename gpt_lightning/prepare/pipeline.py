"""Documents to a dataset: make the files of all units, write the shards, deliver the dataset."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from gpt_lightning.data.formats import file_header
from gpt_lightning.data.manifest import Manifest, Shard, TextOrigin
from gpt_lightning.data.progress import Progress
from gpt_lightning.data.tokenizers import Tokenizer, build_tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.executors import Execution, check_main_guard, run_all
from gpt_lightning.prepare.input_file import Input
from gpt_lightning.prepare.inputs import fingerprint
from gpt_lightning.prepare.settings import SPLITS, Settings
from gpt_lightning.prepare.shards import Assembly, Plan, ShardTask, begin_dataset, new_manifest
from gpt_lightning.prepare.target import Target, save_inputs
from gpt_lightning.prepare.units import (
    Job,
    Record,
    Unit,
    all_pieces,
    digest_contents,
    plan_units,
    read_content,
    read_record,
    run_unit,
    units_folder,
)

DONE = "done"  # folder of work that is being deleted


def prepare_documents(
    inputs: Sequence[Input],
    name: str,
    target: Target,
    settings: Settings,
    execution: Execution,
) -> tuple[Manifest | None, bool]:
    """Return the dataset of documents, and whether it was made now; None for one job.

    Unfinished work is in `.NAME.parts` beside `out` until the dataset is complete. A run that was
    killed at any moment continues from the finished units and shards, with the same bytes as a
    result. Units of other settings stay, unless the target is overwritten.

    Raises:
        UserError: The inputs or settings make no dataset, the folder holds something else, the disk
            is full, or units are missing for a merge.
    """
    check_main_guard()
    _tokenizer_of_documents(settings)
    place = target.out.resolve()
    root = place.with_name(f".{place.name}.parts")
    job = Job(units_folder(root, settings), settings)
    stamps = fingerprint(inputs)
    target.wanted.update(inputs=stamps, format=settings.format, **settings.of_documents())
    target.wanted["shuffle"] = settings.shuffle
    contents = cache(partial(_contents, inputs, settings, execution))
    target = replace(target, sizes=fingerprint(inputs, times=False), contents=contents)
    if execution.shard_index is not None and target.existing() is None:
        _run_job(job, plan_units(inputs, settings.text_field), execution)
        return None, True
    manifest, made = target.make_once(partial(_make, job, inputs, name, target, execution))
    if not made and any(map(target.delivered, job.folder.glob("shards-*"))):
        _delete_work(job)  # the process was killed just after it delivered the dataset
    elif not made:
        _sweep(root)
    return manifest, made


def _contents(inputs: Sequence[Input], settings: Settings, execution: Execution) -> str:
    """Return the digest of the inputs' present contents, for an existing dataset."""
    print("the inputs' times changed: comparing their contents", flush=True)
    units = plan_units(inputs, settings.text_field)
    found: dict[str, str] = {}
    with Progress(sum(unit.size for unit in units), 0) as progress:
        for unit, content in run_all(partial(read_content, settings), units, execution):
            found[unit.key] = content
            progress.add(unit.size, 0)
    return digest_contents([(unit.key, found[unit.key]) for unit in units])


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


# ---- units ---------------------------------------------------------------------------------------


def _run_job(job: Job, units: Sequence[Unit], execution: Execution) -> None:
    """Make the units of one job of an array."""
    _make_units(job, [unit for unit in units if execution.own(unit.index)], execution)
    missing = [unit.index for unit in units if read_record(job, unit) is None]
    rest = f"missing are {_described(missing, execution)}" if missing else "none is missing: "
    print(
        f"job {execution.shard_index} of {execution.shard_count} is done, "
        f"{len(units) - len(missing)} of {len(units)} parts are complete, "
        f"{rest}{'' if missing else 'add --merge true'}",
        flush=True,
    )


def _make_units(job: Job, units: Sequence[Unit], execution: Execution) -> list[Record]:
    """Return the records of units in order, after making those that are missing.

    A unit is finished if its record has the present sizes and stamps of its inputs. If only these
    differ, run_unit compares the contents.
    """
    done: dict[int, Record] = {}
    for unit in units:
        record = read_record(job, unit)
        if record and record.stamp == unit.stamp and record.fits(job.settings):
            done[unit.index] = record
    todo = [unit for unit in units if unit.index not in done]
    if done and todo:
        print(f"continuing: {len(done)} of {len(units)} parts are complete", flush=True)
    n_bytes = sum(unit.size for unit in units)
    with Progress(n_bytes, n_bytes - sum(unit.size for unit in todo)) as progress:
        for unit, record in run_all(partial(run_unit, job), todo, execution):
            done[unit.index] = record
            progress.add(unit.size, record.tokens)
    return [done[unit.index] for unit in units]


def _described(missing: Sequence[int], execution: Execution) -> str:
    """Return the numbers of units, and of the jobs that make them: 0-3, 7."""
    if execution.shard_count is None:
        return f"units {_ranges(missing)}"
    jobs = {index % execution.shard_count for index in missing}
    return f"units {_ranges(missing)} (shard_index {_ranges(jobs)} of {execution.shard_count})"


def _ranges(numbers: Collection[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    ranges = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    return ", ".join(ranges[:20]) + (", ..." if len(ranges) > 20 else "")


# ---- the dataset ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """Records of all units, the pieces and the plan that they make, and the shards to write."""

    records: list[Record]
    assembly: Assembly
    plan: Plan
    shards: dict[ShardTask, Shard]  # complete ones
    todo: list[ShardTask]


def _make(
    job: Job, inputs: Sequence[Input], name: str, target: Target, execution: Execution
) -> tuple[Manifest, bool]:
    """Make the missing units and shards, and deliver the dataset."""
    target.check_writable()
    units = plan_units(inputs, job.settings.text_field)
    missing = [unit.index for unit in units if read_record(job, unit) is None]
    if execution.merge and missing:
        raise UserError(
            f"{job.folder} lacks {len(missing)} of {len(units)} parts, "
            f"{_described(missing, execution)}: run these jobs, then merge again"
        )
    if target.overwrite and job.folder.parent.exists():
        for other in set(job.folder.parent.iterdir()) - {job.folder}:
            shutil.rmtree(other)
    tokenizer = _tokenizer_of_documents(job.settings)
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        work = _planned(job, units, name, tokenizer, target, execution)
        while lost := work.assembly.lost(work.todo):
            for piece in lost:
                piece.forget()
            work = _planned(job, units, name, tokenizer, target, execution)
        new = work.assembly.folder / "new"
        if not new.exists():
            begin_dataset(new, tokenizer, job.settings)
        target.make_room()
        _write_shards(work, execution)
        contents = zip(units, work.records, strict=True)
        found = digest_contents([(unit.key, record.content) for unit, record in contents])
        inputs_facts = {"inputs": target.wanted["inputs"], "sizes": target.sizes}
        save_inputs(new, inputs_facts | {"contents": found})
        manifest = _manifest(work, tokenizer, name)
        manifest.save(new)
        manifest, made = target.deliver(work.assembly.folder, manifest)
    finally:
        for empty in (job.folder, job.folder.parent):
            with contextlib.suppress(OSError):  # it holds finished units
                empty.rmdir()
    _print_damage(manifest.settings)
    _delete_work(job)
    return manifest, made


def _planned(
    job: Job,
    units: Sequence[Unit],
    name: str,
    tokenizer: Tokenizer,
    target: Target,
    execution: Execution,
) -> _Work:
    """Make the missing units, and plan the shards; those of other inputs or settings are deleted."""
    settings, records = job.settings, _make_units(job, units, execution)
    facts = [
        [
            [unit.key, record.content, record.errors]
            for unit, record in zip(units, records, strict=True)
        ],
        settings.of_documents() | {"errors": None},  # the records have the damage
        settings.format,
        target.url,
    ]
    folder = job.folder / f"shards-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    others = set(job.folder.glob("shards-*")) - {folder}
    for other in others:
        print("the inputs changed since shards were written: writing them again", flush=True)
        shutil.rmtree(other)
    folder.mkdir(exist_ok=True)
    dtype, pieces = token_dtype(tokenizer.vocab_size), all_pieces(job, units, records)
    assembly = Assembly(folder, tuple(pieces), dtype, settings, target.url)
    try:
        plan = assembly.plan()
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    tasks = assembly.tasks(plan)
    shards = {task: shard for task in tasks if (shard := assembly.finished(task))}
    if shards:
        print("continuing with the shards of an earlier run", flush=True)
    return _Work(records, assembly, plan, shards, [task for task in tasks if task not in shards])


def _write_shards(work: _Work, execution: Execution) -> None:
    """Write the missing shards; delete the pieces whose tokens are all written."""
    assembly, size = work.assembly, work.assembly.dtype.itemsize
    if scattered := assembly.unscattered():
        print("shuffling the documents on the disk", flush=True)
        with Progress(size * assembly.n_tokens, 0) as progress:
            for index, _ in run_all(assembly.scatter, scattered, execution):
                n_tokens = assembly.pieces[index].tokens
                progress.add(size * n_tokens, n_tokens)
    n_bytes = size * assembly.n_tokens
    done_bytes = size * sum(shard.tokens for shard in work.shards.values())
    with Progress(n_bytes, done_bytes) as progress:
        for task, shard in run_all(assembly.write_shard, list(work.todo), execution):
            work.shards[task] = shard
            work.todo.remove(task)
            assembly.delete_read(work.todo, task)
            progress.add(size * shard.tokens, shard.tokens)


def _manifest(work: _Work, tokenizer: Tokenizer, name: str) -> Manifest:
    settings, plan = work.assembly.settings, work.plan
    splits: dict[str, list[Shard]] = {split: [] for split in work.assembly.splits}
    for task in work.assembly.tasks(plan):
        splits[SPLITS[task.split]].append(work.shards[task])
    recorded = settings.of_documents() | {
        "documents": int(plan.documents.sum()),
        "skipped": sum(record.skipped for record in work.records),
        "replaced": sum(record.replaced for record in work.records),
    }
    origin = TextOrigin(name, plan.text_bytes, plan.sha256)
    shards = {split: tuple(found) for split, found in splits.items()}
    return new_manifest(tokenizer, settings, origin, recorded, shards)


def _delete_work(job: Job) -> None:
    """Delete the work of this dataset, and the folder of all work if it holds no other."""
    root = job.folder.parent
    _sweep(root)
    with contextlib.suppress(OSError):  # one step, which a later run can tell from unfinished work
        job.folder.rename(root / DONE)
    _sweep(root)
    if root.exists():
        print(f"{root} keeps parts of other settings: delete it if you do not need them")


def _sweep(root: Path) -> None:
    """Delete work that a dataset has replaced, and its folder if it holds no other."""
    shutil.rmtree(root / DONE, ignore_errors=True)
    with contextlib.suppress(OSError):
        root.rmdir()


def _print_damage(settings: Mapping[str, Any]) -> None:
    skipped, replaced = settings["skipped"], settings["replaced"]
    if skipped:
        n_documents = settings["documents"] + skipped
        print(f"left out {skipped:,} of {n_documents:,} documents (errors skip)")
    if replaced:
        print(
            f"put U+FFFD for {replaced:,} damaged bytes or characters (errors {settings['errors']})"
        )
