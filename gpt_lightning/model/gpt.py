"""GPT-2 in PyTorch alone.

Shapes: B sequences, T tokens, C = n_embd channels, nh = n_head heads of hs = C / nh channels, V =
vocab_size. Submodules carry the names of GPT-2's state dict, so that Hugging Face's weights map one
to one. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and
OpenAI's released weights.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gpt_lightning.errors import UserError
from gpt_lightning.model.attention import ATTENTION
from gpt_lightning.model.dropout import Dropout
from gpt_lightning.model.embedding import Embedding
from gpt_lightning.model.gelu import GELU
from gpt_lightning.model.loss import chunked_cross_entropy, pad_columns, product_dtype


@dataclass(frozen=True)
class GPTConfig:
    """Shape and numerics of a GPT-2. The defaults are the published 124M model.

    Args:
        n_layer: Number of transformer blocks.
        n_head: Attention heads a block; must divide n_embd.
        n_embd: Width C of the residual stream; the MLP is 4 C wide.
        block_size: Longest context T, in tokens; one learned position embedding each.
        vocab_size: Rows V of the token embedding. null: as many as the data's tokenizer has tokens.
        bias: Biases in linear layers and layer norms, as in GPT-2; false is slightly faster.
        dropout: Probability after the embeddings, in the attention weights and at the end of both
            branches.
        tie_weights: The output head shares the token embedding's matrix, as in GPT-2.
        init: gpt2: normal(0, 0.02), residual projections scaled by 1/sqrt(2 n_layer), biases 0.
            nanogpt: the same distribution from nanoGPT's stream of draws. default: PyTorch's.
        attention: sdpa: PyTorch's fused kernels. naive: the (T, T) matrix written out. auto: the
            faster of the two; see attention.py.
        activation: gelu_tanh: the tanh approximation that GPT-2 was trained with. gelu: exact, as
            in nanoGPT.
        loss_chunk: Positions whose logits the loss holds at a time; null: all B x T of them.
        checkpointing: Keep only the blocks' inputs and compute the rest again in the backward:
            a third more work, a fraction of the memory, the same gradients.
    """

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int | None = 50257
    bias: bool = True
    dropout: float = 0.0
    tie_weights: bool = True
    init: Literal["gpt2", "nanogpt", "default"] = "gpt2"
    attention: Literal["auto", "sdpa", "naive"] = "auto"
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"
    loss_chunk: int | None = None
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "loss_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        if self.n_embd % self.n_head:
            divisible = self.n_head * max(1, round(self.n_embd / self.n_head))
            raise UserError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}: "
                f"set n_embd to {divisible} or change n_head"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout is {self.dropout}; it must be at least 0 and below 1")


# The four published sizes: https://huggingface.co/openai-community. Exact parameter counts are
# tested.
SIZES: dict[str, GPTConfig] = {
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),  # 124,439,808
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),  # 354,823,168
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),  # 774,030,080
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),  # 1,557,611,200
}


class LayerCache:
    """Keys and values of the tokens that one layer has seen.

    Args:
        size: Tokens that there is room for: one buffer that is written once, where appending would
            copy all of it again at each token.
    """

    def __init__(self, size: int) -> None:
        self.size, self.length = size, 0
        self.k: torch.Tensor | None = None  # (B, nh, size, hs), known at the first tokens
        self.v: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.length

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the keys and values of new tokens and returns those of all tokens so far."""
        if self.k is None or self.v is None:
            B, nh, _, hs = k.shape
            self.k, self.v = (k.new_empty(B, nh, self.size, hs) for _ in range(2))
        start, self.length = self.length, self.length + k.size(-2)
        assert self.length <= self.size, "more tokens than the cache has room for"
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]  # (B, nh, S, hs) each


class CausalSelfAttention(nn.Module):
    """Multi-head attention to the past, (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        C = config.n_embd
        self.c_attn = nn.Linear(C, 3 * C, bias=config.bias)
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.resid_dropout = Dropout(config.dropout)
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.attention = ATTENTION[config.attention]

    def forward(self, x: torch.Tensor, cache: LayerCache | None = None) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        q, k, v = (
            t.view(B, T, self.n_head, -1).transpose(1, 2) for t in (q, k, v)
        )  # (B, nh, T, hs)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, nh, S, hs)
        y = self.attention(q, k, v, self.dropout if self.training else 0.0)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two layers a position, four times as wide in between, (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = GELU(approximate="tanh" if config.activation == "gelu_tanh" else "none")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each added to a residual stream that is normalized before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cache: LayerCache | None = None) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class Transformer(nn.Module):
    """Tokens (B, T) to the final residual stream (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.block_size, config.n_embd)
        self.drop = Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.checkpointing = config.checkpointing

    def forward(self, idx: torch.Tensor, caches: list[LayerCache] | None = None) -> torch.Tensor:
        start = len(caches[0]) if caches else 0
        assert start + idx.size(1) <= self.wpe.num_embeddings, "longer than block_size"
        pos = torch.arange(start, start + idx.size(1), device=idx.device)  # (T,)
        x = self.drop(self.wte(idx) + self.wpe(pos))  # (B, T, C)
        for layer, block in enumerate(self.h):
            if self.checkpointing and caches is None and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)  # dropout draws the same again
            else:
                x = block(x, caches[layer] if caches else None)
        return self.ln_f(x)  # type: ignore[no-any-return]


def project_to_vocabulary(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T, with shapes that a CPU's matrix products are good at.

    At least 16 columns: the gradient of x sums V = 50,257 terms. For matrices of fewer than 16
    columns some BLAS (MKL on AMD) adds them in one running float32 sum, at a relative error of
    3.6e-6; from 16 columns on it sums blocks, at 3.8e-7. The lecture's model is 6 wide and trained
    at a learning rate of 0.09: unpadded, its losses drift by 3.5e-4 from the published ones in 50
    steps there, padded by 2.3e-5. Columns of zeros change nothing else.

    A multiple of 64 rows in compiled code for a CPU, where autocast copies the weight anyway: for
    50,257 rows oneDNN's gradient of it takes 109 ms (C = 768, 1,024 positions in bfloat16), for
    50,304 rows 89.

    Args:
        x: activations, (B, T, C).
        weight: (V, C).

    Returns:
        Logits, (B, T, V).
    """
    x, weight = pad_columns(x, weight)
    V = len(weight)
    missing = -V % 64
    compiled = torch.compiler.is_compiling() and x.device.type == "cpu"
    if compiled and 0 < missing < V / 100 and product_dtype(weight) != weight.dtype:
        return F.linear(x, F.pad(weight, (0, 0, 0, missing)))[..., :V]
    return F.linear(x, weight)


class GPT(nn.Module):
    """A GPT-2 language model.

    The order of creation (wte, wpe, blocks, ln_f, lm_head), the tying before the initialization and
    the order of the draws are part of the contract: with `torch.manual_seed(1337)` they give the
    published losses of a lecture's run digit by digit (tests/test_lecture.py).

    Args:
        config: The shape; `vocab_size` must be known.

    Raises:
        UserError: `vocab_size` is None.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UserError(
                "vocab_size is null: give a number, or a dataset whose tokenizer tells it"
            )
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer.wte.weight = self.lm_head.weight
        # A residual stream that 2 n_layer branches add to keeps its variance if each is scaled by
        # 1/sqrt(2 n_layer).
        residual_std = 0.02 * (2 * config.n_layer) ** -0.5
        if config.init == "gpt2":
            self._init_normal(residual_std)
        elif config.init == "nanogpt":
            self._init_normal(0.02)
            for name, weight in self.named_parameters():
                if name.endswith("c_proj.weight"):
                    nn.init.normal_(weight, std=residual_std)

    def _init_normal(self, residual_std: float) -> None:
        # A tied matrix is drawn twice, as wte and as lm_head: that is the originals' stream of
        # random numbers.
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = residual_std if name.endswith("c_proj") else 0.02
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self,
        idx: torch.Tensor,
        targets: torch.Tensor | None = None,
        caches: list[LayerCache] | None = None,
    ) -> torch.Tensor:
        """Logits of the next token, or the loss against it.

        Args:
            idx: tokens, int64 (B, T); together with the cached ones at most block_size of them.
            targets: the tokens that follow, int64 (B, T); -100 where there is none.
            caches: one LayerCache a layer, which this call reads and extends; from the second call
                on T must be 1.

        Returns:
            Without targets the logits (B, T, V); with targets their mean cross-entropy in nats, a
            float32 scalar.
        """
        x = self.transformer(idx, caches)  # (B, T, C)
        chunk = self.config.loss_chunk
        if targets is not None and chunk is not None:  # the same loss in less memory
            return chunked_cross_entropy(*pad_columns(x, self.lm_head.weight), targets, chunk)
        logits = project_to_vocabulary(x, self.lm_head.weight)  # (B, T, V)
        if targets is None:
            return logits
        # float32 whatever the precision: a bfloat16 sum of exponentials over V has two digits
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1))

    def make_caches(self, size: int | None = None) -> list[LayerCache]:
        """Empty caches for one batch of sequences of up to `size` tokens; None: block_size."""
        size = self.config.block_size if size is None else size
        return [LayerCache(size) for _ in range(self.config.n_layer)]

    def num_params(self, embeddings: bool = True) -> int:
        """Number of parameters.

        Args:
            embeddings: False leaves out the tables that are only looked up: wpe and, where the head
                has its own matrix, wte. That is the N of `flops.flops_per_token`; with tied weights
                it is nanoGPT's count.
        """
        n = sum(p.numel() for p in self.parameters())  # a tied matrix counts once
        if not embeddings:
            n -= self.transformer.wpe.weight.numel()
            n -= 0 if self.config.tie_weights else self.transformer.wte.weight.numel()
        return n
