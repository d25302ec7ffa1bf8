"""LightningModule that trains a GPT: build, step, update, evaluate, save."""

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import torch
from jsonargparse.typing import register_type
from lightning import Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_lightning import parsing
from gpt_lightning.data.loader import tokens_and_targets
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.hardware.device import keep_freed_memory, limit_kept_memory, seed_device
from gpt_lightning.model.fast import compilation
from gpt_lightning.model.fast.compilation import compile_in_place, is_compiled, should_compile
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.network import Network, check_tokens, count_flops, missing_network
from gpt_lightning.runs.checkpoint import RunRecord, environment, run_identity
from gpt_lightning.runs.folders import run_id
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training import build, optim, optimizers, steps
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.evaluation import EvaluatedModule
from gpt_lightning.training.schedule import Schedule
from gpt_lightning.training.sharding import shard

if TYPE_CHECKING:
    from gpt_lightning.training.keywords import ModelArguments

# jsonargparse would import the class of a dict with a class_path, while it parses
register_type(Network, serializer=Network.record, deserializer=Network.of)
MEMORY_READ_S = 0.1  # shortest time between two readings of the process's memory


class GPTModule(EvaluatedModule):
    """LightningModule that trains a GPT-2.

    The model is made in `configure_model`, after the data are known, so that it may take its
    vocabulary from the tokenizer. It is made on the CPU, as the first to draw from the run's seed,
    so that every device starts from the same weights.

    Args:
        config: Shape of the model.
        init_from: Weights to start from instead of random ones: gpt2, gpt2-medium, gpt2-large or
            gpt2-xl (downloaded), a folder with model.safetensors, or a checkpoint. model.config
            must describe the same shape.
        network: Network of one's own in place of GPT: an nn.Module's class, its import path such as
            my_package.MyGPT, or {class_path, init_args}. It is built as MyGPT(config, **init_args).
        settings: Training arguments, the fields of gpt_lightning.runs.settings.Settings.

    Raises:
        UserError: The settings contradict each other or the data.

    Attributes:
        model: The GPT, or the network of one's own.
        attention_kernel: Kernel that runs: avx512, naive, flash, cudnn, efficient, math.
        notes: Lines of the banner about substitutes for what the settings name.
        micro_batches: Micro-batches done in the current step.
        last_loss: Mean loss of the last step on this rank; None before the first.
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
        self.micro_batches = 0
        self.stop_requested = False
        self._loss: Tensor | None = None  # the current micro-batch's
        self._loss_sum: Any = 0.0  # sum over the current step's micro-batches
        self.seed: int | None = None
        # a subclass may leave out setup or on_train_start
        self._products_before = torch.get_float32_matmul_precision()
        self._generator_state = torch.get_rng_state()
        self._guard = optim.NonFiniteGuard()
        self._memory_read_s = 0.0  # last time

    # ---- build ---------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        self._products_before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.settings.matmul_precision)

    def teardown(self, stage: str) -> None:
        torch.set_float32_matmul_precision(self._products_before)

    def configure_model(self) -> None:
        trainer = self.attached_trainer
        data = token_data(trainer)
        self.config = build.fit_to_data(self.config, data)
        fitting = trainer is not None and steps.is_fitting(trainer)
        if trainer and fitting:
            if not is_overridden("configure_optimizers", self, GPTModule):
                build.check_decay(self.settings, trainer)
            build.check_device(self.config, trainer, self._device_type)
            if self.compiles[0] and trainer.accumulate_grad_batches > 1:
                compilation.check_cuda_graphs()
            if not (self.automatic_optimization or is_overridden("training_step", self, GPTModule)):
                raise UserError("automatic_optimization is False: write a training_step, too")
        if not hasattr(self, "model"):
            tokens = data.tokenizer.spec() if data is not None and self.init_from else None
            self.model = build.build_model(
                self.config, self.settings, self.init_from, self.network, tokens
            )
        if not trainer:
            return  # load_from_checkpoint
        if fitting and self.network:
            build.check_network(self.network, self.model, self.config, self.settings, trainer)
        if trainer.precision == "64-true":
            self.model.double()  # callbacks may call this before Lightning restores weights
        sharded = steps.is_sharded(trainer)
        if self.compiles[0] and not is_compiled(self.model):
            scope = "block" if sharded else self.settings.compile_scope
            compile_in_place(self.model, self._device_type, scope, self.settings.pad_head)
        if sharded:
            shard(self.model, cast(Any, trainer.strategy).device_mesh["data_parallel"])
        dropout = self.config.dropout if fitting else 0.0
        self.attention_kernel, self.notes = build.find_kernel(
            self.model, trainer, self.context, dropout
        )
        if self.network:
            self.notes["FLOPs"] = count_flops(self.model, self.context)[1]
        if fitting and self._device_type == "cpu":
            keep_freed_memory()

    @property
    def attached_trainer(self) -> Trainer | None:
        """Trainer of this module; None after load_from_checkpoint."""
        try:
            return self.trainer
        except RuntimeError:
            return None

    @property
    def _device_type(self) -> str:
        return self.trainer.strategy.root_device.type

    @property
    def compiles(self) -> tuple[bool, str]:
        """True if the model is compiled on this device, and the reason."""
        if self.settings.compile != "auto":
            return self.settings.compile, "as set"
        return should_compile(self._device_type, self.trainer.precision, self.config.dropout)

    @property
    def evaluates_compiled(self) -> bool:
        """True if evaluations are compiled too: on a CPU that takes longer than it saves."""
        return self.compiles[0] and self._device_type != "cpu"

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a training token, forward and backward, at the run's context."""
        if self.network:
            return count_flops(self.model, self.context)[0]
        return build.flops_per_token(self.model, self.context)

    @property
    def context(self) -> int:
        """Tokens of a sequence of the data, else those of the model."""
        data = token_data(self.attached_trainer)
        return self.config.block_size if data is None else data.block_size

    # ---- step ----------------------------------------------------------------------------------

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss, or the logits (B, T, V) without targets; idx and targets are (B, T)."""
        try:
            return self.model(idx, targets)
        except IndexError:  # the embedding or the loss raises it
            check_tokens("idx", idx, self.config)
            check_tokens("targets", idx if targets is None else targets.clamp(min=0), self.config)
            raise

    def on_train_start(self) -> None:
        self._loss_sum, self.micro_batches, self.last_loss = 0.0, 0, None
        self.stop_requested = False
        if steps.is_sharded(self.trainer):  # the sanity check leaves the embeddings gathered
            cast(Any, self.model).reshard()
        several = isinstance(self.trainer.train_dataloader, list | tuple)
        if several and not is_overridden("training_step", self, GPTModule):
            raise UserError("there are several training loaders: give one, or write training_step")
        self._guard = optim.NonFiniteGuard()
        self.run_seed()
        self._generator_state = torch.get_rng_state()
        # A resumed optimizer has the checkpoint's state, and the settings of this run.
        if self.schedule:
            self.schedule.begin(self._build_optimizer().param_groups, self.global_step)
            if steps.find_callback(self.trainer, BaseFinetuning):
                for group in self.schedule.optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.requires_grad_(True)  # a resume forgets what it has unfrozen

    def run_seed(self) -> int:
        """Return the seed of the run: that of seed_everything, else one that is drawn once."""
        if "PL_GLOBAL_SEED" in os.environ:  # TokenDataModule reads it too
            self.seed = int(os.environ["PL_GLOBAL_SEED"])
        if self.seed is None:
            # a copy: the run's own draws stay as they are
            generator = torch.default_generator.clone_state()
            drawn = int(torch.randint(2**32, (), generator=generator))
            self.seed = int(self.trainer.strategy.broadcast(drawn))
        return self.seed

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Dropout's seeds are derived, not saved: any step can be computed without those before it,
        # and each rank drops other activations.
        trainer = self.trainer
        place = (self.run_seed(), trainer.global_step, self.micro_batches, trainer.global_rank)
        seed_device(self.device, optim.mix(*place))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(*tokens_and_targets(batch))
        self._loss = loss.detach()
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        if not loss.requires_grad or loss.numel() != 1:
            raise UserError(
                f"{type(self).__name__}.training_step returns a loss of shape {tuple(loss.shape)} "
                f"and requires_grad {loss.requires_grad}; expected a scalar of trained parameters"
            )
        # a step of a subclass may return a loss of its own, or None, which skips the micro-batch
        if self._loss is None:
            scaler: Any = getattr(self.trainer.precision_plugin, "scaler", None)
            scale = scaler.get_scale() if scaler else 1.0
            self._loss = loss.detach() * (self.trainer.accumulate_grad_batches / scale)
        # a new tensor: the next run of a CUDA graph overwrites its output
        self._loss_sum = self._loss_sum + self._loss
        self._loss, self.micro_batches = None, self.micro_batches + 1

    def _keep_request(self, *args: Any) -> None:
        """Store a request to stop, which steps.stop_due obeys between two steps."""
        trainer = self.trainer
        now = time.monotonic()
        if self.device.type == "cpu" and now - self._memory_read_s >= MEMORY_READ_S:
            self._memory_read_s = now
            limit_kept_memory()
        if trainer.should_stop:
            trainer.should_stop, self.stop_requested = False, True
        if self.stop_requested and not isinstance(trainer.train_dataloader, steps.BetweenSteps):
            trainer.should_stop = steps.at_step_boundary(trainer)

    on_train_batch_end = on_train_epoch_start = _keep_request  # type: ignore[assignment]

    def on_validation_end(self) -> None:
        if steps.is_fitting(self.trainer) and not self.trainer.sanity_checking:
            self._keep_request()  # a subclass may have hooks of its own

    # ---- update --------------------------------------------------------------------------------

    @property
    def decay_steps(self) -> int:
        """Optimizer step at which the decay of the learning rate ends; 0 if nothing decays."""
        settings = self.settings
        own = is_overridden("configure_optimizers", self, GPTModule)
        if own or settings.schedule == "constant" or not steps.is_fitting(self.trainer):
            return 0
        if settings.decay_steps is None:
            return build.last_step(self.trainer)
        return settings.decay_steps

    @property
    def learning_rate(self) -> float:
        """Peak of the learning rate, which Tuner.lr_find sets."""
        return self.settings.learning_rate

    @learning_rate.setter
    def learning_rate(self, peak: float) -> None:
        old: Any = self.settings
        minimum = old.min_learning_rate * (peak / old.learning_rate)  # the same share of the peak
        self.settings = dataclasses.replace(old, learning_rate=peak, min_learning_rate=minimum)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self._build_optimizer()
        schedule = Schedule(optimizer, self.settings, self.decay_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @property
    def schedule(self) -> Schedule | None:
        """Schedule of the learning rates; None with another author's optimizer or scheduler."""
        schedule = self.lr_schedulers()
        if isinstance(schedule, Schedule) and self.trainer.optimizers == [schedule.optimizer]:
            return schedule
        return None

    def _build_optimizer(self) -> Optimizer:
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            way_out = ": shorten model.freeze" if self.settings.freeze else ""
            raise UserError(f"{type(self.model).__name__} has no parameter to train{way_out}")
        file = optimizers.load(self.settings)
        fused = optim.is_fused(self.settings, self.device, self.trainer.precision_plugin)
        return file.build(self.model, self.settings, fused)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if not self.micro_batches:  # all steps have returned None, or a second optimizer follows
            return
        self.last_loss = (self._loss_sum / self.micro_batches).reshape(())
        step, groups = self.trainer.global_step, optimizer.param_groups
        if steps.at_log_step(self.trainer, step + 1) and groups:  # none without an optimizer
            lr = groups[0]["lr"]
            self.log("train/loss", self.last_loss, sync_dist=True)
            if self.schedule:
                if self.settings.optimizer == "muon":
                    self.log("optim/lr_muon", lr)
                lr = self.settings.learning_rate * self.schedule.share
            self.log("optim/lr", lr)
        self._loss_sum, self.micro_batches = 0.0, 0

    def on_train_epoch_end(self) -> None:
        self._log_last_loss()
        # a request of one rank must not end the run there; all ranks know of one that is due
        if self.trainer.world_size > 1 and not steps.stop_due(self.trainer):
            self._keep_request()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # Lightning's own raises for fused optimizers under bf16-mixed, where nothing is scaled
        # (PL#21435)
        trainer, by_value = self.trainer, gradient_clip_algorithm == "value"
        ours = getattr(optimizer, "optimizer", optimizer)  # Lightning may wrap it
        limit = None if by_value else gradient_clip_val
        norm = optim.clip_gradients(self.parameters(), limit, ours)
        step = trainer.global_step + 1
        norm = norm.to(self.device)  # the CPU's without gradients
        loss = norm if self.last_loss is None else self.last_loss.to(norm)
        # a GradScaler skips the step and lowers the scale
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            self._guard.watch(ours, loss, norm, step)
        if by_value and gradient_clip_val is not None and gradient_clip_val > 0:
            nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)
        if steps.at_log_step(trainer, step):
            self._guard.check()
            self.log("optim/grad_norm", norm)

    def on_train_end(self) -> None:
        torch.set_rng_state(self._generator_state)
        self._guard.check()

    # ---- evaluate ------------------------------------------------------------------------------

    def on_validation_model_zero_grad(self) -> None:
        super().on_validation_model_zero_grad()
        # Lightning calls on_validation_start later, when the loader's workers have been started
        for callback in steps.step_callbacks(self.trainer):
            callback.before_validation(self.trainer)

    def _evaluate(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.evaluates_compiled or not self.compiles[0]:
            return self(idx, targets)
        with torch.compiler.set_stance("force_eager"):
            return self(idx, targets)

    # ---- checkpoints ---------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(cls, *args: Any, network: Any = None, **kwargs: Any) -> Self:
        """Return the module of a checkpoint; only a network that is given is imported."""
        return super().load_from_checkpoint(*args, network=network, **kwargs)

    def hyperparameters(self) -> Fields:
        """Return the arguments as plain values: `GPTModule(**hyperparameters())` is this module.

        Without `init_from`, whose weights are in the checkpoint.
        """
        own = {"network": self.network.record()} if self.network else {}
        return RunRecord(config=self.config, settings=self.settings).hyperparameters() | own

    def on_save_checkpoint(self, checkpoint: Fields) -> None:
        self._guard.check()  # no checkpoint of steps that were skipped
        self.record().write(checkpoint)

    def on_load_checkpoint(self, checkpoint: Fields) -> None:
        if self.attached_trainer is None:  # load_from_checkpoint: no run to compare with
            theirs = checkpoint.get("gpt_lightning", {}).get("network")
            if theirs and not self.network:
                raise missing_network("the checkpoint", theirs)
            return
        from gpt_lightning.training import continuation  # not for a new run

        continuation.continue_from(checkpoint, self)

    def record(self) -> RunRecord:
        """Return the description of this run that its checkpoints hold."""
        data, logger = token_data(self.trainer), steps.run_logger(self.trainer)
        return RunRecord(
            config=self.config,
            settings=self.settings,
            network=self.network.record() if self.network else None,
            run_identity=run_identity(self.trainer, self.run_seed(), self.decay_steps),
            environment=environment(self.trainer, self.compiles[0], self.attention_kernel),
            micro_batches=steps.unfinished_micro_batches(self.trainer),
            run_id=run_id(logger.folder) if logger else None,
            metrics_rows=logger.rows if logger else None,
            script=parsing.script,
            **({} if data is None else data.record()),
        )
