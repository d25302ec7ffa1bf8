"""Documents to a dataset: make the files of all units, write the shards, deliver the dataset."""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gpt_lightning.data.formats import file_header
from gpt_lightning.data.manifest import Manifest, Shard, TextOrigin
from gpt_lightning.data.tokenizers import Tokenizer, build_tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.output import progress_bar
from gpt_lightning.prepare.executors import check_main_guard, run_all
from gpt_lightning.prepare.inputs import Input, fingerprint
from gpt_lightning.prepare.settings import SPLITS, Settings
from gpt_lightning.prepare.shards import Assembly, begin_dataset, check_size
from gpt_lightning.prepare.target import Target, save_inputs
from gpt_lightning.prepare.units import Job, Record, Unit, content_of, digest, plan_units, run_unit


def prepare_documents(
    inputs: Sequence[Input], name: str, target: Target, settings: Settings
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
    target = replace(target, has_contents=partial(_has_contents, inputs, settings))
    if settings.shard_index is not None and target.existing() is None:
        units = plan_units(inputs, settings.text_field)
        _make_units(job, units[settings.shard_index :: settings.shard_count])
        print(f"this job is done; parts are missing of: {_missing(job, units) or '-'}", flush=True)
        return None, True
    manifest, made = target.make_once(partial(_make, job, inputs, name, target, tokenizer))
    shutil.rmtree(job.folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # it holds work of other settings
        root.rmdir()
    if made and root.exists():
        print(f"{root} keeps parts of other settings: delete it if you do not need them")
    return manifest, made


def _has_contents(inputs: Sequence[Input], settings: Settings, facts: dict[str, str]) -> bool:
    """Return whether the inputs have the sizes and contents in a dataset's facts about its own."""
    if facts.get("sizes") != fingerprint(inputs, times=False):
        return False
    print("the inputs' times changed: comparing their contents", flush=True)
    units = plan_units(inputs, settings.text_field)
    found = dict(run_all(partial(content_of, settings), units, settings))
    return facts.get("contents") == digest([(unit.key, found[unit]) for unit in units], 64)


def _tokenizer_of_documents(settings: Settings) -> Tokenizer:
    name = settings.tokenizer
    tokenizer = None if name == "char" else build_tokenizer(name)
    if tokenizer is None or tokenizer.eot_token is None:
        fix = "use the tokenizer gpt2, or give one text file"
        raise UserError(f"tokenizer {name} has no end-of-text token to separate documents: {fix}")
    file_header(settings.format, token_dtype(tokenizer.vocab_size).name, 0)  # or it cannot hold it
    return tokenizer


# ---- units ---------------------------------------------------------------------------------------


def _missing(job: Job, units: Sequence[Unit]) -> str:
    """Return the jobs of an array whose units are missing; "" if all are finished."""
    count = job.settings.shard_count or len(units)
    jobs = sorted({unit.index % count for unit in units if job.record(unit) is None})
    return "shard_index " * bool(jobs) + ", ".join(map(str, jobs))


def _make_units(job: Job, units: Sequence[Unit]) -> dict[Unit, Record]:
    """Return the records of units in order, after making those that are missing.

    A unit is finished if its record has the present sizes and stamps of its inputs. If only these
    differ, run_unit compares the contents.
    """
    records = {unit: record for unit in units if (record := job.record(unit))}
    done = {u: r for u, r in records.items() if r.stamp == u.stamp and r.fits(job.settings)}
    todo = [unit for unit in units if unit not in done]
    if done and todo:
        print(f"continuing: {len(done)} of {len(units)} parts are complete", flush=True)
    n_bytes = sum(unit.size for unit in units)
    with progress_bar(n_bytes, sum(unit.size for unit in done)) as bar:
        for unit, record in run_all(partial(run_unit, job), todo, job.settings):
            done[unit] = record
            bar.update(unit.size)
    return {unit: done[unit] for unit in units}


# ---- the dataset ---------------------------------------------------------------------------------


def _make(
    job: Job, inputs: Sequence[Input], name: str, target: Target, tokenizer: Tokenizer
) -> tuple[Manifest, bool]:
    """Make the missing units and shards, and deliver the dataset."""
    settings, units = job.settings, plan_units(inputs, job.settings.text_field)
    if settings.merge and (missing := _missing(job, units)):
        raise UserError(f"parts are missing of {missing}: run these jobs, then merge again")
    records = _make_units(job, units)
    folder = _shards_folder(job, records)
    assembly = Assembly(folder, job.pieces(records), token_dtype(tokenizer.vocab_size), settings)
    for split in assembly.splits:
        n_tokens, n_documents = assembly.totals(split)
        check_size(name, split, n_tokens, f"{n_documents} documents")
    if not (folder / "new").exists():
        begin_dataset(folder / "new", tokenizer, settings)
    for left in (folder / "new").glob(".*.tmp.*"):  # a killed process left them
        left.unlink()
    splits = _write_shards(assembly)
    contents = digest([(unit.key, record.content) for unit, record in records.items()], 64)
    sizes = fingerprint(inputs, times=False)
    save_inputs(folder / "new", inputs=target.wanted["inputs"], sizes=sizes, contents=contents)
    recorded = settings.of_documents() | {
        "documents": int(assembly.documents.sum()),
        "skipped": sum(record.skipped for record in records.values()),
        "replaced": sum(record.replaced for record in records.values()),
    }
    origin = TextOrigin(name, assembly.text_bytes, assembly.sha256)
    spec, vocab_size, dtype = tokenizer.spec(), tokenizer.vocab_size, assembly.dtype.name
    manifest = Manifest(spec, vocab_size, dtype, origin, recorded, splits, settings.format)
    return target.deliver(folder, manifest)


def _shards_folder(job: Job, records: dict[Unit, Record]) -> Path:
    """Make the folder of the shards of these units and settings; delete those of others."""
    facts = [[unit.key, record.content, record.errors] for unit, record in records.items()]
    settings = job.settings.of_documents() | {"errors": None, "format": job.settings.format}
    folder = job.folder / f"shards-{digest([facts, settings], 16)}"
    for other in job.folder.glob("shards-*"):
        if other != folder:
            shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_shards(assembly: Assembly) -> dict[str, tuple[Shard, ...]]:
    """Return the shards of each split, after writing those that are missing."""
    settings = assembly.settings
    if settings.shuffle is not None:
        print("shuffling the documents on the disk", flush=True)
        indices = range(len(assembly.pieces))
        unscattered = [i for i in indices if not assembly.scattered(i)[0].exists()]
        list(run_all(assembly.scatter, unscattered, settings))
    tasks, size = assembly.tasks(), assembly.dtype.itemsize
    shards = {task: shard for task in tasks if (shard := assembly.finished(task))}
    todo = [task for task in tasks if task not in shards]
    with progress_bar(size * sum(task.last - task.first for task in todo)) as bar:
        for task, shard in run_all(assembly.write_shard, todo, settings):
            shards[task] = shard
            bar.update(size * shard.tokens)
    return {
        split: tuple(shards[task] for task in tasks if SPLITS[task.split] == split)
        for split in assembly.splits
    }
