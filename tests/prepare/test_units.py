"""Units are a pure function of the inputs; parts are whole or not there."""

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from gpt_lightning.data.tokenizers import build_tokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.documents import Documents
from gpt_lightning.prepare.inputs import Input, find_inputs
from gpt_lightning.prepare.parts import Part, PartWriter, read_blocks, read_part
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.units import (
    Job,
    describe_units,
    discard_parts,
    open_parts,
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
    part = run_unit(job, unit)
    assert read_part(job.part(unit)) == part
    gpt2 = build_tokenizer("gpt2")
    expected = [[gpt2.eot_token, *gpt2.encode(text).tolist()] for text in texts]
    (block,) = read_blocks(job.part(unit), part, UINT16)
    assert block.tokens.tolist() == list(itertools.chain(*expected))
    assert block.lengths.tolist() == [len(tokens) for tokens in expected]
    assert (part.documents, part.tokens) == (len(texts), len(block.tokens))
    assert part.text_bytes == sum(len(text.encode()) for text in texts)


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
        blocks = list(read_blocks(tmp_path / "a.part", part, UINT16))
        assert np.concatenate([block.tokens for block in blocks]).tolist() == list(
            itertools.chain(*documents)
        )
        digests = np.concatenate([block.digests for block in blocks]).tobytes()
        texts = [str(i).encode() for i in range(50)]
        assert digests == b"".join(hashlib.sha256(text).digest() for text in texts)


def test_every_flipped_bit_of_a_part_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.part"
    part = write_part(path, [[1, 2, 3], [4], [5, 6]])
    content = path.read_bytes()
    blocks = 16 + 3 * 8 + 3 * 32 + 6 * 2
    for at in range(blocks * 8):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.part is damaged.*run the same command again"):
            list(read_blocks(path, part, UINT16))
        assert not path.exists()  # the next run makes it anew


def test_half_a_part_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.part"
    write_part(path, [[1, 2, 3], [4]])
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert read_part(path) is None, size
    assert read_part(tmp_path / "none.part") is None


def test_nothing_is_left_of_a_unit_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\nbad\n')
    (unit,) = plan_units(find_inputs(str(path)), "text")
    job = job_of(tmp_path)
    with pytest.raises(UserError, match="line 2"):
        run_unit(job, unit)
    assert not list(job.parts.iterdir())


def test_an_input_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n')
    (unit,) = plan_units(find_inputs(str(path)), "text")
    path.write_text('{"text": "hood"}\n' * 2)
    job = job_of(tmp_path)
    with pytest.raises(UserError, match=r"a\.jsonl changed while it was read"):
        run_unit(job, unit)
    assert not list(job.parts.iterdir())


def test_text_that_tiktoken_refuses_is_a_damaged_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" + " " * 2_000_000 + "y"}) + '\n{"text": "good"}\n')
    (unit,) = plan_units(find_inputs(str(path)), "text")
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: tiktoken cannot tokenize"):
        run_unit(job_of(tmp_path), unit)
    part = run_unit(job_of(tmp_path, errors="skip"), unit)
    assert (part.documents, part.skipped) == (1, 1)


def test_the_folder_of_parts_is_of_one_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path / "parts", Settings("gpt2"), "inputs")
    open_parts(job, 3)
    mark = job.parts / "mark"
    mark.touch()
    open_parts(job, 3)
    # How parts are put together is no matter of theirs.
    open_parts(Job(job.parts, Settings("gpt2", 0.3, 0.2, 7, format="llmc"), "inputs"), 3)
    assert mark.exists()
    assert not capsys.readouterr().out
    others = [
        (Settings("gpt2"), "other inputs", 3),
        (Settings("gpt2"), "inputs", 4),
        (Settings("r50k_base"), "inputs", 3),
        (Settings("gpt2", errors="skip"), "inputs", 3),
        (Settings("gpt2", text_field="body"), "inputs", 3),
    ]
    for settings, inputs, count in others:
        open_parts(job, 3)
        capsys.readouterr()
        mark.touch()
        open_parts(Job(job.parts, settings, inputs), count)
        assert "is of other inputs or settings: starting again" in capsys.readouterr().out
        assert not mark.exists()
    discard_parts(job)  # the folder is of the last one's work
    assert job.parts.exists()
    discard_parts(Job(job.parts, others[-1][0], "inputs"))
    assert not list(tmp_path.iterdir())


def test_numbers_in_few_words() -> None:
    assert describe_units([7, 0, 1, 2, 3]) == "0-3, 7"
    assert describe_units(range(0, 100, 2)).endswith("38, ...")
