"""Documents to a dataset: plan units, make their parts, assemble the parts."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.formats import file_header
from gpt_lightning.data.manifest import Manifest, TextOrigin
from gpt_lightning.data.progress import Progress
from gpt_lightning.data.tokenizers import Tokenizer, build_tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import write_atomic
from gpt_lightning.prepare.assemble import PARTS, PLAN, Assembly, Plan, ShardTask
from gpt_lightning.prepare.executors import Execution, check_main_guard, run_all
from gpt_lightning.prepare.input_file import Input
from gpt_lightning.prepare.inputs import fingerprint
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.shard_writer import begin_dataset, finish_dataset
from gpt_lightning.prepare.target import Target, save_inputs
from gpt_lightning.prepare.units import (
    UNFINISHED,
    Job,
    PartName,
    Unit,
    describe_units,
    digest_contents,
    find_parts,
    matching_part,
    parts_folder,
    plan_units,
    read_content,
    run_unit,
)

SHARDS = "shards"
DONE = "done"  # folder of parts that are being deleted


def prepare_documents(
    inputs: Sequence[Input],
    name: str,
    target: Target,
    settings: Settings,
    execution: Execution,
) -> tuple[Manifest | None, bool]:
    """Return the dataset of documents, and whether it was made now; None for one job.

    Parts of the work are in `.NAME.parts` beside `out` until the dataset is complete. A run that
    was killed at any moment continues from the complete parts and shards, with the same bytes as a
    result. Parts are recognized by the contents of their inputs, so that a run with other inputs or
    another setting of `errors` uses those that it would make again. Parts of other settings stay,
    unless the target is overwritten.

    Raises:
        UserError: The inputs or settings make no dataset, the folder holds something else, the disk
            is full, or parts are missing for a merge.
    """
    check_main_guard()
    _tokenizer_of_documents(settings)
    place = target.out.resolve()
    root = place.with_name(f".{place.name}.parts")
    job = Job(parts_folder(root, settings), settings, fingerprint(inputs))
    target.wanted.update(inputs=job.inputs, format=settings.format, **settings.of_documents())
    target.wanted["shuffle"] = settings.shuffle
    contents = cache(partial(_contents, inputs, settings, execution))
    target = replace(target, sizes=fingerprint(inputs, times=False), contents=contents)
    if execution.shard_index is not None and target.existing() is None:
        units = plan_units(inputs, settings.text_field)
        _run_job(job, units, _Maker(name, job, units, target, execution).consumed(), execution)
        return None, True
    manifest, made = target.make_once(partial(_make, job, inputs, name, target, execution))
    shards = job.parts / SHARDS
    if not made and (shards / PLAN).exists() and target.delivered(shards):
        _delete_parts(job)  # the process was killed just after it delivered the dataset
    elif not made:
        _sweep(root)
    return manifest, made


def _contents(inputs: Sequence[Input], settings: Settings, execution: Execution) -> str:
    """Return the digest of the inputs' present contents, for an existing dataset."""
    print("the inputs' times changed: comparing their contents", flush=True)
    units = plan_units(inputs, settings.text_field)
    found: dict[str, str] = {}
    with Progress(sum(unit.size for unit in units), 0) as progress:
        for unit, (content, _) in run_all(partial(read_content, settings), units, execution):
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


# ---- parts ---------------------------------------------------------------------------------------


def _run_job(
    job: Job, units: Sequence[Unit], consumed: Sequence[PartName], execution: Execution
) -> None:
    """Make the parts of one job of an array; it deletes no part."""
    own = [unit for unit in units if execution.own(unit.index)]
    _parts(job, units, consumed, execution, own)
    # parts of other jobs, whose copies of the inputs may have other times: the merge compares
    _, todo = find_parts(job, units, [*job.present(), *consumed])
    missing = [unit.index for unit, candidates in todo if not candidates]
    rest = "none is missing: add --merge true"
    if missing:
        rest = f"missing are {_described(missing, execution)}"
    print(
        f"job {execution.shard_index} of {execution.shard_count} is done, "
        f"{len(units) - len(missing)} of {len(units)} parts are complete, {rest}",
        flush=True,
    )


def _parts(
    job: Job,
    units: Sequence[Unit],
    consumed: Sequence[PartName],
    execution: Execution,
    own: Sequence[Unit] | None = None,
) -> dict[int, PartName]:
    """Return the parts of units by index, after making those that are missing.

    Args:
        job: Facts of the work.
        units: All units.
        consumed: Names of parts whose tokens are in shards already.
        execution: Distribution of the work; a merge makes no part.
        own: Units whose parts are made; None: all.
    """
    done, todo = find_parts(job, units, [*job.present(), *consumed])
    if own is not None:
        indices = {unit.index for unit in own}
        todo = [work for work in todo if work[0].index in indices]
    elif execution.merge:
        todo = [work for work in todo if work[1]]
    if not execution.merge:  # a file may have another name now
        keys = {unit.key for unit in units}
        spare = tuple(name for name in job.present() if name.key not in keys)
        todo = [(unit, candidates + spare) for unit, candidates in todo]
    wanted = units if own is None else own
    n_done = sum(unit.index in done for unit in wanted)
    if 0 < n_done < len(wanted):
        print(f"continuing: {n_done} of {len(wanted)} parts are complete", flush=True)
    n_bytes = sum(unit.size for unit in wanted)
    done_bytes = n_bytes - sum(unit.size for unit, _ in todo)
    with Progress(n_bytes, done_bytes) as progress:
        if execution.merge:
            for (unit, _), found in run_all(partial(matching_part, job), todo, execution):
                if found is not None:
                    done[unit.index] = found
        else:
            for (unit, _), (name, n_tokens) in run_all(partial(run_unit, job), todo, execution):
                done[unit.index] = name
                progress.add(unit.size, n_tokens)
    return done


def _described(missing: Sequence[int], execution: Execution) -> str:
    units = f"units {describe_units(missing)}"
    if execution.shard_count is None:
        return units
    jobs = {index % execution.shard_count for index in missing}
    return f"{units} (shard_index {describe_units(list(jobs))} of {execution.shard_count})"


def _delete_parts(job: Job) -> None:
    """Delete the parts of this work, and the folder of all parts if it holds no others."""
    root = job.parts.parent
    _sweep(root)
    with contextlib.suppress(OSError):  # one step, which a later run can tell from unfinished work
        job.parts.rename(root / DONE)
    _sweep(root)
    if root.exists():
        print(f"{root} keeps parts of other settings: delete it if you do not need them")


def _sweep(root: Path) -> None:
    """Delete parts that a dataset has replaced, and their folder if it holds no others."""
    shutil.rmtree(root / DONE, ignore_errors=True)
    for old in [root / "plan.json", *root.glob("????????.part")]:  # of the first version
        old.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        root.rmdir()


# ---- the dataset ---------------------------------------------------------------------------------


def _make(
    job: Job, inputs: Sequence[Input], name: str, target: Target, execution: Execution
) -> tuple[Manifest, bool]:
    """Make the missing parts, and deliver the dataset that they assemble to."""
    target.check_writable()
    units = plan_units(inputs, job.settings.text_field)
    if target.overwrite and job.parts.parent.exists():
        for other in set(job.parts.parent.iterdir()) - {job.parts}:
            shutil.rmtree(other) if other.is_dir() else other.unlink()
    job.parts.mkdir(parents=True, exist_ok=True)
    try:
        maker = _Maker(name, job, units, target, execution)
        plan = maker.make_plan()
        target.make_room()
        manifest, made = target.deliver(maker.assembly.folder, maker.write(plan))
        _print_damage(manifest.settings)
    finally:
        for folder in (job.parts / UNFINISHED, job.parts, job.parts.parent):
            with contextlib.suppress(OSError):  # it holds complete parts
                folder.rmdir()
    _delete_parts(job)
    return manifest, made


@dataclass
class _Maker:
    """Sequence of steps from units to shards, each of which continues an earlier run.

    Args:
        source: Name of the inputs.
        job: Facts of the work.
        units: All units.
        target: Output folder.
        execution: Distribution of the work.
    """

    source: str
    job: Job
    units: Sequence[Unit]
    target: Target
    execution: Execution

    def __post_init__(self) -> None:
        self.tokenizer = _tokenizer_of_documents(self.job.settings)
        self.assembly = Assembly(
            self.job.parts / SHARDS,
            self.job.parts,
            token_dtype(self.tokenizer.vocab_size),
            self.job.settings,
            self.target.url,
        )
        self._n_deleted = 0

    def make_plan(self) -> Plan:
        """Make the missing parts and the index, or continue with an earlier run's shards."""
        assembly = self.assembly
        plan, consumed = assembly.plan(), self.consumed()
        if plan is not None:
            known = map(PartName.of_file, self._names())
            if [name and name.key for name in known] != [unit.key for unit in self.units]:
                self._refuse_loss(consumed)  # before parts of the new inputs are made
            names = self._complete(consumed)
            if plan.identity == self._identity(names):
                self._save_names(names)
                print("continuing with the shards of an earlier run", flush=True)
                return plan
            self._refuse_loss(consumed)
            print("the inputs changed since shards were written: writing them again", flush=True)
        shutil.rmtree(assembly.folder, ignore_errors=True)
        names = self._complete([])
        assembly.folder.mkdir()
        begin_dataset(assembly.folder / "new", self.tokenizer, self.job.settings)
        self._save_names(names)
        try:
            return assembly.make_plan([name.file for name in names], self._identity(names))
        except UserError as error:
            raise UserError(f"{self.source}: {error}") from error

    def consumed(self) -> list[PartName]:
        """Return the parts that are deleted, because an earlier run has put them into shards."""
        plan = self.assembly.plan()
        if plan is None:
            return []
        done = {task for task in self.assembly.tasks(plan) if self.assembly.finished(task)}
        n_replaced = self.assembly.replaced(plan, done, self.assembly.ends())
        names = map(PartName.of_file, self._names()[:n_replaced])
        return [name for name in names if name]

    def _refuse_loss(self, consumed: Sequence[PartName]) -> None:
        if consumed and not self.target.overwrite:
            raise UserError(
                f"{self.assembly.folder} holds shards of other inputs or settings, and "
                f"{len(consumed)} finished parts are in them alone: finish them with the earlier "
                "inputs and settings, or discard them with --overwrite true"
            )

    def _complete(self, consumed: Sequence[PartName]) -> list[PartName]:
        """Return the parts of all units in order, after making those that are missing."""
        done = _parts(self.job, self.units, consumed, self.execution)
        missing = [unit.index for unit in self.units if unit.index not in done]
        if missing:
            raise UserError(
                f"{self.job.parts} lacks {len(missing)} of {len(self.units)} parts, "
                f"{_described(missing, self.execution)}: run these jobs, then merge again"
            )
        return [done[unit.index] for unit in self.units]

    def _names(self) -> list[str]:
        return (self.assembly.folder / PARTS).read_text().splitlines()

    def _save_names(self, names: Sequence[PartName]) -> None:
        content = "".join(f"{name.file}\n" for name in names)
        write_atomic(self.assembly.folder / PARTS, content.encode())

    def _identity(self, names: Sequence[PartName]) -> str:
        """Return a digest of what decides the shards: all but the inputs' times."""
        parts = [[name.key, name.content, name.damage] for name in names]
        documents = self.job.settings.of_documents() | {"errors": None}  # the parts have the damage
        settings = [documents, self.job.settings.format, self.target.url]
        return hashlib.sha256(json.dumps([parts, settings]).encode()).hexdigest()

    def write(self, plan: Plan) -> Manifest:
        """Write the missing shards and the manifest; delete parts whose tokens are all written."""
        assembly, settings = self.assembly, self.job.settings
        tasks = assembly.tasks(plan)
        shards = {task: shard for task in tasks if (shard := assembly.finished(task))}
        todo = [task for task in tasks if task not in shards]
        done_bytes = self._bytes(shards)
        n_bytes = done_bytes + self._bytes(todo)
        self._write_runs(plan, n_bytes)
        if settings.shuffle is not None:
            todo.reverse()  # the runs are cut at their ends
        with Progress(n_bytes, done_bytes) as progress:
            for task, shard in run_all(assembly.write_shard, todo, self.execution):
                shards[task] = shard
                progress.add(self._bytes([task]), shard.tokens)
                self._delete_replaced(plan, shards)
                assembly.cut_runs(plan, shards)
        splits = {key: tuple(found) for key, found in assembly.shards(plan, shards).items()}
        keys = ("documents", "skipped", "replaced")
        recorded = settings.of_documents() | {key: plan.counts[key] for key in keys}
        origin = TextOrigin(self.source, plan.counts["text_bytes"], plan.sha256)
        new = assembly.folder / "new"
        parts = filter(None, map(PartName.of_file, self._names()))
        contents = digest_contents([(part.key, part.content) for part in parts])
        facts = {"inputs": self.job.inputs, "sizes": self.target.sizes, "contents": contents}
        save_inputs(new, facts)
        return finish_dataset(new, self.tokenizer, settings, origin, recorded, splits)

    def _write_runs(self, plan: Plan, n_bytes: int) -> None:
        """Write the missing runs of shuffled documents."""
        runs = self.assembly.missing_runs(plan)
        if not runs:
            return
        print("shuffling the documents on the disk", flush=True)
        with Progress(n_bytes, 0) as progress:
            for _, n_tokens in run_all(self.assembly.write_run, runs, self.execution):
                progress.add(n_tokens * self.assembly.dtype.itemsize, n_tokens)
                self._delete_replaced(plan, {})

    def _delete_replaced(self, plan: Plan, shards: Collection[ShardTask]) -> None:
        n_replaced = self.assembly.replaced(plan, shards, self._ends)
        for name in self._names()[self._n_deleted : n_replaced]:
            (self.job.parts / name).unlink(missing_ok=True)
        self._n_deleted = n_replaced

    @cached_property
    def _ends(self) -> np.ndarray:
        return self.assembly.ends()

    def _bytes(self, tasks: Iterable[ShardTask]) -> int:
        return self.assembly.dtype.itemsize * sum(task.last - task.first for task in tasks)


def _print_damage(settings: Mapping[str, Any]) -> None:
    skipped, replaced = settings["skipped"], settings["replaced"]
    if skipped:
        n_documents = settings["documents"] + skipped
        print(f"left out {skipped:,} of {n_documents:,} documents (errors skip)")
    if replaced:
        print(
            f"put U+FFFD for {replaced:,} damaged bytes or characters (errors {settings['errors']})"
        )
