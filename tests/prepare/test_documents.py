"""Documents to a dataset: the same bytes whoever works, however often it is interrupted."""

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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prepared import contents, naive, tokens_of

from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.errors import UserError
from gpt_lightning.prepare import documents
from gpt_lightning.prepare.command import prepare
from gpt_lightning.prepare.documents import (
    Job,
    Unit,
    make_unit,
    plan_units,
    unit_size,
)
from gpt_lightning.prepare.readers import Reader
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.sources import Input, find_inputs, fingerprint

UNIT_BYTES = 4000
WORDS = ["a", "an", "the", "<|endoftext|>", "sea", "été", "😀", "storm,", "king.\n"]


@pytest.fixture
def texts() -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(60))) for _ in range(200)]


@pytest.fixture
def source(tmp_path: Path, texts: list[str]) -> Path:
    return write_lines(tmp_path / "docs.jsonl", texts)


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", UNIT_BYTES)


def split_by_hash(text: str) -> int:
    hashed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") / 2**64
    if hashed < 0.1:
        return 1
    return 2 if hashed < 0.2 else 0


# ---- units ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit_bytes", [1, 100, 777, 10**9])
def test_units_tile_the_inputs(tmp_path, monkeypatch, unit_bytes):
    monkeypatch.setattr(documents, "UNIT_BYTES", unit_bytes)
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "a.jsonl", [f"a {i} " * (i % 7) for i in range(50)])
    write_lines(tmp_path / "sub/b.jsonl", [f"b {i} " * (i % 7) for i in range(50)])
    write_lines(tmp_path / "empty.jsonl", [])
    for i in range(9):
        (tmp_path / f"c{i}.txt").write_text(f"text {i} " * 30)
    inputs = find_inputs([str(tmp_path)])
    units = plan_units(inputs)
    assert len({fingerprint(unit) for unit in units}) == len(units)
    assert list(texts_of(itertools.chain(*units))) == list(texts_of(inputs))
    assert sum(map(unit_size, units)) == sum(entry.size for entry in inputs)
    if unit_bytes == 10**9:  # many small files of several kinds are one unit
        assert len(units) == 1


def texts_of(parts: Iterable[Input]) -> Iterator[str]:
    settings = Settings("gpt2")
    for part in parts:
        yield from Reader(part, Path(part.path).parent, settings).texts()


def one_unit(path: Path) -> Unit:
    (entry,) = find_inputs([str(path)])
    return (entry,)


def test_an_input_that_changed_is_an_error(tmp_path: Path) -> None:
    unit = one_unit(write_lines(tmp_path / "a.jsonl", ["good"]))
    write_lines(tmp_path / "a.jsonl", ["hood", "good"])
    with pytest.raises(UserError, match=r"a\.jsonl changed while it was read"):
        make_unit(Job(tmp_path / "work", Settings("gpt2")), unit)
    assert not list((tmp_path / "work").iterdir())


def test_text_that_tiktoken_refuses_is_a_damaged_document(tmp_path: Path) -> None:
    unit = one_unit(write_lines(tmp_path / "a.jsonl", ["x" + " " * 2_000_000 + "y", "good"]))
    job = Job(tmp_path / "work", Settings("gpt2"))
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: damaged document, tiktoken cannot"):
        make_unit(job, unit)
    skipping = Job(job.folder, Settings("gpt2", errors="skip"))
    made = make_unit(skipping, unit)
    assert made.settings == {"documents": 1, "skipped": 1}
    with pytest.raises(UserError, match="tiktoken cannot"):  # a finished unit that has skipped
        make_unit(job, unit)


# ---- contents of the dataset ---------------------------------------------------------------------


@pytest.mark.parametrize("shard_tokens", [pytest.param(7, marks=pytest.mark.slow), 90, 10**8])
@pytest.mark.parametrize("file_format", ["npy", "nanogpt", "llmc"])
def test_documents_held_out_by_hash(source, texts, tmp_path, shard_tokens, file_format):
    texts = texts[:40] if shard_tokens == 7 else texts
    write_lines(source, texts)
    out = tmp_path / "out"
    prepare(
        str(source),
        out=str(out),
        test_fraction=0.1,
        shard_tokens=shard_tokens,
        workers=1,
        format=file_format,
    )
    manifest = load_manifest(out)
    for number, split in enumerate(("train", "val", "test")):
        own = [text for text in texts if split_by_hash(text) == number]
        assert tokens_of(out, split) == naive(own)
        assert manifest.text_bytes[split] == sum(len(text.encode()) for text in own)
        if file_format == "nanogpt":
            assert [shard.file for shard in manifest.splits[split]] == [f"{split}.bin"]
        else:
            assert all(0 < shard.tokens <= shard_tokens for shard in manifest.splits[split])
    assert manifest.source.bytes == sum(len(text.encode()) for text in texts)
    assert manifest.settings["documents"] == len(texts)
    for shard in manifest.shards():
        assert hashlib.sha256((out / shard.file).read_bytes()).hexdigest() == shard.sha256


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [None, 5])
def test_the_same_whatever_the_number_of_workers(source, tmp_path, shuffle):
    for count in (1, 2):
        options: dict[str, Any] = {"workers": count, "shard_tokens": 900, "shuffle": shuffle}
        prepare(str(source), out=str(tmp_path / f"out{count}"), **options)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")
    assert not list(tmp_path.glob(".*"))


def test_the_same_tokens_whatever_files_and_units_they_come_in(
    source, texts, tmp_path, monkeypatch
):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "docs.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
    pq.write_table(pa.table({"text": texts}), tmp_path / "docs.parquet", row_group_size=30)
    (tmp_path / "copy").mkdir()
    shutil.copy(source, tmp_path / "copy")
    os.utime(tmp_path / "copy" / source.name, (1, 1))
    found = []
    for name in ("docs.jsonl", "copy/docs.jsonl", "docs.jsonl.gz", "docs.parquet"):
        for unit_bytes in (500, UNIT_BYTES, 10**9):
            monkeypatch.setattr(documents, "UNIT_BYTES", unit_bytes)
            out = tmp_path / "out"
            prepare(str(tmp_path / name), out=str(out), workers=1)
            manifest = load_manifest(out)
            tokens = [tokens_of(out, split) for split in manifest.splits]
            found.append((tokens, manifest.settings, manifest.text_bytes))
            shutil.rmtree(out)
    assert all(dataset == found[0] for dataset in found)


def test_a_shuffle_orders_the_units(source, texts, tmp_path):
    orders = []
    for seed in (5, 6, 5):
        out = tmp_path / "out"
        prepare(str(source), out=str(out), shuffle=seed, val_fraction=0.0, workers=1)
        orders.append(tokens_of(out, "train"))
        shutil.rmtree(out)
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(naive(texts))
    prepare(str(source), out=str(out), val_fraction=0.0, workers=1)
    with pytest.raises(UserError, match="shuffle None, not 5"):
        prepare(str(source), out=str(out), shuffle=5, val_fraction=0.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "docs.jsonl: the train split has 0 tokens, needs 2"),
        ("\n \n", "the train split has 0 tokens, needs 2"),
        ('{"text": ""}\n', "the train split has 1 tokens, needs 2"),
        ('{"text": 1}\n', "docs.jsonl, line 1: damaged document, expected text in the field"),
    ],
)
def test_input_that_makes_no_dataset(source: Path, tmp_path: Path, content: str, said: str) -> None:
    source.write_text(content)
    with pytest.raises(UserError, match=said):
        prepare(str(source), out=str(tmp_path / "out"), val_fraction=0.0, workers=1)
    assert [path for path in tmp_path.iterdir() if ".parts-" not in path.name] == [source]


# ---- a folder that is there already --------------------------------------------------------------


def test_again_reads_nothing(source, tmp_path, capsys):
    out = tmp_path / "out"
    prepare(str(source), out=str(out), workers=1)
    before = contents(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpt_lightning.prepare.readers.open", None, raising=False)
        prepare(str(source), out=str(out), workers=1)
    assert "is already prepared" in capsys.readouterr().out
    assert contents(out) == before
    changes: list[tuple[dict[str, Any], str]] = [
        ({"val_fraction": 0.2}, "val_fraction 0.1, not 0.2"),
        ({"text_field": "body"}, "text_field text, not body"),
        ({"format": "llmc"}, "format npy, not llmc"),
        ({"errors": "skip"}, "errors strict, not skip"),
    ]
    for changed, said in changes:
        with pytest.raises(UserError, match=f"{said}.*--overwrite true"):
            prepare(str(source), out=str(out), workers=1, **changed)
    assert contents(out) == before
    prepare(str(source), out=str(out), workers=1, format="llmc", overwrite=True)
    prepare(str(source), out=str(out), workers=1, overwrite=True)
    assert contents(out).keys() == before.keys()


def test_a_dataset_of_other_inputs_is_kept(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(str(source), out=str(out), workers=1)
    before = contents(out)
    source.write_bytes(source.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(UserError, match=r"prepared with inputs .*--overwrite true"):
        prepare(str(source), out=str(out), workers=1)
    assert contents(out) == before
    prepare(str(source), out=str(out), workers=1, overwrite=True)
    assert contents(out) != before


# ---- a run that was interrupted ------------------------------------------------------------------


def clean(source: Path, tmp_path: Path, **settings: Any) -> dict[str, bytes]:
    """Return the files of an uninterrupted preparation, and delete them."""
    prepare(str(source), out=str(tmp_path / "clean"), workers=1, **settings)
    found = contents(tmp_path / "clean")
    shutil.rmtree(tmp_path / "clean")
    return found


def interrupt(source: Path, out: Path, **settings: Any) -> None:
    """Make all units, and nothing of the dataset."""

    def fail(*arguments: object) -> None:
        raise UserError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "file_name", fail)
        with pytest.raises(UserError, match="enough"):
            prepare(str(source), out=str(out), workers=1, **settings)


def test_other_errors_after_a_damaged_document(source, tmp_path, monkeypatch, capsys):
    with open(source, "a") as file:
        file.write("damaged\n")
    out = tmp_path / "out"
    expected = clean(source, tmp_path, errors="skip")
    with pytest.raises(UserError, match="line 201"):
        prepare(str(source), out=str(out), workers=1)
    finished = list(tmp_path.glob(".out.parts-*/*/manifest.json"))
    assert len(finished) > 2
    capsys.readouterr()
    written = []
    real = documents._write_unit
    monkeypatch.setattr(documents, "_write_unit", lambda *given: written.append(0) or real(*given))
    prepare(str(source), out=str(out), workers=1, errors="skip")
    assert len(written) == 1  # the unit that failed
    assert contents(out) == expected
    printed = capsys.readouterr().out
    assert f"continuing: {len(finished)} of {len(finished) + 1} parts are complete" in printed
    assert "left out   1 of 201 documents" in printed
    settings = load_manifest(out).settings
    assert (settings["documents"], settings["skipped"]) == (200, 1)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damage_of_unfinished_work_never_reaches_the_dataset(source, tmp_path, damage):
    settings: dict[str, Any] = {"shard_tokens": 1500, "val_fraction": 0.3}
    out = tmp_path / "out"
    expected = clean(source, tmp_path, **settings)
    interrupt(source, out, **settings)
    files = sorted(tmp_path.glob(".out.parts-*/*/*"))
    assert len(files) > 5
    for file in files:
        content = bytearray(file.read_bytes())
        if damage == "flip" and file.suffix == ".npy":
            content[len(content) // 2] ^= 4
            file.write_bytes(content)
        elif damage == "cut":
            file.write_bytes(content[:-2])
        elif damage == "delete" and file.suffix == ".npy":
            file.unlink()
    prepare(str(source), out=str(out), workers=1, **settings)
    assert contents(out) == expected
    assert not list(tmp_path.glob(".*"))


def test_work_of_other_settings_stays(source: Path, tmp_path: Path) -> None:
    source.write_text(source.read_text().replace("}", ', "body": "x y"}'))
    interrupt(source, tmp_path / "out", text_field="body", val_fraction=0.0)
    prepare(str(source), out=str(tmp_path / "out"), workers=1)
    assert list(tmp_path.glob(".out.parts-*/*/manifest.json"))


# ---- accidents -----------------------------------------------------------------------------------

RUN = """
import os, resource, signal, sys, time
from gpt_lightning.prepare import command as prepare
from gpt_lightning.prepare import documents
documents.UNIT_BYTES = {unit_bytes}
{accident}
try:
    prepare.prepare(sys.argv[1], out=sys.argv[2], workers={workers}, shard_tokens=500)
except prepare.UserError as error:
    print(error)
    sys.exit(2)
"""
# Each child dies before its k-th change of a file, and the next one finishes the dataset.
KILLED_EVERYWHERE = """
import itertools, os, pathlib, shutil, signal, sys
from gpt_lightning.prepare import command, documents
source, folder, tokenizer = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
shuffle, step = eval(sys.argv[4])
documents.UNIT_BYTES = 800
CHANGES = [(os, "replace"), (os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"),
           (os, "mkdir"), (shutil, "rmtree"), (pathlib.Path, "unlink"),
           (pathlib.Path, "mkdir")]

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
    module = f"import os, time\ndef make_unit(job, unit):\n    {line}\n"
    (tmp_path / "other_unit.py").write_text(module)
    insert = f"sys.path.insert(0, {str(tmp_path)!r})\nimport other_unit\n"
    return f"{insert}documents.make_unit = other_unit.make_unit"


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
    late = "real = documents.file_name\n"
    late += "documents.file_name = lambda *given: time.sleep(0.3) or real(*given)"
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
prepare.prepare(sys.argv[1], sys.argv[3], out=sys.argv[2], workers=1)
status = open("/proc/self/status").read()  # not getrusage: that begins with the parent's peak
print("PEAK", status.split("VmHWM:")[1].split()[0])
"""


def peak_mib(source: Path, out: Path, tokenizer: str) -> float:
    command = [sys.executable, "-c", PEAK, str(source), str(out), tokenizer]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(out)
    return int(done.stdout.split("PEAK")[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("char", marks=pytest.mark.slow),
        *(pytest.param(k, marks=pytest.mark.long) for k in ("parquet", "jsonl.gz")),
    ],
)
def test_memory_does_not_grow_with_the_input(texts: list[str], tmp_path: Path, kind: str) -> None:
    peaks = []
    # 50 and 125 MB; of one text 125 and 250 MB, because the first 100 MB warm the allocators up
    for repeats in (20, 40) if kind == "char" else (8, 20):
        suffix = "txt" if kind == "char" else kind
        path = tmp_path / f"docs.{suffix}"
        write_many(path, [text * 200 for text in texts], repeats)
        tokenizer = "char" if kind == "char" else "gpt2"
        peaks.append(peak_mib(path, tmp_path / "out", tokenizer))
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
