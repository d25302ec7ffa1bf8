"""Networks of one's own: found, trained, continued, evaluated, sampled; what they cannot have."""

import shlex
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from torch import nn

from gpt_lightning import GPTModule, load_model
from gpt_lightning import fit as fit_in_python
from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.model.generate import generate
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.network import Network, count_flops
from gpt_lightning.training import build
from gpt_lightning.training.continuation import hyperparameters

OWN = """
from torch import nn
from torch.nn.functional import cross_entropy

class MyGPT(nn.Module):
    def __init__(self, config, width=8):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.out = nn.Linear(width, config.vocab_size)

    def forward(self, idx, targets=None):
        x = self.embedding(idx)
        logits = self.out(x + self.mlp(x.cumsum(1)))
        return logits if targets is None else cross_entropy(logits.mT, targets)

class Pair(MyGPT):
    def forward(self, idx, targets=None):
        return super().forward(idx), super().forward(idx, targets)

class NotOne:
    pass
"""
SETTINGS = """
model:
  config: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16, vocab_size: null}
  network: {class_path: MODULE.MyGPT, init_args: {width: 12}}
  learning_rate: 1.0e-2
data: {text_file: text.txt, tokenizer: char, batch_size: 4}
trainer: {accelerator: cpu, devices: 1, max_steps: 4, val_check_interval: 2, logger: false}
samples: {max_new_tokens: 3}
"""


@pytest.fixture
def module(request, tmp_path, monkeypatch):
    """Name of a module in the current folder, and code/own.yaml, which names its class."""
    name = f"own_{abs(hash(request.node.nodeid))}"
    (tmp_path / "code").mkdir()
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / "code" / "own.yaml").write_text(SETTINGS.replace("MODULE", name))
    (tmp_path / "text.txt").write_text("a text of letters that are learned, " * 100)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def fit(*options: str) -> int:
    return main(["fit", "--config", "code/own.yaml", *options])


def checkpoint(run: str = "own") -> Path:
    return max(Path("lightning_logs", run, "version_0/checkpoints").glob("*.ckpt"))


def lone_checkpoint() -> str:
    for suffix in ("", ".sha256"):
        shutil.copy(f"{checkpoint()}{suffix}", f"lone.ckpt{suffix}")
    return "lone.ckpt"


def test_a_run_of_ones_own_network_and_all_that_reads_it(module, capsys, monkeypatch):
    count = Mock(wraps=count_flops)
    monkeypatch.setattr("gpt_lightning.training.build.count_flops", count)
    assert fit("--speed={peak_flops: 1e12, warmup_steps: 0}", "--trainer.log_every_n_steps=1") == 0
    assert count.call_count == 2  # for the banner and the MFU, not at each log
    printed = capsys.readouterr().out
    assert "FlopCounterMode" in printed
    sample = next(line for line in printed.splitlines() if line.startswith("sample "))
    assert main([*shlex.split(sample.partition("gpt-lightning")[2]), "--max_new_tokens=1"]) == 0
    config = yaml.safe_load(Path("lightning_logs/own/version_0/config.yaml").read_text())
    assert config["model"]["network"] == {
        "class_path": f"{module}.MyGPT",
        "init_args": {"width": 12},
    }
    del sys.modules[module]
    lone = lone_checkpoint()
    for command in (
        "sample lightning_logs/own --max_new_tokens 4 --prompt a --device cpu",
        f"sample {lone} --max_new_tokens 4 --device cpu",
        "validate lightning_logs/own",
        "resume lightning_logs/own --trainer.max_steps 6",
    ):
        assert main(command.split()) == 2
        assert module not in sys.modules
        hint = shlex.split(capsys.readouterr().err.partition("name the class with ")[2])
        network = [hint[0], hint[1].removesuffix(",")]  # works as it is printed
        assert main([*command.split(), *network]) == 0, capsys.readouterr().err
        sys.modules.pop(module, None)
        capsys.readouterr()
    assert main(["sample", lone, *network, "--max_new_tokens", "4", "--device", "cpu"]) == 0
    given = {"network": yaml.safe_load(network[1]) | {"class_path": sys.modules[module].MyGPT}}
    loaded = GPTModule.load_from_checkpoint(lone, weights_only=True, **given)
    assert type(loaded.model) is type(load_model(lone, **given)[0]) is sys.modules[module].MyGPT


def test_a_resumed_run_is_the_run_without_an_interruption(module):
    assert fit("--run_name", "whole") == 0
    assert fit("--trainer.max_steps", "2", "--model.decay_steps", "4") == 0
    network = f'--model.network={{"class_path": "{module}.MyGPT", "init_args": {{"width": 12}}}}'
    assert main(["resume", "lightning_logs/own", "--trainer.max_steps", "4", network]) == 0
    found = [torch.load(checkpoint(run)) for run in ("whole", "own")]
    for weights in zip(*(content["state_dict"].values() for content in found), strict=True):
        assert torch.equal(*weights)


NOTHING = {
    "lone checkpoint": ["sample", "lone.ckpt"],
    "validate of one": ["validate", "--ckpt_path", "lone.ckpt", "--config", "plain.yaml"],
    "copy of a run": ["sample", "elsewhere"],
    "its validation": ["validate", "elsewhere"],
    "its resume": ["resume", "elsewhere"],
    "run": ["sample", "lightning_logs/own"],
    "validation of a run": ["validate", "lightning_logs/own"],
    "resume of a run": ["resume", "lightning_logs/own"],
    "mirrored run": ["sample", "copies/own/version_0"],
    "init_from": ["fit", "--config", "plain.yaml", "--model.init_from", "lone.ckpt"],
    "export": ["export", "lone.ckpt", "--to", "out"],
    "export of a run": ["export", "lightning_logs/own", "--to", "out"],
}


def test_reading_a_file_imports_nothing(module, capsys):
    assert fit("--checkpoint.folder", str(Path("copies").absolute())) == 0
    lone_checkpoint()
    plain = SETTINGS.replace("  network: {class_path: MODULE.MyGPT, init_args: {width: 12}}\n", "")
    Path("plain.yaml").write_text(plain)
    shutil.copytree("lightning_logs/own/version_0", "elsewhere")
    del sys.modules[module]
    for name, command in NOTHING.items():
        capsys.readouterr()
        assert main(command) == 2, name
        error = capsys.readouterr().err.splitlines()[-1]
        assert "network" in error, (name, error)
        assert module not in sys.modules, name
    with pytest.raises(UserError, match="network="):
        GPTModule.load_from_checkpoint("lone.ckpt", weights_only=True)
    assert module not in sys.modules
    Path("elsewhere", f"{module}.py").write_text("raise ValueError('it comes with the copy')")
    network = f'{{"class_path": "{module}.MyGPT", "init_args": {{"width": 12}}}}'
    assert main(["validate", "elsewhere", "--model.network", network]) == 0


def test_a_file_that_names_a_network_as_an_argument_imports_nothing(tmp_path):
    """The arguments in a file are given to GPTModule by Lightning."""
    module = GPTModule(GPTConfig(1, 1, 8, 8, 16))
    module.configure_model()
    content = {
        "state_dict": module.state_dict(),
        "hyper_parameters": hyperparameters(module) | {"network": "antigravity.MyGPT"},
        "pytorch-lightning_version": "2.5.0",
    }
    torch.save(content, tmp_path / "bad.ckpt")
    loaded = GPTModule.load_from_checkpoint(tmp_path / "bad.ckpt", weights_only=True)
    assert type(loaded.model) is GPT
    assert "antigravity" not in sys.modules


REFUSED = {
    "model.compile_scope": "--model.compile_scope=block",
    "model.config.loss_chunk": "--model.config.loss_chunk=8",
    "model.pad_head": "--model.pad_head=true",
    "model.optimizer": "--model.optimizer=muon",
    "trainer.strategy": "--trainer.devices=1",  # and the strategy
    "no attribute 'MissingClass'": "--model.network=MODULE.MissingClass",
    "NotOne is no nn.Module": "--model.network.class_path=MODULE.NotOne",
    "No module named 'no_module'": "--model.network=no_module.MyGPT",
    "ValueError: a cause of two lines": "--model.network=failing.MyGPT",
    "unexpected keyword argument 'depth'": (
        '--model.network={"class_path": "MODULE.MyGPT", "init_args": {"depth": 1}}'
    ),
    "Pair returns a tuple with targets; expected a tensor": "--model.network=MODULE.Pair",
    "model.network is": "--model.network=5",
    "model.network": '--model.network={"init_args": {}}',
    "model.network is in parts": "--model.network.init_args.width=16",
    "cannot have model.config.attention naive": "--model.config.attention=naive",
    "cannot have model.config.checkpointing": "--model.config.checkpointing=true",
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_it_cannot_have_is_refused_by_name(module, key, capsys, monkeypatch):
    monkeypatch.setattr(build.run_state, "is_sharded", lambda trainer: key == "trainer.strategy")
    Path("failing.py").write_text("raise ValueError('a cause\\nof two lines')")
    assert fit(REFUSED[key].replace("MODULE", module)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: model.")
    assert key in error
    assert not Path("lightning_logs").exists()


def test_a_class_path_typed_with_a_dot_is_the_network(module, capsys):
    assert fit("--model.network.class_path", f"{module}.MyGPT", "--trainer.max_steps=2") == 0
    assert f"network {module}.MyGPT" in capsys.readouterr().out
    path = ["--model.network.class_path", f"{module}.MyGPT"]
    assert main(["sample", lone_checkpoint(), *path, "--max_new_tokens=2", "--device=cpu"]) == 0


def test_a_class_given_to_fit_in_python_is_its_path(module):
    kind = Network(f"{module}.MyGPT").load()
    for value in (kind, {"class_path": kind, "init_args": {"width": 4}}):
        run = fit_in_python("code/own.yaml", {"model.network": value}).run_folder
        assert f"class_path: {module}.MyGPT" in (run / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"model\.network is '<object"):
        fit_in_python({"model.network": object()})


@pytest.mark.parametrize("targets", [True, False])
def test_a_network_that_returns_another_form_is_named_where_it_is_called(targets):
    class Flat(GPT):
        flops_per_token = float

        def forward(self, idx, targets=None):
            logits = super().forward(idx)
            return logits.flatten(0, 1) if targets is None else (logits, None)

    module = GPTModule(GPTConfig(1, 1, 8, 8, 16), network=Flat)
    idx = torch.zeros(1, 4).long()
    module.configure_model()
    assert Network.of(Flat).record()["class_path"].startswith(f"{__name__}.")
    with pytest.raises(UserError, match=r"model\.network .*Flat returns a .*; expected a tensor"):
        module(idx, idx) if targets else generate(module.model, idx, 1)


def test_lora_trains_its_linear_layers(module):
    lora = ["--model.lora_rank=2", '--model.lora_targets=["mlp.0", "out"]']
    assert fit() == 0
    assert fit("--run_name=lora", f"--model.init_from={lone_checkpoint()}", *lora) == 0
    weights, before = (torch.load(checkpoint(run))["state_dict"] for run in ("lora", "own"))
    assert torch.equal(weights["model.out.weight"], before["model.out.weight"])
    assert weights["model.mlp.0.lora_b"].any()
    network = f'--model.network={{"class_path": "{module}.MyGPT", "init_args": {{"width": 12}}}}'
    short = ["--max_new_tokens", "4", "--device", "cpu"]
    assert main(["sample", "lightning_logs/lora", *short, network]) == 0


class Doubled(GPT):
    """GPT whose logits are twice as large: what reads only its layers would not see it."""

    def forward(self, idx, targets=None):
        logits = 2 * self.lm_head(self.transformer(idx))
        return logits if targets is None else nn.functional.cross_entropy(logits.mT, targets)


def test_tokens_are_those_of_its_own_forward():
    torch.manual_seed(0)
    config = GPTConfig(1, 1, 8, 8, 16, init="default")
    model = Doubled(config)
    idx = torch.zeros(1, 1, dtype=torch.int64)
    found = generate(model, idx, 20, generator=torch.Generator().manual_seed(1))
    expected, generator = idx, torch.Generator().manual_seed(1)
    for _ in range(20):  # without a cache, and past block_size
        logits = model(expected[:, -8:])[:, -1].double()
        sums = logits.softmax(-1).cumsum(-1)
        drawn = 1 - torch.rand(1, 1, generator=generator, dtype=torch.float64)
        expected = torch.cat([expected, torch.searchsorted(sums, drawn * sums[:, -1:])], 1)
    assert torch.equal(found, expected)


def test_flops_are_its_own_count_or_pytorchs():
    model = GPT(GPTConfig(2, 2, 16, 8, 32))
    before = torch.get_rng_state()
    flops, how = count_flops(model, 8)
    # 6 a weight of a product, and 12 C T a layer for attention; GPT-2 counts the same
    matrices = 6 * (12 * 2 * 16**2 + 32 * 16)
    assert flops == matrices + 12 * 2 * 16 * 8
    assert "FlopCounterMode" in how
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    model.flops_per_token = lambda context: 3 * context
    assert count_flops(model, 8)[0] == 24


def test_the_tutorials_variant_has_30_lines():  # tests/test_shown_commands.py trains it
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "own_network.md"
    (code,) = (b for b in page.read_text().split("```") if b.startswith("python\n"))
    assert len(code.strip().splitlines()) <= 31
