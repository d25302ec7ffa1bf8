"""A run's arithmetic against the published formulas: its model, and its first updates.

A loss does not show what is smaller than its tolerance, such as another GELU in the first steps,
and a flag shows what was asked for. So the formulas are computed once more, in float64 and as they
stand in the papers, from what the run has: the classes of its model, and its weights and gradients
before and after each update. The settings of the published run decide them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gpt_lightning.files import Fields
from gpt_lightning.model.gpt import GPT
from gpt_lightning.training.module import GPTModule

AS_PUBLISHED = "as published"
HEADS, LAYERS, VOCABULARY, LENGTH = 2, 2, 48, 24  # of the small model, whose heads are 8 wide
UPDATES = 50  # first updates that are computed again
ELEMENTS = 512  # of a tensor, at equal distances


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

    B, T = idx.shape
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = weights["transformer.wte.weight"][idx] + weights["transformer.wpe.weight"][:T]
    for block in (f"transformer.h.{i}" for i in range(LAYERS)):
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        q, k, v = qkv.view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        scores = (q @ k.transpose(2, 3) / q.size(-1) ** 0.5).masked_fill(future, -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1)  # (B, T, C)
        x = x + linear(attended, f"{block}.attn.c_proj")
        hidden = gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))  # (B, T, 4 C)
        x = x + linear(hidden, f"{block}.mlp.c_proj")
    logits = linear(norm(x, "transformer.ln_f"), "lm_head")  # (B, T, V)
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


def check_model(model: GPT) -> str:
    """Return AS_PUBLISHED, or in what a small model of a model's class differs from plain_loss.

    Its weights are large, so that GELU, scale and mask show in the loss and in its gradients, which
    agree within 1e-9 of the largest: it is in float64, on the CPU.
    """
    shape: Fields = {"n_head": HEADS, "n_layer": LAYERS, "n_embd": 8 * HEADS, "block_size": LENGTH}
    config = replace(model.config, **shape, vocab_size=VOCABULARY, dropout=0.0, loss_chunk=None)
    with torch.random.fork_rng(devices=[]):  # the run draws as if nothing had been drawn here
        torch.manual_seed(0)
        small = type(model)(config).double()
        for weight in small.parameters():
            torch.nn.init.normal_(weight, std=0.5)
        idx, targets = torch.randint(VOCABULARY, (2, 3, LENGTH))
    ours = dict(small.named_parameters(remove_duplicate=False))  # a tied matrix has two names
    copies = {id(p): p.detach().clone().requires_grad_() for p in ours.values()}
    plain = {name: copies[id(p)] for name, p in ours.items()}
    loss = small(idx, targets)
    expected = plain_loss(plain, idx, targets, config.activation == "gelu_tanh")
    pairs = zip(
        [loss, *torch.autograd.grad(loss, list(ours.values()))],
        [expected, *torch.autograd.grad(expected, list(plain.values()))],
        strict=True,
    )
    for name, (a, b) in zip(["loss", *ours], pairs, strict=True):
        error = ((a - b).abs().max() / b.abs().max()).item()
        if not error < 1e-9:
            return f"{name} is off by {error:.0e} in a small model of its class"
    return AS_PUBLISHED


class UpdateCheck:
    """Computes the first updates of a run again, by AdamW's formulas (Loshchilov and Hutter 2019).

    Args:
        theirs: Settings of the published run: betas, eps, weight decay, clipping of gradients.

    Attributes:
        found: AS_PUBLISHED, or the first difference.
    """

    def __init__(self, theirs: Fields):
        self.theirs, self.found, self.step = theirs, AS_PUBLISHED, 0
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}

    def before(self, module: GPTModule) -> None:
        """Keep weights and gradients, before these are clipped."""
        if self.step != module.trainer.global_step or self.step >= UPDATES:
            return  # a run that is continued has earlier updates
        found = {name: (p, p.grad) for name, p in module.named_parameters() if p.grad is not None}
        norm = torch.stack([gradient.norm() for _, gradient in found.values()]).norm().item()
        most = str(self.theirs["gradient_clip"]).partition(",")[0]
        scale = 1.0 if most == "none" else min(1.0, float(most) / (norm + 1e-6))
        self._before = {name: (some(p), some(g) * scale) for name, (p, g) in found.items()}

    def after(self, module: GPTModule) -> None:
        """Compare the weights after an update with those of the formulas."""
        groups = [group for each in module.trainer.optimizers for group in each.param_groups]
        of = {id(p): group for group in groups for p in group["params"]}
        for name, parameter in module.named_parameters() if self._before else ():
            error = self._error(name, parameter, of[id(parameter)], module)
            if not error <= 1 and self.found == AS_PUBLISHED:
                self.found = (
                    f"{name} at step {self.step} is off by {error:.1f} of what rounding explains"
                )
        self._before, self.step = {}, self.step + bool(self._before)

    def _error(self, name: str, parameter: Tensor, group: Fields, module: GPTModule) -> float:
        (weight, gradient), theirs, t = self._before[name], self.theirs, self.step + 1
        (beta1, beta2), eps = theirs["betas"], theirs["eps"]
        m, v = self._moments.get(name, (torch.zeros_like(weight), torch.zeros_like(weight)))
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        self._moments[name] = m, v
        rate = module.learning_rate_at(self.step, group["peak_lr"])
        decay = theirs["weight_decay"] if group["weight_decay"] else 0.0
        direction = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        expected = weight - rate * (decay * weight + direction)
        # a weight has 24 bits, and so have the moments
        allowed = 2e-4 * rate + 2.0**-22 * weight.abs()
        return ((some(parameter) - expected).abs() / allowed).max().item()


def some(tensor: Tensor) -> Tensor:
    """Return elements of a tensor, at most ELEMENTS at equal distances, in float64 on the CPU."""
    flat = tensor.detach().flatten()
    return flat[:: -(-len(flat) // ELEMENTS)].cpu().double().clone()
