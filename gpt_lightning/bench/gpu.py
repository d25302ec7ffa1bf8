"""GPT-2 in four sizes on a GPU, `fit` and transformers; writes benchmarks/gpu_CHIP.md.

ours: `fit` as configured, with the callbacks of every run. hf: transformers' GPT2LMHeadModel,
eager. hf-compiled: hf through torch.compile. All have the same tokens per step, bf16 autocast,
float32 products in TF32, and no dropout. Where theirs does not fit into memory, its micro-batch is
halved.

step: a whole optimizer step, median of `steps` after the warm-up. tokens/s: rate of that step. MFU:
6 N + 12 n_layer n_embd T FLOPs per token (flops.py) over the published dense bf16 peak, or over a
measured one where none is published. target: our target on one H200. memory:
torch.cuda.max_memory_allocated.
"""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveInt

from gpt_lightning.bench.core import fit_run, options, timing, training_step
from gpt_lightning.bench.core.options import Option, Values, devices, listed
from gpt_lightning.bench.core.peer import make_peer
from gpt_lightning.bench.core.sweep import Bench, Sweep, sweep_row
from gpt_lightning.errors import UserError, is_out_of_memory
from gpt_lightning.hardware.device import free_memory
from gpt_lightning.hardware.peaks import device_name
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.reports.tables import column

# size, with an overlay configs/gpu/gpt2_SIZE.yaml -> target MFU on one H200
TARGETS = {"124m": 0.48, "350m": 0.52, "774m": 0.52, "1558m": 0.55}
MODELS = ("ours", "hf", "hf-compiled")


@sweep_row
class GPURow:
    """Size and model of a run, and its speed."""

    size: str = column("size")
    model: str = column("model", width=11)
    batch: int | None = column("batch", "d")
    accumulate: int | None = column("accumulated", "d")
    context: int | None = column("context", "d")
    parameters: int | None = column("parameters", ",d", 13)
    steps: int = column("steps", "d")
    step_ms: float | None = column("step ms", ",.1f", 9)
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    mfu: float | None = column("MFU", ".1%", 6)
    target: float | None = column("target", ".0%", 6)
    peak_memory_gib: float | None = column("memory GiB", ",.1f")
    graphs: int | None = column("graphs", "d")


def read_device(args: Any) -> list[Values]:
    """Return the first device of --device.

    Raises:
        UserError: This machine has no NVIDIA GPU.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "bench gpu: no NVIDIA GPU on this machine; use bench sizes and bench peers, which "
            "measure any device"
        )
    return [{"device": devices(args)[0]}]


def read_models(args: Any) -> list[Values]:
    """Return the models with their steps."""
    return [
        {"model": model, "steps": args.steps if model == "ours" else args.peer_steps}
        for model in listed(args, "models", options.one_of(MODELS))
    ]


def publish(args: Any, sweep: Sweep) -> str:
    """Copy the report to gpu_CHIP.md in the folder of --out; return its path."""
    device = torch.device(sweep.configurations[0]["device"])
    chip = re.sub(r"[^a-z0-9]+", "_", device_name(device).lower().removeprefix("nvidia "))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    return str(shutil.copy(sweep.folder / "results.md", out / f"gpu_{chip.strip('_')}.md"))


BENCH = Bench(
    name="gpu",
    title="GPT-2 in four sizes on one GPU",
    row=GPURow,
    measure="gpt_lightning.bench.gpu:measure_size",
    options=(
        Option("device", "cuda", "cuda; another device tries the command out.", read_device),
        options.words("sizes", "size", TARGETS),
        Option("models", ",".join(MODELS), f"Any of {', '.join(MODELS)}.", read_models),
        Option("steps", 50, "Measured steps of ours.", type=PositiveInt),
        Option("peer_steps", 10, "Measured steps of theirs.", type=PositiveInt),
        options.warmup(5, PositiveInt),
        Option("out", "benchmarks", "Folder of the page gpu_CHIP.md."),
    ),
    timeout_s=3600.0,
    takes_fit_options=True,
    epilogue=publish,
)


def measure_size(row: GPURow, device: str, warmup: int, fit_options: list[str]) -> dict[str, Any]:
    """Train one size of one model."""
    where = torch.device(device)
    arguments = ["--config=gpt2_124m", f"--config=gpu/gpt2_{row.size}", *fit_options]
    arguments += [f"--trainer.accelerator={device}", "--trainer.devices=1"]
    parsed = fit_run.parse_fit([*arguments, "--data.seed=1"])
    config = GPTConfig(**parsed.model.config.as_dict())
    context = parsed.data.block_size or config.block_size
    batch, accumulate = parsed.data.batch_size, parsed.trainer.accumulate_grad_batches or 1
    torch.set_float32_matmul_precision(parsed.model.matmul_precision)
    graphs = training_step.compiled_graphs()
    if row.model == "ours":
        arguments += fit_run.random_token_options("gpu", config.vocab_size, row.steps, warmup)
        arguments += ["--trainer.logger=false", "--model.warmup_steps=0"]
        with tempfile.TemporaryDirectory() as folder:
            speed = fit_run.timed_fit(arguments, Path(folder))
        measured = {"step_ms": speed.step_ms, "note": fit_run.stall_note(speed)}
        measured["graphs"] = training_step.compiled_graphs() - graphs
    else:
        sequences, compiled = batch * accumulate, row.model == "hf-compiled"
        step_ms, batch = measure_theirs(row, where, config, (batch, accumulate, context), warmup)
        measured = {"step_ms": step_ms, "graphs": training_step.checked_graphs(compiled, graphs)}
        accumulate = sequences // batch
    with torch.device("meta"):
        shape = GPT(config)
    rate = batch * accumulate * context / measured["step_ms"] * 1e3
    return {
        "batch": batch,
        "accumulate": accumulate,
        "context": context,
        "target": TARGETS[row.size] if row.model == "ours" else None,
        "peak_memory_gib": training_step.peak_memory_gib(where),
        "parameters": shape.num_params(),
        **measured,
        **training_step.rates(shape, where, "bf16", rate, context),
    }


def measure_theirs(
    row: GPURow, device: torch.device, config: GPTConfig, step: tuple[int, int, int], warmup: int
) -> tuple[float, int]:
    """Train transformers' GPT-2, with smaller micro-batches where memory runs out.

    Args:
        row: Name of the model and number of measured steps.
        device: Device that does the work.
        config: Configuration of our model.
        step: Sequences per micro-batch, micro-batches per step, tokens per sequence.
        warmup: Steps before the measured ones.

    Returns:
        Median milliseconds of a step, and the sequences of the micro-batch that fitted.
    """
    batch, accumulate, context = step
    torch.manual_seed(0)
    peer = make_peer(GPT(config)).to(device)
    if row.model == "hf-compiled":
        peer.compile()
    while True:
        try:
            return time_steps(peer, device, (batch, accumulate, context), row.steps, warmup), batch
        except Exception as error:
            if not is_out_of_memory(error) or batch == 1 or batch % 2:
                raise
        peer.zero_grad()
        free_memory()  # outside the handler: the error holds the activations
        batch, accumulate = batch // 2, accumulate * 2


def time_steps(
    model: Any, device: torch.device, step: tuple[int, int, int], steps: int, warmup: int
) -> float:
    """Return the median milliseconds of an optimizer step of transformers' model."""
    batch, accumulate, context = step
    x, y = training_step.random_batch(batch, context, device, model.model.config.vocab_size)
    train = training_step.TrainingStep(model, device, "bf16")
    times, _ = timing.measure(
        lambda timer: train(x, y, timer.phase, accumulate), device, warmup, steps
    )
    return times["total"].median
