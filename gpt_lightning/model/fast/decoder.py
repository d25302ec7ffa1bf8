"""Fast decoding: a key-value cache, and weights in another dtype and layout.

A decoded token reads every weight once and does one multiply-add with it, so its time is that of
reading. On a CPU, oneDNN reads a matrix in its own layout up to twice as fast as a row-major one,
and in bfloat16 there is half as much to read (benchmarks/speed.md).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_lightning.model.attention import FUSED, sdpa_attention
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.lora import LoRALinear, plain


class Decoder:
    """Eager GPT in evaluation mode that remembers keys and values and computes new tokens alone.

    The plain version is `GPT.forward`, which computes all positions. The operations are the same,
    in the same order; dropout is left out. The model stays as it is. Its parameters are shared
    unless dtype or layout change: then later changes of the model are not followed. A model that is
    restricted to one of PyTorch's attention kernels is decoded with any.

    Args:
        model: The model; a compiled one is not compiled here.
        dtype: dtype of the linear layers' products; None: the weights' own. The other layers keep
            theirs.
        pack: Lay the weights out for oneDNN, if it has products of this dtype on this device. False
            keeps the plain layout, without a second copy of the weights in memory.
    """

    remembers = True  # a call with one token computes it after those before

    def __init__(self, model: GPT, dtype: torch.dtype | None = None, pack: bool = True):
        weight, body = model.lm_head.weight, model.transformer
        self.config = model.config
        self.dtype = dtype or weight.dtype
        self.device = weight.device
        self.wte = body.wte
        self.wpe = body.wpe
        self.ln_f = body.ln_f
        pack = pack and can_pack(weight, self.dtype)
        linear = partial(product, dtype=self.dtype, pack=pack, stream=weight.dtype)
        self.head = linear(model.lm_head)
        self.blocks: list[tuple[Any, ...]] = []
        block: Any
        for block in body.h:
            attn, mlp = block.attn, block.mlp
            # flash and cuDNN's kernel do not take float32 on CUDA
            attend = sdpa_attention if model.config.attention in FUSED else attn.attention
            attention = (block.ln_1, linear(attn.c_attn), attend, linear(attn.c_proj))
            rest = (block.ln_2, linear(mlp.c_fc), mlp.gelu, linear(mlp.c_proj))
            self.blocks.append((*attention, *rest))

    def new_caches(self, B: int, size: int) -> list[Tensor]:
        """Return buffers for keys and values of `size` tokens, (2, B, nh, size, hs) for each layer.

        They are filled in place, where appending would copy all keys and values at each token.
        """
        shape = (2, B, self.config.n_head, size, self.config.n_embd // self.config.n_head)
        return [self.wte.weight.new_empty(shape) for _ in self.blocks]

    def __call__(self, idx: Tensor, start: int, caches: Sequence[Tensor]) -> Tensor:
        """Return the logits after the last of the tokens, (B, V).

        Args:
            idx: Tokens, int64 (B, T): the first T of a sequence, or one token (T = 1).
            start: Number of tokens before them; the caches hold their keys and values.
            caches: Buffers of `new_caches`. The keys and values of idx are written to them.
        """
        (B, T), end = idx.shape, start + idx.size(1)
        x = self.wte(idx) + self.wpe.weight[start:end]  # (B, T, C)
        for block, cache in zip(self.blocks, caches, strict=True):
            ln_1, c_attn, attention, c_proj, ln_2, c_fc, gelu, mlp_c_proj = block
            qkv = c_attn(ln_1(x)).view(B, T, 3, self.config.n_head, -1)
            qkv = qkv.permute(2, 0, 3, 1, 4)  # (3, B, nh, T, hs)
            cache.narrow(3, start, T).copy_(qkv[1:])
            k, v = cache.narrow(3, 0, end).unbind()  # (B, nh, end, hs)
            y = attention(qkv[0], k, v, 0.0)  # (B, nh, T, hs)
            x = x + c_proj(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, C)
            x = x + mlp_c_proj(gelu(c_fc(ln_2(x))))
        return self.head(self.ln_f(x[:, -1]))  # the other positions are not sampled from


class RecomputingDecoder(Decoder):
    """Decoder without a cache of keys and values: it computes all positions for each token.

    It decodes any network with a `config` that returns the logits of tokens.

    Args:
        model: The network.
        dtype: dtype of the linear layers' products; None: the weights' own.
    """

    remembers = False

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None):
        weight = next(model.parameters())
        self.model = model
        self.config = cast(GPTConfig, model.config)
        self.device = weight.device
        self.dtype, self.blocks = dtype or weight.dtype, []
        self.casts = self.dtype != weight.dtype

    def __call__(self, idx: Tensor, start: int, caches: Sequence[Tensor]) -> Tensor:
        """Return the logits after the last of all tokens of a sequence, (B, V); as Decoder."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        with (
            torch.compiler.set_stance("force_eager"),
            torch.autocast(self.device.type, self.dtype if self.casts else None, self.casts),
        ):
            logits = self.model(idx)  # (B, T, V)
        for module in training:
            module.training = True
        return logits[:, -1]


def product(
    layer: nn.Module, dtype: torch.dtype, pack: bool, stream: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return a linear layer with products in a dtype, and its weights laid out for oneDNN.

    The output has the dtype of the input. A layer with other parameters than a linear layer's, such
    as an adapter's, is returned as it is.
    """
    if isinstance(layer, LoRALinear) and (pack or layer.weight.dtype != dtype):
        layer = plain(layer)
    own = dict(layer.named_parameters())
    if own.keys() not in ({"weight"}, {"weight", "bias"}):
        return layer
    if not pack and own["weight"].dtype == dtype == stream:  # the dtype of inputs
        return layer
    weight = own["weight"].detach().to(dtype)
    bias = own["bias"].detach().to(dtype) if "bias" in own else None
    if not pack:
        return lambda x: F.linear(x.to(dtype), weight, bias).to(x.dtype)
    weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x.to(dtype), weight, bias, "none", [], "").to(x.dtype)


def can_pack(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether this build of PyTorch and this CPU have oneDNN's products of a dtype."""
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not (hasattr(ops, "_linear_pointwise") and hasattr(ops, "_reorder_linear_weight")):
        return False
    if dtype == torch.bfloat16:
        # torch 2.10 has none
        units: Any = getattr(torch.cpu, "get_capabilities", dict)()
        return any(map(units.get, ("avx512_bw", "bf16")))  # x86, ARM
    return dtype == torch.float32
