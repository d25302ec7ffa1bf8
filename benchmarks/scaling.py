"""Write the tables of docs/scaling.md: GPT-2's four sizes on up to 1,024 GPUs, by the model.

    python benchmarks/scaling.py

Nothing is measured here. The constants are at the top, and their sources in docs/scaling.md.
"""

import re
from pathlib import Path

import torch

from gpt_lightning.bench.core.scaling import Link, Step
from gpt_lightning.model import flops
from gpt_lightning.model.gpt import GPT, GPTConfig

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
SIZES = {"124M": (12, 12, 768), "350M": (24, 16, 1024), "774M": (36, 20, 1280)}
SIZES |= {"1558M": (48, 25, 1600)}
T = 1024  # tokens of a sequence
MICRO_BATCH = {"124M": 32, "350M": 16, "774M": 16, "1558M": 8}  # sequences
BATCH = 2**19  # tokens of a step with a fixed batch
PER_GPU = 2**15  # tokens of a step and a GPU, with a batch that grows
GPUS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
NODE = 8  # GPUs

PEAK, MFU = 989.4e12, 0.5  # FLOP/s, and what one GPU reaches of it
INSIDE = Link(10e-6, 350e9)  # NVLink 4
LINKS = {  # between nodes
    "eight 400 Gb/s": Link(20e-6, 8 * 50e9 * 0.8),
    "one 400 Gb/s": Link(20e-6, 50e9 * 0.8),
}
OVERLAP = 0.9  # all but the last bucket of gradients
BACKWARD = 2 / 3  # of a micro-batch's time
GRADIENT_BYTES = 4  # of a parameter: float32
STATE_BYTES = 12  # of a parameter in a checkpoint: float32 weight and two moments
COPY = 20e9  # bytes/s to the host; the file is written while training goes on
INTERVAL = 1000  # steps between checkpoints


def step_s(size: str, gpus: int, link: Link, tokens: float) -> float:
    """Return the seconds of a step of some tokens for each GPU."""
    n_layer, n_head, n_embd = SIZES[size]
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer, n_head, n_embd, block_size=T, vocab_size=50257))
    per_token = flops.flops_per_token(model.num_params(embeddings=False), n_layer, n_embd, T)
    compute = tokens * per_token / (PEAK * MFU)
    n = model.num_params()
    micro = compute * min(1.0, MICRO_BATCH[size] * T / tokens)
    copy = STATE_BYTES * n / COPY
    step = Step(compute, GRADIENT_BYTES * n, OVERLAP, BACKWARD * micro, 0.0, copy, INTERVAL)
    return step.time_s(link, gpus)


def table(fixed: bool) -> str:
    """Return a table of the share of linear speed, by size, link and number of GPUs."""
    gpus = [n for n in GPUS if not fixed or BATCH // n >= T]
    lines = ["| size | network of a node | " + " | ".join(f"{n:,}" for n in gpus) + " |"]
    lines.append("| --- | --- |" + " ---: |" * len(gpus))
    for size in SIZES:
        for name, between in LINKS.items():
            cells = []
            for n in gpus:
                tokens = BATCH / n if fixed else PER_GPU
                link = INSIDE if n <= NODE else between
                time = step_s(size, n, link, tokens)
                alone = step_s(size, 1, INSIDE, tokens)
                cells.append(f"{tokens * n / time / 1e6:,.2f} ({alone / time:.0%})")
            lines.append(f"| {size} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Replace the tables of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, fixed in (("fixed", True), ("growing", False)):
        found = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text = found.sub(lambda m, fixed=fixed: m[1] + table(fixed) + m[2], text)
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
