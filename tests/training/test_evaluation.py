"""Evaluations: what is in memory, and the losses of predictions."""

import lightning as L
import pytest
import torch
from tiny_fit import quiet_trainer

from gpt_lightning.data.loader import IGNORE_INDEX
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.training.module import GPTModule


def test_the_gradients_are_freed_before_a_validation():
    """A validation between two steps needs their memory for its activations."""
    seen = []

    class Gradients(L.Callback):
        def on_validation_start(self, trainer, pl_module):
            seen.append([p.grad for p in pl_module.parameters()])

    tokens = torch.randint(9, (8, 9))
    pairs = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = torch.utils.data.DataLoader(pairs, batch_size=4)
    settings = {"val_check_interval": 1, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(max_steps=2, callbacks=[Gradients()], **settings)
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=9)
    trainer.fit(GPTModule(config, compile=False), loader, loader)
    assert len(seen) == 2
    assert all(gradient is None for gradients in seen for gradient in gradients)


def test_predictions_have_a_loss_for_each_target_and_none_for_padding():
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=9)
    module = GPTModule(config, compile=False)
    module.configure_model()
    x = torch.randint(9, (2, 8))
    y = torch.randint(9, (2, 8))
    y[1, 5:] = IGNORE_INDEX
    with torch.no_grad():
        losses = module.predict_step((x, y), 0)
        mean = module.model(x, y)
    assert losses.dtype == torch.float32
    assert (losses[1, 5:] == 0).all()
    assert losses.sum() / 13 == pytest.approx(float(mean), rel=1e-5)
