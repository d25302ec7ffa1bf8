"""StepSeeds: any step can be computed without those before it."""

import os
from typing import Any

import numpy as np
import torch
from lightning import Callback, Trainer

from gpt_lightning.data.order import INCREMENT, splitmix64
from gpt_lightning.hardware.device import seed_device


class StepSeeds(Callback):
    """Seed dropout at each micro-batch, by the run's seed, the step, the micro-batch and the rank.

    Seeds are derived, not saved. Each rank drops other activations; seed_everything alone would
    give the same masks to all. The process's own generator goes on after the run as if it had not
    been seeded.
    """

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        run_seed(pl_module)
        self._state = torch.get_rng_state()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        seed = run_seed(pl_module)
        place = (trainer.global_step, pl_module.micro_batches, trainer.global_rank)
        seed_device(pl_module.device, mix(seed, *place))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        torch.set_rng_state(self._state)


def run_seed(module: Any) -> int:
    """Return the seed of a module's run: that of seed_everything, else one that is drawn once."""
    if "PL_GLOBAL_SEED" in os.environ:  # TokenDataModule reads it too
        module.seed = int(os.environ["PL_GLOBAL_SEED"])
    if module.seed is None:
        # a copy: the run's own draws stay as they are
        generator = torch.default_generator.clone_state()
        drawn = int(torch.randint(2**32, (), generator=generator))
        module.seed = int(module.trainer.strategy.broadcast(drawn))
    return int(module.seed)


def mix(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on every number and on their order.

    SplitMix64's finalizer over each number in turn.
    """
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = splitmix64((state ^ np.uint64(number % 2**64)) + INCREMENT)
    return int(state[0]) >> 1
