"""Reading: every document once, whatever file it is in, and a line for every damaged one."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gpt_lightning.errors import UserError
from gpt_lightning.prepare.readers import Documents, column_sizes
from gpt_lightning.prepare.sources import Input, find_inputs

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

# Everything that a careless reader changes or trips over.
TEXTS = [
    "plain",
    "",
    "<|endoftext|>",
    "\ufeffBOM, CRLF\r\n, NUL \x00, separators \u2028\u2029\x85",
    "\U0001f600 \u00e9t\u00e9",
    "   ",
    '{"text": "nested"}',
    "long " * 5000,
]


def lines(texts: list[str], ascii_only: bool = False) -> bytes:
    entries = [json.dumps({"id": 1, "text": text}, ensure_ascii=ascii_only) for text in texts]
    return "\n".join(entries).encode() + b"\n"


def jsonl(path: Path, texts: list[str]) -> None:
    path.write_bytes(lines(texts))


def gz(path: Path, texts: list[str]) -> None:
    half = len(texts) // 2  # two members, as `cat a.gz b.gz` makes
    path.write_bytes(gzip.compress(lines(texts[:half])) + gzip.compress(lines(texts[half:])))


def zst(path: Path, texts: list[str]) -> None:
    """Two frames, the second with a window of 256 MB, as in dumps of Reddit (zstd --long=28)."""
    half = len(texts) // 2
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    long = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    first = zstandard.ZstdCompressor().compress(lines(texts[:half]))
    path.write_bytes(first + long.compress(lines(texts[half:])) + long.flush())


def parquet(path: Path, texts: list[str]) -> None:
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    pq.write_table(table, path, row_group_size=3)


def categories(path: Path, texts: list[str]) -> None:
    column = pa.array(texts).dictionary_encode()
    pq.write_table(pa.table({"text": column}), path)


WRITERS: dict[str, tuple[str, Callable[[Path, list[str]], None]]] = {
    "jsonl": ("a.jsonl", jsonl),
    "gz": ("a.jsonl.gz", gz),
    "zst": ("a.jsonl.zst", zst),
    "parquet": ("a.parquet", parquet),
    "dictionary": ("a.parquet", categories),
}


def read(path: Path, errors: str = "strict", field: str = "text") -> tuple[list[str], Documents]:
    reader = Documents(field, errors)  # type: ignore[arg-type]
    texts = [text for entry in find_inputs(str(path)) for text, _ in reader.read(entry, 0, None)]
    return texts, reader


@pytest.mark.parametrize("writer", WRITERS)
def test_every_text_comes_back(tmp_path: Path, writer: str) -> None:
    name, write = WRITERS[writer]
    write(tmp_path / name, TEXTS)
    assert read(tmp_path / name)[0] == TEXTS


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.replace(b"\n", b"\r\n"),
        lambda content: b"\xef\xbb\xbf" + content,
        lambda content: content.removesuffix(b"\n"),
        lambda content: content.replace(b"\n", b"\n\n \t\n"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_line_ends_and_mark_are_no_text(tmp_path, change, compressed):
    content = change(lines(TEXTS, ascii_only=True))
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if compressed else content)
    assert read(path)[0] == TEXTS


def test_byte_ranges_share_the_lines_out(tmp_path: Path) -> None:
    # Wherever a file is cut, each line is read once: by the range that its first byte is in.
    rng = random.Random(0)
    texts = ["x" * rng.choice([0, 1, 5, 40, 300]) + str(i) for i in range(60)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(texts))
    (entry,) = find_inputs(str(path))
    size = path.stat().st_size
    for width in (*range(1, 40), 97, 1000, size - 1, size, size + 1):
        reader = Documents("text", "strict")
        found = [
            text
            for start in range(0, size, width)
            for text, _ in reader.read(entry, start, min(start + width, size))
        ]
        assert found == texts, width


def test_row_groups_share_the_rows_out(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", TEXTS)
    (entry,) = find_inputs(str(tmp_path / "a.parquet"))
    groups = len(column_sizes(entry, "text"))
    reader = Documents("text", "strict")
    ranges = [(group, group + 1) for group in range(groups)]
    found = [document for first, last in ranges for document in reader.read(entry, first, last)]
    assert [text for text, _ in found] == TEXTS
    assert [where() for _, where in found] == [
        f"{entry.path}, row {row}" for row in range(1, len(TEXTS) + 1)
    ]


# ---- damage --------------------------------------------------------------------------------------

BAD = {
    b"no json": "found no JSON (Expecting value)",
    b'{"text": "cut': "found no JSON (Unterminated string",
    b"[1]": "found [1]",
    b"null": "found null",
    b'{"body": "x"}': """found {"body": "x"} (--text_field""",
    b'{"text": null}': 'found {"text": null}',
    b'{"text": ["x"]}': 'found {"text": ["x"]}',
    b'{"text": "\\ud800 x"}': "is half of a surrogate pair",
    b'{"text": "\xff"}': "expected UTF-8, found byte 0xff at offset 10",
    b"[" * 100_000: "found no JSON (RecursionError",
    b'{"text": "\x00"}': "found no JSON (Invalid control character",
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_line(tmp_path: Path, bad: bytes, compressed: bool) -> None:
    content = lines(["first", "\u00e9"]) + b"\n" + bad + b"\n" + lines(["last"])
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(UserError) as caught:
        read(path)
    said = str(caught.value)
    assert said.startswith(f"{path}, line 4: ")
    assert BAD[bad] in said
    assert "--errors skip" in said
    assert "\n" not in said
    texts, reader = read(path, errors="skip")
    assert texts == ["first", "\u00e9", "last"]
    assert reader.skipped == 1


def test_replaced_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a\xffb\xc3"}\n{"text": "\\ud83d\\ude00 \\udc00 \xef\xbf\xbd"}\n')
    texts, reader = read(path, errors="replace")
    assert texts == ["a\ufffdb\ufffd", "\U0001f600 \ufffd \ufffd"]
    assert reader.replaced == 3  # the last was in the text
    path.write_bytes(b"[1]\n")
    with pytest.raises(UserError, match="expected a JSON object"):
        read(path, errors="replace")


def test_another_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "text": 1}\n')
    assert read(path, field="body")[0] == ["x"]


def test_bytes_that_are_no_text_in_parquet(tmp_path: Path) -> None:
    strings = pa.array([b"good", b"a\xff", None], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": strings}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 2: expected UTF-8"):
        read(tmp_path / "a.parquet")
    texts, reader = read(tmp_path / "a.parquet", errors="skip")
    assert (texts, reader.skipped) == (["good"], 2)
    with pytest.raises(UserError, match=r"row 3: expected a value .* found null"):
        read(tmp_path / "a.parquet", errors="replace")


@pytest.mark.parametrize("writer", ["gz", "zst"])
def test_a_cut_or_flipped_archive_is_never_a_shorter_one(tmp_path: Path, writer: str) -> None:
    name = WRITERS[writer][0]
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh \n", k=3000)) for _ in range(40)]
    path = tmp_path / name
    path.write_bytes(b"")
    assert read(path)[0] == []
    content = lines(texts)
    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    whole = gzip.compress(content) if writer == "gz" else compress(content)
    for cut in (1, 5, 17, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=f"{name}.*get it again|{name}.*no JSON"):
            read(path)
    for at in rng.sample(range(100, len(whole) - 100), 10):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(UserError):
            read(path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all", b"PAR1" * 10])
def test_no_parquet(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    (entry,) = find_inputs(str(path))
    with pytest.raises(UserError, match=r"a\.parquet: expected Parquet"):
        column_sizes(entry, "text")


def test_columns_that_hold_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "raw": [b"x"]}), path)
    (entry,) = find_inputs(str(path))
    for field, said in {
        "text": "expected a column 'text' of strings (--text_field)",
        "id": "found 'id' of int64, 'raw' of binary",
    }.items():
        with pytest.raises(UserError) as caught:
            column_sizes(entry, field)
        assert said in str(caught.value)


def test_a_text_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\xef\xbb\xbf\x00")
    entry = Input(str(path), "a.txt", "text", "", 9, "0")
    ((text, _),) = Documents("text", "strict").read(entry, 0, None)
    assert text == "one\r\n\ufeff\x00"
    path.write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"a\.txt: expected UTF-8, found byte 0xff at offset 2"):
        list(Documents("text", "strict").read(entry, 0, None))


@pytest.mark.parametrize("suffix", ["csv", "TSV"])
def test_a_column_of_a_table(tmp_path: Path, suffix: str) -> None:
    texts = ['a, ""b""\r\nc\td', "", "\u00e9", "long " * 40_000]
    border = "," if suffix == "csv" else "\t"
    path = tmp_path / f"a.{suffix}"
    rows = "".join(f'{i}{border}"{text}"\r\n' for i, text in enumerate(texts))
    path.write_text(f"\ufeffid{border}body\r\n{rows}", "utf-8", newline="")
    assert read(path, field="body")[0] == [text.replace('""', '"') for text in texts]
    with pytest.raises(UserError, match=r"expected a column named 'text' .*, found 'id', 'body'"):
        read(path)
    path.write_bytes(f"id{border}text\n1{border}a\n2\n3{border}".encode() + b"\xff\n")
    with pytest.raises(UserError, match=rf"a\.{suffix}, line 3: expected a value"):
        read(path)
    texts, reader = read(path, errors="skip")
    assert (texts, reader.skipped) == (["a"], 2)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="found nothing"):
        read(path)


def save_to_disk(folder: Path, texts: list[str]) -> None:
    """Write a dataset as Hugging Face's datasets does: two streams and descriptions."""
    folder.mkdir(parents=True)
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (texts[:30], texts[30:]), strict=True):
        table = pa.table({"id": range(len(part)), "text": part})
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def test_a_dataset_of_save_to_disk_is_its_texts(tmp_path: Path, capsys) -> None:
    texts = [f"text {i} " * (i % 5) + "ä" for i in range(50)]
    save_to_disk(tmp_path / "saved/train", texts)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    memory = MemoryFileSystem()
    memory.put(str(tmp_path / "saved"), "/saved", recursive=True)
    for source, prefix in (("memory://saved", "memory:///saved/"), (str(tmp_path / "saved"), "")):
        inputs = find_inputs(source)
        documents = Documents("text", "strict")
        assert [text for entry in inputs for text, _ in documents.read(entry, 0, None)] == texts
        assert f"skipped 3: {prefix}dataset_dict.json" in capsys.readouterr().out
    memory.rm("/saved", recursive=True)
    with pytest.raises(UserError, match=r"expected a column 'body' of strings .*, found 'id' of"):
        list(Documents("body", "strict").read(inputs[0], 0, None))
    cut = tmp_path / "cut.arrow"
    cut.write_bytes(Path(inputs[0].path).read_bytes()[:900])
    (entry,) = find_inputs(str(cut))
    with pytest.raises(UserError, match=r"cut\.arrow: expected .*Arrow.*, found damage"):
        list(Documents("text", "strict").read(entry, 0, None))


def test_an_array_beside_jsonl_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.json").write_text('\n[{"text": "b"}]')
    with pytest.raises(UserError, match=r"b\.json: expected a JSON object on each line"):
        find_inputs(str(tmp_path))


def test_jsonl_that_a_client_has_unpacked_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    (entry,) = find_inputs(str(path))
    assert [text for text, _ in Documents("text", "strict").read(entry, 0, None)] == ["a", "b"]
