"""`gpt-lightning bench gpu`: all four GPT-2s through `fit`, and transformers' beside them.

Every row is a process of its own. Ours is `fit` with the size's file in configs/gpu, on random
tokens; theirs is a plain loop over the same step: micro-batches, clipping, fused AdamW.
"""

import itertools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_lightning.bench.core import results as folders
from gpt_lightning.bench.core.options import check_bounds, devices, listed, one_of
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser, split_fit_options, underscored
from gpt_lightning.reports.tables import column

if TYPE_CHECKING:
    import torch

# size -> overlay of configs/gpt2_124m.yaml, and the MFU that we are after on one H200
SIZES = {
    "124m": ("gpu/gpt2_124m", 0.48),
    "350m": ("gpu/gpt2_350m", 0.52),
    "774m": ("gpu/gpt2_774m", 0.52),
    "1558m": ("gpu/gpt2_1558m", 0.55),
}
MODELS = {
    "ours": "fit, as configured",
    "hf": "transformers' GPT2LMHeadModel, eager",
    "hf-compiled": "the same through torch.compile",
}


@dataclass(frozen=True)
class GPURow:
    """A size and whose model it was."""

    size: str = column("size")
    model: str = column("model", width=11)
    batch: int | None = column("batch", "d")
    accumulate: int | None = column("accumulated", "d")
    context: int | None = column("context", "d")
    parameters: int | None = column("parameters", ",d", 13)
    steps: int | None = column("steps", "d")
    step_ms: float | None = column("step ms", ",.1f", 9)
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    mfu: float | None = column("MFU", ".1%", 6)
    target: float | None = column("target", ".0%", 6)
    peak_memory_gib: float | None = column("memory GiB", ",.1f")
    graphs: int | None = column("graphs", "d")
    status: str = column("status", default="")
    note: str = column("note", default="")


BENCH = Bench(
    name="gpu",
    title="GPT-2 in four sizes on one GPU",
    row=GPURow,
    measure="gpt_lightning.bench.gpu_run:measure_size",
    notes=(
        "; ".join(f"{name}: {what}" for name, what in MODELS.items()) + ". The same tokens a step, "
        "bf16 autocast, float32 products in TF32, no dropout. ours: Trainer.fit with the callbacks "
        "of every run. Where theirs does not fit into memory its micro-batch is halved.",
        "step: a whole optimizer step, the median of `steps` after the warm-up. tokens/s: of that "
        "step. MFU: 6 N + 12 n_layer n_embd T FLOPs a token (flops.py) over the published dense "
        "bf16 peak, or a measured one where none is published. target: ours, on one H200. memory: "
        "torch.cuda.max_memory_allocated.",
    ),
)


def make_parser() -> OneLineParser:
    """The parser of the command's own options."""
    parser = OneLineParser(
        prog="gpt-lightning bench gpu",
        allow_abbrev=False,
        description=f"{BENCH.title}. Options of `fit` follow: --data.batch_size 32.",
    )
    parser.add_argument("--device", default="cuda", help="cuda; another one tries the command out.")
    parser.add_argument("--sizes", default=",".join(SIZES), help="With commas.")
    parser.add_argument("--models", default=",".join(MODELS), help="With commas.")
    parser.add_argument("--steps", type=int, default=50, help="Of ours, measured.")
    parser.add_argument("--peer_steps", type=int, default=10, help="Of theirs, measured.")
    parser.add_argument("--warmup", type=int, default=5, help="Steps before.")
    parser.add_argument("--out", default="benchmarks", help="Folder of the page gpu_CHIP.md.")
    add_sweep_arguments(parser, timeout_s=3600.0)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench gpu ...`.

    Returns:
        0: every row was measured; 1: one failed.

    Raises:
        UserError: there is no such device.
    """
    own, fit_options = split_fit_options(argv[2:])
    args = make_parser().parse_args(underscored(own))
    check_bounds(args, steps=1, peer_steps=1, warmup=1)
    sizes = listed(args, "sizes", one_of(list(SIZES)))
    models = listed(args, "models", one_of(list(MODELS)))

    import torch  # not for --help: it takes seconds

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "bench gpu: no NVIDIA GPU on this machine; bench sizes and bench peers measure what "
            "there is"
        )
    (device,) = devices(args)[:1]
    configurations = [
        {
            "device": device,
            "size": size,
            "model": model,
            "steps": args.steps if model == "ours" else args.peer_steps,
            "warmup": args.warmup,
            "fit_options": fit_options,
        }
        for size, model in itertools.product(sizes, models)
    ]
    code = run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)
    pages = (folders.ROOT / BENCH.name).glob("*/results.md")
    newest = max(pages, key=lambda page: page.stat().st_mtime)
    print(publish(newest, Path(args.out), torch.device(device)))
    return code


def publish(page: Path, out: Path, device: "torch.device") -> Path:
    """Copies a page of results to `out`/gpu_CHIP.md."""
    from gpt_lightning.hardware.peaks import device_name

    chip = re.sub(r"[^a-z0-9]+", "_", device_name(device).lower().removeprefix("nvidia "))
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(page, out / f"gpu_{chip.strip('_')}.md"))
