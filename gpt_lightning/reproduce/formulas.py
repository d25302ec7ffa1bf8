"""A run's arithmetic against the published formulas: batches, model, gradients and updates.

A loss does not show what is smaller than its tolerance, such as another GELU in the first steps,
and a flag shows what was asked for. So the first steps are computed once more, as the formulas are
in the papers, from the run's own weights, batches and gradients, and the published settings.
"""

import math
import zlib
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from gpt_lightning.data.loader import Batch
from gpt_lightning.files import Fields
from gpt_lightning.model.fast.compilation import is_compiled
from gpt_lightning.model.gpt import GPT

AS_PUBLISHED = "as published"
CHECKED = ("formulas", "batches", "loss", "gradients", "updates")  # parts of a step
STEPS = 50  # first steps that are computed again
SMALL = 2**20  # parameters up to which every element is compared
LOGITS = 2**24  # numbers up to which a step's gradients are computed again


def plain_loss(weights: Fields, idx: Tensor, targets: Tensor, heads: int, tanh: bool) -> Tensor:
    """Return the mean cross-entropy of a GPT-2, in nats.

    Args:
        weights: Parameters by the names in GPT's state dict.
        idx: Tokens, int64 (B, T).
        targets: Next tokens, int64 (B, T).
        heads: Attention heads per block.
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
        inner = torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
        return x * (1 + (inner if tanh else torch.erf(x / 2**0.5))) / 2

    B, T = idx.shape
    future = torch.ones(T, T, dtype=torch.bool, device=idx.device).triu(1)
    x = weights["transformer.wte.weight"][idx] + weights["transformer.wpe.weight"][:T]  # (B, T, C)
    layers = sum(name.endswith("ln_1.weight") for name in weights)
    for block in (f"transformer.h.{i}" for i in range(layers)):
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        q, k, v = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(future, -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1)  # (B, T, C)
        x = x + linear(attended, f"{block}.attn.c_proj")
        hidden = gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))  # (B, T, 4 C)
        x = x + linear(hidden, f"{block}.mlp.c_proj")
    logits = linear(norm(x, "transformer.ln_f"), "lm_head")  # (B, T, V)
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


def plain_step(model: GPT, idx: Tensor, targets: Tensor, theirs: Fields, heads: int) -> Fields:
    """Return plain_loss of a model's weights and its gradients, by the names of the parameters."""
    copies = {p: p.detach().clone().requires_grad_() for p in model.parameters()}
    names = dict(model.named_parameters(remove_duplicate=False))  # a tied matrix has two names
    weights = {name: copies[p] for name, p in names.items()}
    loss = plain_loss(weights, idx, targets, heads, theirs["activation"] == "gelu, tanh")
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss, [*copies.values()], materialize_grads=True)
    names_once = (name for name, _ in model.named_parameters())
    return {"loss": loss.detach(), **dict(zip(names_once, gradients, strict=True))}


def check_model(model: GPT, theirs: Fields) -> str:
    """Return in what a model's classes differ from plain_loss; empty if they do not.

    A small model of the same classes has heads 8 wide, so that the scale of attention shows; a copy
    of the model itself shows what is its own. Large weights let GELU and the mask show. They are
    in float64, on the CPU, and agree within 1e-9 of the largest number.
    """
    shape: Fields = {"n_head": 2, "n_embd": 16, "n_layer": 2, "block_size": 24, "vocab_size": 48}
    config = replace(model.config, **shape, dropout=0.0, loss_chunk=None, attention="naive")
    with torch.random.fork_rng(devices=[]):  # the run draws as if nothing had been drawn here
        torch.manual_seed(0)
        models = [(type(model)(replace(config, attention=a)), 2) for a in ("naive", "sdpa")]
        if is_whole(model) and not is_compiled(model) and not theirs["dropout"]:
            models.append((deepcopy(model).cpu(), theirs["n_head"]))
        for copy, heads in models:
            for weight in copy.double().parameters():
                torch.nn.init.normal_(weight, std=0.5)
            idx, targets = torch.randint(48, (2, 3, 24))
            plain = plain_step(copy, idx, targets, theirs, heads)
            for mode in (True, False):
                loss = copy.train(mode)(idx, targets)
                ours = torch.autograd.grad(loss, [*copy.parameters()], materialize_grads=True)
                if wrong := differing(plain, [loss, *ours], 1e-9):
                    return f"{wrong} in a copy with large weights"
    return ""


def differing(expected: Fields, ours: list[Tensor], tolerance: float) -> str:
    """Return a text about the first tensor that differs by more than a part of its largest."""
    for (name, b), a in zip(expected.items(), ours, strict=True):
        error = ((a - b).abs().max() / b.abs().max()).item()
        if not error <= tolerance and b.abs().max() + a.abs().max() > 0:
            return f"{name} is off by {error:.0e}"
    return ""


def is_whole(model: GPT) -> bool:
    """Return whether every element of a model is compared."""
    return model.num_params() <= SMALL


class FormulaCheck(Callback):
    """Compute the first steps of a run again; it must come before the callback that times them.

    Args:
        theirs: Settings of the published run.

    Attributes:
        found: For each part of a step AS_PUBLISHED, or its first difference.
    """

    def __init__(self, theirs: Fields):
        self.theirs, self.step, self.found = theirs, 0, Fields()
        self._crc = self._batches = 0
        self._plain: Fields = {}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}

    def _note(self, part: str, wrong: str) -> None:
        """Keep the first difference of a part."""
        if self.found.setdefault(part, AS_PUBLISHED) == AS_PUBLISHED and wrong:
            self.found[part] = f"step {self.step}: {wrong}"

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        theirs, exact = self.theirs, ("32-true", "highest")
        arithmetic = theirs["precision"], theirs["matmul_precision"]
        # a continued run has earlier batches, and ranks share them
        self._compares = not trainer.ckpt_path and trainer.world_size == 1
        self._computes = arithmetic == exact and not theirs["dropout"]
        self._computes &= trainer.accumulate_grad_batches == 1
        self._computes &= math.prod(theirs["batch"]) * theirs["vocab_size"] <= LOGITS
        try:
            self._note("formulas", check_model(pl_module.model, theirs))
        except (KeyError, RuntimeError) as error:  # another structure than GPT-2's
            self._note("formulas", f"cannot be computed: {error!r}")
            self._computes = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Batch, batch_idx: int
    ) -> None:
        self._finish(trainer, pl_module)
        if not self._compares or self.step >= STEPS:
            return
        (x, y), published = batch, self.theirs.get("batches", [])
        if self._batches < len(published):
            self._crc = zlib.crc32(torch.stack([x, y]).cpu().numpy().tobytes(), self._crc)
            same = self._crc == published[self._batches]
            self._note("batches", "" if same else "another batch than theirs")
            self._batches += 1
        if self._computes:
            self._plain = plain_step(pl_module.model, x, y, self.theirs, self.theirs["n_head"])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if not self._compares or self.step >= STEPS:
            return
        model, whole = pl_module.model, is_whole(pl_module.model)
        found = [(n, p, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        self._scale = 1.0
        if (most := str(self.theirs["gradient_clip"]).partition(",")[0]) != "none":
            norm = torch.stack([gradient.norm() for _, _, gradient in found]).norm().item()
            self._scale = min(1.0, float(most) / (norm + 1e-6))
        self._before = {n: (some(p, whole), some(g, whole)) for n, p, g in found}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module)

    def _finish(self, trainer: Trainer, module: Any) -> None:
        """Compare the loss, the gradients and the update of the step before, if it is whole."""
        if not self._compares or trainer.global_step == self.step or self.step >= STEPS:
            return
        self._note("updates", "" if self._before else "no gradient was seen")
        whole, ours = is_whole(module.model), dict(module.model.named_parameters())
        if self._plain:
            loss = module.last_loss
            self._note("loss", differing({"loss": self._plain.pop("loss")}, [loss], 1e-5))
            plain = {name: some(g, whole) for name, g in self._plain.items()}
            zeros = torch.zeros(())
            found = [self._before[n][1] if n in self._before else zeros for n in plain]
            self._note("gradients", differing(plain, found, 1e-3))
        for name in self._before:
            self._note("updates", self._wrong_update(name, ours[name], whole))
        self._before, self._plain, self.step = {}, {}, self.step + 1

    def _wrong_update(self, name: str, parameter: Tensor, whole: bool) -> str:
        """Return a text about a tensor's update if it is not AdamW's (Loshchilov, Hutter 2019)."""
        (weight, gradient), theirs, t = self._before[name], self.theirs, self.step + 1
        gradient = gradient * self._scale
        clipped = gradient if parameter.grad is None else some(parameter.grad, whole)
        if wrong := differing({name: gradient}, [clipped], 1e-4):
            return f"clipped gradient of {wrong}: gradient_clip?"
        (beta1, beta2), eps = theirs["betas"], theirs["eps"]
        m, v = self._moments.get(name, (torch.zeros_like(weight), torch.zeros_like(weight)))
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        self._moments[name] = m, v
        first, peak = theirs["learning_rates"][:2]  # the published warm-ups take 100 steps
        rate = min(peak, first * t)
        all_decay = theirs["decayed_parameters"] == theirs["parameters"]
        decay = theirs["weight_decay"] if all_decay or parameter.dim() >= 2 else 0.0
        direction = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        expected = weight - rate * (decay * weight + direction)
        # a weight has 24 bits, and so have the moments
        allowed = 2e-4 * rate + 2.0**-22 * weight.abs()
        error = ((some(parameter, whole) - expected).abs() / allowed).max().item()
        cause = "rate, betas, eps or weight decay?"
        return "" if error <= 1 else f"{name} is off by {error:.1f} roundings: {cause}"


def some(tensor: Tensor, whole: bool) -> Tensor:
    """Return a tensor's elements, or 512 at equal distances, in float64 on the CPU."""
    flat = tensor.detach().flatten()
    return flat[:: 1 if whole else (len(flat) // 512) | 1].cpu().double().clone()
