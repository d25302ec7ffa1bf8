"""Pairs of Trainer arguments, drawn by a seed: `fit` against a training loop in plain PyTorch."""

import itertools
import json
import math
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_fit import TINY_MODEL, rows

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.training.datamodule import DEFAULT_SEED
from gpt_lightning.training.fit import default_callbacks, run_cli

B, T, LR, WARMUP, DECAY = 2, 16, 1e-2, 2, 10
# two epochs of 12 micro-batches; 12, 6 and 24 are multiples of every accumulation below
BASE = {
    "max_steps": -1,
    "max_epochs": 2,
    "limit_train_batches": 12,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
    "log_every_n_steps": 1,
    "precision": "32-true",
}
# argument -> the values that are drawn; a value may need others with it
VALUES = {
    "accumulate_grad_batches": [{"accumulate_grad_batches": k} for k in (2, 3)],
    "gradient_clip_val": [{"gradient_clip_val": norm} for norm in (0, 0.05, 0.5)],
    "gradient_clip_algorithm": [
        {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01},
        {"gradient_clip_algorithm": "norm"},
    ],
    "max_steps": [{"max_steps": 3}, {"max_steps": 7}],
    "max_epochs": [{"max_epochs": 1}, {"max_epochs": 3}],
    "limit_train_batches": [{"limit_train_batches": 24}, {"limit_train_batches": 0.05}],
    "limit_val_batches": [{"limit_val_batches": n} for n in (0, 2, 0.5)],
    "val_check_interval": [
        {"val_check_interval": 6},
        {"val_check_interval": 0.5},
        {"val_check_interval": 6, "check_val_every_n_epoch": None},
    ],
    "check_val_every_n_epoch": [{"check_val_every_n_epoch": 2}],
    "overfit_batches": [{"overfit_batches": 12}],
    "log_every_n_steps": [{"log_every_n_steps": 2}],
    "precision": [{"precision": "64-true"}, {"precision": "bf16-mixed"}],
    "num_sanity_val_steps": [{"num_sanity_val_steps": 2}, {"num_sanity_val_steps": -1}],
    "reload_dataloaders_every_n_epochs": [{"reload_dataloaders_every_n_epochs": 1}],
    "detect_anomaly": [{"detect_anomaly": True}],
    "deterministic": [{"deterministic": True}],
    "inference_mode": [{"inference_mode": False}],
    "min_steps": [{"min_steps": 2}],
    "enable_checkpointing": [{"enable_checkpointing": False}],
    "enable_progress_bar": [{"enable_progress_bar": False}],
    "enable_model_summary": [{"enable_model_summary": True}],
    "use_distributed_sampler": [{"use_distributed_sampler": True}],
}


def draw(n: int, seed: int = 0) -> list[dict]:
    """Return n pairs of arguments with their values."""
    rng = random.Random(seed)
    names = rng.sample(list(itertools.combinations(VALUES, 2)), n)
    return [{**rng.choice(VALUES[a]), **rng.choice(VALUES[b])} for a, b in names]


def rate(step: int) -> float:
    """Return the learning rate of a step, 0 the first."""
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    progress = min(1.0, (step - WARMUP) / (DECAY - WARMUP))
    return LR / 10 + (LR - LR / 10) * (1 + math.cos(math.pi * progress)) / 2


class RawLoop:
    """Train a GPT as the arguments say, without Lightning."""

    def __init__(self, settings: dict) -> None:
        self.s = {"accumulate_grad_batches": 1, "limit_val_batches": 1.0} | settings
        data = TokenDataset("data/text-char", Path("data"))
        self.text = {split: self.tokens(data, split) for split in ("train", "val")}
        self.order = WindowOrder("shuffled", len(self.text["train"]), T, DEFAULT_SEED)
        vocab_size = int(max(tokens.max() for tokens in self.text.values())) + 1
        config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=T, vocab_size=vocab_size)
        torch.manual_seed(DEFAULT_SEED)
        # the weights are drawn in the precision in which they are trained
        torch.set_default_dtype(
            torch.float64 if self.s["precision"] == "64-true" else torch.float32
        )
        self.model = GPT(config)
        torch.set_default_dtype(torch.float32)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
        self.losses: dict[int, float] = {}
        self.norms: dict[int, float] = {}
        self.validations: dict[int, float] = {}

    @staticmethod
    def tokens(data: TokenDataset, split: str) -> torch.Tensor:
        stream = data.stream(split, T)
        return torch.from_numpy(stream.windows(np.array([0]), len(stream))[0].astype("int64"))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the summed loss of targets, (n, T); -1 counts as nothing."""
        mixed = self.s["precision"] == "bf16-mixed"
        with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
            logits = self.model(x).flatten(0, 1)
            logits = logits.float() if mixed else logits
            return F.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction="sum")

    def run(self) -> "RawLoop":
        s, k = self.s, self.s["accumulate_grad_batches"]
        whole = self.order.n_windows // (B * k) * k
        limit = s.get("overfit_batches") or s["limit_train_batches"]
        n = int(whole * limit) // k * k if isinstance(limit, float) else min(whole, limit)
        step = batches = 0
        for epoch in range(s["max_epochs"]):
            for i in range(n):
                starts = self.order.starts(0 if "overfit_batches" in s else epoch, i * B, B)
                windows = torch.stack([self.text["train"][a : a + T + 1] for a in starts])
                loss = self.loss(windows[:, :-1], windows[:, 1:]) / (B * T)
                (loss / k).backward()
                self.losses[step + 1] = self.losses.get(step + 1, 0.0) + float(loss) / k
                batches += 1
                if batches % k == 0:
                    step += 1
                    self.update(step)
                if self.validates(epoch, i + 1, n, batches):
                    self.validate(step)
                if step == s["max_steps"]:
                    return self
        return self

    def update(self, step: int) -> None:
        grads = [p.grad for p in self.model.parameters()]
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        self.norms[step] = float(norm)
        most = self.s.get("gradient_clip_val")
        if most and self.s.get("gradient_clip_algorithm") == "value":
            for grad in grads:
                grad.clamp_(-most, most)
        elif most and norm > most:
            for grad in grads:
                grad.mul_(most / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step - 1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def validates(self, epoch: int, done: int, n: int, batches: int) -> bool:
        """Return whether a validation follows a micro-batch, `done` of n in its epoch."""
        interval, epochs = self.s["val_check_interval"], self.s["check_val_every_n_epoch"]
        if epochs is None:
            return batches % interval == 0
        interval = int(n * interval) if isinstance(interval, float) else interval
        return (epoch + 1) % epochs == 0 and done % interval == 0

    @torch.no_grad()
    def validate(self, step: int) -> None:
        text = self.text["val"]
        limit = self.s.get("overfit_batches") or self.s["limit_val_batches"]
        rows = -(-(len(text) - 1) // T)
        whole = -(-rows // B)
        n = int(whole * limit) if isinstance(limit, float) else min(whole, limit)
        total = count = 0
        for row in range(min(n * B, rows)):
            window = text[row * T : row * T + T + 1][None]
            total += float(self.loss(window[:, :-1], window[:, 1:]))
            count += window.shape[1] - 1
        if n:
            self.validations[step] = total / count


def fit(settings: dict) -> tuple[dict, dict, dict, int]:
    """Return losses, norms and validation losses by step, and the number of steps, of `fit`."""
    typed = {key: v if isinstance(v, str) else json.dumps(v) for key, v in settings.items()}
    options = [f"--trainer.{key}={value}" for key, value in typed.items()]
    model = [option for option in TINY_MODEL if "schedule" not in option and "limit" not in option]
    argv = [
        *("fit", *model, *options, "--run_name=run", "--model.compile=false"),
        *("--data.text_file=text.txt", "--data.tokenizer=char", f"--data.batch_size={B}"),
        *(f"--model.learning_rate={LR}", f"--model.warmup_steps={WARMUP}"),
        f"--model.decay_steps={DECAY}",
    ]
    trainer = run_cli(argv, callbacks=default_callbacks("fit")).trainer
    keys = ("train/loss", "optim/grad_norm", "val/loss")
    found = [{row["step"]: row[key] for row in rows() if key in row} for key in keys]
    return *found, trainer.global_step


@pytest.fixture
def folder(tmp_path, text_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


CASES = draw(20)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=[pytest.mark.slow] * (i >= 4), id=f"{i}-{','.join(pair)}")
        for i, pair in enumerate(CASES)
    ],
)
def test_a_pair_of_arguments_trains_as_a_plain_loop(pair, folder):
    settings = BASE | pair
    losses, norms, validations, steps = fit(settings)
    raw = RawLoop(settings).run()
    assert steps == len(raw.norms)
    logged = [step for step in raw.norms if step % settings["log_every_n_steps"] == 0]
    # bfloat16 has 8 bits: products of other shapes are rounded differently
    close = {"rel": 2e-2, "abs": 1e-3} if settings["precision"] == "bf16-mixed" else {"rel": 1e-5}
    assert losses == pytest.approx({step: raw.losses[step] for step in logged}, **close)
    assert norms == pytest.approx({step: raw.norms[step] for step in logged}, **close)
    assert validations == pytest.approx(raw.validations, **close)


def test_the_drawn_pairs_have_every_argument():
    assert {key for pair in CASES for key in pair} >= set(VALUES)
