"""Sampling: ms a token of `generate`, with its cache, against other ways to draw as many tokens.

cached: `generate`. other, by --against: naive is nanoGPT's loop in the float32 of the weights, in
which each token takes the whole window through the model, with the head at the last position alone
(every n-th of the lengths is timed: --every). transformers is the generate of its GPT-2 with the
same weights in the row's dtype.

One process runs blocks of cached, other, cached, ... at temperature 0.8 and top-k 200. Times are ms
a token of a sequence. ratio: other over cached, median over the rounds. prepare: time to cast the
weights and lay them out, once; neither this nor transformers' cast is in the other times.

dtype: dtype of the products of cached. agreement: share of the greedy tokens at the timed lengths
that naive would have taken too. Weights are random.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt_lightning.bench import models, timing
from gpt_lightning.bench.peers import Peer
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.hardware.precision import DTYPES
from gpt_lightning.model.fast.decoder import Decoder
from gpt_lightning.model.generate import generate, sample_token
from gpt_lightning.model.gpt import GPT
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import Row, Values
from gpt_lightning.tables.sweep import Bench

MODELS = models.TABLE["generate"]


BENCH = Bench(
    measure="gpt_lightning.bench.generate:measure_generate",
    options=(
        options.DEVICE,
        options.sizes(MODELS, "baby,small"),
        options.batches("1"),
        options.numbers("prompts", "prompt", "1", "Tokens of the prompt"),
        options.dtypes("fp32,bf16", ("fp32", "bf16")),
        options.words("against", "against", ("naive", "transformers"), "naive"),
        options.shared("tokens", 256, "New tokens."),
        options.shared("every", 16, "Stride of the naive loop's lengths."),
        options.shared("rounds", 5, "Blocks of each way."),
    ),
)


def measure_generate(row: Row) -> Values:
    """Sample both ways in turns."""
    device, prompt, tokens = torch.device(row.device), row.prompt, row.tokens
    torch.manual_seed(0)
    config = models.make_config(**MODELS[row.size])
    model = GPT(config).to(device).eval()
    start = torch.randint(model.lm_head.out_features, (row.batch, prompt), device=device)
    products = DTYPES[row.dtype].cast
    generator = torch.Generator(device).manual_seed(0)
    sampling = {"max_new_tokens": tokens, "temperature": 0.8, "top_k": 200}
    began = time.perf_counter()
    decoder = Decoder(model, products)
    prepare_ms = (time.perf_counter() - began) * 1e3
    # the middle of each stretch of `every` lengths, because the time grows with the length
    every = min(row.every, tokens)
    lengths = range(prompt + every // 2, prompt + tokens, every)
    text = generate(decoder, start, tokens, temperature=0.0)

    @torch.no_grad()
    def naive_logits(length: int) -> Tensor:
        x = model.transformer(text[:, max(0, length - config.block_size) : length])
        return model.lm_head(x[:, -1])

    def timed(sequence_tokens: int, call: Callable[..., Any], *arguments: Any) -> float:
        began = time.perf_counter()
        call(*arguments)
        synchronize(device)
        return (time.perf_counter() - began) * 1e3 / sequence_tokens

    def naive_token(length: int) -> Tensor:
        return sample_token(naive_logits(length), 0.8, 200, generator)

    def naive() -> list[float]:
        return [timed(row.batch, naive_token, length) for length in lengths]

    def whole(sample: Callable[..., Any]) -> list[float]:
        return [timed(row.batch * tokens, sample, start)]

    cached = partial(whole, partial(generate, decoder, generator=generator, **sampling))
    other = naive
    if row.against == "transformers":
        other = partial(whole, transformers_generate(model, products, sampling))
    naive()  # fills memory pools and triggers late imports
    same = [torch.equal(naive_logits(n).argmax(-1), text[:, n]) for n in lengths]
    found = timing.compare({"cached": cached, "other": other}, row.rounds)
    return {
        **found,
        "cached_tokens_per_sec": 1e3 / found["cached_ms"],
        "prepare_ms": prepare_ms,
        "agreement": sum(same) / len(same),
    }


def transformers_generate(
    model: GPT, dtype: torch.dtype | None, sampling: Values
) -> Callable[[Tensor], Any]:
    """Return transformers' generate with our weights in a dtype; None: float32."""
    theirs = Peer(model).model.to(model.lm_head.weight.device, dtype or torch.float32).eval()
    theirs.generation_config.eos_token_id = None  # no token ends its text

    def sample(idx: Tensor) -> Any:
        return theirs.generate(idx, attention_mask=torch.ones_like(idx), do_sample=True, **sampling)

    return sample
