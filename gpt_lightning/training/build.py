"""BuildModule: make a GPT for the data of a run, and compile it for the run's device."""

import dataclasses
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import keep_freed_memory, memory_gib
from gpt_lightning.model import flops
from gpt_lightning.model.attention import NoKernelError
from gpt_lightning.model.compilation import (
    attention_kernel,
    check_cuda_graphs,
    compile_in_place,
    is_compiled,
    should_compile,
)
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.variants import make_model
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.steps import is_fitting, is_sharded

WHOLE = (DDPStrategy, SingleDeviceStrategy)  # each rank has the whole model


class BuildModule(L.LightningModule):
    """Base class of GPTModule that makes the model.

    The model is created in `configure_model`, after the data are known, so that it may take its
    vocabulary from the tokenizer. It is created on the CPU, as the first to draw from the run's
    seed, so that every device starts from the same weights.
    """

    config: GPTConfig
    init_from: str | None
    settings: Settings
    model: GPT
    attention_kernel: str  # that runs: avx512, naive, chunked, flash, cudnn, efficient, or math

    def configure_model(self) -> None:
        fitting = self._trainer is not None and is_fitting(self.trainer)
        if self._trainer is not None:
            self.config = self._fit_to_data()
        if fitting and self.settings.schedule != "constant":
            self._check_decay()
        if fitting:
            self._check_device()
        if not hasattr(self, "model"):
            check_memory(self.config)
            torch.set_float32_matmul_precision(self.settings.matmul_precision)
            # on the CPU: in Lightning's device context the GPU would draw the weights
            with torch.device("cpu"):
                self.model = make_model(self.config)
            if self.init_from is not None:
                from gpt_lightning.runs.sources import initial_weights  # not for random weights

                self.model.load_state_dict(initial_weights(self.init_from, self.config))
            if any(
                (self.settings.lora_rank, self.settings.freeze, self.settings.learning_rate_factors)
            ):
                from gpt_lightning.training.finetuning import prepare  # most runs do not need it

                prepare(self.model, self.settings)
        if self._trainer is None:
            return  # load_from_checkpoint
        if self.trainer.precision == "64-true":
            self.model.double()  # for callbacks that call this before Lightning restores weights
        sharded = is_sharded(self.trainer)
        if self.compiles[0] and not is_compiled(self.model):
            scope = "block" if sharded else self.settings.compile_scope
            compile_in_place(self.model, self._device_type, scope, self.settings.pad_head)
        if sharded:
            strategy: Any = self.trainer.strategy
            strategy.shard(self.model, self.trainer.precision == "bf16-mixed")
        self.attention_kernel = self._find_kernel(self.config.dropout if fitting else 0.0)
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

    def _check_decay(self) -> None:
        decay_steps = self.settings.decay_steps
        if (self.trainer.max_steps if decay_steps is None else decay_steps) < 0:
            raise UserError(
                f"the {self.settings.schedule} decay has no end: set trainer.max_steps or "
                "model.decay_steps, or model.schedule to constant"
            )
        # by default a short run ends in its warm-up
        if decay_steps is not None and decay_steps <= self.settings.warmup_steps:
            raise UserError(
                f"model.warmup_steps {self.settings.warmup_steps} must be below "
                f"model.decay_steps {decay_steps}: lower model.warmup_steps"
            )
        end = self.trainer.max_steps if decay_steps is None else decay_steps
        if self.settings.decay_start >= max(1, end):
            raise UserError(
                f"model.decay_start {self.settings.decay_start} must be below the decay's end at "
                f"step {end}: lower it, or set model.schedule to constant"
            )

    def _check_device(self) -> None:
        """Raise an error if this strategy, device or precision cannot train the model."""
        strategy = self.trainer.strategy
        if not (is_sharded(self.trainer) or isinstance(strategy, WHOLE)):
            raise UserError(f"{type(strategy).__name__} cannot train a GPTModule: use ddp or fsdp2")
        again = self.config.checkpointing or self.config.attention == "chunked"  # forward twice
        if self._device_type == "mps" and again and (p := self.config.dropout):
            raise UserError(  # PyTorch restores no seed there (pytorch#127676)
                f"model.config.dropout is {p:g}, and mps would recompute another: set it to 0, or "
                "model.config.checkpointing to false and model.config.attention to auto"
            )
        if self.config.residual != "float32" and self.trainer.precision != "bf16-mixed":
            raise UserError(
                f"model.config.residual bfloat16 has no meaning in {self.trainer.precision}: set "
                "trainer.precision to bf16-mixed, or model.config.residual to float32"
            )
        if self.compiles[0] and self.trainer.accumulate_grad_batches > 1:
            check_cuda_graphs()

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

    def _find_kernel(self, dropout_p: float) -> str:
        """Return the attention kernel of this run; raise if there is none."""
        config, data, trainer = self.config, token_data(self.trainer), self.trainer
        T = config.block_size if data is None else data.block_size
        try:
            with trainer.precision_plugin.forward_context():
                return attention_kernel(self.model, trainer.strategy.root_device, T, dropout_p)
        except NoKernelError as error:
            raise UserError(
                f"model.config.attention {config.attention} on {self._device_type} in "
                f"{trainer.precision} with dropout {dropout_p:g} and "
                f"{config.n_embd // config.n_head} channels per head: {error} Set it to auto"
            ) from error

    @property
    def evaluates_compiled(self) -> bool:
        """True if evaluations are compiled too: on a CPU that takes longer than it saves."""
        return self.compiles[0] and self._device_type != "cpu"

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a training token, forward and backward, at the run's context; see flops.py."""
        data = None if self._trainer is None else token_data(self.trainer)
        block_size = data.block_size if data is not None else self.config.block_size
        C = self.config.n_embd
        n_params = self.model.num_params(embeddings=False)
        total = flops.flops_per_token(n_params, self.config.n_layer, C, block_size)
        if all(parameter.requires_grad for parameter in self.model.parameters()):
            return total
        # a frozen weight's gradient is one of the three products; no gradient passes the blocks
        # before the first trained parameter
        modules = self.model.transformer.modules()
        embedding = [m.weight for m in modules if isinstance(m, nn.Embedding)]  # wte is the first
        looked_up = embedding[self.config.tie_weights :]
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        total -= 2 * sum(p.numel() for p in frozen if not any(p is table for table in looked_up))
        if not any(table.requires_grad for table in embedding):
            for block in self.model.transformer.h:
                if any(p.requires_grad for p in block.parameters()):
                    break
                total -= 2 * sum(p.numel() for p in block.parameters()) + 8 * C * block_size
            else:
                if not any(p.requires_grad for p in self.model.transformer.ln_f.parameters()):
                    total -= 2 * self.model.lm_head.weight.numel()  # the input's gradient
        return total


def check_memory(config: GPTConfig) -> None:
    """Check that the weights alone fit into this machine's memory, before they are made.

    Raises:
        UserError: names the number of parameters and the memory that they take.
    """
    n, here_gib = config.n_matrix_params, memory_gib()
    if n * 4 / 2**30 > here_gib:
        raise UserError(
            f"model.config has {n:,} parameters, {n * 4 / 2**30:,.0f} GiB in float32, and this "
            f"machine has {here_gib:.0f} GiB: lower model.config.n_layer or model.config.n_embd"
        )
