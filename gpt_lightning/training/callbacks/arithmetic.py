"""A run's arithmetic against the published formulas: its model, its batches and its first updates.

A loss does not show what is smaller than its tolerance, such as another GELU in the first steps,
and a flag shows what was asked for. So the formulas are computed once more, in float64 and as they
stand in the papers, from what the run has: the classes of its model, and its weights and gradients
before and after each update. The settings of the published run decide them.
"""

import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from gpt_lightning.data.loader import Batch
from gpt_lightning.files import Fields
from gpt_lightning.model.gpt import GPT
from gpt_lightning.training.schedule import share_of_peak

AS_PUBLISHED = "as published"
CHECKED = ("arithmetic", "batches", "updates")
# the small model; its heads are 8 wide
HEADS = 2
LAYERS = 2
VOCABULARY = 48
LENGTH = 24
UPDATES = 3  # first updates that are checked
ELEMENTS = 512  # the most that are taken of a tensor


def plain_loss(weights: Fields, idx: Tensor, targets: Tensor, tanh: bool) -> Tensor:
    """Return the mean cross-entropy of the small GPT-2, in nats.

    Args:
        weights: Parameters by the names in GPT's state dict.
        idx: Tokens, int64 (B, T).
        targets: Next tokens, int64 (B, T).
        tanh: True for GPT-2's approximation of GELU.

    Source: Radford et al. 2019 and the code of its release.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)

    def gelu(x: Tensor) -> Tensor:
        share = torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
        return x * (1 + (share if tanh else torch.erf(x / 2**0.5))) / 2

    T = idx.size(1)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = weights["transformer.wte.weight"][idx] + weights["transformer.wpe.weight"][:T]
    for i in range(LAYERS):
        block = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        q, k, v = qkv.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        scores = q @ k.mT / q.size(-1) ** 0.5
        probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
        attended = (probabilities @ v).transpose(1, 2).flatten(2)  # (B, T, C)
        x = x + linear(attended, f"{block}.attn.c_proj")
        hidden = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")  # (B, T, 4 C)
        x = x + linear(gelu(hidden), f"{block}.mlp.c_proj")
    logits = linear(norm(x, "transformer.ln_f"), "lm_head")  # (B, T, V)
    log_p = logits.log_softmax(-1).gather(-1, targets[..., None])
    return -log_p.mean()


def check_model(model: GPT, activation: str) -> str:
    """Return in what a small model of a model's class differs from plain_loss; empty if in nothing.

    Its weights are large, so that GELU, scale and mask show in the loss and in its gradients, which
    agree within 1e-9 of the largest: it is in float64, on the CPU.

    Args:
        model: Model of the run.
        activation: Published one: gelu, tanh or gelu, none.
    """
    config = replace(
        model.config,
        n_head=HEADS,
        n_layer=LAYERS,
        n_embd=8 * HEADS,
        block_size=LENGTH,
        vocab_size=VOCABULARY,
        dropout=0.0,
        loss_chunk=None,
    )
    with torch.random.fork_rng(devices=[]):  # the run draws as if nothing had been drawn here
        torch.manual_seed(0)
        small = type(model)(config).double()
        for weight in small.parameters():
            torch.nn.init.normal_(weight, std=0.5)
        idx, targets = torch.randint(VOCABULARY, (2, 3, LENGTH))
    # a tied matrix has two names
    named = small.named_parameters(remove_duplicate=False)
    ours = dict(named)
    copies = {p: p.detach().clone().requires_grad_() for p in small.parameters()}
    plain = {name: copies[p] for name, p in ours.items()}
    loss = small(idx, targets)
    gradients = torch.autograd.grad(loss, [*ours.values()], materialize_grads=True)
    expected = plain_loss(plain, idx, targets, activation == "gelu, tanh")
    others = torch.autograd.grad(expected, [*plain.values()], materialize_grads=True)
    names = ["loss", *ours]
    for name, a, b in zip(names, [loss, *gradients], [expected, *others], strict=True):
        error = ((a - b).abs().max() / b.abs().max()).item()
        if not error < 1e-9:
            return f"{name} is off by {error:.0e} in a small model of its class"
    return ""


class ArithmeticCheck(Callback):
    """Check a run's model, its first batches, and its first updates by AdamW's formulas.

    Source of the updates: Loshchilov and Hutter 2019. A run that is continued is not checked. The
    checks take time, so the callback comes before the one that times the steps, and leaves most
    steps alone.

    Args:
        theirs: Settings of the published run: batches, betas, eps, weight decay, clipping. Its
            batches are the CRC-32 of the first n micro-batches (inputs and targets, int64) for n =
            1, 2, ...

    Attributes:
        found: AS_PUBLISHED, or the first difference, for each of CHECKED.
    """

    def __init__(self, theirs: Fields):
        self.theirs = theirs
        self.found: dict[str, str] = {}
        self._step = 0
        self._batches = 0
        self._crc = 0
        self._m: Tensor | float = 0.0
        self._v: Tensor | float = 0.0
        self._before: tuple[Tensor, Tensor] | None = None

    def _note(self, name: str, difference: str) -> None:
        if self.found.setdefault(name, AS_PUBLISHED) == AS_PUBLISHED and difference:
            self.found[name] = difference

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_step == 0:
            try:
                wrong = check_model(pl_module.model, self.theirs["activation"])
            except (KeyError, RuntimeError) as error:
                wrong = f"another structure than GPT-2's: {error!r}"
            self._note("arithmetic", wrong)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Batch, batch_idx: int
    ) -> None:
        if self.found and self._batches < len(self.theirs["batches"]):
            rows = torch.stack([*batch]).cpu()
            self._crc = zlib.crc32(rows.numpy().tobytes(), self._crc)
            other = self._crc != self.theirs["batches"][self._batches]
            self._batches += 1
            self._note("batches", f"others from batch {self._batches} on" if other else "")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if self.found and self._step < UPDATES:
            # not clipped yet
            gradients = [
                torch.zeros_like(p) if p.grad is None else p.grad for _, p in parameters(optimizer)
            ]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
            limit = str(self.theirs["gradient_clip"]).partition(",")[0]
            scale = 1.0 if limit == "none" else min(1.0, float(limit) / (norm + 1e-6))
            weights = strided(p for _, p in parameters(optimizer))
            gradient = strided(gradients) * scale
            self._before = weights, gradient

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if self._before is None:
            return
        weight, gradient = self._before
        beta1, beta2 = self.theirs["betas"]
        self._before = None
        self._m = beta1 * self._m + (1 - beta1) * gradient
        self._v = beta2 * self._v + (1 - beta2) * gradient**2
        groups = parameters(trainer.optimizers[0])
        decay_steps = pl_module.schedule.decay_steps
        share = share_of_peak(self._step, pl_module.settings, decay_steps)
        rate = groups[0][0]["initial_lr"] * share
        decays = strided(torch.full_like(p, bool(group["weight_decay"])) for group, p in groups)
        self._step += 1
        m = self._m / (1 - beta1**self._step)
        v = self._v / (1 - beta2**self._step)
        direction = m / (v.sqrt() + self.theirs["eps"])
        update = rate * (self.theirs["weight_decay"] * decays * weight + direction)
        error = strided(p for _, p in groups) - weight + update
        # a weight has 24 bits, and so have the moments
        allowed = 2e-4 * rate + 2.0**-22 * weight.abs()
        roundings = (error.abs() / allowed).max().item()
        wrong = f"update {self._step} is off by {roundings:.1f} roundings"
        self._note("updates", "" if roundings <= 1 else wrong)


def parameters(optimizer: Any) -> list[tuple[Fields, Tensor]]:
    """Return an optimizer's parameters, each behind its group."""
    return [(group, p) for group in optimizer.param_groups for p in group["params"]]


def strided(tensors: Iterable[Tensor]) -> Tensor:
    """Return at most ELEMENTS of each tensor, at equal distances, in float64 on the CPU."""
    flat = (tensor.detach().flatten() for tensor in tensors)
    return torch.cat([x[:: -(-len(x) // ELEMENTS)].cpu().double() for x in flat])
