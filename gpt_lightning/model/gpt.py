"""GPT-2 in plain PyTorch.

Shapes: B sequences, T tokens, C = n_embd channels, nh = n_head heads of hs = C / nh channels, V =
vocab_size. Submodules have the names of GPT-2's state dict, so that Hugging Face's weights map one
to one. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and
OpenAI's released weights.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor, nn

from gpt_lightning.errors import UserError
from gpt_lightning.model.attention import ATTENTION
from gpt_lightning.model.loss import MIN_COLUMNS, NarrowHead, chunked_cross_entropy, mean_loss
from gpt_lightning.parsing import HalfOpen, checked


@checked("model.config")
@dataclass(frozen=True)
class GPTConfig:
    """Shape and numerics of a GPT-2. The defaults are the published 124M model.

    Args:
        n_layer: Number of transformer blocks.
        n_head: Attention heads per block; must divide n_embd.
        n_embd: Width C of the residual stream; the MLP is 4 C wide.
        block_size: Maximum context in tokens, each with a learned position embedding.
        vocab_size: Rows V of the token embedding. null: the size of the data's vocabulary.
        bias: Biases in linear layers and layer norms, as in GPT-2; false is slightly faster.
        dropout: Probability of dropout after the embeddings, in the attention weights and at the
            end of both branches.
        tie_weights: Use the token embedding's matrix as the output head, as in GPT-2.
        init: gpt2: normal(0, 0.02), residual projections scaled by 1/sqrt(2 n_layer), biases 0.
            nanogpt: the same distribution, drawn in nanoGPT's order. default: PyTorch's.
        attention: sdpa: the fused kernel that PyTorch chooses. flash, cudnn, efficient: that kernel
            of PyTorch's, or an error where it does not run. naive: the (T, T) matrix written out.
            auto: sdpa; in models compiled for a CPU a kernel of ours (cpu_attention.py), or naive,
            where that is faster.
        activation: gelu_tanh: the tanh approximation that GPT-2 was trained with. gelu: exact, as
            in nanoGPT.
        loss_chunk: Number of positions whose logits are in memory at a time; null: all B x T.
        residual: Dtype of the residual stream in mixed precision. bfloat16 halves its bytes, and
            rounds every sum (transforms.py).
        checkpointing: Keep only the inputs of the blocks and recompute the rest in the backward
            pass: a third more work, a fraction of the memory, the same gradients. products: keep
            the results of products and attention, too, which take nearly all of the work.

    Raises:
        UserError: A value is of another type or out of bounds; the message names its key.
    """

    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_embd: PositiveInt = 768
    block_size: PositiveInt = 1024
    vocab_size: PositiveInt | None = 50257
    bias: bool = True
    dropout: HalfOpen = 0.0
    tie_weights: bool = True
    init: Literal["gpt2", "nanogpt", "default"] = "gpt2"
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "naive"] = "auto"
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"
    loss_chunk: PositiveInt | None = None
    residual: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool | Literal["products"] = False

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            divisible = self.n_head * max(1, round(self.n_embd / self.n_head))
            raise UserError(
                f"model.config.n_embd {self.n_embd} is not divisible by n_head {self.n_head}: "
                f"set model.config.n_embd to {divisible} or change model.config.n_head"
            )

    @property
    def n_matrix_params(self) -> int:
        """Parameters of the embeddings and the blocks' matrices, without the small rest."""
        C = self.n_embd
        return ((self.vocab_size or 0) + self.block_size + 12 * self.n_layer * C) * C


# The four published sizes (layers, heads, width): https://huggingface.co/openai-community. A test
# pins the counts.
SIZES: dict[str, GPTConfig] = {
    "gpt2": GPTConfig(12, 12, 768),  # 124,439,808 parameters
    "gpt2-medium": GPTConfig(24, 16, 1024),  # 354,823,168
    "gpt2-large": GPTConfig(36, 20, 1280),  # 774,030,080
    "gpt2-xl": GPTConfig(48, 25, 1600),  # 1,557,611,200
}


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention in which no position sees a later one: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        C = config.n_embd
        self.c_attn = nn.Linear(C, 3 * C, bias=config.bias)  # queries, keys, values of all heads
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.attention = ATTENTION[config.attention]

    def forward(self, x: Tensor) -> Tensor:
        (B, T, C), nh = x.shape, self.n_head
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        q, k, v = (t.view(B, T, nh, -1).transpose(1, 2) for t in (q, k, v))  # 3 x (B, nh, T, hs)
        p = self.dropout if self.training else 0.0
        y = self.attention(q, k, v, p)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side
        y = self.resid_dropout(self.c_proj(y))  # (B, T, C)
        return y


class MLP(nn.Module):
    """Position-wise feed-forward network with a hidden width of 4 C: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate="tanh" if config.activation == "gelu_tanh" else "none")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)  # (B, T, 4 C)
        x = self.gelu(x)  # (B, T, 4 C)
        x = self.c_proj(x)  # (B, T, C)
        x = self.dropout(x)
        return x


class Block(nn.Module):
    """Attention and MLP, each reading a normalized residual stream (B, T, C) and adding to it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class Transformer(nn.Module):
    """GPT-2 without its head: tokens (B, T) -> final residual stream (B, T, C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.vocab_size is not None
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # tokens
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # positions
        self.cast: nn.Module = nn.Identity()  # transforms.py has another one
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.checkpointing = config.checkpointing

    def forward(self, idx: Tensor) -> Tensor:
        """Return the final residual stream, (B, T, C), of tokens idx, int64 (B, T)."""
        T = idx.size(1)
        if self.wpe.num_embeddings < T:
            raise UserError(f"idx has rows of {T} tokens: at most {self.wpe.num_embeddings} fit")
        pos = torch.arange(T, device=idx.device)  # (T,)
        x = self.drop(self.cast(self.wte(idx) + self.wpe(pos)))  # (B, T, C)
        for block in self.h:
            if self.checkpointing and torch.is_grad_enabled():
                from gpt_lightning.model.transforms import recomputed  # not for most models

                x = recomputed(block, x, self.checkpointing == "products", self.drop.p > 0)
            else:
                x = block(x)
        x = self.ln_f(x)
        return x


class GPT(nn.Module):
    """A GPT-2 language model.

    The order of creation (wte, wpe, blocks, ln_f, lm_head), the tying before the initialization and
    the order of the draws are part of the contract: with `torch.manual_seed(1337)` they give the
    published losses of a lecture's run digit by digit (tests/model/test_lecture.py).

    Args:
        config: Shape of the model; `vocab_size` must be a number.

    Raises:
        UserError: `vocab_size` is None.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        if not isinstance(config, GPTConfig) or config.vocab_size is None:
            raise UserError(
                "config is no GPTConfig, or vocab_size is null: give a number; a dataset has one"
            )
        self.config = config
        self.transformer = Transformer(config)
        Head = NarrowHead if config.n_embd < MIN_COLUMNS else nn.Linear
        self.lm_head = Head(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer.wte.weight = self.lm_head.weight
        if config.residual == "bfloat16":
            from gpt_lightning.model.transforms import install_residual  # only these models need it

            install_residual(self.transformer)
        # 2 n_layer branches add to the residual stream: scaling each of their projections by
        # 1/sqrt(2 n_layer) keeps its variance.
        residual_std = 0.02 * (2 * config.n_layer) ** -0.5
        if config.init == "gpt2":
            self._init_normal(residual_std)
        elif config.init == "nanogpt":
            self._init_normal(0.02)
            for name, weight in self.named_parameters():
                if name.endswith("c_proj.weight"):
                    nn.init.normal_(weight, std=residual_std)

    def _init_normal(self, residual_std: float) -> None:
        # A tied matrix is drawn twice, as wte and as lm_head, because the originals draw it twice.
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = residual_std if name.endswith("c_proj") else 0.02
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of the next token, or the loss against it.

        Args:
            idx: Tokens, int64 (B, T), T at most block_size.
            targets: Next token of each position, int64 (B, T); -100 where there is none.

        Returns:
            Without targets the logits (B, T, V); with targets their mean cross-entropy in nats, a
            float32 scalar (float64 for float64 weights).
        """
        x = self.transformer(idx)  # (B, T, C)
        return self.head(x, targets)

    def head(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return what `forward` returns, from the final residual stream x, (B, T, C)."""
        chunk = self.config.loss_chunk
        if targets is not None and chunk is not None:  # the same loss in less memory
            return chunked_cross_entropy(x, self.lm_head.weight, targets, chunk)
        logits = self.lm_head(x)  # (B, T, V)
        return logits if targets is None else mean_loss(logits, targets)

    def num_params(self, embeddings: bool = True) -> int:
        """Return the number of parameters; a tied matrix counts once.

        Args:
            embeddings: Count the tables that are only looked up: wpe and, where the head has its
                own matrix, wte. Without them it is the N of `flops.flops_per_token`; with tied
                weights it is nanoGPT's count.
        """
        n = sum(p.numel() for p in self.parameters())
        if not embeddings:
            tables = (m.weight for m in self.transformer.modules() if isinstance(m, nn.Embedding))
            n -= sum(t.numel() for t in tables if t is not self.lm_head.weight)
        return n
