"""`gpt-lightning bench generate`: tokens/s with a cache against the whole window for each token."""

import itertools
import time
from dataclasses import dataclass
from typing import Any

from gpt_lightning.bench.core.options import at_least, check_bounds, devices, listed, one_of
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.reports.tables import column

# layers, heads, width, context, vocabulary
SHAPES = {
    "tiny": (2, 2, 64, 64, 65),
    "baby": (6, 6, 384, 256, 65),
    "small": (12, 12, 768, 1024, 50257),
    "medium": (24, 16, 1024, 1024, 50257),
}
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class GenerateRow:
    """A model and a token's time both ways."""

    device: str = column("device")
    dtype: str = column("dtype")
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
    status: str = column("status", default="")
    note: str = column("note", default="")


BENCH = Bench(
    name="generate",
    title="Sampling with a cache of keys and values against the naive loop",
    row=GenerateRow,
    measure="gpt_lightning.bench.generate:measure_generate",
    notes=(
        "naive: nanoGPT's loop, in the weights' float32: the whole window through the model for "
        "each token, the head at its last position alone; timed at every so many of the lengths "
        "that it passes. cached: generate, from the prompt to the last token, with whatever it "
        "prepares. In blocks naive, cached, naive, ... of one process, one sequence, temperature "
        "0.8, top-k 200; ms a token. ratio: naive over cached, median over the rounds.",
        "dtype: of cached's products. agreement: of the greedy tokens at those lengths, the share "
        "that the naive loop would have taken too. Weights are random.",
    ),
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench generate", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto; with commas.")
    parser.add_argument("--sizes", default="baby,small", help=f"Of {', '.join(SHAPES)}.")
    parser.add_argument("--dtypes", default="fp32,bf16", help=f"Of {', '.join(DTYPES)}.")
    parser.add_argument("--prompts", default="1", help="Tokens of the prompt, with commas.")
    parser.add_argument("--tokens", type=int, default=256, help="New tokens.")
    parser.add_argument("--every", type=int, default=16, help="The naive loop's lengths timed.")
    parser.add_argument("--rounds", type=int, default=5, help="Blocks of each.")
    add_sweep_arguments(parser)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench generate ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    check_bounds(args, tokens=1, every=1, rounds=1)
    if args.every > args.tokens:
        raise UserError(f"--every {args.every} is more than --tokens {args.tokens}")
    configurations = [
        {
            "device": device,
            "size": size,
            "shape": list(SHAPES[size]),
            "dtype": dtype,
            "prompt": prompt,
            "tokens": args.tokens,
            "every": args.every,
            "rounds": args.rounds,
        }
        for device, size, prompt, dtype in itertools.product(
            devices(args),
            listed(args, "sizes", one_of(list(SHAPES))),
            listed(args, "prompts", at_least(1)),
            listed(args, "dtypes", one_of(DTYPES)),
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


def measure_generate(
    device: str,
    size: str,
    shape: list[int],
    dtype: str,
    prompt: int,
    tokens: int,
    every: int,
    rounds: int,
) -> dict[str, Any]:
    """Samples both ways in turns, in the row's own process."""
    import torch

    from gpt_lightning.bench.core.paired import compare, interleave
    from gpt_lightning.hardware.device import synchronize
    from gpt_lightning.model.generate import generate, sample_token
    from gpt_lightning.model.gpt import GPT, GPTConfig

    where = torch.device(device)
    n_layer, n_head, n_embd, context, vocabulary = shape
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer, n_head, n_embd, context, vocabulary)).to(where).eval()
    start = torch.randint(vocabulary, (1, prompt), device=where)
    products = torch.bfloat16 if dtype == "bf16" else None
    generator = torch.Generator(where).manual_seed(0)
    # the middle of each stretch of `every` lengths: what it takes grows with the length
    lengths = range(prompt + every // 2, prompt + tokens, every)
    text = generate(model, start, tokens, temperature=0.0, dtype=products)

    @torch.no_grad()
    def naive_logits(length: int) -> torch.Tensor:
        x = model.transformer(text[:, max(0, length - context) : length])
        return model.lm_head(x[:, -1])  # type: ignore[no-any-return]

    def naive() -> list[float]:
        times = []
        for length in lengths:
            began = time.perf_counter()
            sample_token(naive_logits(length), 0.8, 200, generator)
            synchronize(where)
            times.append((time.perf_counter() - began) * 1e3)
        return times

    def cached() -> list[float]:
        began = time.perf_counter()
        generate(model, start, tokens, 0.8, 200, generator, dtype=products)
        synchronize(where)
        return [(time.perf_counter() - began) / tokens * 1e3]

    naive()  # memory pools, and what is imported late
    same = [int(naive_logits(n).argmax()) == int(text[0, n]) for n in lengths]
    found = compare(interleave(cached, naive, rounds))
    return {
        **found.named("cached", "naive"),
        "naive_tokens_per_sec": 1e3 / found.b_ms,
        "cached_tokens_per_sec": 1e3 / found.a_ms,
        "agreement": sum(same) / len(same),
    }
