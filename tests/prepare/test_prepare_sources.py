"""Files that SOURCE may name, and the names of the datasets made of them."""

import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from prepared import contents, naive, tokens_of
from served import Server, serving

from gpt_lightning.cli import main
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.command import dataset_folder, prepare
from gpt_lightning.prepare.sources import find_inputs, fingerprint, is_one_text

LINES = "".join(json.dumps({"text": f"document number {i}"}) + "\n" for i in range(40))


TEXTS = [json.loads(line)["text"] for line in LINES.splitlines()]


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


# ---- on this machine -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "docs.v1"
    (source / "sub").mkdir(parents=True)
    for name in ("b.jsonl", "sub/a.jsonl.gz", "c.parquet", "d.TXT", "README.md", ".e.txt", "f.gz"):
        (source / name).write_text("x")
    return source


def test_a_folder_and_a_glob(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["b.jsonl", "c.parquet", "d.TXT", "sub/a.jsonl.gz"]
    assert [entry.name for entry in find_inputs([str(folder)])] == names
    assert "skipped" in (said := capsys.readouterr().out)
    assert "README.md" in said
    assert "f.gz" in said
    assert [entry.name for entry in find_inputs([f"{folder}/**/*.jsonl*"])] == [
        "b.jsonl",
        "sub/a.jsonl.gz",
    ]
    kinds = [entry.kind for entry in find_inputs([str(folder)])]
    assert kinds == ["jsonl", "parquet", "text", "packed"]


def test_other_endings_of_jsonl(tmp_path: Path) -> None:
    """C4, Dolma and RedPajama name JSONL .json, and compress it."""
    names = ["a.json", "b.ndjson", "c.json.gz"]
    for name in names:
        content = LINES.replace("document", name).encode()
        packed = gzip.compress(content) if name.endswith("gz") else content
        (tmp_path / name).write_bytes(packed)
    prepare(str(tmp_path), out=str(tmp_path / "out"), val_fraction=0.0, workers=1)
    whole = [text.replace("document", name) for name in names for text in TEXTS]
    assert tokens_of(tmp_path / "out") == naive(whole)


def test_json_that_is_no_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "settings.json").write_text('{\n"text": "not a document"\n}\n')
    assert [entry.name for entry in find_inputs([str(tmp_path)])] == ["a.jsonl"]
    assert "skipped 1: settings.json" in capsys.readouterr().out
    for content in ('[{"text": "x"}]', '{\n"text": "x"}', ""):
        (tmp_path / "settings.json").write_text(content)
        with pytest.raises(UserError, match=r"holds no documents.* on each line .*jq -c"):
            prepare(str(tmp_path / "settings.json"), out=str(tmp_path / "out"))


def test_several_sources_are_a_glob(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name in "cab":
        (folder / f"{name}.jsonl").write_text(LINES.replace("document", name))
    pattern = f"{folder}/*.jsonl"
    listed = [f"{folder}/{name}.jsonl" for name in "bcab"]  # one twice
    assert find_inputs(listed) == find_inputs([pattern])
    assert (
        dataset_folder(listed, "gpt2") == dataset_folder(pattern, "gpt2") == Path("data/docs-gpt2")
    )
    for words, out in (([pattern], "glob"), (listed, "list")):
        assert main(["prepare", *words, "--out", str(tmp_path / out), "--workers=1"]) == 0
    assert contents(tmp_path / "glob") == contents(tmp_path / "list")
    (tmp_path / "more.txt").write_text("a text")
    names = [entry.name for entry in find_inputs([str(folder), str(tmp_path / "more.txt")])]
    assert names == ["docs/a.jsonl", "docs/b.jsonl", "docs/c.jsonl", "more.txt"]
    for wrong in ("-", "tinyshakespeare", "a.txt", "nowhere.jsonl"):
        with pytest.raises(UserError, match=f"{wrong}.*no such file"):
            prepare([pattern, wrong], out=str(tmp_path / "none"))


def test_links_are_followed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = tmp_path / "in", tmp_path / "other"
    (source / "sub").mkdir(parents=True)
    (other / "deep").mkdir(parents=True)
    for path in (source / "a.jsonl", other / "b.jsonl", other / "deep" / "c.jsonl"):
        path.write_text(LINES)
    (source / "link").symlink_to(other)
    (source / "sub" / "loop").symlink_to(source)
    (source / "sub" / "again").symlink_to(other / "deep")
    (source / "gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    (source / "file.jsonl").symlink_to(source / "a.jsonl")
    names = [entry.name for entry in find_inputs([str(source)])]
    assert names == ["a.jsonl", "link/b.jsonl", "link/deep/c.jsonl"]
    assert capsys.readouterr().out == "skipped 1: gone.jsonl\n"
    assert len(find_inputs([f"{source}/**/*.jsonl"])) == 3


def test_a_glob_descends_as_a_shells_words(folder, tmp_path, capsys):
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    shell = [str(path) for path in sorted(folder.iterdir()) if path.exists()]
    names = [entry.name for entry in find_inputs(shell) if not entry.name.startswith(".")]
    capsys.readouterr()
    assert [entry.name for entry in find_inputs([f"{folder}/*"])] == names
    assert "sub/a.jsonl.gz" in names
    assert "gone.jsonl" in capsys.readouterr().out
    assert [entry.name for entry in find_inputs([f"{folder}/**/s*"])] == ["a.jsonl.gz"]
    assert [entry.name for entry in find_inputs([f"{folder}/**/*"])] == names


@pytest.mark.parametrize("rest", ["", "/*.jsonl", "/**/*.jsonl", "/a.jsonl"])
def test_brackets_in_a_name(tmp_path: Path, rest: str) -> None:
    source = tmp_path / "news [2024]"
    source.mkdir()
    (source / "a.jsonl").write_text(LINES)
    assert [entry.name for entry in find_inputs([f"{source}{rest}"])] == ["a.jsonl"]


MAGIC = {
    "gzip": gzip.compress(b"x"),
    "zstd": b"\x28\xb5\x2f\xfd and more",
    "parquet": b"PAR1",
    "zip": b"PK\x03\x04",
    "utf-16": "text".encode("utf-16"),
    "utf-32": "text".encode("utf-32"),
    "pdf": b"%PDF-1.4",
}


@pytest.mark.parametrize("content", MAGIC.values(), ids=MAGIC)
def test_packed_bytes_are_never_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a.jsonl", "a.txt", "folder/a.txt"):
        (tmp_path / name).write_bytes(content + b"\n" + LINES.encode())
        source = tmp_path / name.removesuffix("/a.txt")
        for errors in ("strict", "skip"):
            if (errors, name) == ("skip", "a.txt"):
                continue  # one text has no documents to skip
            with pytest.raises(UserError, match=r"a\.\w+ is not UTF-8 text: "):
                prepare(str(source), out=str(tmp_path / "out"), errors=errors, workers=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["part-00000", "a.jl", "-"])
@pytest.mark.parametrize("content", [LINES, '[\n {"a": 1}]'])
def test_json_under_another_name_is_never_text(tmp_path, monkeypatch, name, content):
    path, out = tmp_path / name, tmp_path / "out"
    path.write_text(content)
    if name == "-":
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    if (name, content) == ("-", LINES):
        prepare("-", out=str(out))
        return
    with pytest.raises(UserError, match=r"begins as JSON: .* end in \.jsonl"):
        prepare("-" if name == "-" else str(path), out=str(out), tokenizer="byte")
    prepare(str(path.rename(tmp_path / "a.txt")), out=str(out), tokenizer="byte")


def test_a_json_whose_first_line_is_damaged(tmp_path: Path) -> None:
    path, out = tmp_path / "a.json", tmp_path / "out"
    path.write_text(f'{{"text": "cut off\n{LINES}')
    with pytest.raises(UserError, match="line 1: damaged document"):
        prepare(str(path), out=str(out), workers=1)
    prepare(str(tmp_path), out=str(out), workers=1, errors="skip")
    assert load_manifest(out).settings["skipped"] == 1


@pytest.mark.parametrize("encoding", ["utf-16le", "utf-16be"])
def test_utf16_without_a_mark(tmp_path: Path, encoding: str) -> None:
    content = LINES.encode(encoding)
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        with pytest.raises(UserError, match=f"not UTF-8 text: .*{encoding[:-2]}"):
            prepare(str(tmp_path / name), out=str(tmp_path / "out"), workers=1)
    (tmp_path / "a.txt").write_bytes("\u4e2d\u6587\u5b57 ".encode(encoding))  # few NUL bytes
    for source in (tmp_path / "a.txt", tmp_path / "*.txt"):
        with pytest.raises(UserError, match=r"a\.txt.* .?(UTF-8|utf-8)"):
            prepare(str(source), out=str(tmp_path / "out"), workers=1)


def test_sources_without_documents(folder: Path) -> None:
    with pytest.raises(UserError, match=r"holds no documents: expected \.txt, \.csv"):
        find_inputs([f"{folder}/*.md"])
    with pytest.raises(UserError, match="no file matches"):
        find_inputs([f"{folder}/*.none"])
    assert is_one_text(str(folder / "d.TXT"))
    with pytest.raises(UserError, match=r"no-such-file\.jsonl: no such file"):
        prepare("no-such-file.jsonl", data_dir=str(folder))


def test_the_fingerprint_stays_if_a_folder_moves(folder: Path, tmp_path: Path) -> None:
    before = fingerprint(find_inputs([str(folder)]))
    folder.rename(tmp_path / "moved")
    moved = tmp_path / "moved"
    assert fingerprint(find_inputs([str(moved)])) == before


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("a/wiki.jsonl.gz", "wiki"),
        ("a/docs/*.jsonl", "docs"),
        ("-", "stdin"),
        ("https://host/a/wiki.jsonl.zst?download=true", "wiki"),
        ("s3://bucket/docs/*.parquet", "docs"),
        ("hf:org/fineweb-1.5", "fineweb-1.5"),
    ],
)
def test_names_of_datasets(source: str, name: str) -> None:
    assert dataset_folder(source, "gpt2", "data") == Path("data") / f"{name}-gpt2"


def test_a_folder_of_texts(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    for name, text in {"b.txt": "second", "a.txt": "first\r\n", "c.jsonl": LINES}.items():
        (source / name).write_bytes(text.encode())
    prepare(str(source), out=str(tmp_path / "out"), val_fraction=0.0, workers=1)
    assert tokens_of(tmp_path / "out") == naive(["first\r\n", "second", *TEXTS])


# ---- standard input ------------------------------------------------------------------------------


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_standard_input(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    for _ in range(2):
        feed(monkeypatch, LINES.encode())
        prepare("-", out=str(out), val_fraction=0.0, workers=1)
    assert "is already prepared" in capsys.readouterr().out
    assert tokens_of(out) == naive(TEXTS)
    feed(monkeypatch, LINES.replace("40", "41").encode() + b"\n")
    with pytest.raises(UserError, match="prepared with inputs"):
        prepare("-", out=str(out), val_fraction=0.0, workers=1)
    feed(monkeypatch, LINES.encode() + b"bad")
    with pytest.raises(UserError, match="standard input, line 41: damaged document"):
        prepare("-", out=str(tmp_path / "bad"), workers=1)
    feed(monkeypatch, b"one text, not documents\n" * 9)
    prepare("-", "char", out=str(tmp_path / "text"))
    assert load_manifest(tmp_path / "text").source.name == "stdin"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text"]


# ---- URLs ----------------------------------------------------------------------------------------


def test_a_file_behind_a_url(memory: MemoryFileSystem, tmp_path: Path) -> None:
    memory.pipe("/docs/a.jsonl", LINES.encode())
    memory.pipe("/docs/notes.md", b"no document")
    for number, source in enumerate(["memory://docs/a.jsonl", "memory://docs/*.jsonl"]):
        out = tmp_path / f"out{number}"
        prepare(source, out=str(out), val_fraction=0.0, workers=1)
        assert tokens_of(out) == naive(TEXTS)
    memory.pipe("/docs/novel.txt", b"one text behind a URL\n" * 9)
    prepare("memory://docs/novel.txt", "char", data_dir=str(tmp_path))
    assert load_manifest(tmp_path / "novel-char").tokens("train") > 100


def test_urls_that_lead_nowhere(memory: MemoryFileSystem, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for source, said in {
        "memory://none.jsonl": r"cannot read memory://+none\.jsonl: no such file",
        "memory://none/*.jsonl": "holds no documents",
        "memory://none.txt": r"cannot read memory://+none\.txt: no such file",
        "nosuch://x/a.jsonl": "nosuch://x/a.jsonl: Protocol not known: nosuch",
    }.items():
        with pytest.raises(UserError, match=said):
            prepare(source, out=out, workers=1)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("gpt_lightning.remote.attempts.BACKOFF_S", 0.001)
    monkeypatch.setattr("gpt_lightning.remote.attempts.PATIENCE_S", 1.0)
    (tmp_path / "web").mkdir()
    with serving(tmp_path / "web") as found:
        yield found


NAMES = ["a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet"]


def put(server: Server, name: str, text: str = LINES) -> str:
    """Write documents behind a URL, of more than one read; return the URL."""
    texts = [json.loads(line)["text"] for line in text.splitlines()]
    content = {".gz": gzip.compress, "parquet": lambda _: parquet_bytes(texts)}
    made = content.get(Path(name).suffix.replace(".p", "p"), bytes)(text.encode())
    (server.folder / name).write_bytes(made)
    return f"{server.url}/{name}"


@pytest.mark.slow  # aiohttp's import
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranges", [False, True])
def test_lost_connections_and_busy_servers(server, tmp_path, name, ranges):
    url = put(server, name, LINES * 900)
    server.headers = {"Accept-Ranges": "bytes"} if ranges else {}
    server.busy, server.cut = {name: 2}, {name: 3}
    prepare(url, "byte" if name == "a.txt" else "gpt2", out=str(tmp_path / "out"), workers=1)
    path = str(server.folder / name)
    prepare(path, "byte" if name == "a.txt" else "gpt2", out=str(tmp_path / "own"), workers=1)
    assert tokens_of(tmp_path / "out") == tokens_of(tmp_path / "own")
    assert server.cut[name] == server.busy[name] == 0


@pytest.mark.slow
def test_a_server_that_stays_busy_and_one_that_is_gone(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gpt_lightning.prepare.sources.PATIENCE_S", 0.0)
    url = put(server, "a.jsonl")
    for busy in ({"a.jsonl": 10**6}, {"": 10**6}):
        server.busy = busy
        with pytest.raises(UserError, match=r"cannot \w+ http.*503.*run the same command again"):
            prepare(url if "a.jsonl" in busy else f"{server.url}/", out=str(tmp_path / "out"))
    with pytest.raises(UserError, match="no such file"):
        prepare(url.replace("a.j", "b.j"), out=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9.*check the address"):
        prepare("http://127.0.0.1:9/a.jsonl", out=str(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["ETag", "Last-Modified"])
def test_documents_behind_a_url_that_change_in_place(server, tmp_path, capsys, key):
    url, out = put(server, "a.jsonl"), str(tmp_path / "out")
    server.headers = {key: "1"}
    for _ in range(2):
        prepare(url, out=out, workers=1)
    assert "is already prepared" in capsys.readouterr().out
    put(server, "a.jsonl", LINES.replace("document", "DOCUMENT"))  # the size stays the same
    server.headers = {key: "2"}
    with pytest.raises(UserError, match="prepared with inputs"):
        prepare(url, out=out, workers=1)


class Hub(MemoryFileSystem):  # type: ignore[misc]
    """The hub's file system as fsspec knows it, with files in memory."""

    protocol = "hf"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("hf://").strip("/")

    def unstrip_protocol(self, name: str) -> str:
        return "hf://" + name.strip("/")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", Hub)
    yield Hub()
    Hub.store.clear()


def parquet_bytes(texts: list[str]) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), sink)
    return sink.getvalue()


def test_a_dataset_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    texts = TEXTS
    address = "datasets/org/name@refs/convert/parquet"
    for path, part in {
        "default/train/0000.parquet": texts[:10],
        "default/train/0001.parquet": texts[10:],
        "en/test/0000.parquet": texts[:5],
        "large/partial-train/0000.parquet": texts[:5],
    }.items():
        hub.pipe(f"/{address}/{path}", parquet_bytes(part))
    prepare("hf:org/name", data_dir=str(tmp_path), val_fraction=0.0, workers=1)
    assert tokens_of(tmp_path / "name-gpt2-val0") == naive(TEXTS)
    prepare("hf:org/name:en:test", out=str(tmp_path / "en"), val_fraction=0.0, workers=1)
    assert load_manifest(tmp_path / "en").settings["documents"] == 5
    for source, said in {
        "hf:org/name:large": "hf:org/name:large holds no documents: .*branch refs/convert/parquet",
        "hf:": "expected hf:OWNER/NAME",
        "hf:a:b:c:d": "expected hf:OWNER/NAME",
    }.items():
        with pytest.raises(UserError, match=said):
            prepare(source, out=str(tmp_path / "none"), workers=1)
