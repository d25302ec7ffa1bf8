"""EvaluateTasks: published tasks at an interval."""

from contextlib import nullcontext
from typing import Any

import torch
from lightning import LightningModule, Trainer

from gpt_lightning.errors import UserError
from gpt_lightning.evaluate.scoring import Scorer
from gpt_lightning.evaluate.tasks import FILES, Task, task_names
from gpt_lightning.files import Fields
from gpt_lightning.hardware.precision import autocast_dtype
from gpt_lightning.runs.settings import TaskSettings
from gpt_lightning.training import steps
from gpt_lightning.training.callbacks.samples import evaluated_weights, run_tokenizer
from gpt_lightning.training.callbacks.signals import Watchdog
from gpt_lightning.training.callbacks.speed import phase


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

    def __init__(self, settings: TaskSettings):
        self.settings = settings
        self._names = task_names(settings.tasks or "", FILES)
        self._tasks: list[Task] = []
        self._due = False

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        tokenizer = run_tokenizer(trainer)
        watchdog = steps.find_callback(trainer, Watchdog)
        if self.settings.every_n_steps is None and not trainer.limit_val_batches:
            raise UserError(
                "evaluation.tasks follow the validations, and trainer.limit_val_batches is 0: set "
                "--evaluation.every_n_steps"
            )
        products, settings = autocast_dtype(trainer.precision), self.settings
        scorer = Scorer(pl_module.model, tokenizer, settings.batch_size, products)
        if watchdog:
            scorer.beat = watchdog.beat
        self._tasks = [Task(name, scorer, settings.data, settings.limit) for name in self._names]
        for task in self._tasks if trainer.is_global_zero else ():
            print(*(f"evaluation  {task.name}: {note}\n" for note in task.notes), sep="", end="")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        every = self.settings.every_n_steps
        if every is not None and steps.at_step_boundary(trainer):
            self._due |= trainer.global_step % every == 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if steps.is_fitting(trainer) and not trainer.sanity_checking:
            self._due |= self.settings.every_n_steps is None

    def between_batches(self, trainer: Trainer) -> None:
        """Evaluate if it is time to."""
        if self._due and steps.at_step_boundary(trainer) and not steps.stop_due(trainer):
            self._evaluate(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._due and not trainer.should_stop:
            self._evaluate(trainer)

    def state_dict(self) -> Fields:
        return {"due": True} if self._due else {}  # an empty one leaves no trace in a checkpoint

    def load_state_dict(self, state_dict: Fields) -> None:
        self._due = state_dict["due"]

    def _evaluate(self, trainer: Trainer) -> None:
        self._due, bar = False, trainer.progress_bar_callback
        module: Any = trainer.lightning_module
        # a batch of another shape would make the training's graph dynamic
        eager = torch.compiler.set_stance("force_eager") if module.compiles[0] else nullcontext()
        with phase(trainer, "evaluation"), evaluated_weights(trainer), eager:
            results = [task.run() for task in self._tasks]
        values = {f"val/{result.task}": result.metrics[0].value for result in results}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        line = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        if trainer.is_global_zero:
            (bar.print if bar else print)(f"step {trainer.global_step} | {line}")
