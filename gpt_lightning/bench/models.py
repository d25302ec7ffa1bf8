"""Models that benches measure: sizes.yaml, the options that choose them, and two other models.

The systems course's language model stands beside GPT-2. A decoder with RMSNorm, rotary position
embeddings (RoPE), SwiGLU, no biases and a head with its own matrix: the model of the published
reports in `reference/end_to_end.csv`. Shapes: B sequences, T tokens, C = n_embd channels, nh =
n_head heads of hs = C / nh channels, F = 4 C hidden channels of the MLP, V = vocab_size. The
published medium size has F = 4098, a slip; here it is 4096.

Sources: Zhang and Sennrich 2019 (RMSNorm), https://arxiv.org/abs/1910.07467; Su et al. 2021 (RoPE),
https://arxiv.org/abs/2104.09864; Shazeer 2020 (SwiGLU), https://arxiv.org/abs/2002.05202.
"""

import importlib
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from jsonargparse import Namespace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt_lightning.files import yaml_beside
from gpt_lightning.model import gpt
from gpt_lightning.model.attention import naive_attention
from gpt_lightning.model.gpt import GPT, Block, GPTConfig
from gpt_lightning.model.huggingface import settings_of, to_huggingface
from gpt_lightning.model.loss import mean_loss
from gpt_lightning.model.weights import HEAD
from gpt_lightning.tables.options import Option, at_least, listed, one_of, optional, words
from gpt_lightning.tables.rows import Count, Row, Text, Values
from gpt_lightning.tables.worker import SkippedError

TABLE = yaml_beside(__file__, "sizes.yaml")
SHAPES: dict[str, list[int]] = TABLE["shapes"]  # layers, heads, width
# the first three fields of a GPTConfig: n_layer, n_head, n_embd
for size, name in TABLE["published"].items():
    SHAPES[size] = [*vars(gpt.SIZES[name]).values()][:3]
COURSE_SIZES: list[str] = TABLE["course"]
GPU_SIZES: list[str] = TABLE["gpu"]
MODELS = ("gpt2", "course")
EPS = 1e-5
THETA = 10_000.0
HEAD_WIDTH = 64  # GPT-2's
VOCABULARY = 10_000  # the systems course's

MODEL = words("model", "model", MODELS, "gpt2")


@dataclass
class ModelRow(Row):
    """Row of a model; the columns of a measurement follow."""

    device: Text
    dtype: Text
    model: Text
    size: Text
    batch: Count
    context: Count


def shape_of(size: str) -> list[int]:
    """Return (layers, heads, width) of a size: a name in SHAPES, or LAYERS/HEADS/WIDTH."""
    return SHAPES.get(size) or [int(number) for number in size.split("/")]


def make_config(size: str, context: int, vocab_size: int = VOCABULARY) -> GPTConfig:
    """Return the configuration of a model of a size."""
    n_layer, n_head, n_embd = shape_of(size)
    return GPTConfig(n_layer, n_head, n_embd, context, vocab_size)


def make_model(model: str, size: str, context: int) -> "GPT | CourseModel":
    """Make one of MODELS, of a size."""
    config = make_config(size, context)
    return GPT(config) if model == "gpt2" else CourseModel(config)


# ---- options -------------------------------------------------------------------------------------


def own_shape(text: str) -> str:
    """Convert LAYERSxWIDTH to LAYERS/HEADS/WIDTH, with heads of HEAD_WIDTH."""
    layers, x, width = text.partition("x")
    if not x:
        raise ValueError(f"{text!r} is not LAYERSxWIDTH, such as 4x512")
    C = at_least(1)(width)
    n_head = max(1, C // HEAD_WIDTH)
    if C % (2 * n_head):  # RoPE rotates pairs of channels
        raise ValueError(f"a width of {C} is not divisible by {n_head} heads of an even width")
    return f"{at_least(1)(layers)}/{n_head}/{C}"


def course_or_own_sizes(args: Namespace) -> list[Values]:
    """Return the sizes of --shapes, or of --sizes."""
    name, kind = ("sizes", one_of(COURSE_SIZES)) if args.shapes is None else ("shapes", own_shape)
    return [{"size": size} for size in listed(args, name, kind)]


SIZES = (
    MODEL,
    Option("sizes", "small", f"Any of {', '.join(COURSE_SIZES)}.", course_or_own_sizes),
    optional("shapes", "Custom sizes, LAYERSxWIDTH: 4x512,16x1024.", str),
)


# ---- transformers' model -------------------------------------------------------------------------


class Peer(nn.Module):
    """transformers' GPT-2 with our weights, as a module of tokens and targets to a loss.

    Args:
        model: GPT whose shape and weights it gets.

    Raises:
        SkippedError: transformers is not installed.
    """

    def __init__(self, model: GPT):
        try:
            transformers = importlib.import_module("transformers")
        except ModuleNotFoundError as error:
            raise SkippedError(f"{error.name} is missing: pip install transformers") from error

        super().__init__()
        ours = replace(model.config, dropout=0.0)
        # token 0 ends texts: transformers' own, 50,256, exceeds a small vocabulary
        settings = settings_of(ours, model.lm_head.out_features, 0, {})
        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
        weights = to_huggingface(model.state_dict(), ours)  # the file format omits a tied head
        self.model.load_state_dict(weights | {HEAD: model.lm_head.weight})

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(self.model(idx, use_cache=False).logits, targets)


# ---- the course's model --------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """Divide each position by its root mean square, in float32: (..., C) -> (..., C)."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
        return (self.weight * y).to(x.dtype)


class RoPE(nn.Module):
    """Rotate channel pairs (2 i, 2 i + 1) of position t by t THETA^(-2 i / hs).

    The product of a rotated query and a rotated key depends on the distance of their positions
    alone. Maps (..., T, hs) to (..., T, hs); under autocast the output is float32, as the course's.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, hs: int, block_size: int):
        super().__init__()
        angles = torch.outer(torch.arange(block_size), THETA ** (-torch.arange(0, hs, 2) / hs))
        self.register_buffer("cos", angles.cos(), persistent=False)  # (block_size, hs / 2)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        T = x.size(-2)
        cos, sin = self.cos[:T], self.sin[:T]  # (T, hs / 2)
        even, odd = x[..., 0::2], x[..., 1::2]  # (..., T, hs / 2)
        rotated = torch.stack((cos * even - sin * odd, sin * even + cos * odd), dim=-1)
        return rotated.flatten(-2)  # (..., T, hs)


class CourseAttention(nn.Module):
    """Causal multi-head self-attention with RoPE, written out: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig, rope: RoPE):
        super().__init__()
        C = config.n_embd
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(C, C, bias=False) for _ in range(4)
        )
        self.n_head, self.rope = config.n_head, rope
        self.attention = naive_attention

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            proj(x).view(B, T, self.n_head, -1).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # 3 x (B, nh, T, hs)
        y = self.attention(self.rope(q), self.rope(k), v, 0.0)  # (B, nh, T, hs)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    """MLP whose hidden channels are gated: (B, T, C) -> (B, T, C)."""

    def __init__(self, C: int):
        super().__init__()
        self.w1 = nn.Linear(C, 4 * C, bias=False)
        self.w3 = nn.Linear(C, 4 * C, bias=False)
        self.w2 = nn.Linear(4 * C, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated = F.silu(self.w1(x)) * self.w3(x)  # (B, T, F)
        return self.w2(gated)


class CourseBlock(Block):
    """GPT's block with other layers: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig, rope: RoPE):
        nn.Module.__init__(self)
        self.ln_1 = RMSNorm(config.n_embd)  # type: ignore[assignment]
        self.attn = CourseAttention(config, rope)  # type: ignore[assignment]
        self.ln_2 = RMSNorm(config.n_embd)  # type: ignore[assignment]
        self.mlp = SwiGLU(config.n_embd)  # type: ignore[assignment]


class CourseModel(nn.Module):
    """The systems course's language model, with the submodules that benches expect of a GPT.

    Args:
        config: Shape of the model, with an even number of channels in each head; other settings of
            a GPT have no effect.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        C, V = config.n_embd, config.vocab_size
        assert V is not None
        self.config = config
        rope = RoPE(C // config.n_head, config.block_size)
        h = nn.ModuleList([CourseBlock(config, rope) for _ in range(config.n_layer)])
        transformer = {
            "wte": nn.Embedding(V, C),
            "h": h,
            "ln_f": RMSNorm(C),
        }
        self.transformer = cast(Any, nn.ModuleDict(transformer))
        self.transformer.checkpointing = False
        self.lm_head = nn.Linear(C, V, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = 1.0 if "wte" in name else (2 / sum(weight.shape)) ** 0.5
                nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V), or their mean cross-entropy in nats against the targets.

        Args:
            idx: Tokens, int64 (B, T), T at most block_size.
            targets: Next token of each position, int64 (B, T).
        """
        x = self.transformer.wte(idx)  # (B, T, C)
        for block in self.transformer.h:
            if self.transformer.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))  # (B, T, V)
        return logits if targets is None else mean_loss(logits, targets)

    num_params: Any = GPT.num_params  # it asks for the submodules that both have
