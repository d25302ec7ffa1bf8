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
from prepared import contents, naive, tokens_of

from gpt_lightning.cli import main
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.manifest import MANIFEST
from gpt_lightning.data.order import shuffle_keys
from gpt_lightning.errors import UserError
from gpt_lightning.prepare import pipeline, units
from gpt_lightning.prepare.command import prepare
from gpt_lightning.prepare.documents import Documents
from gpt_lightning.prepare.inputs import find_inputs
from gpt_lightning.prepare.pipeline import Assembly
from gpt_lightning.prepare.units import plan_units

UNIT_BYTES = 4000
WORDS = ["a", "an", "the", "<|endoftext|>", "sea", "été", "😀", "storm,", "king.\n"]


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


def dataset_digest(folder: Path) -> str:
    """Digest of all files but the one that holds times, without what earlier versions lack."""
    found = contents(folder)
    found.pop(".inputs.json", None)
    manifest = json.loads(found[MANIFEST])
    assert sum(manifest.pop("text_bytes").values()) == manifest["source"]["bytes"]
    found[MANIFEST] = json.dumps(manifest, indent=2).encode() + b"\n"
    content = b"".join(name.encode() + content for name, content in found.items())
    return hashlib.sha256(content).hexdigest()[:16]


def split_by_hash(text: str) -> int:
    hashed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") / 2**64
    return 1 if hashed < 0.1 else 2 if hashed < 0.2 else 0


# ---- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        ({"test_fraction": 0.1, "shard_tokens": 500}, "beb590aecf820f00"),
        ({"split_by": "fraction", "val_fraction": 0.3}, "a47d3bb3e221cbf1"),
        ({"shuffle": 5, "shard_tokens": 900}, "72b745b1224f155e"),
        ({"shuffle": 7, "split_by": "fraction", "test_fraction": 0.2}, "c9da63115f446f4c"),
        ({"format": "nanogpt"}, "04864317ea819b0a"),
        ({"format": "llmc", "shard_tokens": 1000}, "3623199006951424"),
    ],
)
def test_the_bytes_of_the_first_versions(source, tmp_path, settings, digest):
    """Runs resume on datasets that are made again."""
    prepare(str(source), out=str(tmp_path / "out"), workers=1, **settings)
    assert dataset_digest(tmp_path / "out") == digest


@pytest.mark.parametrize("shard_tokens", [pytest.param(7, marks=pytest.mark.slow), 500, 10**8])
def test_documents_held_out_by_hash(source, texts, tmp_path, shard_tokens):
    texts = texts[:40] if shard_tokens == 7 else texts
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "out"
    prepare(str(source), out=str(out), test_fraction=0.1, shard_tokens=shard_tokens, workers=1)
    for number, split in enumerate(("train", "val", "test")):
        own = [text for text in texts if split_by_hash(text) == number]
        assert tokens_of(out, split) == naive(own)
        sizes = [shard.tokens for shard in load_manifest(out).splits[split]]
        assert set(sizes[:-1]) <= {shard_tokens}
        assert 0 < sizes[-1] <= shard_tokens
    manifest = load_manifest(out)
    assert manifest.source.bytes == sum(len(text.encode()) for text in texts)
    assert manifest.settings["documents"] == len(texts)
    for shard in manifest.shards():
        assert hashlib.sha256((out / shard.file).read_bytes()).hexdigest() == shard.sha256


@pytest.mark.parametrize("test_fraction", [0.0, 0.2])
def test_the_last_documents_held_out(source, texts, tmp_path, test_fraction):
    """A document is in the split in which it begins."""
    out, fractions = tmp_path / "out", {"val_fraction": 0.3, "test_fraction": test_fraction}
    prepare(str(source), out=str(out), split_by="fraction", workers=1, **fractions)
    documents = [naive([text]) for text in texts]
    n_tokens = len(naive(texts))
    borders = [0.7 - test_fraction, 1.0 - test_fraction, 1.0]
    expected: list[list[int]] = [[], [], []]
    position = 0
    for document in documents:
        expected[sum(position >= int(n_tokens * border) for border in borders)] += document
        position += len(document)
    for split, own in zip(load_manifest(out).splits, expected, strict=False):
        assert tokens_of(out, split) == own


@pytest.mark.parametrize("shuffle", [pytest.param(x, marks=pytest.mark.slow) for x in (None, 5)])
def test_the_same_whatever_the_number_of_workers(source, tmp_path, shuffle):
    for count in (1, 2):
        options: dict[str, Any] = {"workers": count, "shard_tokens": 900, "shuffle": shuffle}
        prepare(str(source), out=str(tmp_path / f"out{count}"), **options)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("shuffle", [None, pytest.param(5, marks=pytest.mark.slow)])
def test_the_same_whatever_the_pieces_and_buckets(source, tmp_path, monkeypatch, shuffle):
    settings: dict[str, Any] = {"shuffle": shuffle, "shard_tokens": 700, "workers": 1}
    prepare(str(source), out=str(tmp_path / "out"), **settings)
    for n_tokens, n_documents, bucket in ((64, 5, 300), (1, 1, 3000), (10**6, 7, 100)):
        monkeypatch.setattr(units, "PIECE_TOKENS", n_tokens)
        monkeypatch.setattr(units, "PIECE_DOCUMENTS", n_documents)
        monkeypatch.setattr(pipeline, "BUCKET_TOKENS", bucket)
        prepare(str(source), out=str(tmp_path / "other"), **settings)
        assert contents(tmp_path / "out") == contents(tmp_path / "other")
        shutil.rmtree(tmp_path / "other")


@pytest.mark.parametrize("shuffle", [None, 5])
def test_the_same_whatever_files_they_come_in(source, texts, tmp_path, shuffle):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "docs.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
    pq.write_table(pa.table({"text": texts}), tmp_path / "docs.parquet", row_group_size=30)
    (tmp_path / "copy").mkdir()
    shutil.copy(source, tmp_path / "copy")
    os.utime(tmp_path / "copy" / source.name, (1, 1))
    manifests = []
    for name in ("docs.jsonl", "copy/docs.jsonl", "docs.jsonl.gz", "docs.parquet"):
        prepare(str(tmp_path / name), out=str(tmp_path / "out"), workers=1, shuffle=shuffle)
        manifest = load_manifest(tmp_path / "out")
        manifests.append((manifest.splits, manifest.source.sha256, manifest.settings))
        shutil.rmtree(tmp_path / "out")
    assert all(manifest == manifests[0] for manifest in manifests)


@pytest.mark.parametrize("kind", ["list", "large", "fixed", "arrow"])
def test_ids_make_the_shards_of_their_texts(source, texts, tmp_path, kind):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ids = [naive([text])[1:] for text in texts]  # without the end-of-text token
    types = {"large": pa.large_list(pa.uint16()), "fixed": pa.list_(pa.int64(), 5)}
    if kind == "fixed":
        texts = [f" the sea, {word} storm" for word in ("a", "an", "my", "no")] * 20
        ids = [naive([text])[1:] for text in texts]
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    column = pa.array(ids, types.get(kind, pa.list_(pa.int32())))
    table = pa.table({"id": range(len(ids)), "input_ids": column})
    path = tmp_path / f"ids.{'arrow' if kind == 'arrow' else 'parquet'}"
    if kind == "arrow":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    else:
        pq.write_table(table, path, row_group_size=30)
    found = []
    for name, field in ((source, "text"), (path, "input_ids")):
        out = tmp_path / field
        prepare(str(name), out=str(out), workers=1, text_field=field, shard_tokens=900)
        manifest = load_manifest(out)
        found.append((manifest.splits, manifest.source.sha256, manifest.source.bytes))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([50257], "row 2: token 50257 is outside the 50,257 tokens of gpt2"),
        ([-1], r"row 2: token -1 is outside .* \(--tokenizer names theirs\); repair it"),
        ([1, None], "row 2: expected a value in the column 'input_ids', found null"),
        (None, "row 2: expected a value in the column 'input_ids', found null"),
    ],
)
def test_ids_that_are_no_tokens(tmp_path, ids, said):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, options = tmp_path / "ids.parquet", {"workers": 1, "val_fraction": 0}
    pq.write_table(pa.table({"input_ids": [[1, 2], ids, [], [3]]}), path)
    settings: dict[str, Any] = {"text_field": "input_ids", **options}
    with pytest.raises(UserError, match=said):
        prepare(str(path), out=str(tmp_path / "out"), **settings)
    prepare(str(path), out=str(tmp_path / "out"), errors="skip", **settings)
    assert tokens_of(tmp_path / "out") == [50256, 1, 2, 50256, 50256, 3]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "docs.jsonl: the train split has 0 documents, 0 tokens, needs 2"),
        ("\n \n", "the train split has 0 documents"),
        ('{"text": ""}\n', "the train split has 1 documents, 1 tokens, needs 2"),
        ('{"text": 1}\n', "docs.jsonl, line 1: expected a JSON object with a string"),
    ],
)
def test_input_that_makes_no_dataset(source: Path, tmp_path: Path, content: str, said: str) -> None:
    source.write_text(content)
    with pytest.raises(UserError, match=said):
        prepare(str(source), out=str(tmp_path / "out"), val_fraction=0.0, workers=1)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".parts"] == [source]


# ---- shuffled documents --------------------------------------------------------------------------


def test_a_shuffle_sorts_by_the_keys_of_its_seed(source, texts, tmp_path):
    out = tmp_path / "out"
    for seed in (5, 6):
        prepare(str(source), out=str(out), shuffle=seed, val_fraction=0.0, workers=1)
        order = np.argsort(shuffle_keys(seed, 0, len(texts)))
        assert tokens_of(out, "train") == naive(texts[i] for i in order)
        shutil.rmtree(out)
    prepare(str(source), out=str(out), val_fraction=0.0, workers=1)
    assert "shuffle" not in load_manifest(out).settings
    with pytest.raises(UserError, match="shuffle None, not 5"):
        prepare(str(source), out=str(out), shuffle=5, val_fraction=0.0)


def test_keys_are_distinct_whatever_piece_they_are_asked_for() -> None:
    whole = shuffle_keys(3, 0, 100_000)
    assert len(np.unique(whole)) == len(whole)
    pieces = [shuffle_keys(3, first, 1000) for first in range(0, 100_000, 1000)]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    # a document's place says nothing about its place before, nor about that with another seed
    places = np.argsort(whole)
    others = np.argsort(shuffle_keys(4, 0, 100_000))
    for left, right in ((np.arange(100_000), places), (places[1:], places[:-1]), (others, places)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.015  # five standard deviations


# ---- a folder that is there already --------------------------------------------------------------


def test_again_reads_nothing(source, tmp_path, capsys):
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


def test_a_dataset_of_touched_inputs_is_kept(source, tmp_path, capsys):
    out, workers = tmp_path / "out", 1
    prepare(str(source), out=str(out), workers=workers)
    before = dataset_digest(out)
    os.utime(source, (1, 1))
    prepare(str(source), out=str(out), workers=workers)
    printed = capsys.readouterr().out
    assert "is already prepared" in printed
    assert "comparing their contents" in printed
    with pytest.raises(UserError, match=r"shard_tokens \d+, not 900"):
        prepare(str(source), out=str(out), shard_tokens=900)
    lines = source.read_bytes()
    source.write_bytes(lines.replace(b"a", b"b", 1))
    with pytest.raises(UserError, match="other inputs"):
        prepare(str(source), out=str(out), workers=workers)
    assert dataset_digest(out) == before
    source.write_bytes(lines)
    prepare(str(source), out=str(out), workers=workers)
    (out / ".inputs.json").write_text("[]")  # no version writes this
    with pytest.raises(UserError, match="other inputs"):
        prepare(str(source), out=str(out), workers=workers)


# ---- arrays of jobs ------------------------------------------------------------------------------


def test_jobs_of_an_array(source, tmp_path, capsys, monkeypatch):
    expected, units_made, out = clean(source, tmp_path), made(monkeypatch), tmp_path / "out"
    array = ["prepare", str(source), "--out", str(out), "--workers", "1", "--shard-count=3"]
    assert main([*array, "--merge", "true"]) == 2
    assert "shard_index 0, 1, 2: run these jobs" in capsys.readouterr().err
    for job, missing in {2: "shard_index 0, 1", 0: "shard_index 1", 1: "-"}.items():
        os.utime(source, (job, job))  # each on a machine with a copy of its own
        assert main([*array, f"--shard-index={job}"]) == 0
        assert f"parts are missing of: {missing}\n" in capsys.readouterr().out
        assert not out.exists()
    n_units = len(plan_units(find_inputs(str(source)), "text", UNIT_BYTES))
    assert sorted(units_made) == list(range(n_units))
    assert main([*array, "--shard-index=1", "--merge", "true"]) == 2
    assert "shard_index is 1: leave it out" in capsys.readouterr().err
    assert main([*array, "--merge", "true"]) == 0
    assert sorted(units_made) == list(range(n_units))
    assert {**contents(out), ".inputs.json": b""} == {**expected, ".inputs.json": b""}
    assert not list(tmp_path.glob(".*"))


# ---- work that is not thrown away ----------------------------------------------------------------


def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the index of each unit whose documents are tokenized."""
    found: list[int] = []
    real = units._tokenized

    def tokenized(reader: Documents, unit: units.Unit, tokenizer: Any) -> Iterator[Any]:
        found.append(unit.index)
        return real(reader, unit, tokenizer)

    monkeypatch.setattr(units, "_tokenized", tokenized)
    return found


def clean(source: Path, tmp_path: Path, **settings: Any) -> dict[str, bytes]:
    """Return the files of an uninterrupted preparation, and delete them."""
    with pytest.MonkeyPatch.context() as patch:
        made(patch)
        prepare(str(source), out=str(tmp_path / "clean"), workers=1, **settings)
    found = contents(tmp_path / "clean")
    shutil.rmtree(tmp_path / "clean")
    return found


def interrupt(source: Path, out: Path, n: int, step: str = "write_shard", **settings: Any) -> None:
    """Make all units, and take n times a step of the shards."""
    with pytest.MonkeyPatch.context() as patch:
        taken: list[Any] = []
        real = getattr(Assembly, step)

        def take(self: Assembly, task: Any) -> Any:
            taken.append(task)
            if len(taken) > n:
                raise UserError("enough")
            return real(self, task)

        patch.setattr(Assembly, step, take)
        with pytest.raises(UserError, match="enough"):
            prepare(str(source), out=str(out), workers=1, **settings)


def test_other_errors_after_a_damaged_document(source, tmp_path, monkeypatch, capsys):
    with open(source, "a") as file:
        file.write("damaged\n")
    out, expected = tmp_path / "out", clean(source, tmp_path, errors="skip")
    units_made = made(monkeypatch)
    with pytest.raises(UserError, match="line 201"):
        prepare(str(source), out=str(out), workers=1)
    last = units_made.pop()
    assert len(units_made) == last > 2
    units_made.clear()
    capsys.readouterr()
    prepare(str(source), out=str(out), workers=1, errors="skip")
    assert units_made == [last]
    assert contents(out) == expected
    printed = capsys.readouterr().out
    assert f"continuing: {last} of {last + 1} parts are complete" in printed
    assert "left out   1 of 201 documents" in printed
    settings = load_manifest(out).settings
    assert (settings["documents"], settings["skipped"]) == (200, 1)


@pytest.mark.parametrize("change", ["touched", "longer", "repaired", "added", "settings"])
def test_units_of_equal_contents_are_used_again(source, tmp_path, monkeypatch, change):
    out, folder = tmp_path / "out", tmp_path / "in"
    folder.mkdir()
    source = source.rename(folder / source.name)
    settings: dict[str, Any] = {"shard_tokens": 600 if change == "settings" else 500}
    interrupt(folder, out, 2, shard_tokens=500)
    if change == "touched":
        os.utime(source, (1, 1))
    elif change == "longer":
        source.write_text(source.read_text() + json.dumps({"text": "one more"}) + "\n")
    elif change == "repaired":  # all lines behind it move by three bytes
        lines = source.read_text().splitlines(keepends=True)
        source.write_text("".join([lines[0].replace('{"text"', '{   "text"'), *lines[1:]]))
    elif change == "added":
        (folder / "a.jsonl").write_text('{"text": "first"}\n')
    expected, units_made = clean(folder, tmp_path, **settings), made(monkeypatch)
    prepare(str(folder), out=str(out), workers=1, **settings)
    assert len(units_made) == {"longer": 1, "repaired": 1, "added": 1}.get(change, 0)
    assert contents(out) == expected
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("file_format", "shuffle"), [("npy", None), ("npy", 3), ("nanogpt", None)])
def test_interrupted_in_the_shards_and_continued(
    source, tmp_path, monkeypatch, file_format, shuffle
):
    out = tmp_path / "out"
    settings = {"shard_tokens": 1500, "shuffle": shuffle, "format": file_format}
    expected = clean(source, tmp_path, **settings)
    interrupt(source, out, 1 if file_format == "nanogpt" else 5, **settings)
    (new,) = tmp_path.glob(".out.parts/*/shards-*/new")
    times = {path.name: path.stat().st_mtime_ns for path in new.iterdir()}
    units_made = made(monkeypatch)
    os.utime(source, (1, 1))
    prepare(str(source), out=str(out), workers=1, **settings)  # type: ignore[arg-type]
    assert not units_made
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times
    assert all(contents(out)[name] == expected[name] for name in expected if name != ".inputs.json")
    assert not list(tmp_path.glob(".*"))


def test_work_of_other_settings_stays(source: Path, tmp_path: Path) -> None:
    source.write_text(source.read_text().replace("}", ', "body": "x y"}'))
    interrupt(source, tmp_path / "out", 0, text_field="body", val_fraction=0.0)
    prepare(str(source), out=str(tmp_path / "out"), workers=1)
    assert list(tmp_path.glob(".out.parts/*/*.tokens"))


@pytest.mark.parametrize("shuffle", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_damage_of_unfinished_work_never_reaches_the_dataset(source, tmp_path, shuffle):
    settings: dict[str, Any] = {"shard_tokens": 1500, "shuffle": shuffle, "val_fraction": 0.3}
    out, expected = tmp_path / "out", clean(source, tmp_path, **settings)
    interrupt(source, out, 0, "write_shard" if shuffle is None else "scatter", **settings)
    shutil.copytree(tmp_path / ".out.parts", tmp_path / "kept")
    rng = random.Random(0)
    for file in sorted(path for path in (tmp_path / "kept").rglob("*.tokens")):
        shutil.rmtree(tmp_path / ".out.parts", ignore_errors=True)
        shutil.copytree(tmp_path / "kept", tmp_path / ".out.parts")
        damaged = tmp_path / ".out.parts" / file.relative_to(tmp_path / "kept")
        content = bytearray(damaged.read_bytes())
        content[rng.randrange(len(content))] ^= 4
        damaged.write_bytes(content)
        with pytest.raises(UserError, match=r"is damaged.*same command again"):
            prepare(str(source), out=str(out), workers=1, **settings)
        assert not out.exists()
        prepare(str(source), out=str(out), workers=1, **settings)
        assert contents(out) == expected
        shutil.rmtree(out)


# ---- accidents -----------------------------------------------------------------------------------

RUN = """
import functools, os, resource, signal, sys, time
from gpt_lightning.prepare import command as prepare
from gpt_lightning.prepare import pipeline, units
pipeline.plan_units = functools.partial(units.plan_units, unit_bytes={unit_bytes})
{accident}
try:
    prepare.prepare(sys.argv[1], out=sys.argv[2], workers={workers}, shard_tokens=500)
except prepare.UserError as error:
    print(error)
    sys.exit(2)
"""
# Each child dies before its k-th change of a file, and the next one finishes the dataset.
KILLED_EVERYWHERE = """
import functools, itertools, os, pathlib, shutil, signal, sys
from gpt_lightning.prepare import command, pipeline, units
source, folder, tokenizer = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
shuffle, step = eval(sys.argv[4])
pipeline.plan_units = functools.partial(units.plan_units, unit_bytes=800)
CHANGES = [(os, "replace"), (os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"),
           (os, "mkdir"), (shutil, "rmtree"), (pathlib.Path, "unlink"), (pathlib.Path, "mkdir")]

def forked(out, moment=None):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = itertools.count(1)
    def counted(real):
        def function(*args, **kwargs):
            if next(left) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return function
    for module, name in CHANGES if moment else ():
        setattr(module, name, counted(getattr(module, name)))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    command.prepare(source, tokenizer, str(out), shard_tokens=200, workers=1, shuffle=shuffle)
    os._exit(0)

def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}

command.Settings("gpt2").build_tokenizer().encode("warm")
assert forked(folder / "clean") == 0
for moment in itertools.count(1, step):
    out = folder / "out"
    killed = forked(out, moment)
    assert killed in (0, -9), killed
    assert killed == 0 or forked(out) == 0
    assert contents(out) == contents(folder / "clean"), moment
    assert not list(folder.glob(".*")), (moment, list(folder.glob(".*")))
    shutil.rmtree(out)
    if killed == 0:
        break
print("moments", moment)
"""


def start(source: Path, out: Path, accident: str = "", workers: int = 1) -> subprocess.Popen[str]:
    code = RUN.format(accident=accident, workers=workers, unit_bytes=UNIT_BYTES)
    command = [sys.executable, "-c", code, str(source), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("tokenizer", "shuffle", "step"),
    [
        pytest.param("char", None, 1, marks=pytest.mark.slow),  # one text
        *(pytest.param("gpt2", None, at, marks=pytest.mark.slow) for at in (7, 17)),
        pytest.param("gpt2", 5, 11, marks=pytest.mark.slow),
    ],
)
def test_killed_before_a_change_of_a_file(source, texts, tmp_path, tokenizer, shuffle, step):
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:12]))
    if tokenizer == "char":
        source = source.rename(tmp_path / "one.txt")
        source.write_bytes(source.read_bytes()[:900])
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-c", KILLED_EVERYWHERE, str(source), str(tmp_path / "work")]
    command += [tokenizer, str((shuffle, step))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("moments")[1]) > (20 if tokenizer == "char" else 100)


@pytest.mark.slow
def test_killed_at_random_moments(source: Path, tmp_path: Path, texts: list[str]) -> None:
    source.write_text("".join(json.dumps({"text": text * 4}) + "\n" for text in texts * 2))
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


@pytest.mark.slow
def test_workers_die_with_a_killed_parent(source: Path, tmp_path: Path) -> None:
    parent = start(source, tmp_path / "out", replaced_unit(tmp_path, "time.sleep(600)"), workers=2)
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


def replaced_unit(tmp_path: Path, line: str) -> str:
    """Return code with which workers run a line instead of a unit."""
    module = f"import os, time\ndef run_unit(job, unit):\n    {line}\n"
    (tmp_path / "other_unit.py").write_text(module)
    insert = f"sys.path.insert(0, {str(tmp_path)!r})\nimport other_unit\n"
    return f"{insert}pipeline.run_unit = other_unit.run_unit"


def workers_of(pid: int) -> list[int]:
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.split(None, 1) for line in found.stdout.splitlines()]
    return [int(pid) for pid, args in lines if "spawn_main" in args]


def alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_killed_worker_is_no_riddle(source: Path, tmp_path: Path) -> None:
    dying = replaced_unit(tmp_path, "os.kill(os.getpid(), 9)")
    process = start(source, tmp_path / "out", dying, workers=2)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "was killed, perhaps for lack of memory" in said


@pytest.mark.slow
def test_two_at_once(source: Path, tmp_path: Path) -> None:
    clean, out = tmp_path / "clean", tmp_path / "out"
    prepare(str(source), out=str(clean), shard_tokens=500, workers=1)
    late = "real = pipeline.Manifest\n"
    late += "pipeline.Manifest = lambda **facts: time.sleep(0.7) or real(**facts)"
    both = [start(source, out, late) for _ in range(2)]
    said = [process.communicate(timeout=30)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("by another process: waiting" in text for text in said) == 1
    assert sum("is already prepared" in text for text in said) == 1
    assert contents(out) == contents(clean)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("limit", "name", "workers"),
    [
        (100, "docs.jsonl", 1),
        (1200, "one.txt", 1),  # lets the shards of 1,128 bytes pass and stops the manifest
        pytest.param(1120, "docs.jsonl", 2, marks=pytest.mark.slow),
    ],
)
def test_full_disk(source: Path, tmp_path: Path, limit: int, name: str, workers: int) -> None:
    """A limit on the size of a file fails as a full disk does: in write(), after some bytes."""
    source = source.rename(tmp_path / name)
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


# ---- memory --------------------------------------------------------------------------------------

PEAK = """
import sys
from gpt_lightning.data import tokenizers
from gpt_lightning.prepare import command as prepare
tokenizers.build_tokenizer("gpt2").encode("warm")
shuffle = 3 if sys.argv[4] == "shuffle" else None
prepare.prepare(sys.argv[1], sys.argv[3], out=sys.argv[2], workers=1, shuffle=shuffle)
status = open("/proc/self/status").read()  # not getrusage: that begins with the parent's peak
print("PEAK", status.split("VmHWM:")[1].split()[0])
"""


def peak_mib(source: Path, out: Path, tokenizer: str, kind: str) -> float:
    command = [sys.executable, "-c", PEAK, str(source), str(out), tokenizer, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(out)
    return int(done.stdout.split("PEAK")[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("char", marks=pytest.mark.slow),
        *(pytest.param(k, marks=pytest.mark.long) for k in ("shuffle", "parquet", "jsonl.gz")),
    ],
)
def test_memory_does_not_grow_with_the_input(texts: list[str], tmp_path: Path, kind: str) -> None:
    peaks = []
    # 50 and 125 MB; of one text 125 and 250 MB, because the first 100 MB warm the allocators up
    for repeats in (20, 40) if kind == "char" else (8, 20):
        suffix = {"char": "txt", "shuffle": "jsonl"}.get(kind, kind)
        path = tmp_path / f"docs.{suffix}"
        write_many(path, [text * 200 for text in texts], repeats)
        tokenizer = "char" if kind == "char" else "gpt2"
        peaks.append(peak_mib(path, tmp_path / "out", tokenizer, kind))
    print(kind, peaks)
    # The larger input has 75 MB more, or 125 (one text in memory: 500); what is allowed is the
    # allocators.
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
