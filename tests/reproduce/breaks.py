"""Breaks of the program at run time that a rung must see: patches that no flag shows."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.readers import NanoGPTLoader
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.model import gpt
from gpt_lightning.model.gpt import GPT, MLP, Block, CausalSelfAttention, Transformer
from gpt_lightning.reproduce import breaks
from gpt_lightning.reproduce.breaks import Break, around, attend, clip_at, hidden
from gpt_lightning.training import optim
from gpt_lightning.training.module import GPTModule

LADDER, SMALL = "gpt2-init", "small"


# ---- wrong functions -----------------------------------------------------------------------------


def after(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Call the right function, then change(self): for __init__."""

    def make(old: Any) -> Any:
        def new(self: Any, *args: Any, **options: Any) -> None:
            old(self, *args, **options)
            with torch.no_grad():
                change(self)

        return new

    return make


def unmerged(self: Any, x: Any) -> Any:
    (B, T, C), nh = x.shape, self.n_head
    q, k, v = (t.view(B, T, nh, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
    return self.c_proj(self.attention(q, k, v, 0.0).reshape(B, T, C))


def swapped_starts(old: Any, self: Any, epoch: int, first: int, count: int) -> Any:
    """Swap batches 3 and 4 of four rows."""
    starts = old(self, epoch, 0, first + count).copy()
    starts[8:16] = [*starts[12:16], *starts[8:12]]
    return starts[first:]


def late_softmax(old: Any, q: Any, k: Any, v: Any, p: float) -> Any:
    """Hide the future after the softmax."""
    hidden_keys = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).triu(1)
    return (q @ k.mT * q.size(-1) ** -0.5).softmax(-1).masked_fill(hidden_keys, 0.0) @ v


def attention(change: Callable[..., Any]) -> Any:
    """Replace the attention function of every block by change(right function, ...)."""

    def set_attention(self: Any) -> None:
        right = self.attention
        self.attention = functools.wraps(right)(lambda *args: change(right, *args))

    return after(set_attention)


def untied(self: GPT) -> None:
    self.lm_head.weight = nn.Parameter(self.lm_head.weight.detach().clone())


def no_lookup_gradient(old: Any, self: Any, idx: Any) -> Any:
    return F.embedding(idx, self.weight.detach()) if self.num_embeddings > 2000 else old(self, idx)


def init_std(self: GPT) -> None:
    for name, weight in self.named_parameters():
        if name.endswith("c_proj.weight"):
            weight.normal_(0, 0.02)


def biases(self: GPT) -> None:
    for name, weight in self.named_parameters():
        if name.endswith("bias") and "ln" not in name:
            weight.fill_(0.01)


def norm_eps(self: GPT) -> None:
    for module in self.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6


def positions(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change the indices of the position embedding."""

    def wrong(old: Any, self: Any, idx: Any) -> Any:
        return old(self, idx) if idx.dim() > 1 else change(lambda i: old(self, i))(idx)

    return around(wrong)


def autocast(old: Any, *args: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return old(*args)


def post_norm(self: Block, x: Any) -> Any:
    x = self.ln_1(x + self.attn(x))
    return self.ln_2(x + self.mlp(x))


def mlp(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Use another activation function; the module that names it stays."""
    return lambda old: lambda self, x: self.c_proj(act(self.c_fc(x)))


def late_rows(old: Any, self: Any, starts: Any, length: int) -> Any:
    windows = old(self, starts, length)
    if 8 * 32 in starts.tolist():
        windows = old(self, starts + 1, length)
    return windows


BREAKS = [
    Break("untied: own copy of wte", LADDER, GPT, "__init__", after(untied)),
    Break(
        "gradient of the lookup dropped",
        LADDER,
        nn.Embedding,
        "forward",
        around(no_lookup_gradient),
    ),
    Break("residual projections not scaled", LADDER, GPT, "__init__", after(init_std)),
    Break("biases start at 0.01", LADDER, GPT, "__init__", after(biases)),
    Break("layer norm eps 1e-6", LADDER, GPT, "__init__", after(norm_eps)),
    *(
        Break(f"{key} {text}, hidden", rung, GPTModule, "_build_optimizer", hidden(key, wrong))
        for rung in (LADDER, SMALL)
        for key, text, wrong in (
            ("weight_decay", "0", 0.0),
            ("lr", "x 1.10", lambda rate: rate * 1.10),
            ("lr", "x 1.01", lambda rate: rate * 1.01),
            ("betas", "swapped", lambda betas: betas[::-1]),
            ("betas", "0.9, 0.95", (0.9, 0.95)),
            ("eps", "1e-6", 1e-6),
            ("eps", "1e-10", 1e-10),
        )
    ),
    *(
        Break(name, rung, owner, attribute, make)
        for rung in (LADDER, SMALL)
        for name, owner, attribute, make in (
            ("other GELU, hidden", MLP, "forward", around(breaks.other_gelu)),
            ("ReLU, hidden", MLP, "forward", mlp(F.relu)),
            (
                "targets one token late",
                GPT,
                "forward",
                around(
                    lambda old, self, x, y=None: old(self, x, y if y is None else y.roll(-1, 1))
                ),
            ),
            (
                "targets are the inputs",
                GPT,
                "forward",
                around(lambda old, self, x, y=None: old(self, x, y if y is None else x)),
            ),
            (
                "last position not counted",
                gpt,
                "mean_loss",
                around(lambda old, z, y: old(z[:, :-1].contiguous(), y[:, :-1])),
            ),
            (
                "label smoothing 0.01",
                gpt,
                "mean_loss",
                around(lambda old, z, y: F.cross_entropy(z.mT, y, label_smoothing=0.01)),
            ),
            (
                "logits rounded to bf16",
                gpt,
                "mean_loss",
                around(lambda old, z, y: old(z.bfloat16().float(), y)),
            ),
            (
                "positions off by one",
                nn.Embedding,
                "forward",
                positions(lambda old: lambda i: old(i.roll(-1))),
            ),
            (
                "no position embedding",
                nn.Embedding,
                "forward",
                positions(lambda old: lambda i: 0 * old(i)),
            ),
            ("post-norm blocks", Block, "forward", lambda old: post_norm),
            (
                "heads merged without transpose",
                CausalSelfAttention,
                "forward",
                lambda old: unmerged,
            ),
            ("bf16 autocast inside", GPTModule, "forward", around(autocast)),
            (
                "dropout of 5% in the MLP",
                MLP,
                "forward",
                around(lambda old, self, x: F.dropout(old(self, x), 0.05, self.training)),
            ),
        )
    ),
    Break(
        "final layer norm forgotten",
        LADDER,
        Transformer,
        "__init__",
        after(lambda self: setattr(self, "ln_f", nn.Identity())),
    ),
    Break(
        "last block skipped",
        LADDER,
        Transformer,
        "forward",
        around(
            lambda old, self, x: self.ln_f(
                functools.reduce(
                    lambda h, block: block(h),
                    list(self.h)[:-1],
                    self.wte(x) + self.wpe.weight[: x.size(1)],
                )
            )
        ),
    ),
    *(
        Break(name, rung, CausalSelfAttention, "__init__", make)
        for rung in (LADDER, SMALL)
        for name, make in (
            ("attention without 1/sqrt(hs)", attend(0.0)),
            ("attention scaled by 1/hs", attend(-1.0)),
            ("mask sees one token of the future", attend(-0.5, 2)),
            ("no causal mask", attend(-0.5, 10_000)),
            ("mask applied after softmax", attention(late_softmax)),
            ("queries and keys swapped", attention(lambda old, q, k, v, p: old(k, q, v, p))),
        )
    ),
    Break("gradients not clipped", SMALL, optim, "clip_gradients", clip_at(None)),
    Break("clipped at 2, hidden", SMALL, optim, "clip_gradients", clip_at(2.0)),
    Break(
        "schedule one step early",
        SMALL,
        optim,
        "learning_rate",
        around(lambda old, step, *rest: old(step + 1, *rest)),
    ),
    Break(
        "weight decay on the other tensors",
        SMALL,
        GPTModule,
        "_build_optimizer",
        around(lambda old, *args: swap_decay(old(*args))),
    ),
    Break(
        "batches 3 and 4 swapped",
        SMALL,
        NanoGPTLoader,
        "training_batch",
        around(breaks.swapped_draws),
    ),
    Break("batches 3 and 4 swapped", LADDER, WindowOrder, "starts", around(swapped_starts)),
    Break("rows 9 to 12 one token late", LADDER, TokenStream, "windows", around(late_rows)),
    Break(
        "validation reads the training split",
        SMALL,
        NanoGPTLoader,
        "_batch",
        around(lambda old, self, split, starts: old(self, "train", starts)),
    ),
    Break(
        "validation windows one character late",
        SMALL,
        NanoGPTLoader,
        "_batch",
        around(lambda old, self, split, starts: old(self, split, starts + (split == "val"))),
    ),
    *(
        Break(options, rung, options=(options,))
        for rung, options in (
            ("weight-tying", "--model.config.tie_weights=false"),
            ("sequential-loader", "--model.config.init=gpt2"),
            ("sequential-loader", "--model.learning_rate=6.0e-2"),
            ("sequential-loader", "--model.betas=[0.9,0.95]"),
            ("overfit-one-batch", "--model.learning_rate=6.0e-2"),
            (LADDER, "--model.matmul_precision=high"),
            (LADDER, "--trainer.precision=bf16-mixed"),
            (LADDER, "--trainer.gradient_clip_val=1.0"),
            (LADDER, "--model.config.activation=gelu"),
            (LADDER, "--model.config.attention=sdpa"),
            (LADDER, "--data.order=shuffled"),
            (LADDER, "--model.learning_rate=9.09e-2"),
            (SMALL, "--model.warmup_steps=99"),
            (SMALL, "--model.config.dropout=0.1"),
        )
    ),
]


def swap_decay(optimizer: Any) -> Any:
    a, b = optimizer.param_groups
    a["weight_decay"], b["weight_decay"] = b["weight_decay"], a["weight_decay"]
    return optimizer
