"""SampleText: generated text at every validation. EvaluateTasks: published tasks at an interval."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger

from gpt_lightning.data.tokenizers import Tokenizer, start_tokens
from gpt_lightning.errors import UserError
from gpt_lightning.evaluate.scoring import Scorer
from gpt_lightning.evaluate.tasks import FILES, Task, task_names
from gpt_lightning.hardware.precision import autocast_dtype
from gpt_lightning.parsing import Seed, checked
from gpt_lightning.runs.settings import TaskSettings
from gpt_lightning.training import steps
from gpt_lightning.training.callbacks.signals import Watchdog
from gpt_lightning.training.callbacks.speed import phase
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.steps import find_callback, is_fitting, is_sharded


@checked("samples")
@dataclass(eq=False)
class SampleText(L.Callback):
    """Write generated text to the console and TensorBoard after each validation.

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

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._active(trainer):
            start_tokens(run_tokenizer(trainer), self.prompt)  # raises for a bad prompt

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or not self._active(trainer):
            return
        assert isinstance(pl_module, GPTModule)
        with phase(trainer, "samples"), evaluated_weights(trainer):
            text = self._sample(trainer, pl_module) if trainer.is_global_zero else ""
        if trainer.is_global_zero:
            bar = trainer.progress_bar_callback
            (print if bar is None else bar.print)(textwrap.indent(text, "    "))
            write_text(trainer, "samples/text", text)

    def _active(self, trainer: L.Trainer) -> bool:
        takes_part = trainer.is_global_zero or is_sharded(trainer)  # rank 0 needs all shards
        return is_fitting(trainer) and self.max_new_tokens > 0 and takes_part

    def _sample(self, trainer: L.Trainer, module: GPTModule) -> str:
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
            dtype=autocast_dtype(str(trainer.precision)),
        )
        return tokenizer.decode(tokens[0].tolist())


def run_tokenizer(trainer: L.Trainer) -> Tokenizer:
    """Return the tokenizer of a run's data.

    Raises:
        UserError: The data are no TokenDataModule.
    """
    data = token_data(trainer)
    if data is None:
        raise UserError("samples and tasks need a TokenDataModule for its tokenizer")
    return data.tokenizer


def write_text(trainer: L.Trainer, tag: str, text: str) -> None:
    """Write a text to TensorBoard, in a block of fixed width."""
    block = textwrap.indent(text, "    ")  # TensorBoard reads Markdown
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, block, trainer.global_step)


@contextmanager
def evaluated_weights(trainer: L.Trainer) -> Iterator[None]:
    """Give the model the weights of val/loss: the average, if the run has WeightAveraging.

    Under fsdp2 each rank has all weights meanwhile, and all ranks must take part.
    """
    average, module = find_callback(trainer, WeightAveraging), trainer.lightning_module
    if average is not None:
        average.on_validation_epoch_start(trainer, module)
    strategy: Any = trainer.strategy if is_sharded(trainer) else None
    try:
        with nullcontext() if strategy is None else strategy.whole_weights(module.model):
            yield
    finally:
        if average is not None:
            average.on_validation_epoch_end(trainer, module)


# ---- tasks ---------------------------------------------------------------------------------------


class EvaluateTasks(steps.StepCallback):
    """Score tasks between two steps, on all ranks, and log val/TASK.

    The training is the same as without this callback: no random number is drawn, nothing is
    compiled, and the time is in no step. A checkpoint of the same step is saved before, and a
    resume from it repeats the evaluation.

    Args:
        settings: Tasks, interval and items.

    Raises:
        UserError: There is no such task.
    """

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        self._names = task_names(settings.tasks or "", FILES)
        self._tasks: list[Task] = []
        self._due = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tokenizer, watchdog = run_tokenizer(trainer), find_callback(trainer, Watchdog)
        if self.settings.every_n_steps is None and not trainer.limit_val_batches:
            raise UserError(
                "evaluation.tasks follow the validations, and trainer.limit_val_batches is 0: set "
                "--evaluation.every_n_steps"
            )
        assert isinstance(pl_module, GPTModule)
        products, settings = autocast_dtype(str(trainer.precision)), self.settings
        scorer = Scorer(pl_module.model, tokenizer, settings.batch_size, products)
        if watchdog is not None:
            scorer.beat = watchdog.beat
        self._tasks = [Task(name, scorer, settings.data, settings.limit) for name in self._names]
        for task in self._tasks if trainer.is_global_zero else ():
            print(*(f"evaluation  {task.name}: {note}\n" for note in task.notes), sep="", end="")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        every = self.settings.every_n_steps
        if every is not None and steps.at_step_boundary(trainer):
            self._due |= trainer.global_step % every == 0

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_fitting(trainer) and not trainer.sanity_checking:
            self._due |= self.settings.every_n_steps is None

    def between_batches(self, trainer: L.Trainer) -> None:
        """Evaluate if it is time to."""
        if self._due and steps.at_step_boundary(trainer) and not steps.stop_due(trainer):
            self._evaluate(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._due and not trainer.should_stop:
            self._evaluate(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"due": True} if self._due else {}  # an empty one leaves no trace in a checkpoint

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due = state_dict["due"]

    def _evaluate(self, trainer: L.Trainer) -> None:
        self._due, module, bar = False, trainer.lightning_module, trainer.progress_bar_callback
        assert isinstance(module, GPTModule)
        # a batch of another shape would make the training's graph dynamic
        eager = torch.compiler.set_stance("force_eager") if module.compiles[0] else nullcontext()
        with phase(trainer, "evaluation"), evaluated_weights(trainer), eager:
            results = [task.run() for task in self._tasks]
        values = {f"val/{result.task}": result.metrics[0].value for result in results}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        line = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        if trainer.is_global_zero:
            (print if bar is None else bar.print)(f"step {trainer.global_step} | {line}")
