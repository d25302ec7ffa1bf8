"""`gpt-lightning bench sizes`: forward, backward and optimizer of GPT-2s of several sizes."""

import itertools
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt_lightning.bench.sweep import (
    Bench,
    add_sweep_arguments,
    listed,
    one_of,
    run_sweep,
    switch,
)
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.tables import column

if TYPE_CHECKING:
    import torch

    from gpt_lightning.model import GPT

# layers, heads, width: the systems course's table; the MLP is 4 times as wide
SIZES = {
    "small": (12, 12, 768),
    "medium": (24, 16, 1024),
    "large": (36, 20, 1280),
    "xl": (48, 25, 1600),
    "2.7B": (32, 32, 2560),
}
DTYPES = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class SizeRow:
    """A configuration and its times; of each phase the median and the standard deviation."""

    device: str = column("device")
    dtype: str = column("dtype")
    compile: bool = column("compile")
    size: str = column("size", width=8)
    batch: int = column("batch", "d")
    context: int = column("context", "d")
    warmup: int = column("warm-up", "d")
    inference_ms: float | None = column("inference ms", ",.1f")
    forward_ms: float | None = column("forward ms", ",.1f")
    forward_std_ms: float | None = column("std", ",.2f", 6)
    backward_ms: float | None = column("backward ms", ",.1f")
    backward_std_ms: float | None = column("std", ",.2f", 6)
    optimizer_ms: float | None = column("optimizer ms", ",.1f")
    total_ms: float | None = column("total ms", ",.1f", 9)
    total_mean_ms: float | None = column("mean ms", ",.1f", 9)
    total_std_ms: float | None = column("std", ",.2f", 6)
    total_min_ms: float | None = column("min ms", ",.1f", 9)
    total_p90_ms: float | None = column("p90 ms", ",.1f", 9)
    total_max_ms: float | None = column("max ms", ",.1f", 9)
    first_step_s: float | None = column("first step s", ",.1f")
    graphs: int | None = column("graphs", "d")
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    mfu: float | None = column("MFU", ".1%", 6)
    peak_memory_gib: float | None = column("memory GiB", ",.2f")
    matmul_precision: str = column("matmul", default="")
    status: str = column("status", default="")
    note: str = column("note", default="")


BENCH = Bench(
    name="sizes",
    title="GPT-2s of several sizes: forward, backward, optimizer",
    row=SizeRow,
    measure="gpt_lightning.bench.sizes:measure_size",
    notes=(
        "inference: forward under no_grad. forward, backward, optimizer: phases of one training "
        "step, each timed inside it, medians; total: the whole step. first step: with compilation. "
        "graphs: compiled by torch.compile.",
        "Memory: torch.cuda.max_memory_allocated on a GPU; the highest resident memory of the "
        "row's own process on a CPU. Vocabulary 10,000. MFU of the measured peak in the dtype, or "
        "the published one where there is one.",
    ),
    hidden=(
        "forward_std_ms",
        "backward_std_ms",
        "total_mean_ms",
        "total_min_ms",
        "total_p90_ms",
        "total_max_ms",
        "matmul_precision",
        "note",
    ),
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench sizes", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto; with commas.")
    parser.add_argument("--sizes", default="small", help=f"With commas, of {', '.join(SIZES)}.")
    parser.add_argument("--contexts", default="256", help="Tokens a sequence, with commas.")
    parser.add_argument("--batches", default="4", help="Sequences, with commas.")
    parser.add_argument("--dtypes", default="fp32,bf16", help=f"Of {', '.join(DTYPES)}.")
    parser.add_argument("--compile", default="false", help="true, false, or both with a comma.")
    parser.add_argument("--steps", type=int, default=10, help="Steps measured a row.")
    parser.add_argument(
        "--warmup",
        "--warmup_study",
        default="2",
        help="Steps before, with commas: a study of them.",
    )
    parser.add_argument("--n_layer", type=int | None, default=None, help="A size of your own.")
    parser.add_argument("--n_head", type=int | None, default=None, help="Its heads.")
    parser.add_argument("--d_model", type=int | None, default=None, help="Its width.")
    add_sweep_arguments(parser)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench sizes ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    sizes = {name: SIZES[name] for name in listed(args.sizes, one_of(list(SIZES)), "--sizes")}
    if args.n_layer is not None:
        own = (args.n_layer, args.n_head or 12, args.d_model or 768)
        sizes = {f"{own[0]}/{own[1]}/{own[2]}": own}
    configurations = [
        {
            "device": device,
            "dtype": dtype,
            "compile": compiled,
            "size": size,
            "shape": list(shape),
            "batch": batch,
            "context": context,
            "warmup": warmup,
            "steps": args.steps,
        }
        for device, (size, shape), context, batch, dtype, compiled, warmup in itertools.product(
            devices(args.device),
            sizes.items(),
            listed(args.contexts, int, "--contexts"),
            listed(args.batches, int, "--batches"),
            listed(args.dtypes, one_of(DTYPES), "--dtypes"),
            listed(args.compile, switch, "--compile"),
            listed(args.warmup, int, "--warmup"),
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


def devices(text: str) -> list[str]:
    """The devices of an option, auto resolved.

    Raises:
        UserError: one that is not there.
    """
    from gpt_lightning.device import check_accelerator, default_device

    names = listed(text, one_of(("auto", "cpu", "mps", "cuda")), "--device")
    for name in names:
        check_accelerator(name, "32-true", "--device")
    return [default_device() if name == "auto" else name for name in names]


# ---- in the row's own process --------------------------------------------------------------------


def measure_size(
    device: str,
    dtype: str,
    compile: bool,  # noqa: A002 - the field's word
    size: str,
    shape: list[int],
    batch: int,
    context: int,
    warmup: int,
    steps: int,
) -> dict[str, Any]:
    """Times inference and training of one configuration."""
    import torch

    from gpt_lightning.bench.timing import StepTimer, measure

    where = torch.device(device)
    check_dtype(dtype, where)
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.manual_seed(0)
    model = make_model(shape, context).to(where)
    if compile:
        model.compile()
    x, y = (torch.randint(10_000, (batch, context), device=where) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def inference(timer: StepTimer) -> None:
        with torch.no_grad(), autocast(dtype, where):
            model(x)
        timer.end("inference")

    def training(timer: StepTimer) -> None:
        with autocast(dtype, where):
            loss = model(x, y)
        timer.end("forward")
        loss.backward()
        timer.end("backward")
        optimizer.step()
        optimizer.zero_grad()
        timer.end("optimizer")

    times, first_step_s = measure(training, where, warmup, steps)
    inferences, _ = measure(inference, where, max(1, warmup), steps)
    total = times["total"]
    return {
        "inference_ms": inferences["inference"].median,
        "forward_ms": times["forward"].median,
        "forward_std_ms": times["forward"].std,
        "backward_ms": times["backward"].median,
        "backward_std_ms": times["backward"].std,
        "optimizer_ms": times["optimizer"].median,
        "total_ms": total.median,
        "total_mean_ms": total.mean,
        "total_std_ms": total.std,
        "total_min_ms": total.min,
        "total_p90_ms": total.p90,
        "total_max_ms": total.max,
        "first_step_s": first_step_s,
        "graphs": compiled_graphs(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "peak_memory_gib": peak_memory_gib(where),
        **rates(model, where, dtype, batch * context / total.median * 1e3, context),
    }


def check_dtype(dtype: str, device: "torch.device") -> None:
    """Refuses what would silently be something else."""
    from gpt_lightning.bench.worker import SkippedError

    if dtype == "tf32" and device.type != "cuda":
        raise SkippedError(f"tf32 is a mode of NVIDIA GPUs, not of {device.type}")
    if dtype == "fp16" and device.type == "cpu":
        raise SkippedError("fp16 autocast needs a GPU")


def make_model(shape: list[int], context: int) -> "GPT":
    """A GPT-2 of (layers, heads, width) with the course's vocabulary."""
    from gpt_lightning.model import GPT, GPTConfig

    n_layer, n_head, n_embd = shape
    return GPT(GPTConfig(n_layer, n_head, n_embd, block_size=context, vocab_size=10_000))


def autocast(dtype: str, device: "torch.device") -> AbstractContextManager[Any]:
    """The context of a forward pass in a dtype."""
    import torch

    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, names[dtype]) if dtype in names else nullcontext()


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def peak_memory_gib(device: "torch.device") -> float:
    """The most memory so far: of tensors on a GPU, of the process on a CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def rates(
    model: "GPT", device: "torch.device", dtype: str, tokens_per_sec: float, context: int
) -> dict[str, float]:
    """Tokens/s and MFU, as SpeedMonitor has them."""
    from gpt_lightning import flops
    from gpt_lightning.peaks import device_name, lookup, measured_peak

    per_token = flops.flops_per_token(
        model.num_params(embeddings=False), model.config.n_layer, model.config.n_embd, context
    )
    peak = lookup(device_name(device), dtype) or measured_peak(device, dtype)
    mfu = flops.mfu(tokens_per_sec, per_token, peak.flops)
    return {"tokens_per_sec": tokens_per_sec, "mfu": mfu}
