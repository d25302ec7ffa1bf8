"""Weights of GPT-2s from other programs: their logits, and what is no GPT-2."""

import dataclasses
import json
import os
import pickle

import pytest
import torch

from gpt_lightning.data.tokenizers import gpt2_file
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.huggingface import has_gpt2_tokens
from gpt_lightning.model.weights import Pretrained
from gpt_lightning.runs.sources import (
    check_tokens,
    initial_weights,
    load_model,
    read_source,
    tokenizer_of,
    with_tokenizer,
)

transformers = pytest.importorskip("transformers")

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=65, activation="gelu")
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 65}
CHARACTERS = [chr(i) for i in range(40, 105)]


def shaken(model):
    """Return a model whose biases are not 0 and whose gains are not 1."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.fixture
def tokens():
    return torch.randint(65, (3, 64), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def theirs():
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**SHAPE, **ends, activation_function="gelu")
    return shaken(transformers.GPT2LMHeadModel(config))


def nanogpt_checkpoint(folder, gpt, **changes):
    """Write what nanoGPT's train.py writes of a compiled model."""
    arguments = {key: getattr(gpt.config, key) for key in SHAPE if key != "n_positions"}
    arguments |= {"block_size": 64, "bias": gpt.config.bias, "dropout": 0.2}
    content = {
        "model": {f"_orig_mod.{k}": v for k, v in gpt.state_dict().items()},
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": arguments,
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare_char"},
    }
    folder.mkdir(exist_ok=True)
    torch.save(content | changes, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def write_meta(folder, characters=CHARACTERS):
    folder.mkdir(parents=True, exist_ok=True)
    itos = dict(enumerate(characters))
    meta = {"vocab_size": 65, "itos": itos, "stoi": {c: i for i, c in itos.items()}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def save(theirs, folder, form):
    """Save a model of transformers in one of the forms of its weights."""
    if form == "safetensors":
        theirs.save_pretrained(folder)
    elif form == "several safetensors":
        theirs.save_pretrained(folder, max_shard_size="40KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
    else:
        theirs.config.save_pretrained(folder)
        weights = theirs.state_dict()
        old = {"_use_new_zipfile_serialization": form != "legacy bin"}
        if form != "several bins":
            torch.save(weights, folder / "pytorch_model.bin", **old)
            return
        names = sorted(weights)
        parts = {"a.bin": names[:9], "b.bin": names[9:]}
        for file, part in parts.items():
            torch.save({name: weights[name] for name in part}, folder / file)
        index = {name: file for file, part in parts.items() for name in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize(
    "form", ["safetensors", "several safetensors", "bin", "legacy bin", "several bins"]
)
def test_every_form_of_hugging_face_has_its_logits(form, theirs, tokens, tmp_path):
    save(theirs, tmp_path, form)
    model = read_source(tmp_path).model()
    with torch.no_grad():
        # float32 on both sides, other sums: 1e-6 is seen at logits up to 4
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=5e-6, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt(bias, tokens, tmp_path):
    model = shaken(GPT(dataclasses.replace(TINY, bias=bias)))
    path = nanogpt_checkpoint(tmp_path / "out", model)
    found = read_source(path)
    assert found.figures == {"step": 250, "val_loss": 1.5}
    assert found.tokenizer is None
    assert found.config() == dataclasses.replace(TINY, bias=bias, dropout=0.2)
    with torch.no_grad():
        assert torch.equal(found.model()(tokens), model(tokens))


@pytest.mark.parametrize("place", ["out", "data/shakespeare_char"])
def test_the_characters_of_nanogpt_are_found_where_it_has_them(place, tmp_path):
    path = nanogpt_checkpoint(tmp_path / "out", GPT(TINY))
    with pytest.raises(UserError, match=r"names no tokenizer: .* meta\.pkl beside it"):
        load_model(path)
    write_meta(tmp_path / place)
    assert load_model(path)[1].decode([0, 1]) == "()"


def test_a_vocabulary_that_would_run_code_is_an_error(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "it ran"),)

    path = nanogpt_checkpoint(tmp_path / "out", GPT(TINY))
    (tmp_path / "out" / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match=r"meta\.pkl.*can run code"):
        read_source(path)
    torch.save({"wte.weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is damaged, would run code"):
        read_source(tmp_path)
    assert not (tmp_path / "it ran").exists()


def test_gpt2s_vocabulary_is_known_by_its_size(tmp_path):
    for vocab_size in (50257, 50304):
        config = GPTConfig(n_layer=1, n_head=1, n_embd=2, block_size=2, vocab_size=vocab_size)
        path = nanogpt_checkpoint(tmp_path, GPT(config))
        assert read_source(path).tokenizer == {"name": "gpt2"}


def test_a_folder_with_the_name_of_a_size_does_not_change_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/vocab.json").write_text('{"other": 0}')
    weights = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=2, block_size=2, vocab_size=50257))
    found = read_source(nanogpt_checkpoint(tmp_path, weights))
    for source, spec in (("gpt2", {"name": "gpt2"}), ("./gpt2", None)):
        renamed = dataclasses.replace(found, source=source, tokenizer=None)
        assert with_tokenizer(renamed, []).tokenizer == spec


def test_halves_are_read_as_float32(tmp_path):
    model = shaken(GPT(TINY))
    halves = {name: weight.half() for name, weight in model.state_dict().items()}
    path = nanogpt_checkpoint(tmp_path, model)
    content = torch.load(path, weights_only=True)
    torch.save(content | {"model": halves}, path)
    weights = read_source(path).model().state_dict()
    for name, weight in halves.items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], weight.float())


def test_a_cropped_and_padded_model(tokens, tmp_path):
    model = shaken(GPT(TINY))
    path = str(nanogpt_checkpoint(tmp_path, model))
    config = dataclasses.replace(TINY, block_size=16, vocab_size=128, dropout=0.1)
    smaller = GPT(config).eval()
    smaller.load_state_dict(initial_weights(path, config))
    with torch.no_grad():
        expected = model(tokens[:, :16])
        torch.testing.assert_close(smaller(tokens[:, :16])[..., :65], expected)
    assert read_source(path).model(block_size=16, vocab_size=128, dropout=0.1).config == config


@pytest.mark.parametrize(
    "ours", [None, [], {"figures": None}, {"figures": {"step": "x"}}, {"tokenizer": "gpt2"}]
)
def test_a_damaged_key_of_ours_is_named(ours, theirs, tmp_path):
    save(theirs, tmp_path, "safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"gpt_lightning": ours}))
    with pytest.raises(UserError, match=r"config\.json: its key gpt_lightning is damaged: delete"):
        read_source(tmp_path)


def test_an_index_that_leaves_its_folder_is_an_error(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": "../secret.safetensors"}}))
    with pytest.raises(UserError, match=r"index\.json is damaged: its weight_map names no files"):
        read_source(tmp_path)


@pytest.mark.parametrize("key", ["model", "model_args", "iter_num"])
def test_a_damaged_checkpoint_of_nanogpt_is_named(key, tmp_path):
    path = nanogpt_checkpoint(tmp_path, GPT(TINY), **{key: None})
    with pytest.raises(UserError, match=r"ckpt\.pt is no checkpoint of nanoGPT, or is damaged"):
        read_source(path)


@pytest.mark.parametrize("bad", [torch.tensor(torch.nan), torch.tensor(1)])
def test_weights_that_are_integers_or_not_finite_are_refused(bad, theirs, tmp_path):
    values = bad.expand(theirs.config.n_embd).clone()
    theirs.transformer.ln_f.weight = torch.nn.Parameter(values, requires_grad=False)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"transformer\.ln_f\.weight has integers, NaN or infinity"):
        read_source(tmp_path).model()


def test_a_vocabulary_larger_than_the_model_is_refused(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    found = dataclasses.replace(read_source(tmp_path), tokenizer={"name": "byte"})
    with pytest.raises(UserError, match="tokenizer byte has 256 tokens, the model 65"):
        tokenizer_of(found)


OTHER = {"\u0120o": 262, "<|endoftext|>": 50256}
KEYS = {name: n for n, name in enumerate(("model", "vocab", "version", "merges", "added_tokens"))}


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ("vocab.json", OTHER),
        ("vocab.json", OTHER | KEYS),
        ("tokenizer.json", {"model": {"vocab": OTHER}}),
        ("tokenizer.json", {"model": {"vocab": OTHER | KEYS, "merges": []}, "version": "1.0"}),
        ("tokenizer.json", {"model": {"vocab": [["\u0120o", -1.5], ["model", -2.5]]}}),
    ],
)
def test_another_vocabulary_of_the_size_of_gpt2s(form, content, tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert read_source(tmp_path).tokenizer == {"name": "gpt2"}
    (tmp_path / form).write_text(json.dumps(content))
    assert read_source(tmp_path).tokenizer is None
    assert read_source(tmp_path / "model.safetensors").tokenizer is None
    with pytest.raises(UserError, match="names no tokenizer"):
        load_model(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("form", ["vocab.json", "tokenizer.json"])
def test_gpt2s_own_vocabulary_is_known_though_model_is_a_token_of_it(form, encoding, tmp_path):
    vocabulary = gpt2_file("encoder.json").read_text("utf-8")
    assert json.loads(vocabulary)["model"] == 19849
    merges = gpt2_file("vocab.bpe").read_text("utf-8")
    tmp_path.joinpath("merges.txt").write_text(merges, "utf-8")
    content = vocabulary
    if form == "tokenizer.json":
        content = f'{{"version": "1.0", "model": {{"vocab": {vocabulary}}}, "added_tokens": []}}'
    tmp_path.joinpath(form).write_text(content, encoding)
    assert has_gpt2_tokens(tmp_path)


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ("vocab.json", "[1]"),
        ("vocab.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": 3}'),
    ],
)
def test_a_damaged_vocabulary_is_one_line(form, content, tmp_path):
    (tmp_path / form).write_text(content)
    with pytest.raises(UserError, match=f"{form} is damaged"):
        has_gpt2_tokens(tmp_path)


@pytest.mark.parametrize(
    ("spec", "fix"),
    [
        ({"name": "byte"}, "set data.tokenizer to char"),
        ({"name": "char"}, "'c' is new.: make data of its"),
    ],
)
def test_weights_to_train_further_are_of_the_tokens_of_the_data(spec, fix, tmp_path):
    theirs = {"name": "char", "characters": "ab"}
    found = Pretrained("there", {}, tokenizer=theirs)
    check_tokens(found, None)
    check_tokens(found, theirs)
    with pytest.raises(UserError, match=f"model.init_from there was trained on other.*{fix}"):
        check_tokens(found, spec | {"characters": "abc"})
