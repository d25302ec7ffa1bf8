"""Faults of Lightning 2.6 that we work around: if one test fails, its workaround may go."""

import lightning as L
import pytest
import torch
from tiny_fit import quiet_trainer


class Stock(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(32.0).view(8, 4), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


class Logged(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.last = float(trainer.callback_metrics["loss"])
        self.micro_batch = float(outputs["loss"])


def fit(**settings):
    logged = Logged()
    trainer = quiet_trainer(max_epochs=1, callbacks=[logged], log_every_n_steps=1, **settings)
    trainer.fit(Stock())
    return logged


def test_stock_clipping_refuses_fused_adamw_under_bf16_mixed():
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(precision="bf16-mixed", gradient_clip_val=1.0)  # PL#21435


def test_stock_logging_under_accumulation_is_the_last_micro_batchs():
    logged = fit(accumulate_grad_batches=4)  # PL#14301
    # the closure's output is scaled by the accumulation
    assert logged.last == pytest.approx(logged.micro_batch * 4)


def test_stock_counts_no_flops_of_attention_on_a_cpu():
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.randn(1, 2, 16, 8)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    # pytorch#195460: we count on the meta device; torch 2.15 counts 2 products of 2 T * T * C
    assert counter.get_total_flops() in (0, 4 * 16 * 16 * 16)


def test_stock_turns_float16_into_bfloat16_on_a_cpu():
    trainer = L.Trainer(accelerator="cpu", precision="16-mixed", logger=False)
    assert trainer.precision == "bf16-mixed"  # without an error: we refuse it
