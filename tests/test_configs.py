"""Every file in configs/ parses, describes a model that can be built, and says what it computes."""

from pathlib import Path

import pytest
import torch

from gpt_lightning.data.texts import CORPORA
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT, SIZES, GPTConfig
from gpt_lightning.training import fit as training
from gpt_lightning.training.fit import training_parser

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
# what people run; the ladders' rungs are held against each other in reproduce/test_cases.py
RUNS = sorted(CONFIGS.glob("*.yaml"))
TOKENS_PER_STEP = {
    "quickstart": 16 * 128,
    "shakespeare_char": 64 * 256,
    "shakespeare_char_cpu": 12 * 64,
    "gpt2_124m": 524_288,
    "finetune_shakespeare": 32_768,
    "bench_ladder": 2 * 256,
    "openwebtext": 12 * 1024 * 40,
    "fineweb_edu": 524_288,
}


@pytest.fixture(scope="module")
def parser():
    return training_parser()


@pytest.fixture
def parse(parser):
    return lambda *paths: (
        parser.parse_args(["fit", *(f"--config={path}" for path in paths), "--data.seed=1"]).fit
    )


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_parses_and_its_model_can_be_built(path, parse):
    config = parse(path)
    shape = {**config.model.config.as_dict()}
    shape["vocab_size"] = shape["vocab_size"] or 65
    with torch.device("meta"):
        GPT(GPTConfig(**shape))
    assert config.data.corpus in CORPORA or config.data.dataset
    assert config.trainer.check_val_every_n_epoch is None  # val_check_interval counts across epochs


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_tokens_per_step_are_as_documented(path, parse):
    config = parse(path)
    block_size = config.data.block_size or config.model.config.block_size
    accumulate = config.trainer.accumulate_grad_batches or 1
    assert config.data.batch_size * block_size * accumulate == TOKENS_PER_STEP[path.stem]
    assert config.trainer.val_check_interval % accumulate == 0  # validate between optimizer steps
    assert "matmul_precision" in path.read_text()  # an explicit setting, never a hidden default


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_an_overlay_of_any_run(name, parse):
    config = parse(CONFIGS / "gpt2_124m.yaml", CONFIGS / "model" / f"{name}.yaml")
    published = SIZES[name]
    for key in ("n_layer", "n_head", "n_embd"):
        assert config.model.config[key] == getattr(published, key)
    assert config.data.batch_size == 32  # the rest stays


def test_shakespeare_char_is_nanogpts(parse):
    config = parse(CONFIGS / "shakespeare_char.yaml")
    assert config.model.config.as_dict() == {
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "block_size": 256,
        "vocab_size": None,
        "bias": False,
        "dropout": 0.2,
        "tie_weights": True,
        "init": "gpt2",
        "attention": "auto",
        "activation": "gelu",
        "loss_chunk": None,
        "checkpointing": False,
    }
    assert (config.model.learning_rate, config.model.min_learning_rate) == (1e-3, 1e-4)
    assert (config.model.warmup_steps, config.model.decay_steps) == (100, 5000)
    assert tuple(config.model.betas) == (0.9, 0.99)
    assert config.trainer.gradient_clip_val == 1.0


def test_auto_precision_is_chosen_and_recorded(parse, monkeypatch, capsys):
    config = parse(CONFIGS / "shakespeare_char_cpu.yaml")
    assert config.precision == "auto"
    monkeypatch.setattr(training, "fastest_precision", lambda accelerator: ("bf16-mixed", "why"))
    training.choose_precision(config)
    assert (config.precision, config.trainer.precision) == (None, "bf16-mixed")
    assert "precision   auto: bf16-mixed, why" in capsys.readouterr().out


def test_a_precision_that_is_given_wins_over_auto(parse, monkeypatch, capsys):
    monkeypatch.setattr(training, "fastest_precision", lambda accelerator: ("bf16-mixed", "why"))
    config = parse(CONFIGS / "shakespeare_char_cpu.yaml")
    config.trainer.precision = "32-true"
    training.choose_precision(config)
    assert (config.precision, config.trainer.precision) == (None, "32-true")
    assert capsys.readouterr().out == ""


def test_a_precision_in_the_wrong_place_is_refused(parse):
    config = parse(CONFIGS / "shakespeare_char_cpu.yaml")
    config.precision = "bf16-mixed"
    with pytest.raises(UserError, match=r"--trainer\.precision bf16-mixed sets one"):
        training.choose_precision(config)
