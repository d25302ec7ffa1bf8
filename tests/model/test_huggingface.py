import dataclasses
import json
import os
import re
import sys

import pytest
import torch

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT, SIZES, GPTConfig
from gpt_lightning.model.huggingface import to_huggingface
from gpt_lightning.runs.checkpoint import RunRecord
from gpt_lightning.runs.settings import Settings
from gpt_lightning.runs.sources import initial_weights, read_source

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=101)
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 101}


def make_theirs(**settings):
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**SHAPE, **ends, **settings)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():  # biases of 0 and gains of 1 would hide a mix-up
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture
def theirs():
    return make_theirs()


@pytest.fixture
def folder(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def tokens():
    return torch.randint(101, (3, 64), generator=torch.Generator().manual_seed(1))


def load(source, config=TINY):
    model = GPT(config).eval()
    model.load_state_dict(initial_weights(str(source), config))
    return model


def exported(model):
    return to_huggingface(model.state_dict(), model.config)


def save_ours(path, model):
    checkpoint = {"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}}
    RunRecord(config=model.config, settings=Settings()).write(checkpoint)
    torch.save(checkpoint, path)


def assert_same_logits(model, theirs, tokens):
    # Both compute in float32, in another order (fused attention, its own GELU). The largest
    # difference seen is 1.2e-6, at logits of up to 3.4; one forgotten transpose makes it 2.9.
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=0)


def refusal(source, config=TINY):
    """Return the error message, which must be one line."""
    with pytest.raises(UserError) as caught:
        initial_weights(str(source), config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_logits_are_theirs(folder, theirs, tokens):
    assert_same_logits(load(folder), theirs, tokens)
    assert_same_logits(load(folder / "model.safetensors"), theirs, tokens)


@pytest.mark.parametrize("attention", ["sdpa", "naive"])
@pytest.mark.parametrize(("activation", "named"), [("gelu_tanh", "gelu_new"), ("gelu", "gelu")])
def test_each_form_computes_theirs(attention, activation, named, tmp_path, tokens):
    theirs = make_theirs(activation_function=named)
    theirs.save_pretrained(tmp_path)
    config = dataclasses.replace(TINY, attention=attention, activation=activation)
    assert_same_logits(load(tmp_path, config), theirs, tokens)


def test_a_cropped_context_changes_nothing_within_it(folder, theirs, tokens):
    cropped = load(folder, dataclasses.replace(TINY, block_size=16))
    assert_same_logits(cropped, theirs, tokens[:, :16])


@pytest.mark.parametrize("tied", [True, False])
def test_export_after_import_is_the_identity(tied, tmp_path):
    make_theirs(tie_word_embeddings=tied).save_pretrained(tmp_path)
    weights = exported(load(tmp_path, dataclasses.replace(TINY, tie_weights=tied)))
    safetensors_torch.save_file(weights, tmp_path / "ours.safetensors", metadata={"format": "pt"})
    expected = (tmp_path / "model.safetensors").read_bytes()
    assert (tmp_path / "ours.safetensors").read_bytes() == expected


def test_import_after_export_is_the_identity_without_biases(tmp_path):
    config = dataclasses.replace(TINY, bias=False, tie_weights=False)
    model = GPT(config)
    safetensors_torch.save_file(exported(model), tmp_path / "x.safetensors")
    again = initial_weights(str(tmp_path / "x.safetensors"), config)
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[k], v) for k, v in model.state_dict().items())


def published_form(weights):
    """Return weights as in openai-community's files: no prefix, no head, with causal masks."""
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 64, 64).tril() for n in range(2)}
    masks |= {f"h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}
    return masks | {k.removeprefix("transformer."): v for k, v in weights.items()}


def test_published_files_have_no_prefix_but_masks(folder, theirs, tokens, tmp_path):
    weights = safetensors_torch.load_file(folder / "model.safetensors")
    safetensors_torch.save_file(published_form(weights), tmp_path / "old.safetensors")
    assert_same_logits(load(tmp_path / "old.safetensors"), theirs, tokens)


def test_a_published_name_is_fetched(folder, theirs, tokens, monkeypatch):
    asked = []

    def fetch(*args):
        asked.append(args)
        return str(folder / args[1])

    monkeypatch.setitem(SIZES, "gpt2", TINY)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda _: None)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    assert_same_logits(load("gpt2"), theirs, tokens)
    files = ("config.json", "model.safetensors")
    assert asked == [("openai-community/gpt2", file) for file in files]


def test_our_checkpoints(tmp_path, tokens):
    model = GPT(TINY).eval()
    save_ours(tmp_path / "a.ckpt", model)
    assert torch.equal(load(tmp_path / "a.ckpt")(tokens), model(tokens))
    heads = refusal(tmp_path / "a.ckpt", dataclasses.replace(TINY, n_head=4))
    assert "n_head is 4, there 2" in heads


def test_a_tied_head_is_copied_where_ours_is_untied(folder, theirs, tokens):
    model = load(folder, dataclasses.replace(TINY, tie_weights=False))
    assert_same_logits(model, theirs, tokens)
    assert model.lm_head.weight is not model.transformer.wte.weight


def test_an_untied_head_does_not_fit_a_tied_one(tmp_path, tokens):
    theirs = make_theirs(tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path)
    assert "--model.config.tie_weights false" in refusal(tmp_path)
    untied = load(tmp_path, dataclasses.replace(TINY, tie_weights=False))
    assert_same_logits(untied, theirs, tokens)


def test_reading_draws_no_random_numbers(folder):
    state = torch.get_rng_state()
    initial_weights(str(folder), TINY)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_difference_in_shape_is_told_with_the_way_out(folder):
    config = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=128, vocab_size=None, bias=False)
    message = refusal(folder, config)
    for difference in (
        "n_layer is 3, there 2",
        "n_head is 4, there 2",
        "n_embd is 64, there 32",
        "block_size is 128, there 64",
        "vocab_size is null, there 101",
        "bias is false, there true",
        "--model.config.n_layer 2",
        "--model.config.bias true",
    ):
        assert difference in message


def test_new_rows_of_a_padded_vocabulary_have_the_mean_logit(folder, theirs, tokens):
    padded = load(folder, dataclasses.replace(TINY, vocab_size=128))
    with torch.no_grad():
        logits, expected = padded(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits[..., :101], expected, atol=1e-5, rtol=0)
    mean = expected.mean(dim=-1, keepdim=True).expand(-1, -1, 27)
    torch.testing.assert_close(logits[..., 101:], mean, atol=1e-5, rtol=0)


def test_a_smaller_vocabulary_is_an_error(folder):
    message = refusal(folder, dataclasses.replace(TINY, vocab_size=100))
    assert message.endswith("vocab_size is 100, there 101: set --model.config.vocab_size 101")


def test_a_published_shape_is_checked_before_the_download(monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("downloaded"))
    message = refusal("gpt2-xl", GPTConfig(vocab_size=50000))
    assert "n_layer is 12, there 48, n_head is 12, there 25, n_embd is 768, there 1600" in message
    fixes = "set --config model/gpt2-xl --model.config.vocab_size 50257"
    assert message.endswith(fixes)


def test_without_a_network_a_folder_is_the_way_out(monkeypatch):
    def fail(*_):
        raise ConnectionError("no route to host\nsecond line")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    message = refusal("gpt2", GPTConfig())
    assert "gpt2" in message
    assert "give a folder with its model.safetensors instead" in message
    assert "(no route to host)" in message


@pytest.mark.parametrize("package", ["huggingface_hub", "safetensors.torch"])
def test_a_missing_package(package, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    source, config = ("gpt2", GPTConfig()) if package == "huggingface_hub" else (folder, TINY)
    message = refusal(source, config)
    assert package in message
    assert "pip install 'gpt-lightning[hf]'" in message


@pytest.mark.parametrize("keep", [0, 4, 5000])
def test_files_that_are_missing_or_damaged_are_named(keep, folder, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for source in ("gpt2-huge", tmp_path / "no.ckpt", tmp_path / "pytorch_model.bin"):
        assert str(source) in refusal(source)
    config = (folder / "config.json").read_text()
    for text in ("{", "[]", "3"):
        (folder / "config.json").write_text(text)
        assert str(folder / "config.json") in refusal(folder)
    (folder / "config.json").write_text(config)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refusal(folder)
    checkpoint = tmp_path / "a.ckpt"
    save_ours(checkpoint, GPT(TINY))
    checkpoint.write_bytes(checkpoint.read_bytes()[:keep])
    assert str(checkpoint) in refusal(checkpoint)


def test_a_checkpoint_that_names_code_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "it ran"),)

    torch.save({"state_dict": {}, "hyper_parameters": Trap()}, tmp_path / "a.ckpt")
    assert "a.ckpt" in refusal(tmp_path / "a.ckpt")
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("scale_attn_by_inverse_layer_idx", True), ("activation_function", "relu")]
)
def test_a_function_that_ours_does_not_compute(key, value, folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {key: value}))
    assert f"{key} is {value}" in refusal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_layer", 1),
        ("n_embd", "many"),
        ("n_positions", 32),
        ("n_head", 5),
        ("resid_pdrop", 2),
        ("tie_word_embeddings", False),
    ],
)
def test_a_configuration_that_contradicts_the_tensors(key, value, folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {key: value}))
    message = refusal(folder)
    assert f"config.json: {key} is {json.dumps(value)}, but " in message
    fix = re.search(r"set it to ([\w.]+)", message)[1]
    if key != "n_head":
        (folder / "config.json").write_text(json.dumps(settings | {key: json.loads(fix)}))
        read_source(str(folder))


def test_weights_of_another_model(theirs, tmp_path):
    path = tmp_path / "x.safetensors"
    for change in ({"transformer.h.1.mlp.c_fc.weight": torch.ones(32, 64)}, {"q": torch.ones(1)}):
        safetensors_torch.save_file(exported(GPT(TINY)) | change, path)
        message = refusal(path)
        assert "is not a GPT-2" in message
        assert min(change) in message
    safetensors_torch.save_file({"model.embed_tokens.weight": torch.ones(101, 32)}, path)
    assert "is not a GPT-2 ('transformer.wte.weight' is missing)" in refusal(path)
