"""Units are a pure function of the inputs; parts are whole or not there."""

import hashlib
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from gpt_lightning.data.tokenizers import build_tokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.document_index import ROW
from gpt_lightning.prepare.documents import Documents
from gpt_lightning.prepare.input_file import Input
from gpt_lightning.prepare.inputs import find_inputs
from gpt_lightning.prepare.parts import Part, PartWriter, TokenReader, read_part, read_tables
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.units import (
    Job,
    Unit,
    describe_units,
    find_parts,
    parts_folder,
    plan_units,
    run_unit,
)

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
    units = plan_units(inputs, "text", unit_bytes)
    assert [unit.index for unit in units] == list(range(len(units)))
    reader = Documents("text", "strict")
    whole = [doc.text for entry in inputs for doc in reader.read(entry, 0, None)]
    found = [
        doc.text
        for unit in units
        for entry in unit.files
        for doc in reader.read(entry, unit.start, unit.stop)
    ]
    assert found == whole
    assert sum(unit.size for unit in units) == sum(entry.size or 0 for entry in inputs)


def test_many_texts_are_one_unit(folder: Path) -> None:
    units = plan_units(find_inputs(str(folder)), "text")
    assert [len(unit.files) for unit in units] == [1, 9, 1]


def test_a_file_of_unknown_size_is_one_unit() -> None:
    entry = Input("http://x/a.jsonl", "a.jsonl", "jsonl", "", None, "")
    (unit,) = plan_units([entry], "text", unit_bytes=10)
    assert (unit.start, unit.stop) == (0, None)


# ---- parts ---------------------------------------------------------------------------------------


def job_of(tmp_path: Path, **settings: object) -> Job:
    job = Job(tmp_path / "parts", Settings("gpt2", **settings), "inputs")  # type: ignore[arg-type]
    job.parts.mkdir(exist_ok=True)
    return job


def test_a_part_holds_the_documents_behind_end_of_text(folder: Path, tmp_path: Path) -> None:
    texts = ["one", "", "<|endoftext|> is text", "long " * 3000]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (unit,) = plan_units(find_inputs(str(path)), "text")
    job = job_of(tmp_path)
    path = job.part(run_unit(job, (unit, ()))[0])
    part = read_part(path)
    gpt2 = build_tokenizer("gpt2")
    expected = [[gpt2.eot_token, *gpt2.encode(text).tolist()] for text in texts]
    tokens, lengths, digests = documents_of(path, part)
    assert tokens == list(itertools.chain(*expected))
    assert lengths == [len(document) for document in expected]
    assert digests == b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    assert (part.documents, part.tokens) == (len(texts), len(tokens))
    assert part.text_bytes == sum(len(text.encode()) for text in texts)


def documents_of(path: Path, part: Part) -> tuple[list[int], list[int], bytes]:
    """Return the tokens of a part, the documents' lengths and their digests."""
    rows, digests = [], b""
    for table in read_tables(path, part, 2):
        offsets = table.offset + 2 * (np.cumsum(table.lengths) - table.lengths)
        fields = zip(offsets, table.lengths, table.sums, strict=True)
        rows += [(0, offset, length, checksum) for offset, length, checksum in fields]
        digests += table.digests.tobytes()
    found = np.array(rows, ROW)
    return TokenReader([path], UINT16).read(found).tolist(), found["length"].tolist(), digests


def write_part(path: Path, documents: list[list[int]]) -> Part:
    with path.open("wb") as file:
        writer = PartWriter(file)
        for i, tokens in enumerate(documents):
            writer.add(str(i).encode(), np.array(tokens, UINT16))
        return writer.complete(skipped=0, replaced=0)


def test_blocks_are_the_documents_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 2**16, rng.integers(1, 30)).tolist() for _ in range(50)]
    for tokens, count in ((1, 99), (64, 99), (10**9, 7), (10**9, 10**9)):
        monkeypatch.setattr("gpt_lightning.prepare.parts.BLOCK_TOKENS", tokens)
        monkeypatch.setattr("gpt_lightning.prepare.parts.BLOCK_DOCUMENTS", count)
        part = write_part(tmp_path / "a.part", documents)
        found, _, digests = documents_of(tmp_path / "a.part", part)
        assert found == list(itertools.chain(*documents))
        texts = [str(i).encode() for i in range(50)]
        assert digests == b"".join(hashlib.sha256(text).digest() for text in texts)


def test_every_flipped_bit_of_a_part_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.part"
    write_part(path, [[1, 2, 3], [4], [5, 6]])
    content = path.read_bytes()
    for at in range(len(content) * 8):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.part is damaged.*run the same command again"):
            documents_of(path, read_part(path))
        assert not path.exists()  # the next run makes it anew


def test_half_a_part_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.part"
    write_part(path, [[1, 2, 3], [4]])
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"a\.part is damaged"):
            read_part(path)


def test_nothing_is_left_of_a_unit_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\nbad\n')
    (unit,) = plan_units(find_inputs(str(path)), "text")
    job = job_of(tmp_path)
    with pytest.raises(UserError, match="line 2"):
        run_unit(job, (unit, ()))
    assert not job.present()
    assert not list((job.parts / "unfinished").iterdir())


def test_an_input_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n')
    (unit,) = plan_units(find_inputs(str(path)), "text")
    path.write_text('{"text": "hood"}\n' * 2)
    job = job_of(tmp_path)
    with pytest.raises(UserError, match=r"a\.jsonl changed while it was read"):
        run_unit(job, (unit, ()))
    assert not job.present()


def test_text_that_tiktoken_refuses_is_a_damaged_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" + " " * 2_000_000 + "y"}) + '\n{"text": "good"}\n')
    (unit,) = plan_units(find_inputs(str(path)), "text")
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: tiktoken cannot tokenize"):
        run_unit(job_of(tmp_path), (unit, ()))
    job = job_of(tmp_path, errors="skip")
    part = read_part(job.part(run_unit(job, (unit, ()))[0]))
    assert (part.documents, part.skipped) == (1, 1)


def test_a_part_is_for_equal_contents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')

    def units() -> list[Unit]:
        return plan_units(find_inputs(str(path)), "text")

    job = job_of(tmp_path)
    (unit,) = units()
    name, n_tokens = run_unit(job, (unit, ()))
    assert (n_tokens, name.damage) == (4, "clean")
    assert find_parts(job, units(), job.present()) == ({0: name}, [])
    os.utime(path, (1, 1))  # touched: its contents decide
    (work,) = find_parts(job, units(), job.present())[1]
    assert run_unit(job, work) == (name, 0)
    path.write_text('{"text": "one"}\n{"text": "TWO"}\n')
    (work,) = find_parts(job, units(), job.present())[1]
    other, n_tokens = run_unit(job, work)
    assert n_tokens > 0
    assert set(job.present()) == {name, other}  # a job of an array may have other inputs


def test_a_part_in_which_something_was_skipped_is_for_errors_skip_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nbad\n')
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\n')
    units = plan_units(find_inputs(str(tmp_path / "*.jsonl")), "text")
    skip = job_of(tmp_path, errors="skip")
    for unit in units:
        run_unit(skip, (unit, ()))
    for errors, n_todo in (("skip", 0), ("strict", 1), ("replace", 1)):
        job = job_of(tmp_path, errors=errors)
        assert len(find_parts(job, units, job.present())[1]) == n_todo


def test_settings_that_decide_the_parts() -> None:
    root = Path("parts")
    folder = parts_folder(root, Settings("gpt2"))
    same = [
        Settings("gpt2", 0.3, 0.2, 7, format="llmc"),
        Settings("gpt2", errors="skip", shuffle=1),
    ]
    assert {parts_folder(root, settings) for settings in same} == {folder}
    others = [Settings("r50k_base"), Settings("gpt2", text_field="body")]
    assert len({folder, *(parts_folder(root, settings) for settings in others)}) == 3


def test_a_new_text_moves_few_borders_of_units(tmp_path: Path) -> None:
    inputs = [Input(f"{i}.txt", f"{i:05d}.txt", "text", "", 100, "0") for i in range(4000)]
    before = {unit.key for unit in plan_units(inputs, "text", 10_000)}
    new = Input("new.txt", "00000x.txt", "text", "", 100, "0")
    after = {unit.key for unit in plan_units([inputs[0], new, *inputs[1:]], "text", 10_000)}
    assert len(after - before) < 4 < 30 < len(after)


def test_numbers_in_few_words() -> None:
    assert describe_units([7, 0, 1, 2, 3]) == "0-3, 7"
    assert describe_units(range(0, 100, 2)).endswith("38, ...")
