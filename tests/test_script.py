"""GPTCLI: a script of the user has all commands, with a module and data of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt_lightning import GPTCLI, GPTConfig, GPTModule, TokenDataModule, UserError, parsing
from gpt_lightning.cli import main
from gpt_lightning.runs.checkpoint import read_checkpoint

RUN = Path("lightning_logs/mine/version_0")
MY = """
from gpt_lightning import GPTCLI, GPTModule

class MyModule(GPTModule):
    def __init__(self, my_parameter: int = 1, **settings):
        super().__init__(**settings)
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        self.log("my/metric", float(self.hparams.my_parameter))
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    GPTCLI(MyModule)
"""
CONFIG = """
model:
  my_parameter: 2
  config: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 8, vocab_size: null}
data: {text_file: text.txt, tokenizer: char, batch_size: 2}
trainer: {accelerator: cpu, max_steps: 2, limit_val_batches: 1, log_every_n_steps: 1}
samples: {max_new_tokens: 0}
"""


class Module(GPTModule):
    def __init__(self, config: GPTConfig, aux: float = 0.1, **settings):
        super().__init__(config, **settings)
        self.save_hyperparameters()


class Data(TokenDataModule):
    def __init__(self, skip: int = 0, **settings):
        super().__init__(**settings)


class Above(Module):
    pass


class Short(GPTModule):
    def __init__(self, rate: float = 0.1):
        super().__init__(learning_rate=rate)


@pytest.fixture
def folder(own_folder, monkeypatch):
    """Folder with a configuration; a script leaves no trace in the next test."""
    Path("mine.yaml").write_text(CONFIG.replace("my_parameter: 2", "aux: 0.7"))
    monkeypatch.setattr(parsing, "script", "")


def test_a_script_trains_evaluates_and_continues(own_folder, capsys):
    Path("my.py").write_text(MY)
    Path("mine.yaml").write_text(CONFIG)

    def script(command):
        words = [sys.executable, "my.py", *command.split()]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    done = script("fit --config mine.yaml --model.my_parameter 3")
    assert done.returncode == 0, done.stderr
    assert f"my.py sample {RUN}\n" in done.stdout
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    assert [row["my/metric"] for row in rows if "my/metric" in row] == [3.0, 3.0]
    assert "my_parameter: 3\n" in (RUN / "config.yaml").read_text()
    for command in ("validate", "resume"):  # nothing is imported, and no other class is trained
        assert main([command, str(RUN), "--trainer.max_steps=3"]) == 2
        printed = capsys.readouterr().err.partition(" my.py ")[2]
        assert printed == f"{command} {RUN}`\n"
    assert script(f"validate {RUN} --ckpt_path last").returncode == 0
    assert script(f"resume {RUN} --trainer.max_steps 3").returncode == 0
    saved = sorted((RUN / "checkpoints").glob("*.ckpt"))[-1]
    assert read_checkpoint(saved).step == 3
    assert torch.load(saved)["hyper_parameters"]["my_parameter"] == 3
    wrong = script("fit --config mine.yaml --model.my_paramter 3")
    assert wrong.returncode == 2
    assert wrong.stderr == (
        "error: unknown key 'model.my_paramter': did you mean 'model.my_parameter'?\n"
    )


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("--help", 0, "COMMAND [options]"),
        ("fit --help=model", 0, "--model.aux"),
        ("fit --config mine.yaml --print_config", 0, "aux: 0.7"),
        ("configs", 0, "quickstart"),
        ("fit --config nowhere", 2, "error: --config nowhere: no such file"),
        ("fitt", 2, "did you mean 'fit'"),
        ("", 2, "COMMAND [options]"),
    ],
)
def test_what_trains_nothing_ends_the_script(command, code, words, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["my.py", *command.split()])
    with pytest.raises(SystemExit) as end:
        GPTCLI(Module)
    assert end.value.code == code
    assert words in "".join(capsys.readouterr())


def test_debugging_shows_the_traceback(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my.py", "fit", "--config", "nowhere"])
    monkeypatch.setenv("GPT_LIGHTNING_DEBUG", "1")
    with pytest.raises(UserError, match="nowhere"):
        GPTCLI(Module)


def test_classes_from_python(folder, capsys):
    fit = ["fit", "--config", "mine.yaml", "--data.skip", "3"]
    own = GPTCLI(
        Module, Data, [*fit, "--model.config.n_layer=2"], trainer_defaults={"max_steps": 9}
    )
    assert type(own.model) is Module
    assert type(own.datamodule) is Data
    assert own.trainer.global_step == 2  # the configuration has precedence
    (saved,) = (RUN / "checkpoints").glob("*.ckpt")
    assert read_checkpoint(saved).record.config.n_layer == 2
    assert torch.load(saved)["hyper_parameters"]["aux"] == 0.7
    again = ["fit", f"--config={RUN}/config.yaml", f"--resume={RUN}", "--trainer.max_steps=3"]
    assert GPTCLI(Above, Data, again).trainer.global_step == 3
    assert main(["sample", str(RUN), "--prompt", "a"]) == 0
    capsys.readouterr()
    for classes in ((), (Module,), (GPTModule, Data)):
        config = [f"--config={RUN}/config.yaml", f"--ckpt_path={RUN}"]
        with pytest.raises(UserError, match=r"was trained by (Above|Data), .* GPTCLI\("):
            GPTCLI(*classes, args=["validate", *config])


def test_classes_that_cannot_be_trained(folder):
    fit = ["fit", "--config", "mine.yaml"]
    with pytest.raises(UserError, match="Data is not a subclass of"):
        GPTCLI(Data, args=fit)
    with pytest.raises(UserError, match=r"Short.__init__: take \*\*settings"):
        GPTCLI(Short, args=fit)
