"""Reading: every document once, whatever file it is in, and a line for every damaged one."""

import gzip
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpt_lightning.errors import UserError
from gpt_lightning.prepare.readers import Reader, group_sizes
from gpt_lightning.prepare.settings import Settings
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


def read(path: Path, errors: str = "strict", field: str = "text") -> tuple[list[str], int]:
    """Return the texts of a file, and the number of damaged documents."""
    (entry,) = find_inputs([str(path)])
    settings = Settings("gpt2", errors=errors, text_field=field)  # type: ignore[arg-type]
    reader = Reader(entry, path.parent, settings)
    return list(reader.texts()), reader.skipped


STRICT = Settings("gpt2")


def read_part(entry: Input, start: int, stop: int) -> list[str]:
    part = replace(entry, start=start, stop=stop)
    return list(Reader(part, Path(entry.path).parent, STRICT).texts())


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
    (entry,) = find_inputs([str(path)])
    size = path.stat().st_size
    for width in (*range(1, 40), 97, 1000, size - 1, size, size + 1):
        starts = range(0, size, width)
        found = [read_part(entry, start, min(start + width, size)) for start in starts]
        assert list(itertools.chain(*found)) == texts, width


def test_row_groups_share_the_rows_out(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, [*TEXTS, None])  # type: ignore[list-item]
    (entry,) = find_inputs([str(path)])
    last = len(group_sizes(entry)) - 1
    found = [read_part(entry, group, group + 1) for group in range(last)]
    assert list(itertools.chain(*found)) == TEXTS[: 3 * last]
    with pytest.raises(UserError, match=rf"{path}, row {len(TEXTS) + 1}: damaged document"):
        read_part(entry, last, last + 1)


# ---- damage --------------------------------------------------------------------------------------

BAD = {
    b"no json": "damaged document, Expecting value: column 1",
    b'{"text": "cut': "damaged document, Unterminated string",
    b"[1]": "expected text in the field 'text', found [1]",
    b"null": "found None",
    b'{"body": "x"}': "found {'body': 'x'} (--text_field",
    b'{"text": null}': "found None",
    b'{"text": ["x"]}': "found ['x']",
    b'{"text": "\xff"}': "can't decode byte 0xff in position 10",
    b"[" * 100_000: "maximum recursion depth",
    b'{"text": "\x00"}': "Invalid control character",
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
    assert read(path, errors="skip") == (["first", "\u00e9", "last"], 1)


def test_damage_in_the_middle_of_a_file_is_named_by_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([f"text {i}" for i in range(50)]) + b"bad\n" + lines(["last"]))
    (entry,) = find_inputs([str(path)])
    for start in range(1, path.read_bytes().index(b"bad"), 7):
        with pytest.raises(UserError, match=rf"{path}, line 51: damaged document"):
            read_part(entry, start, entry.size)


def test_another_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "text": 1}\n')
    assert read(path, field="body")[0] == ["x"]


def test_bytes_that_are_no_text_in_parquet(tmp_path: Path) -> None:
    strings = pa.array([b"good", b"a\xff", None], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": strings}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 2: damaged document, .*byte 0xff"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", errors="skip") == (["good"], 2)


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
        with pytest.raises(UserError, match=f"{name} cannot be read as packed .* get it again"):
            read(path)
    for at in rng.sample(range(100, len(whole) - 100), 10):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(UserError):
            read(path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all", b"PAR1" * 10])
def test_no_parquet(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    (entry,) = find_inputs([str(path)])
    with pytest.raises(UserError, match=r"a\.parquet cannot be read as parquet"):
        group_sizes(entry)


def test_columns_that_hold_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "raw": [b"x"]}), path)
    with pytest.raises(UserError, match=r"expected a column 'text' .*, found 'id', 'raw'"):
        read(path)
    with pytest.raises(UserError, match=r"row 1: .* expected text in the field 'id', found 1"):
        read(path, field="id")


def test_a_text_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\xef\xbb\xbf\x00")
    assert read(path)[0] == ["one\r\n\ufeff\x00"]
    path.write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"a\.txt: damaged document, .*byte 0xff in position 2"):
        read(path)


@pytest.mark.parametrize("suffix", ["csv", "TSV"])
def test_a_column_of_a_table(tmp_path: Path, suffix: str) -> None:
    texts = ['a, ""b""\r\nc\td', "", "\u00e9", "long " * 40_000]
    border = "," if suffix == "csv" else "\t"
    path = tmp_path / f"a.{suffix}"
    rows = "".join(f'{i}{border}"{text}"\r\n' for i, text in enumerate(texts))
    path.write_text(f"\ufeffid{border}body\r\n{rows}", "utf-8", newline="")
    assert read(path, field="body")[0] == [text.replace('""', '"') for text in texts]
    with pytest.raises(UserError, match=r"expected a column 'text' .*, found 'id', 'body'"):
        read(path)
    path.write_bytes(f"id{border}text\n1{border}a\n2\n3{border}".encode() + b"\xff\n")
    with pytest.raises(UserError, match=rf"a\.{suffix}, line 3: .* found None"):
        read(path)
    assert read(path, errors="skip") == (["a"], 2)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="found nothing"):
        read(path)


def test_jsonl_that_a_client_has_unpacked_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert read(path)[0] == ["a", "b"]
