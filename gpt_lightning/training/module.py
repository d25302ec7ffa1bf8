"""LightningModule that trains a GPT: build, step, evaluate, update."""

import dataclasses
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from gpt_lightning.data.loader import IGNORE_INDEX, Batch
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import keep_freed_memory, seed_device
from gpt_lightning.model import flops
from gpt_lightning.model.compilation import compile_in_place, should_compile
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.runs import resume
from gpt_lightning.runs.checkpoint import Checkpoint, RunRecord, initial_weights, run_id
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training import optim, optimizers
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.steps import (
    at_log_step,
    at_step_boundary,
    call_hook,
    continue_loops,
    is_fitting,
    run_logger,
    unfinished_micro_batches,
)


class GPTModule(L.LightningModule):
    """LightningModule that trains a GPT-2.

    The model is created in `configure_model`, after the data are known, so that it may take its
    vocabulary from the tokenizer. It is created on the CPU, as the first to draw from the run's
    seed, so that every device starts from the same weights.

    Args:
        config: Shape of the model.
        init_from: Weights to start from instead of random ones: gpt2, gpt2-medium, gpt2-large or
            gpt2-xl (downloaded), a folder with model.safetensors, or a checkpoint. model.config
            must describe the same shape.
        settings: Training arguments, the fields of gpt_lightning.runs.settings.Settings.

    Raises:
        UserError: settings that contradict each other or the data.
    """

    model: GPT  # made by configure_model

    def __init__(
        self,
        config: GPTConfig = GPTConfig(),  # noqa: B008 - frozen
        init_from: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        # in a checkpoint the configuration is plain numbers and words, no class to import
        self.config = GPTConfig(**config) if isinstance(config, dict) else config
        self.init_from = init_from
        self.settings = Settings(**settings)
        optimizers.check(self.settings)
        self.eval_loss = MeanMetric()  # over the held-out split
        self.train_eval_loss = MeanMetric()  # over the training split, if the data evaluate it too
        self._evaluated = 0  # positions of this rank in the current evaluation, with padding
        self.micro_batches = 0  # done in the current step
        self.stop_requested = False  # by trainer.should_stop, and not granted yet
        self._loss_sum: torch.Tensor | None = None  # over the micro-batches of the current step
        self._seed = 0  # of the run
        self._group_options: list[dict[str, Any]] = []  # of our optimizer's parameter groups
        self._trained: list[torch.nn.Parameter] = []  # listed once, not at each step
        self._guard = optim.NonFiniteGuard()

    # ---- build ---------------------------------------------------------------------------------

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        torch.set_float32_matmul_precision(self.settings.matmul_precision)
        fitting = self._trainer is not None and is_fitting(self.trainer)
        if self._trainer is not None:
            self.config = self._fit_to_data()
        if fitting and self.settings.schedule == "cosine":
            self._check_cosine()
        with torch.device("cpu"):  # in Lightning's device context the GPU would draw the weights
            self.model = GPT(self.config)
        if self.init_from is not None:
            self.model.load_state_dict(initial_weights(self.init_from, self.config))
        if self.compiles[0]:
            compile_in_place(self.model, self._device_type)
        if fitting and self._device_type == "cpu":
            keep_freed_memory()

    def _fit_to_data(self) -> GPTConfig:
        """Return the configuration with the tokenizer's vocabulary; raise if it is too small."""
        config, data = self.config, token_data(self.trainer)
        if data is None:
            return config
        if config.vocab_size is None:
            config = dataclasses.replace(config, vocab_size=data.vocab_size)
        assert config.vocab_size is not None
        if config.vocab_size < data.vocab_size:
            raise UserError(
                f"model.config.vocab_size is {config.vocab_size}, but {data.address} has "
                f"{data.vocab_size} tokens: set it to {data.vocab_size}, or to null"
            )
        return config

    def _check_cosine(self) -> None:
        if self._decay_steps < 0:
            raise UserError(
                "the cosine has no end: set trainer.max_steps or model.decay_steps, "
                "or model.schedule to constant"
            )
        if self._decay_steps <= self.settings.warmup_steps:
            raise UserError(
                f"model.warmup_steps {self.settings.warmup_steps} must be below "
                f"model.decay_steps {self._decay_steps} (default: trainer.max_steps): "
                "lower model.warmup_steps"
            )

    @property
    def _decay_steps(self) -> int:
        steps = self.settings.decay_steps
        return self.trainer.max_steps if steps is None else steps

    @property
    def _device_type(self) -> str:
        return "cpu" if self._trainer is None else str(self.trainer.strategy.root_device.type)

    @property
    def compiles(self) -> tuple[bool, str]:
        """True if the model is compiled on this device, and the reason."""
        if self.settings.compile != "auto":
            return self.settings.compile, "as set"
        precision = "32-true" if self._trainer is None else str(self.trainer.precision)
        return should_compile(self._device_type, precision)

    @property
    def evaluates_compiled(self) -> bool:
        """True if evaluations are compiled too: on a CPU that takes longer than it saves."""
        return self.compiles[0] and self._device_type != "cpu"

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a training token, forward and backward, at the run's context; see flops.py."""
        data = None if self._trainer is None else token_data(self.trainer)
        return flops.flops_per_token(
            n_params=self.model.num_params(embeddings=False),
            n_layer=self.config.n_layer,
            n_embd=self.config.n_embd,
            block_size=data.block_size if data is not None else self.config.block_size,
        )

    # ---- checkpoints ---------------------------------------------------------------------------

    def hyperparameters(self) -> dict[str, Any]:
        """Return the arguments as plain values: `GPTModule(**hyperparameters())` is this module.

        Without `init_from`, whose weights are in the checkpoint.
        """
        return RunRecord(config=self.config, settings=self.settings).hyperparameters()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._guard.check()  # no checkpoint of steps that were skipped
        self.record().write(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is None:  # load_from_checkpoint: no run to compare with
            return
        self._seed = torch.initial_seed()
        path, data = Path(str(self.trainer.ckpt_path)), token_data(self.trainer)
        theirs, fitting = Checkpoint.of(checkpoint, path), is_fitting(self.trainer)
        allow_changes = data is not None and data.settings.allow_changes
        address = "this run's data" if data is None else data.address
        changed = resume.check(theirs.record, self.record(), address, fitting, allow_changes)
        if fitting and data is not None and not allow_changes:
            data.reader.check_stamps(theirs.record.shards)
        if fitting:
            continue_loops(checkpoint["loops"]["fit_loop"])
        else:  # the loggers' x, which Lightning restores for fit alone
            self.trainer.fit_loop.epoch_loop._batches_that_stepped = theirs.step
        if self.trainer.is_global_zero:
            print(resume.resumption(path, theirs, changed))

    def record(self) -> RunRecord:
        """Return the description of this run that its checkpoints hold."""
        data, logger = token_data(self.trainer), run_logger(self.trainer)
        return RunRecord(
            config=self.config,
            settings=self.settings,
            run_identity=resume.run_identity(self.trainer, self._seed, self._decay_steps),
            environment=resume.environment(self.trainer, self.compiles[0]),
            micro_batches=unfinished_micro_batches(self.trainer),
            run_id=None if logger is None else run_id(logger.folder),
            metrics_rows=None if logger is None else logger.rows,
            **({} if data is None else data.record()),
        )

    # ---- step ----------------------------------------------------------------------------------

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss, or the logits (B, T, V) without targets; idx and targets are (B, T)."""
        return self.model(idx, targets)

    def on_train_start(self) -> None:
        self._loss_sum, self.micro_batches = None, 0
        self.stop_requested = False
        self._trained = list(self.parameters())
        self._guard = optim.NonFiniteGuard()
        self._seed = torch.initial_seed()
        # A resumed optimizer has the checkpoint's state and the settings of this run. Groups of an
        # optimizer that is not ours have no options here.
        for optimizer in self.trainer.optimizers if self._group_options else ():
            for group, options in zip(optimizer.param_groups, self._group_options, strict=True):
                group.update(options)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # Dropout's seeds are derived, not saved: any step can be computed without those before it,
        # and each rank drops other activations.
        place = (self._seed, self.trainer.global_step, self.micro_batches, self.trainer.global_rank)
        seed_device(self.device, optim.mix(*place))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self(*batch)
        total = loss.detach()
        self._loss_sum = total if self._loss_sum is None else self._loss_sum + total
        self.micro_batches += 1
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        """Take a request to stop; steps.stop_due grants it between two steps."""
        trainer = self.trainer
        if trainer.should_stop:
            trainer.should_stop, self.stop_requested = False, True
        if self.stop_requested and token_data(trainer) is None:  # data without BetweenSteps
            trainer.should_stop = at_step_boundary(trainer)

    on_train_epoch_start = on_train_batch_end

    def on_validation_end(self) -> None:
        if is_fitting(self.trainer) and not self.trainer.sanity_checking:
            self.on_train_batch_end()

    # ---- evaluate ------------------------------------------------------------------------------

    def on_validation_model_zero_grad(self) -> None:
        super().on_validation_model_zero_grad()
        # on_validation_start comes later, when the loader's workers have been started
        call_hook(self.trainer, "before_validation")

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        tokens = (y != IGNORE_INDEX).sum()
        loss = self._evaluate(x, y)
        loss = torch.where(tokens > 0, loss, 0.0)  # a rank's last batch may be padding alone
        self._evaluated += y.numel() if dataloader_idx == 0 else 0
        (self.eval_loss, self.train_eval_loss)[dataloader_idx].update(loss, weight=tokens)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return each target's loss in nats, float32 (B, T); 0 at padded positions."""
        x, y = batch
        logits = self._evaluate(x).float()  # (B, T, V)
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")

    def _evaluate(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        forward = self.model if self.evaluates_compiled else self.model.forward
        return forward(idx, targets)

    def on_validation_epoch_start(self) -> None:
        self._evaluated = 0
        for mean in (self.eval_loss, self.train_eval_loss):
            mean.set_dtype(torch.float32)  # bf16-true casts: a sum of two digits

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log the mean loss over the evaluated tokens in nats, and the perplexity.

        If the tokens are not those of the whole split, their numbers are logged too.
        """
        split, data = "test" if self.trainer.testing else "val", token_data(self.trainer)
        loss = self.eval_loss.compute()  # over all ranks
        metrics = {f"{split}/loss": loss, f"{split}/perplexity": loss.exp()}
        self.eval_loss.reset()
        if self.train_eval_loss.update_called:
            metrics["train/eval_loss"] = self.train_eval_loss.compute()
            self.train_eval_loss.reset()
        if is_fitting(self.trainer):
            metrics["step"] = torch.tensor(float(self.trainer.global_step))
        self.log_dict(metrics, sync_dist=True)
        if data is not None:
            tokens = data.evaluated_part(split, self._evaluated * self.trainer.world_size)
            # float64, on the CPU: MPS has none; equal on all ranks
            exact = {k: torch.tensor(v, dtype=torch.float64) for k, v in tokens.items()}
            self.log_dict(exact, sync_dist=True, rank_zero_only=True)
        if not loss.isfinite():
            raise UserError(
                f"the {split} loss is {loss.item()} at step {self.trainer.global_step}: "
                "lower model.learning_rate, or set trainer.gradient_clip_val"
            )

    on_test_epoch_end = on_validation_epoch_end

    # ---- update --------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = optimizers.build(self.model, self.settings, self._fused())
        self._group_options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        return optimizer

    def _fused(self) -> bool:
        if self.settings.fused != "auto":
            return self.settings.fused
        # A fused step unscales gradients itself: with a GradScaler there is no moment to clip them
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return self.device.type in optim.FUSED_ADAMW_DEVICES and scaler is None

    def _learning_rate(self, peak: float) -> float:
        """Return the coming step's rate of a group: one schedule, scaled to the group's peak."""
        settings = self.settings
        assert settings.min_learning_rate is not None  # Settings fills in the default
        return optim.learning_rate(
            self.trainer.global_step,
            peak=peak,
            minimum=settings.min_learning_rate * (peak / settings.learning_rate),
            warmup_steps=settings.warmup_steps,
            decay_steps=self._decay_steps,
            schedule=settings.schedule,
        )

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # The rate depends on the step alone: nothing to save or restore, the command line wins.
        for group in optimizer.param_groups:
            if "peak_lr" in group:  # an optimizer that is not ours has its own rates
                group["lr"] = self._learning_rate(group["peak_lr"])
        if at_log_step(self.trainer, self.trainer.global_step + 1):
            assert self._loss_sum is not None
            self.log("train/loss", self._loss_sum / self.micro_batches, sync_dist=True)
            self.log("optim/lr", self._learning_rate(self.settings.learning_rate))
            self.log("step", self.trainer.global_step + 1.0)  # the loggers' x: the first is 1
        self._loss_sum, self.micro_batches = None, 0

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # Lightning's own raises for fused optimizers under bf16-mixed, where nothing is scaled
        # (PL#21435)
        assert self._trained, "on_train_start lists the parameters"
        if gradient_clip_algorithm == "value" and gradient_clip_val:
            torch.nn.utils.clip_grad_value_(self._trained, gradient_clip_val)
            gradient_clip_val = None
        norm = optim.clip_gradients(self._trained, gradient_clip_val)
        step = self.trainer.global_step + 1
        # a GradScaler skips the step and lowers the scale
        if getattr(self.trainer.precision_plugin, "scaler", None) is None:
            self._guard.watch(optimizer, norm, step)
        if at_log_step(self.trainer, step):
            self._guard.check()
            self.log("optim/grad_norm", norm)

    def on_train_end(self) -> None:
        self._guard.check()
