"""Sampling: ms a token of `generate`, with its cache, against other ways to draw as many tokens.

cached: `generate`. other, by --against: naive is nanoGPT's loop in the float32 of the weights, in
which each token takes the whole window through the model, with the head at the last position alone
(every n-th of the lengths is timed: --every). transformers is the generate of its GPT-2 with the
same weights in the row's dtype. loop is `generate` for one sequence of the batch after the other.

One process runs blocks of cached, other, cached, ... at temperature 0.8 and top-k 200. Times are ms
a token of a sequence. ratio: other over cached, median over the rounds. prepare: time to cast the
weights and lay them out, once; neither this nor transformers' cast is in the other times. read:
time to read as many bytes as the weights have in the row's dtype. load: load average at the end.

dtype: dtype of the products of cached. agreement: share of the greedy tokens at the timed lengths
that naive would have taken too. Weights are random.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jsonargparse.typing import PositiveInt

from gpt_lightning.bench.core import paired
from gpt_lightning.bench.core.peer import make_peer
from gpt_lightning.bench.core.training_step import DeviceRow
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.model.fast.decoder import Decoder
from gpt_lightning.model.generate import generate, sample_token
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option, Values
from gpt_lightning.tables.rows import column, sweep_row
from gpt_lightning.tables.sweep import Bench

# layers, heads, width, context, vocabulary
MODELS = {
    "tiny": (2, 2, 64, 64, 65),
    "baby": (6, 6, 384, 256, 65),
    "small": (12, 12, 768, 1024, 50257),
    "medium": (24, 16, 1024, 1024, 50257),
}


@sweep_row
class GenerateRow(DeviceRow):
    """Model, and the time of a token both ways."""

    size: str = column("size", width=6)
    batch: int = column("batch", "d")
    prompt: int = column("prompt", "d")
    tokens: int = column("tokens", "d")
    against: str = column("against", width=12)
    other_ms: float | None = column("other ms", ",.2f", 9)
    cached_ms: float | None = column("cached ms", ",.2f", 9)
    cached_tokens_per_sec: float | None = column("cached tokens/s", ",.1f")
    ratio: float | None = column("ratio", ".2f", 6)
    ratio_std: float | None = column("std", ".2f", 6)
    ratio_min: float | None = column("min", ".2f", 6)
    ratio_max: float | None = column("max", ".2f", 6)
    prepare_ms: float | None = column("prepare ms", ",.0f")
    read_ms: float | None = column("read ms", ",.2f")
    load: float | None = column("load", ".1f")
    agreement: float | None = column("agreement", ".1%")


def read_every(args: Any) -> list[Values]:
    """Return --every, which must not exceed --tokens."""
    if args.every > args.tokens:
        raise UserError(f"--every {args.every} is more than --tokens {args.tokens}")
    return [{"every": args.every}]


BENCH = Bench(
    name="generate",
    title="Sampling against the naive loop, transformers, and one sequence after the other",
    row=GenerateRow,
    measure="gpt_lightning.bench.generate:measure_generate",
    options=(
        options.DEVICE,
        options.named_sizes(MODELS, "baby,small"),
        options.batches("1"),
        options.numbers("prompts", "prompt", "1", "Tokens of the prompt"),
        options.dtypes("fp32,bf16", ("fp32", "bf16")),
        options.words("against", "against", ("naive", "transformers", "loop"), "naive"),
        options.shared("tokens", 256, "New tokens."),
        Option("every", 16, "Stride of the naive loop's lengths.", read_every, PositiveInt),
        options.shared("rounds", 5, "Blocks of each way."),
    ),
)


def measure_generate(row: GenerateRow, shape: list[int], every: int, rounds: int) -> dict[str, Any]:
    """Sample both ways in turns."""
    device, prompt, tokens = torch.device(row.device), row.prompt, row.tokens
    n_layer, n_head, n_embd, context, vocabulary = shape
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer, n_head, n_embd, context, vocabulary)).to(device).eval()
    start = torch.randint(vocabulary, (row.batch, prompt), device=device)
    products = torch.bfloat16 if row.dtype == "bf16" else None
    generator = torch.Generator(device).manual_seed(0)
    sampling: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0.8, "top_k": 200}
    began = time.perf_counter()
    decoder = Decoder(model, products)
    prepare_ms = (time.perf_counter() - began) * 1e3
    # the middle of each stretch of `every` lengths, because the time grows with the length
    lengths = range(prompt + every // 2, prompt + tokens, every)
    text = generate(decoder, start, tokens, temperature=0.0)

    @torch.no_grad()
    def naive_logits(length: int) -> torch.Tensor:
        x = model.transformer(text[:, max(0, length - context) : length])
        return model.lm_head(x[:, -1])

    def timed(call: Callable[[], Any], sequence_tokens: int) -> float:
        began = time.perf_counter()
        call()
        synchronize(device)
        return (time.perf_counter() - began) * 1e3 / sequence_tokens

    def blocks(sample: Callable[..., Any], *starts: torch.Tensor) -> Callable[[], list[float]]:
        return lambda: [timed(lambda: [sample(idx) for idx in starts], row.batch * tokens)]

    def naive_token(length: int) -> torch.Tensor:
        return sample_token(naive_logits(length), 0.8, 200, generator)

    def naive() -> list[float]:
        return [timed(partial(naive_token, length), row.batch) for length in lengths]

    cached = partial(generate, decoder, generator=generator, **sampling)
    if row.against == "transformers":
        other = blocks(transformers_generate(model, products, sampling), start)
    else:
        other = naive if row.against == "naive" else blocks(cached, *start[:, None])
    naive()  # fills memory pools and triggers late imports
    same = [torch.equal(naive_logits(n).argmax(-1), text[:, n]) for n in lengths]
    found = paired.compare({"cached": blocks(cached, start), "other": other}, rounds)
    bytes_read = sum(p.numel() for p in model.parameters()) * (2 if products else 4)
    weights = torch.ones(bytes_read // 4, device=device)
    return {
        **found,
        "cached_tokens_per_sec": 1e3 / found["cached_ms"],
        "prepare_ms": prepare_ms,
        "read_ms": min(timed(weights.sum, 1) for _ in range(5)),
        "load": os.getloadavg()[0],
        "agreement": sum(same) / len(same),
    }


def transformers_generate(
    model: GPT, dtype: torch.dtype | None, sampling: dict[str, Any]
) -> Callable[[torch.Tensor], Any]:
    """Return transformers' generate with our weights in a dtype; None: float32."""
    theirs = make_peer(model).model.to(model.lm_head.weight.device, dtype or torch.float32).eval()
    theirs.generation_config.eos_token_id = None  # no token ends its text

    def sample(idx: torch.Tensor) -> Any:
        return theirs.generate(idx, attention_mask=torch.ones_like(idx), do_sample=True, **sampling)

    return sample
