"""Training speed of our GPT-2 and transformers' GPT-2, with the same weights and batch.

Both models have the same weights, batch, loss function and AdamW, and no dropout; theirs keeps no
cache of keys and values. One process runs blocks of training steps of ours, theirs, ours, ... ms:
median over the rounds of a block's mean step. ratio: theirs over ours, median over the rounds, with
its spread; ours is faster where it is above 1.

loss: loss of the first step, before any update, so that equal losses mean equal models.
graphs: graphs that torch.compile made.
"""

import importlib
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from gpt_lightning.bench import models, timing
from gpt_lightning.bench.step import Training, prepare, random_batch
from gpt_lightning.model.gpt import GPT
from gpt_lightning.model.huggingface import settings_of, to_huggingface
from gpt_lightning.model.loss import mean_loss
from gpt_lightning.model.weights import HEAD
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import Row, Values
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.tables.worker import SkippedError

BENCH = Bench(
    measure="gpt_lightning.bench.peers:measure_peers",
    options=(
        options.DEVICE,
        options.sizes(("tiny", *models.COURSE_SIZES), "small"),
        options.contexts("256"),
        options.batches("4"),
        options.dtypes("fp32,bf16"),
        options.switches("compile", "false,true", "Compile both models"),
        options.steps(3),
        options.warmup(1),
        options.shared("rounds", 5, "Blocks of each model."),
    ),
    timeout_s=1200.0,
)


def measure_peers(row: Row) -> Values:
    """Train both models in turns."""
    device = prepare(row)
    model = GPT(models.make_config(row.size, row.context))
    peer = Peer(model)  # compilation renames parameters
    batch = random_batch(row.batch, row.context, device)
    both = {}
    for name, module in (("ours", model), ("theirs", peer)):
        adamw = torch.optim.AdamW(module.to(device).parameters(), lr=1e-4)
        both[name] = Training(module, batch, row.dtype, row.compile, optimizer=adamw, clip=False)
        both[name].block(warmup=0, steps=1)
    blocks = {name: partial(t.block, row.warmup, row.steps) for name, t in both.items()}
    found = dict(timing.compare(blocks, row.rounds))
    for name, training in both.items():
        facts = {
            "tokens_per_sec": row.batch * row.context / found[f"{name}_ms"] * 1e3,
            "graphs": training.graphs,
            "loss": training.loss,
        }
        found |= {f"{name}_{key}": value for key, value in facts.items()}
    return found


class Peer(nn.Module):
    """transformers' GPT-2 with our weights, as a module of tokens and targets to a loss.

    Args:
        model: GPT whose shape and weights it gets.

    Raises:
        SkippedError: transformers is not installed.
    """

    def __init__(self, model: GPT):
        try:
            transformers = importlib.import_module("transformers")
        except ModuleNotFoundError as error:
            raise SkippedError(f"{error.name} is missing: pip install transformers") from error

        super().__init__()
        ours = replace(model.config, dropout=0.0)
        # token 0 ends texts: transformers' own, 50,256, exceeds a small vocabulary
        settings = settings_of(ours, model.lm_head.out_features, 0, {})
        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
        weights = to_huggingface(model.state_dict(), ours)  # the file format omits a tied head
        self.model.load_state_dict(weights | {HEAD: model.lm_head.weight})

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(self.model(idx, use_cache=False).logits, targets)
