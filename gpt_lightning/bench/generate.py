"""Sampling: tokens/s with and without a cache of keys and values.

naive: nanoGPT's loop in the float32 of the weights. Each token takes the whole window through the
model, with the head at the last position alone; every n-th of the lengths is timed (--every).
cached: `generate`, from the prompt to the last token, with its preparations. One process runs
blocks of naive, cached, naive, ... on one sequence at temperature 0.8 and top-k 200; times are ms a
token. ratio: naive over cached, median over the rounds.

dtype: dtype of the products of cached. agreement: share of the greedy tokens at the timed lengths
that naive would have taken too. Weights are random.
"""

import time
from typing import Any

import torch
from jsonargparse.typing import PositiveInt

from gpt_lightning.bench.core import options, paired
from gpt_lightning.bench.core.options import Option, Values
from gpt_lightning.bench.core.sweep import Bench, sweep_row
from gpt_lightning.bench.core.training_step import DeviceRow
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.model.generate import generate, sample_token
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.reports.tables import column

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
    prompt: int = column("prompt", "d")
    tokens: int = column("tokens", "d")
    naive_ms: float | None = column("naive ms", ",.2f", 9)
    cached_ms: float | None = column("cached ms", ",.2f", 9)
    naive_tokens_per_sec: float | None = column("naive tokens/s", ",.1f")
    cached_tokens_per_sec: float | None = column("cached tokens/s", ",.1f")
    ratio: float | None = column("ratio", ".2f", 6)
    ratio_std: float | None = column("std", ".2f", 6)
    ratio_min: float | None = column("min", ".2f", 6)
    ratio_max: float | None = column("max", ".2f", 6)
    agreement: float | None = column("agreement", ".1%")


def read_every(args: Any) -> list[Values]:
    """Return --every, which must not exceed --tokens."""
    if args.every > args.tokens:
        raise UserError(f"--every {args.every} is more than --tokens {args.tokens}")
    return [{"every": args.every}]


BENCH = Bench(
    name="generate",
    title="Sampling with a cache of keys and values against the naive loop",
    row=GenerateRow,
    measure="gpt_lightning.bench.generate:measure_generate",
    options=(
        options.DEVICE,
        options.named_sizes(MODELS, "baby,small"),
        options.numbers("prompts", "prompt", "1", "Tokens of the prompt"),
        options.dtypes("fp32,bf16", ("fp32", "bf16")),
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
    start = torch.randint(vocabulary, (1, prompt), device=device)
    products = torch.bfloat16 if row.dtype == "bf16" else None
    generator = torch.Generator(device).manual_seed(0)
    # the middle of each stretch of `every` lengths, because the time grows with the length
    lengths = range(prompt + every // 2, prompt + tokens, every)
    text = generate(model, start, tokens, temperature=0.0, dtype=products)

    @torch.no_grad()
    def naive_logits(length: int) -> torch.Tensor:
        x = model.transformer(text[:, max(0, length - context) : length])
        return model.lm_head(x[:, -1])

    def naive() -> list[float]:
        times = []
        for length in lengths:
            began = time.perf_counter()
            sample_token(naive_logits(length), 0.8, 200, generator)
            synchronize(device)
            times.append((time.perf_counter() - began) * 1e3)
        return times

    def cached() -> list[float]:
        began = time.perf_counter()
        generate(model, start, tokens, 0.8, 200, generator, dtype=products)
        synchronize(device)
        return [(time.perf_counter() - began) / tokens * 1e3]

    naive()  # fills memory pools and triggers late imports
    same = [int(naive_logits(n).argmax()) == int(text[0, n]) for n in lengths]
    found = paired.compare({"cached": cached, "naive": naive}, rounds)
    return {
        **found,
        "naive_tokens_per_sec": 1e3 / found["naive_ms"],
        "cached_tokens_per_sec": 1e3 / found["cached_ms"],
        "agreement": sum(same) / len(same),
    }
