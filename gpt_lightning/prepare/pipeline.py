"""Documents to a dataset: make the files of all units, write the shards, deliver the dataset."""

import contextlib
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from gpt_lightning.data.formats import file_header
from gpt_lightning.data.manifest import Manifest, Shard, TextOrigin
from gpt_lightning.data.progress import Progress
from gpt_lightning.data.tokenizers import Tokenizer, build_tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.executors import Execution, check_main_guard, run_all
from gpt_lightning.prepare.input_file import Input
from gpt_lightning.prepare.inputs import fingerprint
from gpt_lightning.prepare.settings import SPLITS, Settings
from gpt_lightning.prepare.shards import Assembly, begin_dataset, check_size, finish_dataset
from gpt_lightning.prepare.target import Target, save_inputs
from gpt_lightning.prepare.units import (
    Job,
    Record,
    Unit,
    digest,
    plan_units,
    read_content,
    run_unit,
)


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
    tokenizer = _tokenizer_of_documents(settings)
    place = target.out.resolve()
    root = place.with_name(f".{place.name}.parts")
    job = Job.below(root, settings)
    target.wanted.update(inputs=fingerprint(inputs), format=settings.format)
    target.wanted.update(settings.of_documents(), shuffle=settings.shuffle)
    contents = cache(partial(_contents, inputs, settings, execution))
    target = replace(target, sizes=fingerprint(inputs, times=False), contents=contents)
    if execution.shard_index is not None and target.existing() is None:
        units = plan_units(inputs, settings.text_field)
        _make_units(job, units[execution.shard_index :: execution.shard_count], execution)
        missing = _missing(job, units, execution) or "none, add --merge true"
        print(f"this job is done; parts are missing of shard_index {missing}", flush=True)
        return None, True
    make = partial(_make, job, inputs, name, target, tokenizer, execution)
    manifest, made = target.make_once(make)
    shutil.rmtree(job.folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # it holds work of other settings
        root.rmdir()
    if made and root.exists():
        print(f"{root} keeps parts of other settings: delete it if you do not need them")
    return manifest, made


def _contents(inputs: Sequence[Input], settings: Settings, execution: Execution) -> str:
    """Return the digest of the inputs' present contents, for an existing dataset."""
    print("the inputs' times changed: comparing their contents", flush=True)
    units = plan_units(inputs, settings.text_field)
    found = dict(run_all(partial(read_content, settings), units, execution))
    return digest([(unit.key, found[unit]) for unit in units], 64)


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


def _missing(job: Job, units: Sequence[Unit], execution: Execution) -> str:
    """Return the jobs of an array whose units are missing; "" if all are finished."""
    count = execution.shard_count or len(units)
    jobs = sorted({unit.index % count for unit in units if job.record(unit) is None})
    return ", ".join(map(str, jobs[:20])) + (", ..." if len(jobs) > 20 else "")


def _make_units(job: Job, units: Sequence[Unit], execution: Execution) -> dict[Unit, Record]:
    """Return the records of units in order, after making those that are missing.

    A unit is finished if its record has the present sizes and stamps of its inputs. If only these
    differ, run_unit compares the contents.
    """
    done: dict[Unit, Record] = {}
    for unit in units:
        record = job.record(unit)
        if record and record.stamp == unit.stamp and record.fits(job.settings):
            done[unit] = record
    todo = [unit for unit in units if unit not in done]
    if done and todo:
        print(f"continuing: {len(done)} of {len(units)} parts are complete", flush=True)
    n_bytes = sum(unit.size for unit in units)
    with Progress(n_bytes, sum(unit.size for unit in done)) as progress:
        for unit, record in run_all(partial(run_unit, job), todo, execution):
            done[unit] = record
            progress.add(unit.size, sum(n_tokens for _, n_tokens, _ in record.pieces))
    return {unit: done[unit] for unit in units}


# ---- the dataset ---------------------------------------------------------------------------------


def _make(
    job: Job,
    inputs: Sequence[Input],
    name: str,
    target: Target,
    tokenizer: Tokenizer,
    execution: Execution,
) -> tuple[Manifest, bool]:
    """Make the missing units and shards, and deliver the dataset."""
    settings, units = job.settings, plan_units(inputs, job.settings.text_field)
    if execution.merge and (missing := _missing(job, units, execution)):
        raise UserError(
            f"{job.folder} lacks parts of shard_index {missing} of {execution.shard_count or '?'}: "
            "run these jobs, then merge again"
        )
    records = _make_units(job, units, execution)
    folder, records = _begin_shards(job, records, execution)
    assembly = Assembly(folder, job.pieces(records), token_dtype(tokenizer.vocab_size), settings)
    for split in assembly.splits:
        n_tokens, n_documents = assembly.totals(split)
        check_size(name, split, n_tokens, f"{n_documents} documents")
    if not (folder / "new").exists():
        begin_dataset(folder / "new", tokenizer, settings)
    for left in (folder / "new").glob(".*.tmp.*"):  # a killed process left them
        left.unlink()
    splits = _write_shards(assembly, execution)
    contents = digest([(unit.key, record.content) for unit, record in records.items()], 64)
    facts = {"inputs": target.wanted["inputs"], "sizes": target.sizes, "contents": contents}
    save_inputs(folder / "new", facts)
    recorded = settings.of_documents() | {
        "documents": int(assembly.documents.sum()),
        "skipped": sum(record.skipped for record in records.values()),
        "replaced": sum(record.replaced for record in records.values()),
    }
    origin = TextOrigin(name, assembly.text_bytes, assembly.sha256)
    manifest = finish_dataset(folder / "new", tokenizer, settings, origin, recorded, splits)
    return target.deliver(folder, manifest)


def _begin_shards(
    job: Job, records: dict[Unit, Record], execution: Execution
) -> tuple[Path, dict[Unit, Record]]:
    """Return the folder of the shards of these units and settings, and the units' records.

    Shards of other inputs or settings are deleted, and units whose tokens were in these alone are
    made again.
    """
    facts = [[unit.key, record.content, record.errors] for unit, record in records.items()]
    settings = job.settings.of_documents() | {"errors": None, "format": job.settings.format}
    folder = job.folder / f"shards-{digest([facts, settings], 16)}"
    if folder.exists():
        print("continuing with the shards of an earlier run", flush=True)
        return folder, records
    for other in job.folder.glob("shards-*"):
        print("the inputs changed since shards were written: writing them again", flush=True)
        shutil.rmtree(other)
    for piece in job.pieces(records):
        if not piece.file.exists():
            piece.forget()
    folder.mkdir(parents=True)
    return folder, _make_units(job, list(records), execution)


def _write_shards(assembly: Assembly, execution: Execution) -> dict[str, tuple[Shard, ...]]:
    """Return the shards of each split, after writing those that are missing."""
    if assembly.settings.shuffle is not None:
        print("shuffling the documents on the disk", flush=True)
        indices = range(len(assembly.pieces))
        unscattered = [i for i in indices if not assembly.scattered(i)[0].exists()]
        list(run_all(assembly.scatter, unscattered, execution))
    tasks, size = assembly.tasks(), assembly.dtype.itemsize
    shards = {task: shard for task in tasks if (shard := assembly.finished(task))}
    todo = [task for task in tasks if task not in shards]
    readers = Counter(block for task in todo for block, _ in assembly.blocks(task))
    with Progress(size * sum(task.last - task.first for task in todo), 0) as progress:
        for task, shard in run_all(assembly.write_shard, todo, execution):
            shards[task] = shard
            progress.add(size * shard.tokens, shard.tokens)
            for block, _ in assembly.blocks(task):
                readers[block] -= 1
                if not readers[block] and assembly.settings.shuffle is None:
                    assembly.pieces[block].file.unlink(missing_ok=True)
    return {
        split: tuple(shards[task] for task in tasks if SPLITS[task.split] == split)
        for split in assembly.splits
    }
