"""Documents to a dataset: the same bytes whoever works, however often it is interrupted."""

import functools
import gzip
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_lightning.cli import main
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.manifest import Shard
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.tokenizers import build_tokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.prepare import pipeline, units
from gpt_lightning.prepare.assemble import Assembly, ShardTask
from gpt_lightning.prepare.command import dataset_folder, prepare, prepare_source
from gpt_lightning.prepare.documents import Document, Documents
from gpt_lightning.prepare.inputs import find_inputs
from gpt_lightning.prepare.units import plan_units

UNIT_BYTES = 4000
WORDS = [
    "a",
    "an",
    "the",
    "<|endoftext|>",
    "sea",
    "\u00e9t\u00e9",
    "\U0001f600",
    "storm,",
    "king.\n",
]


@pytest.fixture
def texts() -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(60))) for _ in range(200)]


@pytest.fixture
def source(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(plan_units, unit_bytes=UNIT_BYTES)
    monkeypatch.setattr(pipeline, "plan_units", small)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tokens(folder: Path, split: str) -> list[int]:
    stream = TokenStream(folder, load_manifest(folder), split)
    found: list[int] = stream.windows(np.array([0]), len(stream))[0].tolist()
    return found


def naive(texts: list[str]) -> list[int]:
    gpt2 = build_tokenizer("gpt2")
    return [token for text in texts for token in (gpt2.eot_token, *gpt2.encode(text).tolist())]


def split_by_hash(text: str) -> int:
    hashed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") / 2**64
    return 1 if hashed < 0.1 else 2 if hashed < 0.2 else 0


# ---- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_tokens", [500, 10**8])
def test_documents_held_out_by_hash(
    source: Path, texts: list[str], tmp_path: Path, shard_tokens: int
) -> None:
    out = tmp_path / "out"
    prepare(str(source), out=str(out), test_fraction=0.1, shard_tokens=shard_tokens, workers=1)
    for number, split in enumerate(("train", "val", "test")):
        own = [text for text in texts if split_by_hash(text) == number]
        assert tokens(out, split) == naive(own)
    manifest = load_manifest(out)
    assert manifest.source.bytes == sum(len(text.encode()) for text in texts)
    assert manifest.settings["documents"] == len(texts)


def test_the_last_documents_held_out(source: Path, texts: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(str(source), out=str(out), split_by="fraction", val_fraction=0.3, workers=1)
    train, val = tokens(out, "train"), tokens(out, "val")
    assert train + val == naive(texts)
    assert val[0] == build_tokenizer("gpt2").eot_token
    assert abs(len(val) - 0.3 * len(train + val)) < 100


@pytest.mark.slow
def test_the_same_whatever_the_number_of_workers(source: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        prepare(str(source), out=str(tmp_path / f"out{workers}"), workers=workers)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out3")
    assert not list(tmp_path.glob(".*"))


def test_a_copy_gives_the_same_manifest(source: Path, tmp_path: Path) -> None:
    prepare(str(source), out=str(tmp_path / "out"), workers=1)
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / source.name
    copy.write_bytes(source.read_bytes())
    os.utime(copy, (1, 1))
    prepare(str(copy), out=str(tmp_path / "other"), workers=1)
    for name, content in contents(tmp_path / "out").items():
        same = content == (tmp_path / "other" / name).read_bytes()
        assert same == (name != ".inputs.json")


def test_the_same_whatever_files_they_come_in(
    source: Path, texts: list[str], tmp_path: Path
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "docs.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
    pq.write_table(pa.table({"text": texts}), tmp_path / "docs.parquet", row_group_size=30)
    manifests = []
    for path in (source, tmp_path / "docs.jsonl.gz", tmp_path / "docs.parquet"):
        prepare(str(path), out=str(tmp_path / "out"), workers=1)
        manifest = load_manifest(tmp_path / "out")
        manifests.append((manifest.splits, manifest.source.sha256))
        shutil.rmtree(tmp_path / "out")
    assert manifests[0] == manifests[1] == manifests[2]


@pytest.mark.parametrize("file_format", ["npy", "llmc", "nanogpt"])
def test_every_format_has_the_same_tokens(source: Path, tmp_path: Path, file_format: str) -> None:
    out = tmp_path / "out"
    prepare(str(source), out=str(out), format=file_format, workers=1)  # type: ignore[arg-type]
    manifest = load_manifest(out)
    assert manifest.format == file_format
    raw = b"".join((out / shard.file).read_bytes() for shard in manifest.splits["train"])
    skip = {"npy": 128, "llmc": 1024, "nanogpt": 0}[file_format]
    assert np.frombuffer(raw[skip:], "<u2").tolist() == tokens(out, "train")


@pytest.mark.slow
def test_for_the_datamodule(source: Path, tmp_path: Path) -> None:
    manifest = prepare_source(str(source), "gpt2", tmp_path, 0.2)
    folder = dataset_folder(str(source), "gpt2", tmp_path, 0.2)
    assert folder == tmp_path / "docs-gpt2-val0.2"
    assert load_manifest(folder) == manifest


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "docs.jsonl: the train split has 0 documents, 0 tokens, and needs 2"),
        ("\n \n", "the train split has 0 documents"),
        ('{"text": ""}\n', "the train split has 1 documents, 1 tokens, and needs 2"),
        ('{"text": 1}\n', "docs.jsonl, line 1: expected a string"),
    ],
)
def test_input_that_makes_no_dataset(source: Path, tmp_path: Path, content: str, said: str) -> None:
    source.write_text(content)
    with pytest.raises(UserError, match=said):
        prepare(str(source), out=str(tmp_path / "out"), val_fraction=0.0, workers=1)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".parts"] == [source]


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_tokenizers_without_end_of_text(source: Path, tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(UserError, match="end-of-text tokens: use the tokenizer gpt2"):
        prepare(str(source), tokenizer, str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == [source]


def test_what_was_left_out_is_reported(
    source: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(source, "a") as file:
        file.write("[]\n{}\n")
    with pytest.raises(UserError, match=r"line 201: expected a JSON object"):
        prepare(str(source), out=str(tmp_path / "out"), workers=2)
    prepare(str(source), out=str(tmp_path / "out"), errors="skip", workers=1)
    assert "left out 2 of 202 documents (errors skip)" in capsys.readouterr().out
    settings = load_manifest(tmp_path / "out").settings
    assert (settings["documents"], settings["skipped"]) == (200, 2)


# ---- a folder that is there already --------------------------------------------------------------


def test_again_reads_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    prepare(str(source), out=str(out), workers=1)
    before = contents(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpt_lightning.prepare.inputs.open", None, raising=False)
        prepare(str(source), out=str(out), workers=1)
    assert "is already prepared" in capsys.readouterr().out
    assert contents(out) == before
    changes: list[tuple[dict[str, object], str]] = [
        ({"val_fraction": 0.2}, "val_fraction 0.1, not 0.2"),
        ({"split_by": "fraction"}, "split_by hash, not fraction"),
        ({"format": "llmc"}, "format npy, not llmc"),
        ({"errors": "skip"}, "errors strict, not skip"),
    ]
    for changed, said in changes:
        with pytest.raises(UserError, match=f"{said}.*--overwrite true"):
            prepare(str(source), out=str(out), workers=1, **changed)  # type: ignore[arg-type]
    assert contents(out) == before
    prepare(str(source), out=str(out), workers=1, format="llmc", overwrite=True)
    prepare(str(source), out=str(out), workers=1, overwrite=True)
    assert contents(out).keys() == before.keys()


# ---- arrays of jobs ------------------------------------------------------------------------------


def test_jobs_of_an_array(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(str(source), out=str(tmp_path / "clean"), workers=1)
    out = tmp_path / "out"
    array = ["prepare", str(source), "--out", str(out), "--workers", "1", "--shard-count=3"]
    assert main([*array, "--merge", "true"]) == 2
    assert "(shard_index 0-2 of 3): run these jobs, then merge again" in capsys.readouterr().err
    assert main([*array, "--shard-index", "2"]) == 0
    assert "(shard_index 0-1 of 3)" in capsys.readouterr().out
    assert main([*array, "--shard_index", "0"]) == 0
    assert main([*array, "--merge", "true"]) == 2
    assert "(shard_index 1 of 3)" in capsys.readouterr().err
    assert not out.exists()
    assert main([*array, "--shard-index", "1"]) == 0
    assert "none is missing: add --merge true" in capsys.readouterr().out
    assert main([*array, "--merge", "true"]) == 0
    assert contents(out) == contents(tmp_path / "clean")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers is 0"),
        (
            {"shard_index": 3, "shard_count": 3},
            "give --shard_count, the number of jobs, above every --shard_index",
        ),
        ({"shard_index": 0}, "give --shard_count, the number of jobs, above every --shard_index"),
        ({"shard_count": 0}, "shard_count is 0"),
        ({"shard_index": 0, "shard_count": 1, "merge": True}, "merge after all jobs, alone"),
    ],
)
def test_numbers_of_jobs(source: Path, options: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        prepare(str(source), **options)  # type: ignore[arg-type]


def test_one_text_is_one_job(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text " * 100)
    with pytest.raises(UserError, match="is read as a whole by one process"):
        prepare(str(path), data_dir=str(tmp_path), shard_index=0, shard_count=2)
    with pytest.raises(UserError, match="split_by hash is for documents"):
        prepare(str(path), data_dir=str(tmp_path), split_by="hash")
    assert list(tmp_path.iterdir()) == [path]


# ---- work that is not thrown away ----------------------------------------------------------------


def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the index of each unit whose documents are tokenized."""
    found: list[int] = []
    real = units._documents

    def documents(reader: Documents, unit: units.Unit) -> Iterator[Document]:
        found.append(unit.index)
        return real(reader, unit)

    monkeypatch.setattr(units, "_documents", documents)
    return found


def clean(source: Path, tmp_path: Path, **settings: Any) -> dict[str, bytes]:
    """Return the files of an uninterrupted preparation, and delete them."""
    prepare(str(source), out=str(tmp_path / "clean"), workers=1, **settings)
    found = contents(tmp_path / "clean")
    shutil.rmtree(tmp_path / "clean")
    return found


def interrupt(source: Path, out: Path, **settings: Any) -> None:
    """Make all parts, but no shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Assembly, "make_plan", refuse)
        with pytest.raises(UserError, match="enough"):
            prepare(str(source), out=str(out), workers=1, **settings)


def refuse(*args: object) -> None:
    raise UserError("enough")


def test_other_errors_after_a_damaged_document(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(source, "a") as file:
        file.write("damaged\n")
    out, expected = tmp_path / "out", clean(source, tmp_path, errors="skip")
    units_made = made(monkeypatch)
    with pytest.raises(UserError, match="line 201"):
        prepare(str(source), out=str(out), workers=1)
    last = units_made.pop()
    assert len(units_made) == last > 2
    units_made.clear()
    prepare(str(source), out=str(out), workers=1, errors="skip")
    assert units_made == [last]
    assert contents(out) == expected


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_dataset_of_touched_inputs_is_kept(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    out = tmp_path / "out"
    prepare(str(source), out=str(out), workers=workers)
    before = shards(out)
    os.utime(source, (1, 1))
    capsys.readouterr()
    for compared in (True, False):  # the second time it knows the new times
        prepare(str(source), out=str(out), workers=workers)
        printed = capsys.readouterr().out
        assert "is already prepared" in printed
        assert ("comparing their contents" in printed) == compared
    with pytest.raises(UserError, match=r"shard_tokens \d+, not 900"):
        prepare(str(source), out=str(out), shard_tokens=900)
    lines = source.read_bytes()
    source.write_bytes(lines.replace(b"a", b"b", 1))
    with pytest.raises(UserError, match="other inputs"):
        prepare(str(source), out=str(out), workers=workers)
    assert shards(out) == before
    source.write_bytes(lines)
    prepare(str(source), out=str(out), workers=workers)
    (out / ".inputs.json").write_text("[]")  # of no version
    with pytest.raises(UserError, match="other inputs"):
        prepare(str(source), out=str(out), workers=workers)


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name[0] != "."}


@pytest.mark.parametrize("change", ["touched", "longer", "repaired", "parts of other settings"])
def test_parts_of_equal_contents_are_used_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    out = tmp_path / "out"
    interrupt(source, out)
    if change == "longer":
        source.write_text(source.read_text() + json.dumps({"text": "one more"}) + "\n")
    elif change == "repaired":  # all lines behind it move by three bytes
        lines = source.read_text().splitlines(keepends=True)
        source.write_text("".join([lines[0].replace('{"text"', '{   "text"'), *lines[1:]]))
    elif change == "parts of other settings":
        (tmp_path / ".out.parts" / "other").mkdir()
    else:
        os.utime(source, (1, 1))
    n_units = len(plan_units(find_inputs(str(source)), "text", UNIT_BYTES))
    expected = clean(source, tmp_path)
    units_made = made(monkeypatch)
    prepare(str(source), out=str(out), workers=1)
    assert n_units > 5
    assert len(units_made) == {"longer": 1, "repaired": 1}.get(change, 0)
    assert contents(out) == expected
    left = {".out.parts"} if change == "parts of other settings" else set()
    assert {path.name for path in tmp_path.glob(".*")} == left
    prepare(str(source), out=str(out), workers=1, overwrite=True, shard_tokens=700)
    assert not list(tmp_path.glob(".*"))


def test_an_added_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for name in "bcd":
        lines = [json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(50)]
        (source / f"{name}.jsonl").write_text("".join(lines))
    interrupt(source, out)
    (source / "a.jsonl").write_text(json.dumps({"text": "first"}) + "\n")
    expected = clean(source, tmp_path)
    units_made = made(monkeypatch)
    prepare(str(source), out=str(out), workers=1)
    assert units_made == [0]
    assert contents(out) == expected


def write_lines(path: Path, name: str, count: int = 50) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(count)]
    path.write_text("".join(lines))


@pytest.mark.parametrize("change", ["source", "renamed", "copied"])
def test_equal_contents_under_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A source from another folder changes all names, which begin in the common folder."""
    source, out, others = tmp_path / "in", tmp_path / "out", []
    for name in "bc":
        write_lines(source / f"{name}.jsonl", name)
    interrupt(source, out)
    if change == "source":
        write_lines(tmp_path / "other" / "d.jsonl", "d", 1)
        others = [str(tmp_path / "other")]
    else:
        (source / "b.jsonl").rename(source / "d.jsonl")
    if change == "copied":
        shutil.copy(source / "d.jsonl", source / "e.jsonl")
    sources = [str(source), *others]
    prepare(sources, out=str(tmp_path / "clean"), workers=1)
    n_units = len(plan_units(find_inputs(sources), "text", UNIT_BYTES))
    units_made = made(monkeypatch)
    prepare(sources, out=str(out), workers=1)
    new = {"source": 1, "renamed": 0, "copied": n_units // 3}[change]
    assert len(units_made) == new < n_units
    assert shards(out) == shards(tmp_path / "clean")
    assert not list(tmp_path.glob(".*"))


def test_a_part_of_lines_is_not_used_for_a_text_of_equal_bytes(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    write_lines(source / "b.jsonl", "b", 1)
    interrupt(source, out, val_fraction=0)
    (source / "b.jsonl").rename(source / "b.txt")
    prepare(str(source), out=str(out), workers=1, val_fraction=0)
    assert tokens(out, "train") == naive([(source / "b.txt").read_text()])


def test_jobs_of_an_array_with_other_times(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, units_made = tmp_path / "out", made(monkeypatch)
    n_units = len(plan_units(find_inputs(str(source)), "text", UNIT_BYTES))
    for job in range(3):  # each on a machine with a copy of its own
        os.utime(source, (job, job))
        prepare(str(source), out=str(out), workers=1, shard_index=job, shard_count=3)
    assert sorted(units_made) == list(range(n_units))
    assert "none is missing: add --merge true" in capsys.readouterr().out.splitlines()[-1]
    prepare(str(source), out=str(out), workers=1, merge=True)
    assert sorted(units_made) == list(range(n_units))
    assert contents(out) == clean(source, tmp_path)


@pytest.mark.parametrize(("file_format", "shuffle"), [("npy", None), ("npy", 3), ("nanogpt", None)])
def test_interrupted_in_the_shards_and_continued(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file_format: str,
    shuffle: int | None,
) -> None:
    out = tmp_path / "out"
    settings = {"shard_tokens": 1500, "shuffle": shuffle, "format": file_format}
    expected = clean(source, tmp_path, **settings)
    written: list[ShardTask] = []
    limit, real = 5, Assembly.write_shard

    def write_shard(self: Assembly, task: ShardTask) -> Shard:
        if len(written) == limit:
            raise UserError("enough")
        written.append(task)
        return real(self, task)

    monkeypatch.setattr(Assembly, "write_shard", write_shard)
    with pytest.raises(UserError, match="enough"):
        prepare(str(source), out=str(out), workers=1, **settings)
    n_parts = len(list((tmp_path / ".out.parts").glob("*/*.part")))
    n_units = len(plan_units(find_inputs(str(source)), "text", UNIT_BYTES))
    assert n_parts < n_units  # their place on the disk is for more shards
    limit, units_made = 99, made(monkeypatch)
    os.utime(source, (1, 1))
    prepare(str(source), out=str(out), workers=1, **settings)
    assert not units_made
    n_tokens = [sum(s.tokens for s in shards) for shards in load_manifest(out).splits.values()]
    assert len(written) == len(set(written)) == sum(-(-n // 1500) for n in n_tokens)
    assert all(contents(out)[name] == expected[name] for name in expected if name != ".inputs.json")
    assert not list(tmp_path.glob(".*"))


def interrupt_in_the_shards(source: Path, out: Path, n_shards: int, **settings: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        written: list[ShardTask] = []
        real = Assembly.write_shard

        def write_shard(self: Assembly, task: ShardTask) -> Shard:
            written.append(task)
            return real(self, task) if len(written) <= n_shards else refuse()

        patch.setattr(Assembly, "write_shard", write_shard)
        with pytest.raises(UserError, match="enough"):
            prepare(str(source), out=str(out), workers=1, **settings)


@pytest.mark.parametrize("change", ["document", "shard_tokens"])
def test_a_change_after_shards_were_written_discards_nothing(
    source: Path, tmp_path: Path, change: str
) -> None:
    out, settings = tmp_path / "out", {"shard_tokens": 500}
    interrupt_in_the_shards(source, out, 20, **settings)
    root = tmp_path / ".out.parts"
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    if change == "document":
        source.write_text(source.read_text() + json.dumps({"text": "one more"}) + "\n")
    else:
        settings = {"shard_tokens": 600}
    with pytest.raises(UserError, match=r"finished parts are in them alone: .* --overwrite true"):
        prepare(str(source), out=str(out), workers=1, **settings)
    assert before.items() <= {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}.items()
    prepare(str(source), out=str(out), workers=1, overwrite=True, **settings)
    assert contents(out) == clean(source, tmp_path, **settings)


def test_other_errors_after_shards_were_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt_in_the_shards(source, out, 20, shard_tokens=500)
    units_made = made(monkeypatch)
    prepare(str(source), out=str(out), workers=1, shard_tokens=500, errors="skip")
    assert not units_made
    assert contents(out) == clean(source, tmp_path, shard_tokens=500, errors="skip")


def test_a_job_knows_the_parts_that_a_killed_merge_has_used(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    interrupt_in_the_shards(source, out, 20, shard_tokens=500)
    units_made = made(monkeypatch)
    job = {"shard_index": 0, "shard_count": 1, "shard_tokens": 500}
    prepare(str(source), out=str(out), workers=1, **job)
    assert not units_made
    assert "none is missing: add --merge true" in capsys.readouterr().out


def test_parts_whose_deletion_was_killed_are_deleted_by_the_next_call(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    calls, real = [], pipeline._sweep
    with pytest.MonkeyPatch.context() as patch:

        def sweep(root: Path) -> None:
            calls.append(root)
            real(root) if len(calls) == 1 else refuse()

        patch.setattr(pipeline, "_sweep", sweep)
        with pytest.raises(UserError, match="enough"):
            prepare(str(source), out=str(out), workers=1)
    assert list(tmp_path.glob(".*"))
    prepare(str(source), out=str(out), workers=1)
    assert not list(tmp_path.glob(".*"))


def test_an_overwrite_that_was_killed_keeps_its_parts(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(str(source), out=str(out), workers=1)
    interrupt(source, out, overwrite=True, val_fraction=0.3)
    parts = sorted((tmp_path / ".out.parts").glob("*/*.part"))
    prepare(str(source), out=str(out), workers=1)
    assert parts == sorted((tmp_path / ".out.parts").glob("*/*.part")) != []


def test_parts_of_the_version_before_are_deleted_at_the_end(source: Path, tmp_path: Path) -> None:
    old = tmp_path / ".out.parts"
    old.mkdir()
    for name in ("plan.json", "00000000.part"):
        (old / name).write_text("{}")
    prepare(str(source), out=str(tmp_path / "out"), workers=1)
    assert not old.exists()


# ---- shuffled documents --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_shuffled_whatever_the_workers_and_files(
    source: Path, texts: list[str], tmp_path: Path, workers: int
) -> None:
    settings: dict[str, Any] = {"shuffle": 5, "shard_tokens": 3000, "val_fraction": 0.2}
    expected = clean(source, tmp_path, **settings)
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"text": texts}), tmp_path / "docs.parquet", row_group_size=30)
    prepare(str(tmp_path / "docs.parquet"), out=str(tmp_path / "out"), workers=workers, **settings)
    found = contents(tmp_path / "out")
    shards = [name for name in expected if name.endswith(".npy")]
    assert all(found[name] == expected[name] for name in shards)
    other = clean(source, tmp_path, **settings | {"shuffle": 6})
    assert all(other[name] != expected[name] for name in shards)
    plain = clean(source, tmp_path, **settings | {"shuffle": None})
    sizes = {name: len(content) for name, content in plain.items() if name in shards}
    assert sizes == {name: len(expected[name]) for name in shards}
    assert b"shuffle" not in plain["manifest.json"]
    with pytest.raises(UserError, match="shuffle 5, not None"):
        prepare(
            str(tmp_path / "docs.parquet"),
            out=str(tmp_path / "out"),
            **settings | {"shuffle": None},
        )


# ---- accidents -----------------------------------------------------------------------------------

RUN = """
import functools, itertools, os, resource, signal, sys, time
from gpt_lightning import files
from gpt_lightning.prepare import assemble, command as prepare, document_index
from gpt_lightning.prepare import parts, pipeline, target, units
pipeline.plan_units = functools.partial(units.plan_units, unit_bytes={unit_bytes})
calls = itertools.count(1)
def at(count, function, then):
    def counted(*args, **kwargs):
        if next(calls) == count:
            then()
        return function(*args, **kwargs)
    return counted
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
{accident}
try:
    prepare.prepare(sys.argv[1], out=sys.argv[2], workers={workers}, shard_tokens=500)
except prepare.UserError as error:
    print(error)
    sys.exit(2)
"""
KILLED = {
    "in a part": "parts.PartWriter.add = at(77, parts.PartWriter.add, kill)",
    "before a part's name": "parts.os.replace = at(3, parts.os.replace, kill)",
    "before the index": "document_index.save_array = at(2, document_index.save_array, kill)",
    "before the plan": "assemble.write_atomic = at(1, assemble.write_atomic, kill)",
    "in the shards": "assemble.file_header = at(8, assemble.file_header, kill)",
    "before a shard's record": "assemble.write_atomic = at(7, assemble.write_atomic, kill)",
    "before the manifest": "pipeline.finish_dataset = at(1, pipeline.finish_dataset, kill)",
    "before the dataset's name": "target.move_into_place = at(1, target.move_into_place, kill)",
    "before the parts go": "pipeline._delete_parts = at(1, pipeline._delete_parts, kill)",
}


def start(source: Path, out: Path, accident: str = "", workers: int = 1) -> subprocess.Popen[str]:
    code = RUN.format(accident=accident, workers=workers, unit_bytes=UNIT_BYTES)
    command = [sys.executable, "-c", code, str(source), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(
            moment, marks=[pytest.mark.slow] * (moment not in ("in a part", "in the shards"))
        )
        for moment in KILLED
    ],
)
def test_killed_and_run_again(source: Path, tmp_path: Path, moment: str) -> None:
    clean, out = tmp_path / "clean", tmp_path / "out"
    prepare(str(source), out=str(clean), shard_tokens=500, workers=1)
    killed = start(source, out, KILLED[moment])
    killed.communicate(timeout=30)
    assert killed.returncode == -9
    assert out.exists() == (moment == "before the parts go")
    prepare(str(source), out=str(out), shard_tokens=500, workers=1)
    assert contents(out) == contents(clean)
    assert not list(tmp_path.glob(".*"))


def test_goes_on_where_it_was(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    start(source, out, KILLED["before a part's name"]).communicate(timeout=30)
    parts = sorted((tmp_path / ".out.parts").glob("*/*.part"))
    stamps = [path.stat().st_mtime_ns for path in parts]
    assert parts
    kept = {}

    def look(*args: object, **kwargs: object) -> None:
        kept.update({path: path.stat().st_mtime_ns for path in parts})
        raise UserError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Assembly, "make_plan", look)
        with pytest.raises(UserError, match="enough"):
            prepare(str(source), out=str(out), shard_tokens=500, workers=1)
    assert list(kept.values()) == stamps
    assert f"continuing: {len(parts)} of" in capsys.readouterr().out


def test_a_damaged_part_is_made_again(source: Path, tmp_path: Path) -> None:
    clean, out = tmp_path / "clean", tmp_path / "out"
    prepare(str(source), out=str(clean), shard_tokens=500, workers=1)
    start(source, out, KILLED["in the shards"]).communicate(timeout=30)
    # the last part in the sequence is in none of the shards that were written
    part = tmp_path / ".out.parts"
    (names,) = part.glob("*/shards/parts.txt")
    part = names.parents[1] / names.read_text().splitlines()[-1]
    content = bytearray(part.read_bytes())
    content[-200] ^= 1
    part.write_bytes(content)
    with pytest.raises(UserError, match=r"\.part is damaged.*same command again"):
        prepare(str(source), out=str(out), shard_tokens=500, workers=1)
    assert not out.exists()
    prepare(str(source), out=str(out), shard_tokens=500, workers=1)
    assert contents(out) == contents(clean)


@pytest.mark.slow
def test_workers_die_with_a_killed_parent(source: Path, tmp_path: Path) -> None:
    module = tmp_path / "slow_unit.py"
    module.write_text("import time\ndef run_unit(job, unit):\n    time.sleep(600)\n")
    slow = f"sys.path.insert(0, {str(tmp_path)!r})\nimport slow_unit\n"
    slow += "pipeline.run_unit = slow_unit.run_unit"
    parent = start(source, tmp_path / "out", slow, workers=2)
    deadline_s = time.monotonic() + 30
    while len(children := workers_of(parent.pid)) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate(timeout=30)
    deadline_s = time.monotonic() + 10
    while any(map(alive, children)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert len(children) == 2
    assert not any(map(alive, children))


def workers_of(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split(None, 1) for line in found.stdout.splitlines()]
    return [int(pid) for pid, args in lines if "spawn_main" in args]


def alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_two_at_once(source: Path, tmp_path: Path) -> None:
    clean, out = tmp_path / "clean", tmp_path / "out"
    prepare(str(source), out=str(clean), shard_tokens=500, workers=1)
    late = "pipeline.finish_dataset = at(1, pipeline.finish_dataset, lambda: time.sleep(0.7))"
    both = [start(source, out, late) for _ in range(2)]
    said = [process.communicate(timeout=30)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("by another process: waiting" in text for text in said) == 1
    assert sum("is already prepared" in text for text in said) == 1
    assert contents(out) == contents(clean)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("limit", "workers"),
    [
        (0, 1),
        (100, 1),
        pytest.param(1120, 1, marks=pytest.mark.slow),
        pytest.param(1120, 2, marks=pytest.mark.slow),
    ],
)
def test_full_disk(source: Path, tmp_path: Path, limit: int, workers: int) -> None:
    accident = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    process = start(source, tmp_path / "out", accident, workers)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert said.startswith(f"cannot write {tmp_path}")
    assert "File too large" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
    prepare(str(source), out=str(tmp_path / "out"), shard_tokens=500, workers=1)
    prepare(str(source), out=str(tmp_path / "clean"), shard_tokens=500, workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_killed_worker_is_no_riddle(source: Path, tmp_path: Path) -> None:
    module = tmp_path / "dying_unit.py"
    module.write_text("import os\ndef run_unit(job, unit):\n    os.kill(os.getpid(), 9)\n")
    dying = f"sys.path.insert(0, {str(tmp_path)!r})\nimport dying_unit\n"
    dying += "pipeline.run_unit = dying_unit.run_unit"
    process = start(source, tmp_path / "out", dying, workers=2)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "was killed, perhaps for lack of memory" in said


@pytest.mark.slow
def test_killed_at_random_moments(source: Path, tmp_path: Path, texts: list[str]) -> None:
    big = "".join(json.dumps({"text": text * 4}) + "\n" for text in texts * 5)
    source.write_text(big)
    clean, out, seed = tmp_path / "clean", tmp_path / "out", 7
    prepare(str(source), out=str(clean), shard_tokens=500, workers=1)
    rng = random.Random(seed)
    for turn in itertools.count():
        process = start(source, out, workers=2)
        wait_s = rng.uniform(0.3, 0.9) * 1.2**turn  # longer each turn: a busy machine ends too
        print(f"seed {seed}, turn {turn}, killed after {wait_s:.2f} s")
        try:
            process.communicate(timeout=wait_s)
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    assert contents(out) == contents(clean)
    assert not list(tmp_path.glob(".*"))


# ---- memory --------------------------------------------------------------------------------------

PEAK = """
import sys
from gpt_lightning.data import tokenizers
from gpt_lightning.prepare import command as prepare
tokenizers.build_tokenizer("gpt2").encode("warm")
prepare.prepare(sys.argv[1], sys.argv[3], out=sys.argv[2], workers=1)
status = open("/proc/self/status").read()  # not getrusage: that begins with the parent's peak
print("PEAK", status.split("VmHWM:")[1].split()[0])
"""


def peak_mib(source: Path, out: Path, tokenizer: str = "gpt2") -> float:
    command = [sys.executable, "-c", PEAK, str(source), str(out), tokenizer]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(out)
    return int(done.stdout.split("PEAK")[1]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt", "char"])
def test_memory_does_not_grow_with_the_input(texts: list[str], tmp_path: Path, kind: str) -> None:
    peaks = []
    for repeats in (8, 20):  # 50 MB, of one text three pieces, and 125 MB
        path = tmp_path / f"docs.{'txt' if kind == 'char' else kind}"
        write_many(path, [text * 200 for text in texts], repeats)
        tokenizer = "char" if kind == "char" else "gpt2"
        peaks.append(peak_mib(path, tmp_path / "out", tokenizer))
    print(kind, peaks)
    # The larger input has 75 MB more (one text in memory: 300); what is allowed is the allocators.
    assert peaks[1] < peaks[0] + 32


def write_many(path: Path, texts: list[str], repeats: int) -> None:
    if path.suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pa.table({"text": texts})
        with pq.ParquetWriter(path, table.schema) as writer:
            for _ in range(repeats):
                writer.write_table(table)
        return
    with gzip.open(path, "wt", 1) if path.suffix == ".gz" else open(path, "w") as file:
        for _ in range(repeats):
            for text in texts:
                file.write(text if path.suffix == ".txt" else json.dumps({"text": text}))
                file.write("\n")
