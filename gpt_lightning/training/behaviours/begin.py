"""BeginTraining: what must hold at the first step, of a new run and of a resumed one."""

from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning

from gpt_lightning.errors import UserError
from gpt_lightning.training.run_state import find_callback
from gpt_lightning.training.update import build_optimizer


class BeginTraining(Callback):
    """Forget an earlier run of the module, and give a resumed optimizer this run's settings."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        several = isinstance(trainer.train_dataloader, list | tuple)
        if several and not pl_module.overrides("training_step"):
            raise UserError("there are several training loaders: give one, or write training_step")
        pl_module.train_loss.reset()
        pl_module.last_loss = None
        if not pl_module.schedule:
            return
        groups = build_optimizer(pl_module).param_groups
        pl_module.schedule.begin(groups, trainer.global_step)
        if find_callback(trainer, BaseFinetuning):  # a resume forgets what it has unfrozen
            for group in trainer.optimizers[0].param_groups:
                for parameter in group["params"]:
                    parameter.requires_grad_(True)
