"""Settings of a run, read from its own objects, against those of the published run.

A curve within its tolerance does not prove that a rung is what it is named after: a tied matrix, a
third of the learning rate or another beta changes the curves of unseeded runs by less than another
seed does. So everything that a rung's numbers depend on is compared, too. Theirs are in
reference/*.yaml, written by hand from the published programs. Ours are never read from a
configuration: they are the model's tensors, the optimizer's groups, the Trainer and the batches.

What no object tells, training/callbacks/arithmetic.py computes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from gpt_lightning.files import Fields, yaml_beside
from gpt_lightning.model.fast.compilation import is_compiled
from gpt_lightning.model.gpt import GPT, Block
from gpt_lightning.reproduce.cases import Rung, Verdict
from gpt_lightning.tables.rows import Column, Row, Text
from gpt_lightning.training.callbacks.arithmetic import AS_PUBLISHED, CHECKED
from gpt_lightning.training.datamodule import TokenDataModule, token_data
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.schedule import Schedule

RATE_STEPS = (0, 100, 1000, 2000, 5000)  # optimizer steps whose learning rates are compared
TABLE = yaml_beside(__file__)


@dataclass
class SettingRow(Row):
    """Setting of the published run, and the one that was read from ours."""

    rung: Text
    setting: Annotated[str, Column()]
    theirs: Text
    ours: Text
    verdict: Text


def compare_settings(rung: Rung, ours: Fields) -> list[SettingRow]:
    """Return a row for each setting of the published run that was read from ours."""
    rows = []
    theirs = rung.theirs | dict.fromkeys(CHECKED, AS_PUBLISHED)
    for name in filter(ours.__contains__, theirs):
        a = text(theirs[name])
        b = text(ours[name])
        verdict = Verdict.OK if a == b else Verdict.FAILED
        rows.append(SettingRow(rung.name, name, a, b, verdict))
    return rows


def text(value: Any) -> str:
    """Return a value as it is compared and printed, numbers with five digits."""
    if isinstance(value, list):
        return ", ".join(map(text, value))
    return f"{value:.5g}" if isinstance(value, float) else str(value)


# ---- ours ----------------------------------------------------------------------------------------


def read_settings(module: GPTModule) -> Fields:
    """Return the settings of a run before its first step; a resumed run has no initial weights."""
    weights = {} if module.trainer.ckpt_path else initial_weights(module.model)
    return model_settings(module.model) | weights | update_settings(module) | data_settings(module)


def one(values: Iterable[Any]) -> Any:
    """Return the value that all have, or the list of the values that there are."""
    found: list[Any] = []
    found.extend(value for value in values if value not in found)
    return found[0] if len(found) == 1 else found


def model_settings(model: GPT) -> Fields:
    """Return the shape and the layers of a model."""
    transformer, blocks = model.transformer, cast(list[Block], list(model.transformer.h))
    rates = [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)]
    kernels = (block.attn.attention.__name__.removesuffix("_attention") for block in blocks)
    return {
        "n_layer": len(blocks),
        "n_head": one(block.attn.n_head for block in blocks),
        "n_embd": transformer.wte.embedding_dim,
        "block_size": transformer.wpe.num_embeddings,
        "vocab_size": model.lm_head.out_features,
        "parameters": model.num_params(),
        "bias": any(name.endswith("bias") for name, _ in model.named_parameters()),
        "tie_weights": model.lm_head.weight is transformer.wte.weight,
        "dropout": one([*rates, *(block.attn.dropout for block in blocks)]),
        "activation": one(f"gelu, {block.mlp.gelu.approximate}" for block in blocks),
        # hashed: naive attention of a model that is compiled for a CPU
        "attention": one("naive" if name == "hashed" else name for name in kernels),
        "compile": is_compiled(model),
        "checkpointing": transformer.checkpointing,
        "loss_chunk": model.config.loss_chunk or "none",
    }


def initial_weights(model: GPT) -> Fields:
    """Return standard deviations, and one weight that depends on the seed and every earlier draw.

    init_std: token embedding, position embedding, matrices, residual projections, biases.
    """
    groups = [
        [w.detach().cpu() for name, w in model.named_parameters() if name.endswith(tuple(ends))]
        for ends in TABLE["initial"]
    ]
    stds = [parameters_to_vector(g).double().std().item() if g else 0.0 for g in groups]
    return {"init_std": stds, "init_weight": groups[3][-1][0, 0].item()}


def update_settings(module: GPTModule) -> Fields:
    """Return device and arithmetic, the optimizer, its rates, decay, clipping and accumulation."""
    trainer = module.trainer
    (optimizer,) = trainer.optimizers
    groups = optimizer.param_groups
    decayed = [group for group in groups if group["weight_decay"]]
    clip = trainer.gradient_clip_val
    (config,) = trainer.lr_scheduler_configs
    shares = [cast(Schedule, config.scheduler).lr_lambdas[0](step) for step in RATE_STEPS]
    return {
        "accelerator": trainer.strategy.root_device.type.replace("cuda", "gpu"),
        "ranks": trainer.world_size,
        "precision": str(trainer.precision),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "optimizer": type(optimizer).__name__,
        "fused": one(bool(group.get("fused")) for group in groups),
        "betas": one(list(group.get("betas", ())) for group in groups),
        "eps": one(group.get("eps") for group in groups),
        "weight_decay": one([group["weight_decay"] for group in decayed] or [0.0]),
        "decayed_parameters": sum(p.numel() for group in decayed for p in group["params"]),
        "learning_rates": one(
            [group["initial_lr"] * share for share in shares] for group in groups
        ),
        "gradient_clip": f"{clip}, {trainer.gradient_clip_algorithm or 'norm'}" if clip else "none",
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }


def data_settings(module: GPTModule) -> Fields:
    """Return the tokens, the shape of a batch, the seed, and the evaluations if there are any."""
    trainer, data = module.trainer, cast(TokenDataModule, token_data(module.trainer))
    reader, tokens = data.reader, data.training_tokens()
    batch = [reader.settings.batch_size, reader.block_size]
    settings = {
        "tokenizer": data.manifest.tokenizer["name"],
        "train_tokens": tokens,
        "epoch_batches": tokens // math.prod(batch),
        "batch": batch,
        "seed": reader.seed,
    }
    if "val" in data.manifest.splits:
        settings["eval_batches"] = len(reader.eval_loaders()[0])
        settings["val_check_interval"] = trainer.val_check_interval
        settings["evaluates_first"] = trainer.num_sanity_val_steps == math.inf
    return settings
