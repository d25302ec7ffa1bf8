"""The speedrun's model: a GPT with the changes that its records use.

It is a network of one's own (model.network). Shapes are those of gpt_lightning/model/gpt.py. The
differences from GPT-2 (levers.py measures their gains):

    triples of tokens   the embedding of a token adds one of the last three tokens; with `pairs` of
                        the last two, which a long training overfits less
    rotary positions    (Su et al. 2021) in queries and keys, instead of learned embeddings
    normalized q and k  (Henry et al. 2020), so that a head's scores keep their scale
    squared ReLU        (So et al. 2021) instead of GELU: one product instead of an exponential
    zero projections    each block begins as the identity, and the head with equal probabilities
    RMS norm            (Zhang and Sennrich 2019) without parameters, also after the embedding
    dropout             in the blocks alone, not after the embedding

Source of the combination: Jordan et al. 2024, https://github.com/KellerJordan/modded-nanogpt.
"""

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT, MLP, Block, CausalSelfAttention, GPTConfig

ROWS = 8192  # size of the table of triples or pairs
ROTARY_BASE = 10_000.0
SCORE_SCALE = 1.5  # factor of normalized queries and keys, over sqrt(hs)
# fields of GPTConfig with the one value that this model has
FIXED = {
    "tie_weights": False,
    "activation": "gelu_tanh",  # a default, without a meaning here; as are those below
    "init": "gpt2",
    "residual": "float32",
    "checkpointing": False,
}


class RotaryAttention(CausalSelfAttention):
    """Self-attention with normalized, rotated queries and keys: (B, T, C) -> (B, T, C)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        hs = config.n_embd // config.n_head
        frequencies = ROTARY_BASE ** -(torch.arange(0, hs, 2) / hs)  # (hs/2,)
        angles = torch.arange(config.block_size)[:, None] * frequencies  # (block_size, hs/2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        (B, T, C), nh = x.shape, self.n_head
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        q, k, v = (t.view(B, T, nh, -1).transpose(1, 2) for t in (q, k, v))  # 3 x (B, nh, T, hs)
        q, k = (self.rotate(self.normalize(t)).to(v.dtype) for t in (q, k))
        p = self.dropout if self.training else 0.0
        y = self.attention(SCORE_SCALE * q, k, v, p)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side
        return self.resid_dropout(self.c_proj(y))  # (B, T, C)

    def normalize(self, x: Tensor) -> Tensor:
        """Return (B, nh, T, hs) with a root mean square of 1 over the channels."""
        return F.rms_norm(x, x.shape[-1:])

    def rotate(self, x: Tensor) -> Tensor:
        """Return (B, nh, T, hs) with pairs of channels rotated by their position's angles."""
        T = x.size(2)
        a, b = x.chunk(2, dim=-1)  # 2 x (B, nh, T, hs/2)
        cos, sin = self.cos[:T], self.sin[:T]  # (T, hs/2)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class SquaredReLU(nn.Module):
    """max(x, 0)^2."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class SpeedrunBlock(Block):
    """Attention and MLP of a residual stream: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        nn.Module.__init__(self)
        C = config.n_embd
        self.ln_1 = nn.RMSNorm(C, elementwise_affine=False)  # type: ignore[assignment]
        self.attn = RotaryAttention(config)
        self.ln_2 = nn.RMSNorm(C, elementwise_affine=False)  # type: ignore[assignment]
        self.mlp = MLP(config)
        self.mlp.gelu = SquaredReLU()  # type: ignore[assignment]


class SpeedrunTransformer(nn.Module):
    """The model without its head: tokens (B, T) -> final residual stream (B, T, C).

    Args:
        config: Shape of the model.
        n: Number of tokens of a row of `last`.
    """

    def __init__(self, config: GPTConfig, n: int) -> None:
        super().__init__()
        V = config.vocab_size
        assert V is not None
        self.wte = nn.Embedding(V, config.n_embd)  # tokens
        self.n = n
        self.last = nn.Embedding(ROWS, config.n_embd)
        self.h = nn.ModuleList([SpeedrunBlock(config) for _ in range(config.n_layer)])
        self.ln_f = nn.RMSNorm(config.n_embd, elementwise_affine=False)

    def forward(self, idx: Tensor) -> Tensor:
        """Return the final residual stream, (B, T, C), of tokens idx, int64 (B, T)."""
        V, n, T = self.wte.num_embeddings, self.n, idx.size(1)
        before = F.pad(idx, (n - 1, 0))  # (B, T + n - 1); token 0 comes before the first
        number = before[:, :T]
        for i in range(1, n):
            number = number * V + before[:, i : i + T]  # (B, T)
        x = self.wte(idx) + self.last(hashed(number, self.last.num_embeddings))  # (B, T, C)
        return self.ln_f(self.blocks(self.ln_f(x)))

    def blocks(self, x: Tensor) -> Tensor:
        """Return the residual stream after the blocks, (B, T, C) as before them."""
        for block in self.h:
            x = block(x)
        return x


def hashed(numbers: Tensor, rows: int) -> Tensor:
    """Return a row of a table for each of some int64 numbers.

    Multiplicative hashing (Knuth 1973, volume 3, 6.4): the numbers times 2^32 over the golden
    ratio, modulo 2^32, as a share of 2^32.
    """
    return (numbers * 2654435761) % 2**32 * rows >> 32


class SpeedrunGPT(GPT):
    """Language model of the speedrun; what is not written here is GPT's.

    Args:
        config: Shape of the model.
        pairs: True to embed pairs of tokens in place of triples.

    Raises:
        UserError: The configuration sets a part that this model does not have.
    """

    def __init__(self, config: GPTConfig, pairs: bool = False) -> None:
        nn.Module.__init__(self)
        for name, only in FIXED.items():
            if (value := getattr(config, name)) != only:
                raise UserError(
                    f"model.config.{name} is {value}, which the speedrun's model does not have: "
                    f"set it to {json.dumps(only)}"
                )
        if config.vocab_size is None:
            raise UserError("vocab_size is null: set a number, or train on a prepared dataset")
        if config.n_embd // config.n_head % 2:
            raise UserError(
                "the speedrun's model rotates pairs of channels: set model.config.n_head so that "
                "n_embd / n_head is even"
            )
        self.config = config
        body = SpeedrunTransformer(config, 2 if pairs else 3)
        self.transformer = body  # type: ignore[assignment]
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(body.wte.weight, std=0.1)
        nn.init.normal_(body.last.weight, std=0.01)
        nn.init.zeros_(self.lm_head.weight)
        for block in body.h:
            assert isinstance(block, SpeedrunBlock)
            for layer in (block.attn.c_attn, block.mlp.c_fc):
                nn.init.normal_(layer.weight, std=0.5 * config.n_embd**-0.5)
            for layer in (block.attn.c_proj, block.mlp.c_proj):
                nn.init.zeros_(layer.weight)
