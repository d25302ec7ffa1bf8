"""How `bench gpu` measures a row, in the row's own process."""

import statistics
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.bench.core.timing import StepTimer
from gpt_lightning.bench.core.training_step import (
    TrainingOptimizer,
    autocast,
    checked_graphs,
    compiled_graphs,
    peak_memory_gib,
)
from gpt_lightning.bench.gpu import SIZES
from gpt_lightning.bench.ladder_run import known_vocabulary, parse_fit
from gpt_lightning.bench.peers_run import make_peer
from gpt_lightning.data.synthetic import random_dataset
from gpt_lightning.errors import is_out_of_memory
from gpt_lightning.hardware.device import free_memory
from gpt_lightning.hardware.peaks import device_name, lookup, measured_peak
from gpt_lightning.model import flops
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.recorder import RunRecorder


def measure_size(
    device: str, size: str, model: str, steps: int, warmup: int, fit_options: list[str]
) -> dict[str, Any]:
    """Trains one size with one of the three."""
    where = torch.device(device)
    overlay, target = SIZES[size]
    options = [
        "--config=gpt2_124m",
        f"--config={overlay}",
        *fit_options,
        f"--trainer.accelerator={device}",
        "--trainer.devices=1",
    ]
    parsed = parse_fit([*options, "--data.seed=1"])
    config = GPTConfig(**parsed.model.config.as_dict())
    context = parsed.data.block_size or config.block_size
    batch, accumulate = parsed.data.batch_size, parsed.trainer.accumulate_grad_batches or 1
    torch.set_float32_matmul_precision(parsed.model.matmul_precision)
    if model == "ours":
        measured = measure_ours(options, config, steps, warmup)
    else:
        graphs = compiled_graphs()
        measured, batch = measure_theirs(
            config, where, model == "hf-compiled", (batch, accumulate, context), steps, warmup
        )
        measured["graphs"] = checked_graphs(model == "hf-compiled", graphs)
        accumulate = parsed.data.batch_size * accumulate // batch
    rate = batch * accumulate * context / measured["step_ms"] * 1e3
    return {
        "batch": batch,
        "accumulate": accumulate,
        "context": context,
        "target": target if model == "ours" else None,
        "peak_memory_gib": peak_memory_gib(where),
        **measured,
        **rates(config, where, rate, context),
    }


def measure_ours(options: list[str], config: GPTConfig, steps: int, warmup: int) -> dict[str, Any]:
    """`fit`, on random tokens: median milliseconds of a step."""
    watch = RunRecorder(lambda seen: None, each_step=False)
    dataset = random_dataset(Path("data"), known_vocabulary(config.vocab_size))
    graphs = compiled_graphs()
    training.run(
        [
            "fit",
            *options,
            f"--data.dataset={dataset}",
            f"--trainer.max_steps={warmup + steps}",
            "--trainer.limit_val_batches=0",
            "--trainer.enable_checkpointing=false",
            "--trainer.logger=false",
            "--model.warmup_steps=0",
            "--samples.max_new_tokens=0",
            f"--speed.warmup_steps={warmup}",
        ],
        callbacks=[watch],
    )
    assert watch.speed is not None
    note = f"{watch.speed.stalls} stalls left out" if watch.speed.stalls else ""
    return {
        "step_ms": watch.speed.step_ms,
        "graphs": compiled_graphs() - graphs,
        "note": note,
    }


def measure_theirs(
    config: GPTConfig,
    device: torch.device,
    compiled: bool,
    step: tuple[int, int, int],
    steps: int,
    warmup: int,
) -> tuple[dict[str, Any], int]:
    """transformers' GPT-2 in a plain loop.

    Args:
        config: Of the model.
        device: That does the work.
        compiled: Through torch.compile.
        step: Sequences a micro-batch, micro-batches a step, tokens a sequence.
        steps: Measured.
        warmup: Steps before.

    Returns:
        Median milliseconds of a step, and the sequences of the micro-batch that fitted.
    """
    batch, accumulate, context = step
    torch.manual_seed(0)
    peer = make_peer(GPT(config)).to(device)
    if compiled:
        peer.compile()
    while True:
        try:
            sizes = (batch, accumulate, context)
            return {"step_ms": time_steps(peer, device, sizes, steps, warmup)}, batch
        except Exception as error:
            if not is_out_of_memory(error) or batch == 1 or batch % 2:
                raise
        peer.zero_grad()
        free_memory()  # outside the handler: the error holds the activations
        batch, accumulate = batch // 2, accumulate * 2


def time_steps(
    model: Any, device: torch.device, step: tuple[int, int, int], steps: int, warmup: int
) -> float:
    """Median milliseconds of a training step of a model that takes tokens and targets."""
    batch, accumulate, context = step
    vocab_size = model.model.config.vocab_size
    x, y = (torch.randint(vocab_size, (batch, context), device=device) for _ in range(2))
    optimizer, timer = TrainingOptimizer(model, device, "bf16"), StepTimer(device)
    for _ in range(warmup + steps):
        timer.begin()
        for _ in range(accumulate):
            with autocast("bf16", device):
                loss = model(x, y) / accumulate
            optimizer.backward(loss)
        optimizer.step()
        timer.end("step")
    return statistics.median(timer.milliseconds()["total"][warmup:])


def rates(
    config: GPTConfig, device: torch.device, tokens_per_sec: float, context: int
) -> dict[str, Any]:
    """Parameters, tokens/s, and MFU of the dense bf16 peak."""
    with torch.device("meta"):
        model = GPT(config)
    per_token = flops.flops_per_token(
        model.num_params(embeddings=False), config.n_layer, config.n_embd, context
    )
    peak = lookup(device_name(device), "bf16") or measured_peak(device, "bf16")
    return {
        "parameters": model.num_params(),
        "tokens_per_sec": tokens_per_sec,
        "mfu": flops.mfu(tokens_per_sec, per_token, peak.flops),
    }
