"""An optimizer is one file of training/optimizers, and other optimizers are left alone."""

import lightning as L
import pytest
import torch
from tiny_fit import quiet_trainer, tiny_data

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training import optimizers
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.optimizers import muon

TINY = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=16, vocab_size=None)

SGD = """
import torch

from gpt_lightning.errors import UserError


def check(settings):
    if settings.weight_decay:
        raise UserError("model.weight_decay is not for plainsgd: set it to 0")


def build(model, settings, fused):
    groups = [{"params": list(model.parameters()), "lr": 2 * settings.learning_rate}]
    return torch.optim.SGD(groups, lr=1.0)
"""


def fit(text_file, module) -> L.Trainer:
    L.seed_everything(1337)
    trainer = quiet_trainer(max_steps=3, limit_val_batches=0)
    trainer.fit(module, tiny_data(text_file))
    return trainer


@pytest.fixture
def plainsgd(tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "plainsgd.py").write_text(SGD)
    monkeypatch.setattr(optimizers, "__path__", [*optimizers.__path__, str(tmp_path / "more")])


def test_a_file_is_an_optimizer(plainsgd, text_file):
    assert {"adamw", "muon", "plainsgd"} <= {*optimizers.names()}
    module = GPTModule(
        TINY, optimizer="plainsgd", weight_decay=0.0, schedule="constant", warmup_steps=1
    )
    before = torch.nn.utils.parameters_to_vector(fit(text_file, module).model.parameters())
    (group,) = module.trainer.optimizers[0].param_groups
    assert group["lr"] == group["initial_lr"] == 2 * 6.0e-4  # its own peak, on the one schedule
    assert before.isfinite().all()
    with pytest.raises(UserError, match="weight_decay is not for plainsgd"):
        GPTModule(TINY, optimizer="plainsgd")


def test_a_name_without_a_file_is_an_error_with_the_choices():
    with pytest.raises(UserError, match=r"'adamv': did you mean 'adamw'\?; there are adamw"):
        GPTModule(TINY, optimizer="adamv")


def test_muon_decays_matrices_alone():
    muon.check(Settings(optimizer="muon"))
    with pytest.raises(UserError, match="decay is all, which muon does not support"):
        muon.check(Settings(optimizer="muon", decay="all"))
