"""Stock Lightning with the same tiny model, as its documentation shows it: what do faults do there?

python stock.py FOLDER STEPS [resume] [FAULT STEP]: trains on FOLDER/text.txt and resumes from
last.ckpt; FAULT is nan, moment (a NaN in AdamW's state), stop (trainer.should_stop), term or hup.
Prints a line a step, and at the end a digest of the weights.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from gpt_lightning.model.gpt import GPT, GPTConfig

T = 16


class Stock(L.LightningModule):
    def __init__(self, fault: str = "", at: int = 0) -> None:
        super().__init__()
        size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": T, "vocab_size": 128}
        self.model = GPT(GPTConfig(**size, dropout=0.2))  # type: ignore[arg-type]
        self.fault, self.at, self.calls = fault, at, 0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens = batch[0]
        loss: torch.Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
        if self.global_step == self.at - 1 and self.fault:
            self.calls += 1
            if self.fault == "nan":
                return loss * float("nan")
            if self.calls == 1:
                self._hurt()
        return loss

    def _hurt(self) -> None:
        if self.fault == "stop":
            self.trainer.should_stop = True
        elif self.fault == "moment":
            for state in self.trainer.optimizers[0].state.values():
                state["exp_avg"].view(-1)[0] = torch.nan
        else:
            os.kill(os.getpid(), {"term": signal.SIGTERM, "hup": signal.SIGHUP}[self.fault])

    def on_train_batch_end(self, *_: Any) -> None:
        print(f"step {self.global_step}/", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    folder, steps, *rest = sys.argv[1:]
    resume, fault = "resume" in rest, [word for word in rest if word != "resume"]
    L.seed_everything(7, verbose=False)
    text = torch.tensor(list(Path(folder, "text.txt").read_bytes()[:3240]))
    windows = text[: len(text) // (T + 1) * (T + 1)].view(-1, T + 1)
    data = DataLoader(TensorDataset(windows), batch_size=8, shuffle=True)
    checkpoint = ModelCheckpoint(dirpath=folder, every_n_train_steps=4, save_last=True)
    trainer = L.Trainer(
        max_steps=int(steps), accelerator="cpu", accumulate_grad_batches=2, callbacks=[checkpoint],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    module = Stock(fault[0], int(fault[1])) if fault else Stock()
    trainer.fit(module, data, ckpt_path="last" if resume else None)
    digest = hashlib.sha256()
    for tensor in module.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    finite = all(bool(torch.isfinite(t).all()) for t in module.state_dict().values())
    print(f"weights {digest.hexdigest()} finite {finite} step {trainer.global_step}")


if __name__ == "__main__":
    main()
