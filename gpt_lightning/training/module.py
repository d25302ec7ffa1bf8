"""GPTModule: how a GPT is trained, in Lightning's words."""

import dataclasses
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from gpt_lightning import __version__
from gpt_lightning.data.loader import IGNORE_INDEX, Batch
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import seed_device
from gpt_lightning.hardware.memory import keep_freed_memory
from gpt_lightning.model import flops
from gpt_lightning.model.compilation import compile_in_place, should_compile
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.runs.checkpoint import differences, initial_weights
from gpt_lightning.training import optim
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.gradient_guard import NonFiniteGuard
from gpt_lightning.training.trainer_state import at_log_step, is_fitting, token_data


class GPTModule(L.LightningModule):
    """Trains a GPT-2.

    The model is created in `configure_model`, after the data are known, so that it may take its
    vocabulary from the tokenizer; and on the CPU, where it is the first to draw from the run's
    seed, so that every device starts from the same weights.

    Args:
        config: The model.
        init_from: Weights to start from instead of random ones: gpt2, gpt2-medium, gpt2-large or
            gpt2-xl (fetched), a folder with model.safetensors, or a checkpoint; config must have
            its shape.
        optimizer: adamw, or muon: Muon for the blocks' matrices and AdamW for the rest.
        learning_rate: Peak of AdamW's learning rate.
        min_learning_rate: Where the cosine ends; null: a tenth of the peak.
        schedule: cosine: warm-up, then half a cosine; constant: warm-up, then the peak.
        warmup_steps: Optimizer steps of linear warm-up.
        decay_steps: Optimizer step at which the cosine ends; null: trainer.max_steps.
        weight_decay: Decoupled weight decay.
        decay: matrices: only tensors of two or more dimensions decay. all: all do, PyTorch's
            default.
        betas: AdamW's averaging coefficients.
        muon_learning_rate: Peak of Muon's learning rate; it follows the same schedule.
        muon_momentum: Muon's momentum.
        fused: AdamW in one kernel; auto: where the device has it.
        compile: torch.compile the model; auto: on CUDA, and on a CPU in bfloat16; see
            compilation.py.
        matmul_precision: Of float32 products: highest: float32; high: TF32 on NVIDIA; medium: as
            high, and bfloat16 on CPUs that have it.

    Raises:
        UserError: settings that contradict each other or the data.
    """

    def __init__(
        self,
        config: GPTConfig = GPTConfig(),  # noqa: B008 - frozen
        init_from: str | None = None,
        optimizer: Literal["adamw", "muon"] = "adamw",
        learning_rate: float = 6.0e-4,
        min_learning_rate: float | None = None,
        schedule: Literal["cosine", "constant"] = "cosine",
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        weight_decay: float = 0.1,
        decay: Literal["matrices", "all"] = "matrices",
        betas: tuple[float, float] = (0.9, 0.95),
        muon_learning_rate: float = 0.02,
        muon_momentum: float = 0.95,
        fused: bool | Literal["auto"] = "auto",
        compile: bool | Literal["auto"] = "auto",  # noqa: A002 - the field's word
        matmul_precision: Literal["highest", "high", "medium"] = "highest",
    ) -> None:
        super().__init__()
        # in a checkpoint the configuration is plain numbers and words, no class to import
        self.config = GPTConfig(**config) if isinstance(config, dict) else config
        self.init_from = init_from
        self.optimizer_name = optimizer
        self.learning_rate = learning_rate
        self.min_learning_rate = (
            learning_rate / 10 if min_learning_rate is None else min_learning_rate
        )
        self.schedule = schedule
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.weight_decay = weight_decay
        self.decay = decay
        self.betas = (betas[0], betas[1])
        self.muon_learning_rate = muon_learning_rate
        self.muon_momentum = muon_momentum
        self.fused_setting = fused
        self.compile_setting = compile
        self._check_bounds()
        self.matmul_precision = matmul_precision
        self.model: GPT | None = None
        # of the held-out split, and of the training split where the data evaluate that too
        self.eval_losses = torch.nn.ModuleList([MeanMetric(), MeanMetric()])
        self._seed = 0  # of the run
        self._loss_sum: torch.Tensor | None = None  # over the micro-batches of the current step
        self.micro_batches = 0  # of the step under way that are done
        self._trained: list[torch.nn.Parameter] = []  # walking the modules takes 0.05 to 0.2 ms
        self._guard = NonFiniteGuard()

    def _check_bounds(self) -> None:
        bounds = {
            "learning_rate": (self.learning_rate > 0, "above 0"),
            "muon_learning_rate": (self.muon_learning_rate > 0, "above 0"),
            "min_learning_rate": (self.min_learning_rate >= 0, "at least 0"),
            "warmup_steps": (self.warmup_steps >= 0, "at least 0"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "at least 0 and below 1"),
            "muon_momentum": (0 <= self.muon_momentum < 1, "at least 0 and below 1"),
        }
        for name, (holds, bound) in bounds.items():
            if not holds:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be {bound}")
        if self.optimizer_name == "muon" and self.decay == "all":
            raise UserError("model.decay is all, which muon does not do: set it to matrices")

    # ---- the model -----------------------------------------------------------------------------

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.set_float32_matmul_precision(self.matmul_precision)
        if self._trainer is not None:
            self.config = self._fit_to_data()
            if is_fitting(self.trainer) and self.schedule == "cosine":
                self._check_cosine()
        with torch.device("cpu"):  # Lightning's context is the GPU, whose random numbers are others
            self.model = GPT(self.config)
        if self.init_from is not None:
            self.model.load_state_dict(initial_weights(self.init_from, self.config))
        if self.compiles[0]:
            compile_in_place(self.model, self._device_type)
        if self._device_type == "cpu" and self._trainer is not None and is_fitting(self.trainer):
            keep_freed_memory()

    def _fit_to_data(self) -> GPTConfig:
        """The configuration with the tokenizer's vocabulary, or refused if too small for it."""
        config, data = self.config, token_data(self.trainer)
        if data is None:
            return config
        if config.vocab_size is None:
            config = dataclasses.replace(config, vocab_size=data.vocab_size)
        assert config.vocab_size is not None
        if config.vocab_size < data.vocab_size:
            raise UserError(
                f"model.config.vocab_size is {config.vocab_size}, but {data.address} has "
                f"{data.vocab_size} tokens: set it to {data.vocab_size}, or to null, the data's own"
            )
        return config

    @property
    def compiles(self) -> tuple[bool, str]:
        """Whether the model is compiled on this device, and why."""
        if self.compile_setting != "auto":
            return bool(self.compile_setting), "as set"
        precision = "32-true" if self._trainer is None else str(self.trainer.precision)
        return should_compile(self._device_type, precision)

    @property
    def _device_type(self) -> str:
        return "cpu" if self._trainer is None else str(self.trainer.strategy.root_device.type)

    @property
    def evaluates_compiled(self) -> bool:
        """Whether evaluations are compiled too: on a CPU that takes longer than it saves."""
        return self.compiles[0] and self._device_type != "cpu"

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a training token, forward and backward, at the run's context; see flops.py."""
        assert self.model is not None
        data = None if self._trainer is None else token_data(self.trainer)
        return flops.flops_per_token(
            n_params=self.model.num_params(embeddings=False),
            n_layer=self.config.n_layer,
            n_embd=self.config.n_embd,
            block_size=data.block_size if data is not None else self.config.block_size,
        )

    def hyperparameters(self) -> dict[str, Any]:
        """The arguments as plain values: `GPTModule(**hyperparameters())` is this module again.

        All but `init_from`: a checkpoint has its weights.
        """
        return {
            "config": dataclasses.asdict(self.config),
            "optimizer": self.optimizer_name,
            "learning_rate": self.learning_rate,
            "min_learning_rate": self.min_learning_rate,
            "schedule": self.schedule,
            "warmup_steps": self.warmup_steps,
            "decay_steps": self.decay_steps,
            "weight_decay": self.weight_decay,
            "decay": self.decay,
            "betas": list(self.betas),
            "muon_learning_rate": self.muon_learning_rate,
            "muon_momentum": self.muon_momentum,
            "fused": self.fused_setting,
            "compile": self.compile_setting,
            "matmul_precision": self.matmul_precision,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._guard.check()  # no checkpoint of steps that were skipped
        checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = self.hyperparameters()
        data = token_data(self.trainer)
        if data is not None:  # enough to sample from the file alone
            checkpoint["gpt_lightning"] = {
                "version": __version__,
                "tokenizer": data.tokenizer.spec(),
                "position": data.position(),
                "machine": self.circumstances(),
                "run": self.run_settings(),
            }

    def run_settings(self) -> dict[str, Any]:
        """Settings outside the module that decide its numbers."""
        return {
            "seed_everything": self._seed,
            "gradient_clip_val": self.trainer.gradient_clip_val,
            "gradient_clip_algorithm": self.trainer.gradient_clip_algorithm,
            "decay_steps": self._decay_steps,
        }

    def circumstances(self) -> dict[str, Any]:
        """What a bit-exact continuation has in common beside the configuration."""
        return {
            "torch": str(torch.__version__),
            "device": self.trainer.strategy.root_device.type,
            "threads": torch.get_num_threads(),
            "ranks": self.trainer.world_size,
            "precision": str(self.trainer.precision),
            "compile": self.compiles[0],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        data = None if self._trainer is None else token_data(self.trainer)
        theirs = checkpoint.get("gpt_lightning", {}).get("tokenizer")
        if data is not None and theirs is not None and theirs != data.tokenizer.spec():
            raise UserError(
                f"the checkpoint was trained on other tokens than those of {data.address} "
                f"({theirs['name']} and {data.tokenizer.name}, or other characters): "
                "use the data that it was trained on"
            )
        if self._trainer is not None and is_fitting(self.trainer):
            self._compare_run(checkpoint.get("gpt_lightning", {}), data)

    def _compare_run(self, facts: dict[str, Any], data: TokenDataModule | None) -> None:
        """Says what makes the continuation another run, and refuses another seed."""
        self._seed = torch.initial_seed()
        ours = self.run_settings()
        theirs = facts.get("run", ours)
        allowed = data is not None and data.allow_changes
        if theirs.get("seed_everything") != ours["seed_everything"] and not allowed:
            raise UserError(
                f"the checkpoint has seed_everything {theirs.get('seed_everything')}, this run has "
                f"{ours['seed_everything']}: set it to that, or --data.allow_changes true"
            )
        inexact = differences(facts.get("machine", {}), self.circumstances())
        lines = differences(theirs, ours)
        masks = ", with other dropout masks" if self.config.dropout > 0 else ""
        lines += [f"{line}: equal to rounding errors{masks}, not bit for bit" for line in inexact]
        if self.trainer.is_global_zero:
            print(*(f"changed     {line}" for line in lines), sep="\n", end="\n" if lines else "")

    # ---- steps ---------------------------------------------------------------------------------

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        assert self.model is not None
        return self.model(idx, targets)  # type: ignore[no-any-return]

    def on_train_start(self) -> None:
        self._loss_sum, self.micro_batches = None, 0
        self._trained = list(self.parameters())
        self._guard = NonFiniteGuard()
        self._seed = torch.initial_seed()
        self._settings_win()

    def _settings_win(self) -> None:
        """Gives a resumed optimizer the settings of this run: its state is the checkpoint's."""
        fresh = self._make_optimizer()
        for optimizer in self.trainer.optimizers:
            for group, ours in zip(optimizer.param_groups, fresh.param_groups, strict=True):
                group.update({key: ours[key] for key in ours if key != "params"})

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # Dropout's draws are derived, not saved: any step can be had without those before it, and
        # each rank drops other activations.
        place = (self._seed, self.trainer.global_step, self.micro_batches, self.trainer.global_rank)
        seed_device(self.device, optim.mix(*place))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self(*batch)
        total = loss.detach()
        self._loss_sum = total if self._loss_sum is None else self._loss_sum + total
        self.micro_batches += 1
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        tokens = (y != IGNORE_INDEX).sum()
        loss = self._evaluate(x, y)
        loss = torch.where(tokens > 0, loss, 0.0)  # a rank's last batch may be padding alone
        self._mean(dataloader_idx).update(loss, weight=tokens)

    def _evaluate(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        assert self.model is not None
        forward = self.model if self.evaluates_compiled else self.model.forward
        return forward(idx, targets)

    def _mean(self, dataloader_idx: int) -> MeanMetric:
        metric = self.eval_losses[dataloader_idx]
        assert isinstance(metric, MeanMetric)
        return metric

    def on_validation_epoch_start(self) -> None:
        for index in range(len(self.eval_losses)):
            self._mean(index).set_dtype(torch.float32)  # bf16-true casts: a sum of two digits

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, split: str) -> None:
        """Mean loss over the tokens that were evaluated, in nats, and its exponential."""
        loss = self._mean(0).compute()  # over all ranks
        metrics = {f"{split}/loss": loss, f"{split}/perplexity": loss.exp()}
        if self._mean(1).update_called:
            metrics["train/eval_loss"] = self._mean(1).compute()
        for index in range(len(self.eval_losses)):
            self._mean(index).reset()
        if is_fitting(self.trainer):
            metrics["step"] = torch.tensor(float(self.trainer.global_step))
        self.log_dict(metrics, sync_dist=True)
        if not loss.isfinite():
            raise UserError(
                f"the {split} loss is {loss.item()} at step {self.trainer.global_step}: "
                "lower model.learning_rate, or set trainer.gradient_clip_val"
            )

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Negative log-likelihood in nats of each target, float32 (B, T); 0 where there is none."""
        x, y = batch
        logits = self._evaluate(x).float()  # (B, T, V)
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")

    # ---- the update ----------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return self._make_optimizer()

    def _make_optimizer(self) -> Optimizer:
        assert self.model is not None
        fused = self._fused()
        if self.optimizer_name == "adamw":
            groups = optim.decay_groups(
                self.model.named_parameters(), self.weight_decay, self.decay
            )
            return optim.make_adamw(groups, self.learning_rate, self.betas, fused)
        return optim.MuonAdamW(
            self.model,
            lr=self.learning_rate,
            muon_lr=self.muon_learning_rate,
            momentum=self.muon_momentum,
            weight_decay=self.weight_decay,
            betas=self.betas,
            fused=fused,
        )

    def _check_cosine(self) -> None:
        if self.decay_steps is None and self.trainer.max_steps < 0:
            raise UserError(
                "the cosine has no end: set trainer.max_steps or model.decay_steps, "
                "or model.schedule to constant"
            )
        if self._decay_steps <= self.warmup_steps:
            raise UserError(
                f"model.warmup_steps {self.warmup_steps} must be below model.decay_steps "
                f"{self._decay_steps} (trainer.max_steps where it is not set)"
            )

    def _fused(self) -> bool:
        if self.fused_setting != "auto":
            return bool(self.fused_setting)
        # A fused step unscales gradients itself, so with a GradScaler there would be no moment to
        # clip them at
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return self.device.type in optim.FUSED_ADAMW_DEVICES and scaler is None

    @property
    def _decay_steps(self) -> int:
        return self.trainer.max_steps if self.decay_steps is None else self.decay_steps

    def _learning_rate(self, peak: float) -> float:
        """The rate of the coming step for a group whose peak is `peak`: one schedule, scaled."""
        return optim.learning_rate(
            self.trainer.global_step,
            peak=peak,
            minimum=self.min_learning_rate * (peak / self.learning_rate),
            warmup_steps=self.warmup_steps,
            decay_steps=self._decay_steps,
            schedule=self.schedule,
        )

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # The rate depends on the step alone: nothing to save, nothing to restore, and the command
        # line wins.
        lr = self._learning_rate(self.learning_rate)
        muon_lr = self._learning_rate(self.muon_learning_rate)
        for group in optimizer.param_groups:
            group["lr"] = muon_lr if "momentum" in group else lr
        if at_log_step(self.trainer, self.trainer.global_step + 1):
            assert self._loss_sum is not None
            self.log("train/loss", self._loss_sum / self.micro_batches, sync_dist=True)
            self.log("optim/lr", lr)
            self.log("step", self.trainer.global_step + 1.0)  # the loggers' x: the first is 1
        self._loss_sum, self.micro_batches = None, 0

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # Lightning's own refuses fused optimizers under bf16-mixed, where nothing is scaled
        # (PL#21435)
        assert self._trained, "on_train_start lists the parameters"
        if gradient_clip_algorithm == "value" and gradient_clip_val:
            torch.nn.utils.clip_grad_value_(self._trained, gradient_clip_val)
            gradient_clip_val = None
        norm = optim.clip_gradients(self._trained, gradient_clip_val)
        step = self.trainer.global_step + 1
        # with a GradScaler such a step is skipped, and the scale lowered
        if getattr(self.trainer.precision_plugin, "scaler", None) is None:
            self._guard.watch(optimizer, norm, step)
        if at_log_step(self.trainer, step):
            self._guard.check()
            self.log("optim/grad_norm", norm)

    def on_train_end(self) -> None:
        self._guard.check()
