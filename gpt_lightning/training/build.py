"""Build the model of a run: check its settings, make its weights, choose what is trained."""

import dataclasses
from fnmatch import fnmatchcase
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import memory_gib
from gpt_lightning.model import flops
from gpt_lightning.model.attention import NoKernelError
from gpt_lightning.model.fast.compilation import (
    attention_kernel,
    check_cuda_graphs,
)
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.network import Network, build, has_our_forward
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training.datamodule import TokenDataModule, token_data
from gpt_lightning.training.steps import is_sharded

WHOLE = (DDPStrategy, SingleDeviceStrategy)  # each rank has the whole model


# ---- checks -------------------------------------------------------------------------------------


def fit_to_data(config: GPTConfig, data: TokenDataModule | None) -> GPTConfig:
    """Return the configuration with the tokenizer's vocabulary; raise if it is too small."""
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


def check_decay(settings: Settings, max_steps: int) -> None:
    """Check that the decay of the learning rate has an end, and begins before it."""
    if settings.schedule == "constant":
        return
    end = max_steps if settings.decay_steps is None else settings.decay_steps
    if end < 0:
        raise UserError(
            f"the {settings.schedule} decay has no end: set trainer.max_steps or "
            "model.decay_steps, or model.schedule to constant"
        )
    # A short run ends in its warm-up by default.
    if settings.decay_steps is not None and end <= settings.warmup_steps:
        raise UserError(
            f"model.warmup_steps {settings.warmup_steps} must be below "
            f"model.decay_steps {end}: lower model.warmup_steps"
        )
    if settings.decay_start >= max(1, end):
        raise UserError(
            f"model.decay_start {settings.decay_start} must be below the decay's end at "
            f"step {end}: lower it, or set model.schedule to constant"
        )


def check_device(config: GPTConfig, trainer: L.Trainer, device: str, compiled: bool) -> None:
    """Check that the strategy, the device (cpu, cuda or mps) and the precision can train a GPT."""
    strategy = trainer.strategy
    if not (is_sharded(trainer) or isinstance(strategy, WHOLE)):
        raise UserError(f"{type(strategy).__name__} cannot train a GPTModule: use ddp or fsdp2")
    if device == "mps" and config.checkpointing and (p := config.dropout):
        raise UserError(  # PyTorch restores no seed there (pytorch#127676)
            f"model.config.dropout is {p:g}, and mps would recompute another: set it to 0, or "
            "model.config.checkpointing to false"
        )
    if config.residual != "float32" and trainer.precision != "bf16-mixed":
        raise UserError(
            f"model.config.residual bfloat16 has no meaning in {trainer.precision}: set "
            "trainer.precision to bf16-mixed, or model.config.residual to float32"
        )
    if compiled and trainer.accumulate_grad_batches > 1:
        check_cuda_graphs()


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


# ---- the model ----------------------------------------------------------------------------------


def build_model(
    config: GPTConfig, settings: Settings, init_from: str | None, network: Network | None = None
) -> Any:
    """Return a model with random weights or those of init_from, and with what is trained chosen."""
    if network is None:
        check_memory(config)
    model = build(network, config)
    if init_from is not None:
        # Random weights need neither.
        from gpt_lightning.model.weights import user_errors
        from gpt_lightning.runs.sources import initial_weights

        with user_errors(f"model.init_from {init_from} does not fit {type(model).__name__}"):
            model.load_state_dict(initial_weights(init_from, config, network))
    choose_trained(model, settings)
    return model


def check_network(
    network: Network | None, config: GPTConfig, settings: Settings, trainer: L.Trainer
) -> None:
    """Raise a UserError for a setting that a network of one's own does not have."""
    if network is None:
        return
    kind = network.load()
    ours, same_loss = issubclass(kind, GPT), has_our_forward(kind)
    for key, is_set, possible in (
        ("model.compile_scope block", settings.compile_scope == "block", same_loss),
        ("trainer.strategy fsdp2", is_sharded(trainer), same_loss),
        ("model.config.loss_chunk", config.loss_chunk is not None, same_loss),
        ("model.pad_head true", settings.pad_head is True, ours),
        ("model.optimizer muon", settings.optimizer == "muon", ours),
    ):
        if is_set and not possible:
            raise UserError(
                f"model.network {network.class_path} cannot have {key}, which needs GPT's layers "
                "and its loss: leave it out"
            )


def choose_trained(model: nn.Module, settings: Settings) -> None:
    """Freeze parameters, and add LoRA's, as the settings say.

    Raises:
        UserError: A pattern matches nothing, or no parameter is left to train.
    """
    if settings.lora_rank is not None:
        from gpt_lightning.model import lora  # most runs do not need it

        lora.install(model, settings.lora_rank, settings.lora_alpha, settings.lora_targets)
    names = [name for name, _ in model.named_parameters()]
    for key in ("freeze", "learning_rate_factors"):
        for pattern in getattr(settings, key) or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"model.{key} {pattern!r} matches no parameter: their names are like "
                    f"{names[0]} and {names[2]}"
                )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in settings.freeze):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model.freeze leaves no parameter to train: shorten it")


def find_kernel(
    model: nn.Module, config: GPTConfig, trainer: L.Trainer, dropout: float
) -> tuple[str, dict[str, str]]:
    """Return the attention kernel of this run, and a line for the banner if it is a substitute.

    Raises:
        UserError: There is no kernel.
    """
    if not isinstance(model, GPT):
        return "the network's own", {}
    data, device = token_data(trainer), trainer.strategy.root_device
    T = config.block_size if data is None else data.block_size
    try:
        with trainer.precision_plugin.forward_context():
            kernel, error = attention_kernel(model, device, T, dropout)
        note = f"PyTorch's own, the kernel for this CPU cannot be built: {error}"
        return kernel, {"kernel": note} if error else {}
    except NoKernelError as error:
        raise UserError(
            f"model.config.attention {config.attention} on {device.type} in "
            f"{trainer.precision} with dropout {dropout:g} and "
            f"{config.n_embd // config.n_head} channels per head: {error} Set it to auto"
        ) from error


def flops_per_token(model: GPT, config: GPTConfig, block_size: int) -> int:
    """Return the FLOPs of a training token, forward and backward; see flops.py."""
    C = config.n_embd
    n_params = model.num_params(embeddings=False)
    total = flops.flops_per_token(n_params, config.n_layer, C, block_size)
    if all(parameter.requires_grad for parameter in model.parameters()):
        return total
    # a frozen weight's gradient is one of the three products; blocks below the first trained
    # parameter have no gradient at all
    modules = model.transformer.modules()
    embedding = [m.weight for m in modules if isinstance(m, nn.Embedding)]  # wte is the first
    looked_up = embedding[config.tie_weights :]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    total -= 2 * sum(p.numel() for p in frozen if not any(p is table for table in looked_up))
    if not any(table.requires_grad for table in embedding):
        for block in model.transformer.h:
            if any(p.requires_grad for p in block.parameters()):
                break
            total -= 2 * sum(p.numel() for p in block.parameters()) + 8 * C * block_size
        else:
            if not any(p.requires_grad for p in model.transformer.ln_f.parameters()):
                total -= 2 * model.lm_head.weight.numel()  # the input's gradient
    return total
