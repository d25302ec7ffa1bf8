"""Units are a pure function of the inputs, and their files are whole or not there."""

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from gpt_lightning.data.tokenizers import build_tokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.prepare import units
from gpt_lightning.prepare.documents import Documents
from gpt_lightning.prepare.inputs import Input, find_inputs
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.units import Job, plan_units, run_unit

UINT16 = np.dtype(np.uint16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of several kinds and sizes, in a folder with one below it."""
    source = tmp_path / "in"
    (source / "sub").mkdir(parents=True)
    for name in ("a.jsonl", "sub/b.jsonl", "empty.jsonl"):
        count = 0 if name == "empty.jsonl" else 50
        texts = [json.dumps({"text": f"{name} {i} " * (i % 7)}) + "\n" for i in range(count)]
        (source / name).write_text("".join(texts))
    for i in range(9):
        (source / f"c{i}.txt").write_text(f"text {i} " * 30)
    (source / ".hidden.txt").write_text("no")
    return source


@pytest.mark.parametrize("unit_bytes", [1, 100, 777, 10**9])
def test_units_tile_the_inputs(folder: Path, unit_bytes: int) -> None:
    inputs = find_inputs(str(folder))
    found = plan_units(inputs, "text", unit_bytes)
    assert [unit.index for unit in found] == list(range(len(found)))
    assert len({unit.key for unit in found}) == len(found)
    reader = Documents("text", "strict")
    whole = [text for entry in inputs for text, _ in reader.read(entry, 0, None)]
    in_units = [
        text
        for unit in found
        for entry in unit.files
        for text, _ in reader.read(entry, unit.start, unit.stop)
    ]
    assert in_units == whole
    assert sum(unit.size for unit in found) == sum(entry.size or 0 for entry in inputs)


def test_many_texts_are_one_unit_and_a_file_of_unknown_size_is_one(folder: Path) -> None:
    found = plan_units(find_inputs(str(folder)), "text")
    assert [len(unit.files) for unit in found] == [1, 9, 1]
    entry = Input("http://x/a.jsonl", "a.jsonl", "jsonl", "", None, "")
    (unit,) = plan_units([entry], "text", unit_bytes=10)
    assert (unit.start, unit.stop) == (0, None)


# ---- files of a unit -----------------------------------------------------------------------------


def job_of(tmp_path: Path, **settings: object) -> Job:
    return Job(tmp_path / "work", Settings("gpt2", **settings))  # type: ignore[arg-type]


def write_lines(path: Path, texts: list[str]) -> list[units.Unit]:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return plan_units(find_inputs(str(path)), "text")


@pytest.mark.parametrize(
    ("tokens", "documents"), [(2**22, 2**16), (1, 99), (64, 99), (10**9, 7), (10**9, 1)]
)
def test_pieces_hold_the_documents_behind_end_of_text(tmp_path, monkeypatch, tokens, documents):
    monkeypatch.setattr(units, "PIECE_TOKENS", tokens)
    monkeypatch.setattr(units, "PIECE_DOCUMENTS", documents)
    texts = ["one", "", "<|endoftext|> is text", "long " * 3000, "\u00e9", "x\x00y"] * 3
    (unit,) = write_lines(tmp_path / "a.jsonl", texts)
    job = job_of(tmp_path)
    record = run_unit(job, unit)
    assert record == job.record(unit)
    gpt2 = build_tokenizer("gpt2")
    expected = [[gpt2.eot_token, *gpt2.encode(text).tolist()] for text in texts]
    pieces = job.pieces({unit: record})
    tables = [piece.table() for piece in pieces]
    found = [piece.read(table, UINT16) for piece, table in zip(pieces, tables, strict=True)]
    table = np.concatenate(tables)
    assert np.concatenate(found).tolist() == list(itertools.chain(*expected))
    assert table["tokens"].tolist() == [len(document) for document in expected]
    assert table["bytes"].tolist() == [len(text.encode()) for text in texts]
    digests = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    assert table["sha256"].tobytes() == digests
    counts = [(piece.documents, piece.tokens) for piece in pieces]
    assert counts == [(len(table), len(own)) for table, own in zip(tables, found, strict=True)]


def test_every_flipped_bit_of_a_unit_is_found(tmp_path: Path) -> None:
    (unit,) = write_lines(tmp_path / "a.jsonl", ["one two", "", "three"])
    job = job_of(tmp_path)
    record = run_unit(job, unit)
    (piece,) = job.pieces({unit: record})
    for suffix in (".documents", ".tokens"):
        path = piece.path.with_suffix(suffix)
        content = path.read_bytes()
        damages = [content[:size] for size in range(len(content))]
        for at in range(0, len(content) * 8, 3):
            flipped = bytearray(content)
            flipped[at // 8] ^= 1 << at % 8
            damages.append(bytes(flipped))
        for damage in damages:
            path.write_bytes(damage)
            with pytest.raises(UserError, match=r"is damaged.*run the same command again"):
                piece.read(piece.table(), UINT16)
            assert job.record(unit) is None  # the next run makes the unit again
        path.unlink()
        with pytest.raises(UserError, match="is damaged"):
            piece.read(piece.table(), UINT16)
        path.write_bytes(content)
        piece.read(piece.table(), UINT16)


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"stamp": 1}'])
def test_a_damaged_record_is_none(tmp_path: Path, damage: bytes) -> None:
    (unit,) = write_lines(tmp_path / "a.jsonl", ["one"])
    job = job_of(tmp_path)
    run_unit(job, unit)
    job.record_path(unit).write_bytes(damage)
    assert job.record(unit) is None


def test_a_unit_that_failed_is_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\nbad\n')
    (unit,) = plan_units(find_inputs(str(path)), "text")
    job = job_of(tmp_path)
    with pytest.raises(UserError, match="line 2"):
        run_unit(job, unit)
    assert not job.folder.exists()


def test_an_input_that_changed_is_refused(tmp_path: Path) -> None:
    (unit,) = write_lines(tmp_path / "a.jsonl", ["good"])
    write_lines(tmp_path / "a.jsonl", ["hood", "good"])
    job = job_of(tmp_path)
    with pytest.raises(UserError, match=r"a\.jsonl changed while it was read"):
        run_unit(job, unit)
    assert job.record(unit) is None


def test_text_that_tiktoken_refuses_is_a_damaged_document(tmp_path: Path) -> None:
    (unit,) = write_lines(tmp_path / "a.jsonl", ["x" + " " * 2_000_000 + "y", "good"])
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: tiktoken cannot tokenize"):
        run_unit(job_of(tmp_path), unit)
    record = run_unit(job_of(tmp_path, errors="skip"), unit)
    assert (record.pieces[0][0], record.skipped, record.errors) == (1, 1, "skip")


def test_a_unit_in_which_something_was_skipped_is_for_errors_skip_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nbad\n')
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\n')
    plan = plan_units(find_inputs(str(tmp_path / "*.jsonl")), "text")
    skip = job_of(tmp_path, errors="skip")
    records = [run_unit(skip, unit) for unit in plan]
    for errors, fits in {"skip": [True, True], "strict": [False, True]}.items():
        settings = job_of(tmp_path, errors=errors).settings
        assert [record.fits(settings) for record in records] == fits


def test_settings_that_decide_the_units() -> None:
    root = Path("work")
    folder = Job.below(root, Settings("gpt2")).folder
    same = [
        Settings("gpt2", 0.3, 0.2, 7, format="llmc"),
        Settings("gpt2", errors="skip", shuffle=1),
    ]
    assert {Job.below(root, settings).folder for settings in same} == {folder}
    others = [Settings("r50k_base"), Settings("gpt2", text_field="body")]
    assert len({folder, *(Job.below(root, settings).folder for settings in others)}) == 3
