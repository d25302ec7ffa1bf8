"""Wrong programs, which `gpt-lightning reproduce --selftest` trains: each must be seen.

A break replaces one function while a rung is trained, so that flags, parameter groups and
configuration still have the published values; or it is an option of `fit`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.readers import NanoGPTLoader
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.model import gpt
from gpt_lightning.model.gpt import GPT, MLP, Block, CausalSelfAttention, Transformer
from gpt_lightning.training import optim
from gpt_lightning.training.module import GPTModule

LADDER, SMALL = "gpt2-init", "small"
STEPS = {SMALL: 12}  # others: 4
Change = Callable[..., Any]  # of the right function and its arguments, what the wrong one returns


class Broken(AbstractContextManager[None]):
    """A program with another function, which calls `change` with the right one."""

    def __init__(self, owner: Any, name: str, change: Change) -> None:
        right = getattr(owner, name)
        wrong = wraps(right)(lambda *args, **options: change(right, *args, **options))
        self._patch = patch.object(owner, name, wrong)

    def __enter__(self) -> None:
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def built(change: Callable[[Any], Any]) -> Change:
    """Return a change of __init__ that changes what it has built."""

    def new(right: Any, self: Any, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        with torch.no_grad():
            change(self)

    return new


def attend(change: Change) -> Change:
    """Return a change of a block's attention, a function of the right one, q, k and v."""

    def set_attention(self: Any) -> None:
        right = self.attention
        self.attention = wraps(right)(lambda q, k, v, *_: change(right, q, k, v))

    return built(set_attention)


def scores(power: float = -0.5, future: int = 1, late: bool = False) -> Change:
    """Return attention with scores times hs ** power, which sees keys below `future`."""

    def attention(_: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        unseen = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).triu(future)
        z = q @ k.mT * q.size(-1) ** power
        return (
            z.softmax(-1) * ~unseen if late else z.masked_fill(unseen, -torch.inf).softmax(-1)
        ) @ v

    return attend(attention)


def update(key: str, wrong: Callable[[Any], Any]) -> Change:
    """Return a change of _build_optimizer: another value of a key while it updates."""

    def build(right: Any, *args: Any) -> Any:
        optimizer = right(*args)
        step, groups = optimizer.step, optimizer.param_groups

        def wrong_step(closure: Callable[[], Any]) -> None:
            loss, before = closure(), [group[key] for group in groups]
            for group, value in zip(groups, before, strict=True):
                group[key] = wrong(value)
            step(lambda: loss)
            for group, value in zip(groups, before, strict=True):
                group[key] = value

        optimizer.step = wrong_step
        return optimizer

    return build


def activation(function: Change) -> Change:
    return lambda _, self, x: self.c_proj(function(self, self.c_fc(x)))


def other_gelu(self: Any, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="none" if self.gelu.approximate == "tanh" else "tanh")


def positions(change: Change) -> Change:
    """Return a change of an embedding's forward where it is given positions, a vector."""
    return lambda right, self, idx: right(self, idx) if idx.dim() > 1 else change(right, self, idx)


def unmerged(_: Any, self: Any, x: Tensor) -> Tensor:
    """Merge the heads without a transpose."""
    (B, T, C), nh = x.shape, self.n_head
    q, k, v = (t.view(B, T, nh, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
    return self.c_proj(self.attention(q, k, v, 0.0).reshape(B, T, C))


def no_lookup_gradient(right: Any, self: Any, idx: Tensor) -> Tensor:
    return (
        F.embedding(idx, self.weight.detach()) if self.num_embeddings > 2000 else right(self, idx)
    )


def exchange(right: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return right(k, q, v, 0.0)


def smoothed(_: Any, logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.mT, y, label_smoothing=0.01)


def without_last_position(right: Any, logits: Tensor, y: Tensor) -> Any:
    return right(logits[:, :-1].contiguous(), y[:, :-1])


def targets(change: Callable[[Tensor, Tensor], Tensor]) -> Change:
    return lambda right, self, x, y=None: right(self, x, y if y is None else change(x, y))


def drop_norm(self: Transformer) -> None:
    self.ln_f = nn.Identity()


def untie(self: GPT) -> None:
    self.lm_head.weight = nn.Parameter(self.lm_head.weight.detach().clone())


def redraw(self: GPT) -> None:
    """Draw the residual projections without their smaller standard deviation."""
    for name, weight in self.named_parameters():
        if name.endswith("c_proj.weight"):
            weight.normal_(0, 0.02)


def lift_biases(self: GPT) -> None:
    for name, weight in self.named_parameters():
        if name.endswith("bias") and "ln" not in name:
            weight.fill_(0.01)


def without_last(right: Any, self: Any, x: Tensor) -> Any:
    kept, self.h = self.h, self.h[:-1]
    try:
        return right(self, x)
    finally:
        self.h = kept


def post_norm(_: Any, self: Any, x: Tensor) -> Tensor:
    x = self.ln_1(x + self.attn(x))
    return self.ln_2(x + self.mlp(x))


def in_bfloat16(right: Any, *args: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return right(*args)


def clip_at(limit: float | None) -> Change:
    return lambda right, parameters, old, *rest: right(parameters, limit, *rest)


def swap_decay(right: Any, *args: Any) -> Any:
    a, b = (optimizer := right(*args)).param_groups
    a["weight_decay"], b["weight_decay"] = b["weight_decay"], a["weight_decay"]
    return optimizer


def early(right: Any, step: int, *rest: Any) -> Any:
    return right(step + 1, *rest)


def of_training(right: Any, self: Any, split: str, starts: Any) -> Any:
    return right(self, "train", starts)


def late(right: Any, self: Any, split: str, starts: Any) -> Any:
    return right(self, split, starts + (split == "val"))


def swapped_draws(right: Any, self: Any) -> Any:
    """Draw nanoGPT's next batch, the third and the fourth swapped."""
    self.count = getattr(self, "count", 0) + 1
    if self.count == 3:
        self.kept = right(self)
    return self.kept if self.count == 4 else right(self)


def swapped_starts(right: Any, self: Any, epoch: int, first: int, count: int) -> Any:
    """Swap batches 3 and 4 of four rows."""
    starts = right(self, epoch, 0, first + count).copy()
    starts[8:16] = [*starts[12:16], *starts[8:12]]
    return starts[first:]


def late_rows(right: Any, self: Any, starts: Any, length: int) -> Any:
    return right(self, starts + (8 * 32 in starts.tolist()), length)


INIT, FORWARD, OPTIMIZER = "__init__", "forward", (GPTModule, "_build_optimizer")
# what is broken in both rungs, the function, and what takes its place
BOTH: list[tuple[str, Any, str, Change]] = [
    ("the other GELU", MLP, FORWARD, activation(other_gelu)),
    ("ReLU", MLP, FORWARD, activation(lambda self, x: F.relu(x))),
    ("attention without its scale", CausalSelfAttention, INIT, scores(power=0)),
    ("attention scaled by 1/hs", CausalSelfAttention, INIT, scores(power=-1)),
    ("a mask that sees the next token", CausalSelfAttention, INIT, scores(future=2)),
    ("no mask", CausalSelfAttention, INIT, scores(future=10_000)),
    ("the mask after the softmax", CausalSelfAttention, INIT, scores(late=True)),
    ("queries and keys swapped", CausalSelfAttention, INIT, attend(exchange)),
    ("heads merged without transpose", CausalSelfAttention, FORWARD, unmerged),
    ("post-norm blocks", Block, FORWARD, post_norm),
    ("the last block skipped", Transformer, FORWARD, without_last),
    ("dropout of 5% in the MLP", MLP, FORWARD, lambda f, *a: F.dropout(f(*a), 0.05, a[0].training)),
    ("layer norms' eps 1e-6", nn.LayerNorm, INIT, built(lambda norm: setattr(norm, "eps", 1e-6))),
    ("positions off by one", nn.Embedding, FORWARD, positions(lambda f, s, i: f(s, i.roll(-1)))),
    ("no positions", nn.Embedding, FORWARD, positions(lambda f, s, i: 0 * f(s, i))),
    ("bfloat16 inside", GPTModule, FORWARD, in_bfloat16),
    ("logits rounded to bfloat16", gpt, "mean_loss", lambda f, z, y: f(z.bfloat16().float(), y)),
    ("the last position not counted", gpt, "mean_loss", without_last_position),
    ("label smoothing", gpt, "mean_loss", smoothed),
    ("targets one token late", GPT, FORWARD, targets(lambda x, y: y.roll(-1, 1))),
    ("targets that are the inputs", GPT, FORWARD, targets(lambda x, y: x)),
    ("a rate 10% larger", *OPTIMIZER, update("lr", lambda rate: rate * 1.1)),
    ("a rate 1% larger", *OPTIMIZER, update("lr", lambda rate: rate * 1.01)),
    ("no weight decay", *OPTIMIZER, update("weight_decay", lambda _: 0.0)),
    ("betas swapped", *OPTIMIZER, update("betas", lambda betas: betas[::-1])),
    ("beta2 0.95", *OPTIMIZER, update("betas", lambda betas: (betas[0], 0.95))),
    ("eps 1e-6", *OPTIMIZER, update("eps", lambda _: 1e-6)),
    ("eps 1e-10", *OPTIMIZER, update("eps", lambda _: 1e-10)),
]  # fmt: skip
ONE: list[tuple[str, str, Any, str, Change]] = [
    (LADDER, "a head that is not tied", GPT, INIT, built(untie)),
    (LADDER, "the lookup without gradient", nn.Embedding, FORWARD, no_lookup_gradient),
    (LADDER, "residual projections not scaled", GPT, INIT, built(redraw)),
    (LADDER, "biases that start at 0.01", GPT, INIT, built(lift_biases)),
    (LADDER, "no final layer norm", Transformer, INIT, built(drop_norm)),
    (LADDER, "batches 3 and 4 swapped", WindowOrder, "starts", swapped_starts),
    (LADDER, "rows 9 to 12 one token late", TokenStream, "windows", late_rows),
    (SMALL, "batches 3 and 4 swapped", NanoGPTLoader, "training_batch", swapped_draws),
    (SMALL, "gradients not clipped", optim, "clip_gradients", clip_at(None)),
    (SMALL, "gradients clipped at 2", optim, "clip_gradients", clip_at(2.0)),
    (SMALL, "a schedule one step early", optim, "learning_rate", early),
    (SMALL, "decay of the other tensors", *OPTIMIZER, swap_decay),
    (SMALL, "validation on training text", NanoGPTLoader, "_batch", of_training),
    (SMALL, "validation one character late", NanoGPTLoader, "_batch", late),
]  # fmt: skip
OPTIONS = [
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
]


def all_breaks() -> Iterator[tuple[str, str, AbstractContextManager[None], list[str]]]:
    """Yield a rung, what is broken, the break, and options of `fit`; first the whole rungs."""
    everywhere = ((rung, *each) for rung, each in product((LADDER, SMALL), BOTH))
    rows = [
        *((rung, "", nullcontext(), []) for rung in (LADDER, SMALL)),
        *((rung, name, Broken(*patched), []) for rung, name, *patched in (*everywhere, *ONE)),
        *((rung, option, nullcontext(), [option]) for rung, option in OPTIONS),
    ]
    for rung, name, context, options in rows:
        yield rung, name, context, [f"--trainer.max_steps={STEPS.get(rung, 4)}", *options]


BREAKS = [*all_breaks()]
