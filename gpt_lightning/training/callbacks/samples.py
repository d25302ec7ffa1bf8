"""SampleText: generated text at every validation."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger

from gpt_lightning.data.tokenizers import Tokenizer, start_tokens
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.precision import autocast_dtype
from gpt_lightning.parsing import Seed, checked
from gpt_lightning.training.callbacks.speed import SpeedMonitor, phase
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.run_state import find_callback, is_fitting, is_sharded
from gpt_lightning.training.sharding import whole_weights


@checked("samples")
@dataclass(eq=False)
class SampleText(Callback):
    """Write generated text after each validation.

    It stands on the console, in timeline.jsonl and in TensorBoard.

    Args:
        max_new_tokens: Tokens per sample; 0 turns samples off.
        prompt: Beginning of the text; empty: the tokenizer's start of a text.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to sample from; null: all.
        seed: Seed of the draws. Every validation uses it again, so that only the weights change
            the samples.
    """

    max_new_tokens: NonNegativeInt = 200
    prompt: str = ""
    temperature: NonNegativeFloat = 0.8
    top_k: PositiveInt | None = 200
    seed: Seed = 1337

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active(trainer):
            start_tokens(run_tokenizer(trainer), self.prompt)  # raises for a bad prompt

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or not self._active(trainer):
            return
        with phase(trainer, "samples"), evaluated_weights(trainer):
            text = self._sample(trainer, pl_module) if trainer.is_global_zero else ""
        if trainer.is_global_zero:
            bar = trainer.progress_bar_callback
            (bar.print if bar else print)(textwrap.indent(text, "    "))
            write_text(trainer, "samples/text", text)
            speed = find_callback(trainer, SpeedMonitor)
            if speed and speed.timeline:
                speed.timeline.write("sample", trainer.global_step, text=text)

    def _active(self, trainer: Trainer) -> bool:
        takes_part = trainer.is_global_zero or is_sharded(trainer)  # rank 0 needs all shards
        return is_fitting(trainer) and self.max_new_tokens > 0 and takes_part

    def _sample(self, trainer: Trainer, module: GPTModule) -> str:
        from gpt_lightning.model.generate import generate  # not for runs without samples

        tokenizer = run_tokenizer(trainer)
        prompt = torch.tensor([start_tokens(tokenizer, self.prompt)], device=module.device)
        tokens = generate(
            module.model,
            prompt,
            self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            generator=torch.Generator(module.device).manual_seed(self.seed),
            vocab_size=tokenizer.vocab_size,
            # mixed precision: the weights are cast once, not by autocast for each token
            dtype=autocast_dtype(trainer.precision),
        )
        return tokenizer.decode(tokens[0].tolist())


def run_tokenizer(trainer: Trainer) -> Tokenizer:
    """Return the tokenizer of a run's data.

    Raises:
        UserError: The data are no TokenDataModule.
    """
    data = token_data(trainer)
    if data is None:
        raise UserError("samples and tasks need a TokenDataModule for its tokenizer")
    return data.tokenizer


def write_text(trainer: Trainer, tag: str, text: str) -> None:
    """Write a text to TensorBoard, in a block of fixed width."""
    block = textwrap.indent(text, "    ")  # TensorBoard reads Markdown
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, block, trainer.global_step)


@contextmanager
def evaluated_weights(trainer: Trainer) -> Iterator[None]:
    """Give the model the weights of val/loss: the average, if the run has WeightAveraging.

    Under fsdp2 each rank has all weights meanwhile, and all ranks must take part.
    """
    average = find_callback(trainer, WeightAveraging)
    module: Any = trainer.lightning_module
    if average:
        average.on_validation_epoch_start(trainer, module)
    try:
        with whole_weights(module.model):
            yield
    finally:
        if average:
            average.on_validation_epoch_end(trainer, module)
