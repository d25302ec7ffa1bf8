"""`predict`: one loss for each token of the split, in the order of the text."""

from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from tiny_fit import quiet_trainer, tiny_config, tiny_data

from gpt_lightning.errors import UserError
from gpt_lightning.training.callbacks.recorder import LOSSES_FILE, TokenLosses
from gpt_lightning.training.module import GPTModule

BLOCK = 16


@pytest.mark.parametrize("batch_size", [1, 5])
def test_entry_i_is_the_loss_of_token_i_plus_1(
    text_file, tmp_path, monkeypatch, capsys, batch_size
):
    monkeypatch.chdir(tmp_path)
    L.seed_everything(7)
    data = tiny_data(text_file, eval_batch_size=batch_size)
    module = GPTModule(tiny_config(16))
    quiet_trainer(callbacks=[TokenLosses()]).predict(module, data)
    said = capsys.readouterr().out
    (path,) = Path().rglob(LOSSES_FILE)
    found = np.load(path)
    stream = data.reader.stream("val")
    n_tokens = len(stream)
    assert found.dtype == np.float32
    assert len(found) == n_tokens - 1
    expected = []
    with torch.no_grad():
        for start in range(0, n_tokens - 1, BLOCK):
            window = torch.from_numpy(
                stream.windows(np.array([start]), min(BLOCK + 1, n_tokens - start))
            )
            logits = module(window[:, :-1])[0]
            expected += torch.nn.functional.cross_entropy(
                logits, window[0, 1:].long(), reduction="none"
            ).tolist()
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # float32 sums of other shapes
    assert f"{n_tokens - 1:,} token losses, mean {np.mean(expected):.4f} nats" in said


def test_several_devices_would_mix_up_the_order():
    two = SimpleNamespace(world_size=2)
    with pytest.raises(UserError, match=r"predict on 2 devices .* use --trainer.devices 1"):
        TokenLosses().setup(two, None, "predict")
    TokenLosses().setup(two, None, "fit")
    TokenLosses().setup(SimpleNamespace(world_size=1, limit_predict_batches=1.0), None, "predict")
