"""`gpt-lightning bench sizes`: forward, backward and optimizer of GPT-2s of several sizes."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt_lightning.bench.core.options import (
    DTYPES,
    add_size_arguments,
    at_least,
    check_bounds,
    chosen_sizes,
    devices,
    listed,
    one_of,
    switch,
)
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.bench.core.training_step import (
    TrainingOptimizer,
    autocast,
    checked_graphs,
    compiled_graphs,
    make_model,
    peak_memory_gib,
    rates,
    use_dtype,
)
from gpt_lightning.bench.published import NOTE as PUBLISHED_NOTE
from gpt_lightning.bench.published import published_tables
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.reports.tables import column

if TYPE_CHECKING:
    from gpt_lightning.bench.core.timing import StepTimer


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
        "inference: forward under no_grad in evaluation mode, after the training steps. forward, "
        "backward, optimizer: phases of one training step, each timed inside it, medians; total: "
        "the whole step. The phases of each step add up to its total; medians do so but for noise. "
        "optimizer: clipping to a norm of 1, AdamW and zero_grad, as in `fit`. first step: with "
        "compilation. graphs: compiled by torch.compile; a row without graphs that should have "
        "some, or with graphs that should have none, is an error.",
        "tokens/s: of the mean step, without stalls of over ten times the median, as SpeedMonitor "
        "has it. MFU: of the published dense peak in the dtype where there is one, of the measured "
        "one elsewhere. Memory: torch.cuda.max_memory_allocated on a GPU; the highest resident "
        "memory of the row's own process on a CPU. Vocabulary 10,000.",
        PUBLISHED_NOTE,
    ),
    beside=published_tables,
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
    add_size_arguments(parser)
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
    add_sweep_arguments(parser)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench sizes ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    check_bounds(args, steps=1)
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
            devices(args),
            chosen_sizes(args).items(),
            listed(args, "contexts", at_least(1)),
            listed(args, "batches", at_least(1)),
            listed(args, "dtypes", one_of(DTYPES)),
            listed(args, "compile", switch),
            listed(args, "warmup", at_least(0)),
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


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

    from gpt_lightning.bench.core.timing import measure
    from gpt_lightning.model.compilation import compile_in_place

    where = torch.device(device)
    use_dtype(dtype, where)
    graphs = compiled_graphs()
    torch.manual_seed(0)
    model = make_model(shape, context).to(where)
    if compile:
        compile_in_place(model, where.type)
    x, y = (torch.randint(model.lm_head.out_features, (batch, context), device=where) for _ in "xy")
    optimizer = TrainingOptimizer(model, where, dtype)

    def training(timer: "StepTimer") -> None:
        with autocast(dtype, where):
            loss = model(x, y)
        timer.end("forward")
        optimizer.backward(loss)
        timer.end("backward")
        optimizer.step()
        timer.end("optimizer")

    def inference(timer: "StepTimer") -> None:
        with torch.no_grad(), autocast(dtype, where):
            model(x)
        timer.end("inference")

    times, first_step_s = measure(training, where, warmup, steps)
    model.eval()
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
        "graphs": checked_graphs(compile, graphs),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "peak_memory_gib": peak_memory_gib(where),
        **rates(model, where, dtype, batch * context / total.steady_mean * 1e3, context),
    }
