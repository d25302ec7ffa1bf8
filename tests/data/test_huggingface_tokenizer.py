"""A tokenizer.json as tokenizer: every text comes back, and the file is not needed later."""

import json
from pathlib import Path

import numpy as np
import pytest

from gpt_lightning.commands.export import tokenizer_files
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.tokenizers import HuggingFaceTokenizer, build_tokenizer, tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.command import dataset_folder, prepare

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "",
    "plain words, and more words",
    "<|endoftext|> is text",
    " \u00e9t\u00e9 \U0001f600\x00\r\n\t  end ",
    "\u2581 is a character of its own" * 3,
]


def of_bytes(path: Path) -> Path:
    """Write a small tokenizer of bytes, with merges, padding and truncation."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    made.train_from_iterator(TEXTS * 20, trainer)
    made.enable_truncation(4)
    made.enable_padding(length=4)
    path.write_text(made.to_str(), encoding="utf-8")
    return path


def with_fallback(path: Path) -> Path:
    """Write a tokenizer as Llama 2's: words begin with U+2581, rare characters are bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "wo", "wor"]
    ids = {token: number for number, token in enumerate(tokens)}
    merges = [("w", "o"), ("wo", "r")]
    model = tokenizers.models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback()]
    made.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Fuse()])
    made.add_special_tokens(["<s>", "</s>"])
    path.write_text(made.to_str(), encoding="utf-8")
    return path


@pytest.mark.parametrize("write", [of_bytes, with_fallback])
def test_texts_come_back_from_a_spec_without_the_file(tmp_path: Path, write: object) -> None:
    path = write(tmp_path / "tokenizer.json")  # type: ignore[operator]
    made = build_tokenizer(str(path))
    path.unlink()
    again = tokenizer_from_spec(json.loads(json.dumps(made.spec())))
    assert (again.name, again.vocab_size, again.eot_token) == (
        made.name,
        made.vocab_size,
        made.eot_token,
    )
    assert made.name.startswith("tokenizer.json-")
    for text in TEXTS[:-1] if write is with_fallback else TEXTS:
        tokens = made.encode(text)
        assert again.decode(tokens) == text
        # a text that grows token by token, as samples do
        assert b"".join(again.decode_bytes([token]) for token in tokens) == text.encode()
        assert made.eot_token not in tokens.tolist()
    assert len(made.encode("words " * 50)) > 4  # not truncated
    with pytest.raises(UserError, match="half of a surrogate pair"):
        made.encode("\ud800")


@pytest.mark.slow
def test_a_mark_of_utf8_is_no_part_of_the_file(tmp_path: Path) -> None:
    plain = of_bytes(tmp_path / "tokenizer.json")
    marked = tmp_path / "marked.json"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert build_tokenizer(str(marked)).spec() == build_tokenizer(str(plain)).spec()


def test_gpt2_as_a_tokenizer_json_has_gpt2s_tokens(tmp_path: Path) -> None:
    gpt2 = build_tokenizer("gpt2")
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_files(gpt2, 1024)["tokenizer.json"], encoding="utf-8")
    made = build_tokenizer(str(path))
    assert (made.vocab_size, made.eot_token) == (gpt2.vocab_size, gpt2.eot_token)
    for text in TEXTS:
        assert made.encode(text).tolist() == gpt2.encode(text).tolist()
    assert all(made.decode_bytes([i]) == gpt2.decode_bytes([i]) for i in range(50257))


def test_export_writes_the_file_itself(tmp_path: Path) -> None:
    path = of_bytes(tmp_path / "tokenizer.json")
    files = tokenizer_files(build_tokenizer(str(path)), 64)
    assert files["tokenizer.json"] == path.read_text(encoding="utf-8")
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"


def test_tokenizers_that_lose_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    made.decoder = tokenizers.decoders.WordPiece()
    path.write_text(made.to_str())
    for content, said in {
        made.to_str(): "changes text",
        of_bytes(path).read_text().replace('"special":true', '"special":false'): "changes text",
        with_fallback(path).read_text().replace("<0x41>", "<0x4>"): "changes text",
        "{}": "expected a tokenizer.json of Hugging Face, found",
        "no json": "expected a tokenizer.json of Hugging Face, found",
        "[]": "expected a tokenizer.json of Hugging Face, found",
        made.to_str().replace("[UNK]", "\udcff"): "expected a tokenizer.json of Hugging Face",
    }.items():
        path.write_text(content, errors="surrogateescape")
        with pytest.raises(UserError, match=said):
            build_tokenizer(str(path))


def changed(path: Path, change: dict[str, object]) -> str:
    """Write a tokenizer of bytes, and change its description; return the path."""
    content = json.loads(of_bytes(path).read_text())
    for key, value in change.items():
        if key == "pre_tokenizer":
            value = content[key] | value  # type: ignore[operator]
        content[key] = content["added_tokens"] + value if key == "added_tokens" else value
    path.write_text(json.dumps(content))
    return str(path)


def added(content: str, **facts: object) -> dict[str, object]:
    names = ("special", "lstrip", "rstrip", "single_word", "normalized")
    return {"id": 300, "content": content} | dict.fromkeys(names, False) | facts


LOWER, NFC = {"type": "Lowercase"}, {"type": "NFC"}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": LOWER},
        {"normalizer": {"type": "Sequence", "normalizers": [NFC, LOWER]}},
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"add_prefix_space": True}},
        {"added_tokens": [added("<mask>", lstrip=True)]},
        {"added_tokens": [added("<mask>", rstrip=True)]},
        {"pre_tokenizer": {"type": "Whitespace"}},
    ],
)
def test_tokenizers_that_change_text(tmp_path: Path, change: dict[str, object]) -> None:
    path = changed(tmp_path / "tokenizer.json", change)
    with pytest.raises(UserError, match=r"tokenizer\.json changes text: ") as caught:
        build_tokenizer(path)
    assert "\n" not in str(caught.value)
    content = Path(path).read_text()  # an older dataset can be read
    assert tokenizer_from_spec({"name": "old", "json": content}).eot_token is not None


def test_tokenizers_that_keep_text(tmp_path: Path) -> None:
    for change in ({"normalizer": NFC}, {"added_tokens": [added("<tool>")]}):
        assert build_tokenizer(changed(tmp_path / "a.json", change)).decode([40]) != ""
    path = with_fallback(tmp_path / "b.json")  # with Llama's space before each text
    content = json.loads(path.read_text())
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [prepend, content["normalizer"]]}
    path.write_text(json.dumps(content))
    made = build_tokenizer(str(path))
    assert made.decode(made.encode("word")) == " word"


@pytest.mark.parametrize("name", ["docs.jsonl", "text.txt"])
def test_prepare_with_a_tokenizer_json(tmp_path: Path, name: str) -> None:
    path, source = of_bytes(tmp_path / "tokenizer.json"), tmp_path / name
    texts = [f"text {i}\n" for i in range(50)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    source.write_text("".join(lines if name == "docs.jsonl" else texts))
    folder = dataset_folder(str(source), str(path), tmp_path, 0.0)
    assert folder.parent == tmp_path
    prepare(str(source), str(path), data_dir=str(tmp_path), val_fraction=0.0, workers=1)
    made = build_tokenizer(str(path))
    path.rename(tmp_path / "moved.json")
    prepare(
        str(source), str(tmp_path / "moved.json"), str(folder), val_fraction=0.0, workers=1
    )  # the same one
    manifest = load_manifest(folder)
    assert str(tmp_path) not in json.dumps(manifest.settings)
    stream = TokenStream(folder, manifest, "train")
    tokens = stream.windows(np.array([0]), len(stream))[0]
    separator = "<|endoftext|>" if name == "docs.jsonl" else ""
    found = tokenizer_from_spec(manifest.tokenizer).decode(tokens)
    assert found == "".join(separator + text for text in texts)
    assert isinstance(made, HuggingFaceTokenizer)
