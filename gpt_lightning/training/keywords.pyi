"""Types of keyword arguments: `make stubs` writes them from dataclasses of settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

class ModelArguments(TypedDict, total=False):
    optimizer: str
    learning_rate: float
    min_learning_rate: float | None
    schedule: Literal["cosine", "linear", "constant"]
    warmup_steps: int
    decay_start: int
    decay_steps: int | None
    weight_decay: float
    decay: Literal["matrices", "all"]
    betas: tuple[float, float] | list[float]
    muon_learning_rate: float
    muon_momentum: float
    freeze: tuple[str, ...] | list[str]
    learning_rate_factors: Mapping[str, float] | None
    lora_rank: int | None
    lora_alpha: float
    lora_targets: tuple[str, ...] | list[str]
    fused: bool | Literal["auto"]
    compile: bool | Literal["auto"]
    compile_scope: Literal["model", "block"]
    pad_head: bool | Literal["auto"]
    matmul_precision: Literal["highest", "high", "medium"]

class DataArguments(TypedDict, total=False):
    dataset: str | Path | None
    corpus: str | Path | None
    text_file: str | Path | None
    tokenizer: str | Path
    val_fraction: float
    val_text_file: str | Path | None
    data_dir: str | Path
    block_size: int | None
    batch_size: int
    tokens_per_step: int | None
    eval_batch_size: int | None
    eval_batches: int | None
    eval_train_batches: int | None
    order: Literal["sequential", "random", "shuffled", "repeat"] | Literal["nanogpt"]
    patience: float
    num_workers: int
    seed: int | None
    allow_changes: bool
