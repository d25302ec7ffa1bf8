"""The public Python API: its names, the cost of importing it, `fit` and the example."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import LambdaCallback
from stubs import STUB, stub

import gpt_lightning
from gpt_lightning import FitResult, UserError, fit, load_model

ROOT = Path(__file__).parents[1]
CALLS = ROOT / "tests/typed_calls.py"
LINES = CALLS.read_text().splitlines()
WRONG = [i for i, line in enumerate(LINES, 1) if "# wrong" in line]
PUBLIC = {name: getattr(gpt_lightning, name) for name in gpt_lightning.__all__}
TINY = {
    "trainer.accelerator": "cpu",
    "trainer.max_steps": 20,
    "trainer.val_check_interval": 10,
    "trainer.check_val_every_n_epoch": None,
    "model.config": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": None},
    "model.compile": False,
    "data.tokenizer": "char",
    "data.batch_size": 4,
    "samples.max_new_tokens": 0,
}


@pytest.mark.slow
def test_the_names_are_there_and_torch_is_imported_at_their_first_use():
    names = ["GPT", "GPTConfig", "GPTModule", "TokenDataModule", "load_model", "generate", "fit"]
    code = f"""
import sys, gpt_lightning
assert {{*{names}, "__version__"}} <= set(dir(gpt_lightning))
assert not {{"torch", "lightning", "numpy"}} & set(sys.modules)
from gpt_lightning import {", ".join(names)}
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="no attribute 'GTP'"):
        _ = gpt_lightning.GTP


def test_a_star_imports_the_public_names():
    names: dict[str, object] = {}
    exec("from gpt_lightning import *", names)
    assert names["fit"] is fit
    assert names["UserError"] is UserError


@pytest.mark.slow
def test_the_example_trains_evaluates_and_samples(text_file, monkeypatch, capsys):
    example = ROOT / "examples" / "python_api.py"
    code = [line for line in example.read_text().splitlines() if line]
    assert len(code) <= 20
    monkeypatch.chdir(text_file.parent)
    monkeypatch.setattr(sys, "argv", [str(example), str(text_file)])
    runpy.run_path(str(example))
    printed = capsys.readouterr().out.split("validation loss ")[1]
    loss, _, text = printed.partition("\n")
    assert float(loss) < 1.5
    assert text.startswith("the ")


def test_fit_returns_the_outcome(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = {"trainer.max_steps": 30, "data.text_file": text_file}
    seen = []
    counter = LambdaCallback(on_train_batch_end=lambda *_: seen.append(1))
    result = fit(TINY, own, callbacks=[counter], run_name="mine")
    assert len(seen) == 30
    assert isinstance(result, FitResult)
    assert result.steps == 30
    assert result.run_folder == Path("lightning_logs/mine/version_0")
    assert result.best_loss is not None
    assert result.best_loss <= result.validation_loss < 3.0
    assert result.tokens_per_sec > 0
    config = yaml.safe_load((result.run_folder / "config.yaml").read_text())
    assert config["model"]["config"]["n_embd"] == 16
    assert "LambdaCallback" not in str(config)
    model, tokenizer = load_model(result.run_folder)
    assert model.config.vocab_size == tokenizer.vocab_size


def test_fit_takes_configurations_by_name_and_path(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("short.yaml").write_text("trainer: {max_steps: 2, limit_val_batches: 0}\n")
    own = {"data.corpus": None, "data.text_file": text_file, "model.warmup_steps": 0}
    result = fit("quickstart", Path("short.yaml"), TINY | {"trainer.max_steps": 2}, own)
    assert (result.steps, result.best_loss, result.tokens_per_sec) == (2, None, None)
    assert result.run_folder.parent.name == "quickstart"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["quikstart"], "did you mean 'quickstart'"),
        ([{"model.learning_rat": 1}], "unknown key 'model.learning_rat': did you mean"),
        ([{"trainer.max_steps": "many"}], "trainer.max_steps is 'many'; expected int"),
        ([{"precision": "auto"}], "did you mean 'trainer.precision'"),
    ],
)
def test_a_mistake_is_a_user_error(args, message):
    with pytest.raises(UserError, match=message):
        fit(*args)


def test_the_types_of_keyword_arguments_are_those_of_the_settings():
    assert stub() == STUB.read_text(), "make stubs"


@pytest.mark.slow  # 10 s
def test_mypy_sees_the_wrong_calls_and_no_other():
    command = [sys.executable, "-m", "mypy", "--strict", str(CALLS)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert [int(line.split(":")[1]) for line in printed.splitlines() if ": error:" in line] == WRONG
    assert len(WRONG) == 10


@pytest.mark.parametrize("i", [i for i in WRONG if "GPTModule(" in LINES[i - 1]])
def test_a_wrong_argument_is_one_line_that_names_it(i):
    names = {**PUBLIC, "config": PUBLIC["GPTConfig"]()}
    with pytest.raises(UserError, match=r"^[^\n]*model\.\w+[^\n]*(expected|did you mean)[^\n]*$"):
        exec(LINES[i - 1], names)
    assert PUBLIC["TokenDataModule"](text_file="a.txt", batch_size="4").batch_size == 4


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("GPTModule(vocab_size=65)", "'model.vocab_size': did you mean 'model.config.vocab_size'?"),
        ("GPTModule(batch_size=65)", "'model.batch_size': did you mean 'data.batch_size'?"),
        ("GPTModule(65)", "model.config is 65; expected a GPTConfig"),
        ("GPTConfig(n_layers=2)", "'model.config.n_layers': did you mean 'n_layer'?"),
        ("TokenDataModule(path='a')", "'data.path': did you mean 'data.text_file'?"),
        ("TokenDataModule(foo=1)", "'data.foo'; expected one of dataset, corpus, text_"),
    ],
)
def test_an_unknown_argument_is_one_line_with_the_nearest(call, line):
    with pytest.raises(UserError, match=re.escape(line)):
        exec(call, PUBLIC)
