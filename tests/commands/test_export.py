"""`gpt-lightning export` and `import`: transformers computes the same, and nothing is lost."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpt_lightning.cli import main
from gpt_lightning.commands.export import tokenizer_files
from gpt_lightning.data.formats import extras
from gpt_lightning.data.tokenizers import ByteTokenizer, CharTokenizer, build_tokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.runs.checkpoint import RunRecord
from gpt_lightning.runs.checkpoint_io import write_durable_checkpoint
from gpt_lightning.runs.settings import Settings
from gpt_lightning.runs.sources import read_source

transformers = pytest.importorskip("transformers")

CHARACTERS = "\n !?abcdefghijklmnopqrstuvwxyzßä→🙂"
TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=48, vocab_size=len(CHARACTERS))
NAME = "step-0000012-loss-1.2345.ckpt"


def write_checkpoint(path: Path, config: GPTConfig, tokenizer) -> GPT:
    """Write a checkpoint of a model whose biases are not 0 and whose gains are not 1."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    record = RunRecord(config=config, settings=Settings(), tokenizer=tokenizer.spec())
    content = {"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}}
    content |= {"global_step": 12, "callbacks": {"SpeedMonitor": {"tokens": 3456}}}
    record.write(content)
    write_durable_checkpoint(content, path)
    return model


def files(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_model_trained_with_a_gpus_kernel_computes_on_a_cpu():
    config = dataclasses.replace(TINY, attention="cudnn")
    model = write_checkpoint(Path(NAME), config, CharTokenizer(CHARACTERS))
    plain = GPT(dataclasses.replace(config, attention="auto"))
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(24)[None]
    assert torch.equal(read_source(NAME).model()(tokens), plain(tokens))


def test_other_encodings_have_no_files():
    """cl100k_base splits by another regex than GPT-2's, and p50k_base has other ids."""
    with pytest.raises(UserError, match="export writes char, byte, gpt2 and tokenizer"):
        tokenizer_files(SimpleNamespace(name="cl100k_base"), 8)


def test_biases_that_transformers_has_trained_are_read():
    write_checkpoint(Path(NAME), dataclasses.replace(TINY, bias=False), CharTokenizer(CHARACTERS))
    assert main(["export", NAME, "--to", "hf"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained("hf")
    torch.nn.init.ones_(theirs.transformer.h[0].mlp.c_fc.bias)
    theirs.save_pretrained("tuned")  # keeps our key of config.json
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        found = read_source("tuned").model()(tokens)
        torch.testing.assert_close(found, theirs.eval()(tokens).logits, atol=5e-6, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_the_same_logits(bias, tied, recwarn):
    config = dataclasses.replace(TINY, bias=bias, tie_weights=tied, vocab_size=64, dropout=0.1)
    model = write_checkpoint(Path(NAME), config, CharTokenizer(CHARACTERS))
    assert main(["export", NAME, "--to", "hf"]) == 0
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        "hf", output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = torch.randint(len(CHARACTERS), (2, 48))
    with torch.no_grad():
        logits = theirs.eval()(tokens).logits
        torch.testing.assert_close(logits, model(tokens)[..., : len(CHARACTERS)], atol=5e-6, rtol=0)
    settings = json.loads(Path("hf/config.json").read_text())
    assert settings["n_ctx"] == settings["n_positions"] == 48
    assert settings["resid_pdrop"] == 0.1


@pytest.mark.parametrize("bias", [True, False])
def test_an_import_is_equal_and_a_second_export_too(bias):
    config = dataclasses.replace(TINY, bias=bias, activation="gelu")
    model = write_checkpoint(Path(NAME), config, CharTokenizer(CHARACTERS))
    assert main(["export", NAME, "--to", "hf"]) == 0
    assert main(["import", "hf", "--out", "again.ckpt"]) == 0
    again = read_source("again.ckpt")
    assert again.config() == config
    ours = model.state_dict()
    assert again.weights.keys() == ours.keys()
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in ours.items())
    assert again.figures == {"step": 12, "tokens": 3456, "val_loss": 1.2345}
    for source in ("again.ckpt", "hf"):
        assert main(["export", source, "--to", f"from {Path(source).stem}"]) == 0
        assert files(f"from {Path(source).stem}") == files("hf")
    assert len({path.stat().st_mode for path in Path("hf").iterdir()}) == 1


def test_nanogpt_goes_on_with_the_weights_and_adamws_state(text_file, capsys):
    """Its optimizer has two groups, matrices and others, in the order of named_parameters()."""
    shape = "--model.config={n_layer: 1, n_head: 2, n_embd: 8, block_size: 8, vocab_size: 32}"
    fit = ["fit", f"--data.text_file={text_file}", "--data.tokenizer=char", shape]
    fit += ["--trainer.max_steps=3", "--trainer.accelerator=cpu", "--samples.max_new_tokens=0"]
    assert main([*fit, "--data.batch_size=2", "--run_name=mine"]) == 0
    (path,) = Path("lightning_logs/mine").rglob("*.ckpt")
    assert main(["export", str(path), "--to", "data/abc/ckpt.pt"]) == 0
    assert "step 3, AdamW's state" in capsys.readouterr().out
    theirs = torch.load("data/abc/ckpt.pt")
    found = read_source(str(path))
    trained = torch.load(path)["optimizer_states"][0]
    characters = len(found.tokenizer["characters"])
    model = GPT(GPTConfig(**theirs["model_args"]))
    model.load_state_dict(theirs["model"])
    named = dict(model.named_parameters())
    groups = [[n for n, p in named.items() if (p.dim() >= 2) == large] for large in (True, False)]
    optimizer = torch.optim.AdamW([{"params": [named[n] for n in group]} for group in groups])
    optimizer.load_state_dict(theirs["optimizer"])
    order = groups[0] + groups[1]
    for number, name in enumerate(order):
        rows = slice(characters) if name == "transformer.wte.weight" else slice(None)
        for key in ("exp_avg", "exp_avg_sq"):
            expected = trained["state"][number][key][rows]
            assert torch.equal(optimizer.state[named[name]][key], expected)
    assert theirs["iter_num"] == 3
    assert theirs["config"]["dataset"] == "abc"
    again = read_source("data/abc/ckpt.pt")
    assert again.tokenizer == found.tokenizer
    assert all(torch.equal(again.weights[n][:8], found.weights[n][:8]) for n in again.weights)


@pytest.mark.parametrize("what", ["tokenizer", "head", "characters", "suffix"])
def test_what_nanogpt_cannot_have(what, capsys):
    tokenizer = ByteTokenizer() if what == "tokenizer" else CharTokenizer(CHARACTERS)
    size = {"vocab_size": tokenizer.vocab_size, "tie_weights": what != "head"}
    write_checkpoint(Path(NAME), dataclasses.replace(TINY, **size), tokenizer)
    Path("out").mkdir()
    if what == "characters":
        Path("out/meta.pkl").write_bytes(extras("nanogpt", CharTokenizer("abc"))["meta.pkl"])
    out = "out/x.safetensors" if what == "suffix" else "out/ckpt.pt"
    assert main(["export", NAME, "--to", out]) == 2
    assert "give" in capsys.readouterr().err
    assert not Path(out).exists()


@pytest.mark.parametrize("name", ["char", "byte"])
def test_the_tokenizer_gives_the_same_tokens(name):
    tokenizer = CharTokenizer(CHARACTERS) if name == "char" else ByteTokenizer()
    config = dataclasses.replace(TINY, vocab_size=tokenizer.vocab_size)
    write_checkpoint(Path(NAME), config, tokenizer)
    assert main(["export", NAME, "--to", "hf"]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained("hf")
    text = "the  äß? →🙂\n\n a space at the end "
    tokens = tokenizer.encode(text)
    assert theirs(text)["input_ids"] == tokens.tolist()
    assert theirs.decode(tokens) == text
    assert theirs.vocab_size == tokenizer.vocab_size


@pytest.mark.slow
def test_gpt2s_tokenizer_gives_the_same_tokens():
    try:
        tokenizer = build_tokenizer("gpt2")
    except UserError as error:
        pytest.skip(str(error))
    config = GPTConfig(n_layer=1, n_head=1, n_embd=2, block_size=8, vocab_size=50304)
    write_checkpoint(Path(NAME), config, tokenizer)
    assert main(["export", NAME, "--to", "hf"]) == 0
    rng = np.random.default_rng(0)
    for kind in (transformers.AutoTokenizer, transformers.GPT2TokenizerFast):
        theirs = kind.from_pretrained("hf")
        assert theirs.eos_token_id == 50256
        assert len(theirs) == 50257
        for _ in range(100):
            tokens = rng.integers(50256, size=40)
            text = tokenizer.decode(tokens)
            assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()


def test_a_folder_that_exists_is_left_alone(capsys):
    write_checkpoint(Path(NAME), TINY, CharTokenizer(CHARACTERS))
    Path("hf").mkdir()
    Path("hf/mine").write_text("x")
    assert main(["export", NAME, "--to", "hf"]) == 2
    assert "--to hf exists" in capsys.readouterr().err
    assert files("hf") == {"mine": b"x"}
    assert main(["import", NAME, "--out", NAME]) == 2
    assert f"--out {NAME} exists" in capsys.readouterr().err
    Path("new.ckpt.sha256").write_text("mine")
    assert main(["import", NAME, "--out", "new.ckpt"]) == 2
    assert Path("new.ckpt.sha256").read_text() == "mine"


def test_an_imported_model_is_sampled_and_cropped(capsys):
    write_checkpoint(Path(NAME), TINY, CharTokenizer(CHARACTERS))
    options = ["--block_size", "16", "--vocab_size", "64", "--dropout", "0.3"]
    assert main(["import", NAME, "--out", "small.ckpt", *options]) == 0
    assert main(["fit", "--config", "quickstart", "--ckpt_path", "small.ckpt"]) == 2
    assert "small.ckpt has no optimizer's state: give it as --model.init_from" in (
        capsys.readouterr().err
    )
    config = read_source("small.ckpt").config()
    assert config == dataclasses.replace(TINY, block_size=16, vocab_size=64, dropout=0.3)
    assert main(["sample", "small.ckpt", "--max_new_tokens", "20"]) == 0
    for option, value, word in (("block", 64, "up to 48"), ("vocab", 9, "from 34")):
        arguments = ["--out", "other.ckpt", f"--{option}_size", str(value)]
        assert main(["import", NAME, *arguments]) == 2
        assert f"--{option}_size {word}" in capsys.readouterr().err
