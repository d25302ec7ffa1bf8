"""A vocabulary of one's own, bpe:N, and bits per byte, by which models of other tokens compare."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from prepared import contents, tokens_of
from tiny_fit import TINY_MODEL, rows

from gpt_lightning.cli import main
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.tokenizers import tokenizer_from_spec, train_bpe

TEXT = "".join(f"Слово {n} и 文字{n * n}, the {n}th word.\n\n" for n in range(400))
CUT = len(TEXT) * 9 // 10  # int(0.9 n), as all splits of one text


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text(TEXT, encoding="utf-8")


def documents(texts: list[str], path: str) -> None:
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    Path(path).write_text("".join(lines))


def fit(name: str, *options: str) -> int:
    own = ("--data.text_file=my.txt", "--data.batch_size=4", "--trainer.limit_val_batches=1.0")
    steps = ("--trainer.val_check_interval=4", "--trainer.check_val_every_n_epoch=null")
    return main(["fit", *TINY_MODEL, *own, *steps, f"--run_name={name}", *options])


def test_it_is_trained_on_the_training_characters_alone():
    for out in ("a", "b"):
        assert main(["prepare", "my.txt", "--tokenizer", "bpe:300", "--out", out]) == 0
    assert contents(Path("a")) == contents(Path("b"))
    manifest = load_manifest(Path("a"))
    own = tokenizer_from_spec(manifest.tokenizer)
    assert own.vocab_size == manifest.vocab_size == 300
    assert own.spec()["json"] == train_bpe("bpe:300", [TEXT[:CUT]]).content
    assert own.spec()["json"] != train_bpe("bpe:300", [TEXT]).content
    assert Path("a/tokenizer.json").read_text() == own.spec()["json"]
    assert own.decode(tokens_of(Path("a"))) == TEXT
    theirs = tokenizers.Tokenizer.from_file("a/tokenizer.json")
    assert tokens_of(Path("a"), "train") == theirs.encode(TEXT[:CUT]).ids
    assert manifest.text_bytes == {
        "train": len(TEXT[:CUT].encode()),
        "val": len(TEXT[CUT:].encode()),
    }


def test_documents_are_held_out_of_the_training(capsys):
    texts = [f"документ {n}: {'слово ' * (n % 5)}{n * n}" for n in range(300)]
    documents(texts, "all.jsonl")
    command = ["prepare", "all.jsonl", "--tokenizer", "bpe:280"]
    for workers in ("1", "2"):
        assert main([*command, "--out", workers, "--workers", workers]) == 0
    one, two = contents(Path("1")), contents(Path("2"))
    assert one == two
    manifest, own = load_manifest(Path("1")), tokenizers.Tokenizer.from_file("1/tokenizer.json")
    held = [own.decode([t for t in tokens_of(Path("1"), "val") if t])]  # 0: the end-of-text token
    kept = [text for text in texts if text not in held[0]]
    assert 200 < len(kept) < 300
    assert own.to_str() == train_bpe("bpe:280", kept).content
    assert manifest.text_bytes["train"] == sum(len(text.encode()) for text in kept)
    assert not list(Path().glob(".1.parts*"))
    capsys.readouterr()
    assert main([*command, "--out", "1"]) == 0
    assert "already prepared" in capsys.readouterr().out


def test_it_is_made_again_after_a_kill(monkeypatch):
    texts = [f"document {n * n}" for n in range(300)]
    documents(texts, "all.jsonl")
    command = ["prepare", "all.jsonl", "--tokenizer", "bpe:280", "--workers", "1", "--out"]
    assert main([*command, "whole"]) == 0

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gpt_lightning.prepare.documents.make_unit", killed)
        assert main([*command, "again"]) == 130
        patch.setattr("gpt_lightning.prepare.documents.train_bpe", killed)  # it is there
        assert main([*command, "again"]) == 130
    assert main([*command, "again"]) == 0
    assert contents(Path("again")) == contents(Path("whole"))


@pytest.mark.parametrize(
    ("tokenizer", "options", "message"),
    [
        ("bpe:256", [], "tokenizer is bpe:256; expected bpe:N, N from 257: try bpe:8192"),
        ("bpe:", [], "tokenizer is bpe:; expected bpe:N"),
        ("bpe:1e3", [], "tokenizer is bpe:1e3; expected bpe:N"),
        ("bpe:99999", [], "makes {} tokens at most: try bpe:{}"),
        ("bpe:300", ["--format=nanogpt"], "bpe:300: nanoGPT has the tokenizers char and gpt2"),
        ("bpe:300", ["--text_field=ids"], "row 1: damaged document, expected text in the field"),
    ],
)
def test_what_cannot_be_trained_is_an_error(tokenizer, options, message, capsys):
    source = "my.txt"
    if options:
        import pyarrow as pa
        import pyarrow.parquet as pq

        source = "ids.parquet"
        pq.write_table(pa.table({"ids": [[1, 2, 3]], "text": ["abc"]}), source)
    assert main(["prepare", source, f"--tokenizer={tokenizer}", "--out=new", *options]) == 2
    error = capsys.readouterr().err
    most = error.partition("try bpe:")[2].strip()
    assert message.format(f"{int(most):,}" if "{}" in message else "", most) in error
    assert not Path("new").exists()
    if "{}" in message:  # the fix works when typed
        assert main(["prepare", source, f"--tokenizer=bpe:{most}", "--out=new"]) == 0


def test_bits_per_byte_are_logged_and_listed(capsys):
    for tokenizer in ("char", "byte", "bpe:300"):
        name = tokenizer.replace(":", "")
        assert fit(name, f"--data.tokenizer={tokenizer}", "--trainer.max_steps=4") == 0
        assert "bits per byte, best" in capsys.readouterr().out
        row = rows(name)[-1]
        tokens = np.load(f"data/my-{name}/val-00000.npy")
        nats = row["val/loss"] * len(tokens)
        expected = nats / len(TEXT[CUT:].encode()) / math.log(2)
        assert row["val/bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    assert main(["runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert all(0 < run["bits_per_byte"] < 8 for run in listed)
    assert main(["runs", "lightning_logs/byte", "lightning_logs/bpe300"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out


def test_a_split_of_empty_documents_can_be_read():
    documents(["", "", "document 1", "document 2"], "all.jsonl")  # the hash of "" is 0.079
    assert main(["prepare", "all.jsonl", "--out=all", "--val_fraction=0.08"]) == 0
    assert load_manifest(Path("all")).text_bytes == {"train": 20, "val": 0}
    assert main(["data", "verify", "all"]) == 0


def test_export_has_the_same_ids(capsys):
    transformers = pytest.importorskip("transformers")
    assert fit("run", "--data.tokenizer=bpe:300", "--trainer.max_steps=4") == 0
    assert main(["export", "lightning_logs/run", "--to", "hf"]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained("hf")
    ids = [*theirs(TEXT[:CUT])["input_ids"], *theirs(TEXT[CUT:])["input_ids"]]
    assert ids == tokens_of(Path("data/my-bpe300"))
    capsys.readouterr()
    assert main(["sample", "hf", "--max_new_tokens=8", "--prompt=Слово", "--seed=1"]) == 0
    ours = capsys.readouterr().out
    assert (
        main(["sample", "lightning_logs/run", "--max_new_tokens=8", "--prompt=Слово", "--seed=1"])
        == 0
    )
    assert ours.split("\n", 1)[1] == capsys.readouterr().out.split("\n", 1)[1]
