"""Compare the bfloat16 products of a step with PyTorch's on this CPU, and print speed.md's table.

python benchmarks/products.py

Each product of a model's linear layers, forward and for both gradients, is computed in turn by
PyTorch (oneDNN) and by model/cpu_products.py; a row has the sums over the layers of the medians.
"""

import statistics
import time

import torch
from torch import Tensor

from gpt_lightning.hardware.device import keep_freed_memory
from gpt_lightning.model.builds import trust_vector_instructions
from gpt_lightning.model.cpu_products import Products

MODELS = {  # tokens of a step, width, layers, rows of the output head
    "small preset": (12 * 64, 128, 4, 65),
    "baby GPT": (64 * 256, 384, 6, 65),
    "GPT-2 124M, short": (4 * 256, 768, 12, 50257),
}


def main() -> None:
    """Print a row for each model."""
    keep_freed_memory()
    trust_vector_instructions()
    print("| model | product | PyTorch, ms | TFLOP/s | ours, ms | TFLOP/s | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for model, (tokens, width, layers, rows) in MODELS.items():
        layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        shapes = [(layers, *shape) for shape in layer] + [(1, width, rows)]
        flops = sum(2 * n * tokens * inner * outer for n, inner, outer in shapes)
        totals = {"forward": [0.0, 0.0], "gradient of x": [0.0, 0.0], "gradient of w": [0.0, 0.0]}
        for n, inner, outer in shapes:
            x, w, dy = (
                torch.randn(s).bfloat16()
                for s in ((tokens, inner), (outer, inner), (tokens, outer))
            )
            for name, a, b in zip(totals, (x, dy, dy.t()), (w.t(), w, x), strict=True):
                for i, seconds in enumerate(times(a, b)):
                    totals[name][i] += n * seconds
        totals["all"] = [sum(column) for column in zip(*totals.values(), strict=True)]
        for name, (theirs, ours) in totals.items():
            work = flops * (3 if name == "all" else 1)
            cells = [f"{s * 1e3:.2f} | {work / s / 1e12:.3f}" for s in (theirs, ours)]
            print(f"| {model} | {name} | {' | '.join(cells)} | {theirs / ours:.2f} |", flush=True)


def times(a: Tensor, b: Tensor) -> list[float]:
    """Return the medians of seconds of PyTorch's product and of ours."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    ways, seconds = (torch, Products(torch)), ([], [])
    end = time.perf_counter() + 2.0
    while len(seconds[0]) < 5 or time.perf_counter() < end:
        for way, taken in zip(ways, seconds, strict=True):
            begin = time.perf_counter()
            way.mm(a, b, out=out)
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken[1:]) for taken in seconds]


if __name__ == "__main__":
    main()
