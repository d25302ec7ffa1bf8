"""The command `gpt-lightning bench`."""

import importlib

from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser, nearest

# name -> (where it is, what --help says)
BENCHES: dict[str, tuple[str, str]] = {
    "sizes": (
        "gpt_lightning.bench.sizes:run",
        "forward, backward and optimizer by size, dtype, compilation, context and batch",
    ),
    "attention": (
        "gpt_lightning.bench.attention:run",
        "attention alone: definition, compiled, each fused kernel, by width and sequence",
    ),
    "memory": (
        "gpt_lightning.bench.memory:run",
        "peak by phase, context, dtype and checkpointing, with timelines",
    ),
    "fit-batch": (
        "gpt_lightning.bench.fit_batch:run",
        "the largest micro-batch of a configuration that fits, with the same tokens a step",
    ),
    "matmul": (
        "gpt_lightning.bench.matmul:run",
        "rate of matrix products: squares and the model's shapes, beside the measured peak",
    ),
    "data": (
        "gpt_lightning.bench.data:run",
        "the loader: tokens/s by order, block size, batch and workers, beside the floor",
    ),
    "overhead": (
        "gpt_lightning.bench.overhead:run",
        "Lightning's Trainer and our callbacks against a raw PyTorch loop",
    ),
    "peers": (
        "gpt_lightning.bench.peers:run",
        "the same model and batch through transformers' GPT-2",
    ),
    "gpu": (
        "gpt_lightning.bench.gpu:run",
        "all four GPT-2s on a GPU through fit, beside transformers': benchmarks/gpu_CHIP.md",
    ),
    "generate": (
        "gpt_lightning.bench.generate:run",
        "sampling: tokens/s with a cache against the whole window for each token",
    ),
    "compare": (
        "gpt_lightning.bench.compare:run",
        "two reports of one benchmark side by side: compare A B",
    ),
    "profile": (
        "gpt_lightning.bench.profile:run",
        "a step kernel by kernel: named ranges, shares by kind, traces for Chrome and TensorBoard",
    ),
    "accumulation": (
        "gpt_lightning.reproduce.float16_sums:run",
        "a thousand times 0.01 in four mixtures of float32 and float16, against the published sums",
    ),
    "dtypes": (
        "gpt_lightning.reproduce.autocast_dtypes:run",
        "the dtype of every parameter, output, loss and gradient under autocast",
    ),
    "ladder": (
        "gpt_lightning.bench.ladder:run",
        "tokens/s and MFU from plain float32 to all that is fast, one thing a rung",
    ),
}


def usage() -> str:
    """What `gpt-lightning bench --help` prints."""
    width = max(map(len, BENCHES))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in BENCHES.items()]
    return "\n".join(
        [
            "usage: gpt-lightning bench NAME [options]",
            "",
            *lines,
            "",
            "gpt-lightning bench NAME --help explains one.",
        ]
    )


def make_parser() -> OneLineParser:
    """What a completion script knows of the command."""
    parser = OneLineParser(description="Measure this machine.")
    parser.add_argument("name", choices=list(BENCHES), help="What to measure.")
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench NAME ...`; returns the exit code."""
    if len(argv) < 2 or argv[1] in ("-h", "--help"):
        print(usage())
        return 0
    name = argv[1]
    if name not in BENCHES:
        raise UserError(
            f"no bench {name!r}{nearest(name, BENCHES)}; gpt-lightning bench --help lists them"
        )
    module, function = BENCHES[name][0].split(":")
    code: int = getattr(importlib.import_module(module), function)(argv)
    return code
