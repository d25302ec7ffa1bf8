"""LightningModule that trains a GPT-2: build, train, evaluate, optimize, save."""

from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from jsonargparse.typing import register_type
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_lightning.data.loader import Batch, tokens_and_targets
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.loss import sum_dtype
from gpt_lightning.model.network import Network, check_tokens
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training import (
    between_steps,
    build,
    continuation,
    evaluation,
    optimizers,
    run_state,
    update,
)
from gpt_lightning.training.behaviours import of_every_run
from gpt_lightning.training.behaviours.non_finite import NonFiniteGuard
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.metrics import LoaderLosses, StepLoss
from gpt_lightning.training.schedule import Schedule

if TYPE_CHECKING:
    from gpt_lightning.training.keywords import ModelArguments

# jsonargparse would import the class of a dict with a class_path, while it parses
register_type(Network, serializer=Network.record, deserializer=Network.of)


class GPTModule(LightningModule):
    """LightningModule that trains a GPT-2.

    The model is made in `configure_model`, after the data are known, so that it may take its
    vocabulary from the tokenizer. It is made on the CPU, as the first to draw from the run's seed,
    so that every device starts from the same weights.

    Args:
        config: Shape of the model.
        init_from: Weights to start from instead of random ones: gpt2, gpt2-medium, gpt2-large or
            gpt2-xl (downloaded), a folder with model.safetensors, or a checkpoint. model.config
            must describe the same shape.
        network: Custom network in place of GPT: an nn.Module's class, its import path such as
            my_package.MyGPT, or {class_path, init_args}. It is built as MyGPT(config, **init_args).
        settings: Training arguments, the fields of gpt_lightning.runs.settings.Settings.

    Raises:
        UserError: The settings contradict each other or the data.

    Attributes:
        model: The GPT, or the custom network.
        attention_kernel: Kernel that runs: avx512, naive, flash, cudnn, efficient, math.
        notes: Lines of the banner about substitutes for what the settings name.
        train_loss: Mean loss of the micro-batches of the current step.
        last_loss: Mean loss of the last step on this rank; None before the first.
        eval_losses: A TokenLoss for each loader of the last evaluation.
        seed: Seed of the run, once it is known.
        stop_requested: True if trainer.should_stop was set, and the run has not stopped yet.
    """

    model: GPT
    attention_kernel: str
    notes: dict[str, str]

    def __init__(
        self,
        config: GPTConfig = GPTConfig(),  # noqa: B008 - frozen
        init_from: str | None = None,
        network: Network | None = None,
        **settings: "Unpack[ModelArguments]",
    ):
        super().__init__()
        # A checkpoint has the configuration as plain values: no class is imported.
        if isinstance(config, dict):
            config = GPTConfig(**config)
        if not isinstance(config, GPTConfig):
            raise UserError(f"model.config is {config!r}; expected a GPTConfig")
        self.config = config
        self.init_from = init_from
        self.network = Network.of(network)
        self.settings = Settings(**settings)  # type: ignore[arg-type]  # lists too
        optimizers.load(self.settings)  # raises before anything is built
        self.train_loss = StepLoss()
        self.last_loss: Tensor | None = None
        self.eval_losses = LoaderLosses()
        self.guard = NonFiniteGuard()
        self.seed: int | None = None
        self.stop_requested = False
        self._loss: Tensor | None = None  # the current micro-batch's

    def configure_callbacks(self) -> list[Callback]:
        """Return what a run does beside the model's own work; a subclass adds to super()'s."""
        return of_every_run(self.guard)

    # ---- build ---------------------------------------------------------------------------------

    def configure_model(self) -> None:
        trainer = self.attached_trainer  # None in load_from_checkpoint
        data = token_data(trainer)
        self.config = build.fit_to_data(self.config, data)
        if trainer and run_state.is_fitting(trainer):
            build.check_run(self, trainer)
        if not hasattr(self, "model"):
            tokens = data.tokenizer.spec() if data is not None and self.init_from else None
            self.model = build.build_model(
                self.config, self.settings, self.init_from, self.network, tokens
            )
        if trainer:
            build.prepare_model(self, trainer)

    def overrides(self, hook: str) -> bool:
        """Return whether a subclass has a method of its own in place of GPTModule's."""
        return is_overridden(hook, self, GPTModule)

    @property
    def attached_trainer(self) -> Trainer | None:
        """Trainer of this module; None in and after load_from_checkpoint."""
        try:
            return self.trainer
        except RuntimeError:
            return None

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a training token, forward and backward, at the run's context."""
        return build.flops_per_token(self)

    # ---- train ---------------------------------------------------------------------------------

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss, or the logits (B, T, V) without targets; idx and targets are (B, T)."""
        try:
            return self.model(idx, targets)
        except IndexError:  # the embedding or the loss raises it
            check_tokens("idx", idx, self.config)
            check_tokens("targets", idx if targets is None else targets.clamp(min=0), self.config)
            raise

    def on_fit_start(self) -> None:
        build.check_behaviours(self)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self(*tokens_and_targets(batch))
        self._loss = loss.detach()
        return loss

    @property
    def micro_batches(self) -> int:
        """Micro-batches done in the current step; 0 between two steps."""
        return self.train_loss.update_count

    def on_before_backward(self, loss: Tensor) -> None:
        # here, not in training_step: a subclass's may return a loss of its own, or none
        self.train_loss.update(update.micro_batch_loss(self, loss, self._loss))
        self._loss = None

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if not self.micro_batches:  # all steps have returned None, or a second optimizer follows
            return
        self.last_loss = self.train_loss.compute()
        self.train_loss.reset()
        if run_state.at_log_step(self.trainer, self.global_step + 1) and optimizer.param_groups:
            # self.log in training_step would log the last micro-batch of a step (PL#14301)
            self.log("train/loss", self.last_loss, sync_dist=True)
            self.log_dict(update.logged_rates(self, optimizer))

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # Lightning's own raises for fused optimizers under bf16-mixed, where nothing is scaled
        # (PL#21435)
        norm = update.clip(self, optimizer, gradient_clip_val, gradient_clip_algorithm == "value")
        if run_state.at_log_step(self.trainer, self.global_step + 1):
            self.guard.check()
            self.log("optim/grad_norm", norm)

    # ---- evaluate ------------------------------------------------------------------------------

    def on_validation_model_zero_grad(self) -> None:
        super().on_validation_model_zero_grad()
        # Lightning calls on_validation_start later, when the loader's workers have been started
        for callback in between_steps.step_callbacks(self.trainer):
            callback.before_validation(self.trainer)

    def on_validation_epoch_start(self) -> None:
        self.eval_losses = LoaderLosses()

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = tokens_and_targets(batch)
        self.eval_losses.update(self._evaluate(x, y), y, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        losses = evaluation.mean_losses(self, "test" if self.trainer.testing else "val")
        self.log_dict(losses, sync_dist=True, add_dataloader_idx=False)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return each target's loss in nats, float32 (B, T); 0 at padded positions."""
        x, y = tokens_and_targets(batch)
        logits = self._evaluate(x)  # (B, T, V)
        logits = logits.to(sum_dtype(logits.dtype))
        return nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")

    def _evaluate(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        if build.evaluates_compiled(self) or not build.compiles(self)[0]:
            return self(idx, targets)
        with torch.compiler.set_stance("force_eager"):
            return self(idx, targets)

    # ---- optimize ------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = update.build_optimizer(self)
        schedule = Schedule(optimizer, self.settings, build.decay_steps(self))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @property
    def schedule(self) -> Schedule | None:
        """Schedule of the learning rates; None with another author's optimizer or scheduler."""
        schedule = self.lr_schedulers()
        if isinstance(schedule, Schedule) and self.trainer.optimizers == [schedule.optimizer]:
            return schedule
        return None

    @property
    def learning_rate(self) -> float:
        """Peak of the learning rate, which Tuner.lr_find sets."""
        return self.settings.learning_rate

    @learning_rate.setter
    def learning_rate(self, peak: float) -> None:
        self.settings = update.with_peak(self.settings, peak)

    # ---- save ----------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(cls, *args: Any, network: Any = None, **kwargs: Any) -> Self:
        """Return the module of a checkpoint; only a network that is given is imported."""
        return super().load_from_checkpoint(*args, network=network, **kwargs)

    def on_save_checkpoint(self, checkpoint: Fields) -> None:
        self.guard.check()  # no checkpoint of steps that were skipped
        continuation.record_of(self).write(checkpoint)

    def on_load_checkpoint(self, checkpoint: Fields) -> None:
        continuation.continue_from(checkpoint, self)  # before Lightning loads the weights
