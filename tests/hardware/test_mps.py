"""What a Mac's GPU does otherwise, on a machine without one."""

import pytest

from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.training.memory_advice import memory_options


@pytest.mark.parametrize(
    ("device", "dropout", "proposed"),
    [("mps", 0.1, False), ("mps", 0.0, True), ("cuda", 0.1, True)],
)
def test_a_switch_that_would_be_an_error_is_not_proposed(device, dropout, proposed):
    options = memory_options(GPTConfig(loss_chunk=64, dropout=dropout), 1024, device)
    assert options == ["--model.config.checkpointing true"] * proposed
