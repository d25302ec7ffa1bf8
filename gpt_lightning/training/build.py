"""Build the model of a run: check its settings, make its weights, compile it, choose kernels."""

import dataclasses
import math
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from gpt_lightning.data.loader import limited
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.hardware.device import memory_gib
from gpt_lightning.model.attention import NoKernelError
from gpt_lightning.model.fast import compilation
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.network import Network, build, count_flops, has_our_forward
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training import run_state
from gpt_lightning.training.behaviours.stop_between_steps import StopBetweenSteps
from gpt_lightning.training.datamodule import TokenDataModule, token_data
from gpt_lightning.training.sharding import shard

if TYPE_CHECKING:
    from gpt_lightning.training.module import GPTModule

WHOLE = (DDPStrategy, SingleDeviceStrategy)  # each rank has the whole model


# ---- checks -------------------------------------------------------------------------------------


def fit_to_data(config: GPTConfig, data: TokenDataModule | None) -> GPTConfig:
    """Return the configuration with the tokenizer's vocabulary; raise if it is too small."""
    if data is None:
        return config
    rows = config.vocab_size or data.vocab_size
    if rows < data.vocab_size:
        raise UserError(
            f"model.config.vocab_size is {rows}, but {data.address} has {data.vocab_size} tokens: "
            f"set it to {data.vocab_size}, or to null"
        )
    return dataclasses.replace(config, vocab_size=rows)


def check_run(module: "GPTModule", trainer: Trainer) -> None:
    """Raise a UserError for settings that cannot train together, before anything is built."""
    if not module.overrides("configure_optimizers"):
        check_decay(module.settings, trainer)
    check_device(module.config, trainer)
    if compiles(module)[0] and trainer.accumulate_grad_batches > 1:
        compilation.check_cuda_graphs()
    if not (module.automatic_optimization or module.overrides("training_step")):
        raise UserError("automatic_optimization is False: write a training_step, too")


def check_behaviours(module: "GPTModule") -> None:
    """Raise a UserError if a subclass's configure_callbacks has replaced ours."""
    if not run_state.find_callback(module.trainer, StopBetweenSteps):
        raise UserError(
            f"configure_callbacks of {type(module).__name__} leaves out what each run does: return "
            "[*super().configure_callbacks(), ...]"
        )


def check_decay(settings: Settings, trainer: Trainer) -> None:
    """Check that the decay of the learning rate has an end, and begins before it."""
    if settings.schedule == "constant":
        return
    own = settings.decay_steps  # a short run ends in its warm-up by default
    end = last_step(trainer) if own is None else own
    for key in ("decay_start",) if own is None else ("warmup_steps", "decay_start"):
        if (begin := getattr(settings, key)) >= (max(1, end) if own is None else end):
            raise UserError(
                f"model.{key} {begin} must be below the end of the {settings.schedule} decay at "
                f"step {end}, model.decay_steps or else the run's last: lower model.{key}"
            )


def check_device(config: GPTConfig, trainer: Trainer) -> None:
    """Check that the strategy, the device and the precision can train a GPT."""
    strategy = trainer.strategy
    device = strategy.root_device.type
    if not (run_state.is_sharded(trainer) or isinstance(strategy, WHOLE)):
        raise UserError(f"{type(strategy).__name__} cannot train a GPTModule: use ddp or fsdp2")
    if device == "mps" and config.checkpointing and config.dropout:
        raise UserError(  # PyTorch restores no seed there (pytorch#127676)
            f"model.config.dropout is {config.dropout:g}, and mps would recompute another: set it "
            "to 0, or model.config.checkpointing to false"
        )
    if config.residual != "float32" and trainer.precision != "bf16-mixed":
        raise UserError(
            f"model.config.residual bfloat16 has no meaning in {trainer.precision}: set "
            "trainer.precision to bf16-mixed, or model.config.residual to float32"
        )


# ---- the model ----------------------------------------------------------------------------------


def build_model(
    config: GPTConfig,
    settings: Settings,
    init_from: str | None,
    network: Network | None = None,
    tokenizer: Fields | None = None,
) -> Any:
    """Return a model with random weights or those of init_from, and with what is trained chosen.

    `tokenizer` is the spec of the data's tokenizer; None: it is not known.

    Raises:
        UserError: The weights alone are larger than this machine's memory.
    """
    gib = config.n_matrix_params * 4 / 2**30
    if not network and gib > memory_gib():
        raise UserError(
            f"model.config has {config.n_matrix_params:,} parameters, {gib:,.0f} GiB in float32, "
            f"and this machine has {memory_gib():.0f} GiB: lower model.config.n_layer or "
            "model.config.n_embd"
        )
    with torch.device("cpu"):  # Lightning's device context would let the GPU draw the weights
        model = build(network, config)
        if init_from is not None:
            # Random weights need neither.
            from gpt_lightning.model.weights import user_errors
            from gpt_lightning.runs.sources import initial_weights

            with user_errors(f"model.init_from {init_from} does not fit {type(model).__name__}"):
                model.load_state_dict(initial_weights(init_from, config, network, tokenizer))
        choose_trained(model, settings)
    return model


def prepare_model(module: "GPTModule", trainer: Trainer) -> None:
    """Compile and shard a module's model for a Trainer, and find its attention kernel."""
    model = module.model
    device = trainer.strategy.root_device.type
    fitting = run_state.is_fitting(trainer)
    # after all callbacks that may ask for a stop
    cast(Any, trainer).callbacks.sort(key=lambda each: isinstance(each, StopBetweenSteps))
    if fitting and module.network:
        check_network(module.network, model, module.config, module.settings, trainer)
    if trainer.precision == "64-true":
        model.double()  # callbacks may call this before Lightning restores weights
    sharded = run_state.is_sharded(trainer)
    if compiles(module)[0] and not compilation.is_compiled(model):
        scope = "block" if sharded else module.settings.compile_scope
        compilation.compile_in_place(model, device, scope, module.settings.pad_head)
    if sharded:
        shard(model, cast(Any, trainer.strategy).device_mesh["data_parallel"])
    dropout = module.config.dropout if fitting else 0.0
    found = find_kernel(model, trainer, context(module), dropout)
    module.attention_kernel, module.notes = found
    if module.network:
        module.notes["FLOPs"] = count_flops(model, context(module))[1]


def compiles(module: "GPTModule") -> tuple[bool, str]:
    """Return whether the model is compiled on its device, and the reason."""
    if module.settings.compile != "auto":
        return module.settings.compile, "as set"
    trainer = module.trainer
    device = trainer.strategy.root_device.type
    return compilation.should_compile(device, trainer.precision, module.config.dropout)


def evaluates_compiled(module: "GPTModule") -> bool:
    """Return whether evaluations are compiled too: on a CPU that takes longer than it saves."""
    return compiles(module)[0] and module.trainer.strategy.root_device.type != "cpu"


def context(module: "GPTModule") -> int:
    """Return the tokens of a sequence of the data, else those of the model."""
    data = token_data(module.attached_trainer)
    return module.config.block_size if data is None else data.block_size


def check_network(
    network: Network, model: nn.Module, config: GPTConfig, settings: Settings, trainer: Trainer
) -> None:
    """Raise a UserError for a setting that a custom network does not have."""
    ours, same_loss = isinstance(model, GPT), has_our_forward(model)
    for key, is_set, possible in (
        ("model.compile_scope block", settings.compile_scope == "block", same_loss),
        ("trainer.strategy fsdp2", run_state.is_sharded(trainer), same_loss),
        ("model.config.loss_chunk", config.loss_chunk is not None, same_loss),
        ("model.pad_head true", settings.pad_head is True, ours),
        ("model.optimizer muon", settings.optimizer == "muon", ours),
        (f"model.config.attention {config.attention}", config.attention != "auto", ours),
        ("model.config.checkpointing", bool(config.checkpointing), ours),
        ("model.config.residual bfloat16", config.residual != "float32", ours),
    ):
        if is_set and not possible:
            raise UserError(
                f"model.network {network.class_path} cannot have {key}, which needs GPT's layers "
                "and its loss: leave it out"
            )


def choose_trained(model: nn.Module, settings: Settings) -> None:
    """Freeze parameters, and add LoRA's, as the settings say.

    Raises:
        UserError: A pattern matches nothing.
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
                    f"{' and '.join(names[:3:2])}"
                )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in settings.freeze):
            parameter.requires_grad_(False)


def find_kernel(
    model: nn.Module, trainer: Trainer, T: int, dropout: float
) -> tuple[str, dict[str, str]]:
    """Return the attention kernel of this run, and a line for the banner if it is a substitute.

    Raises:
        UserError: There is no kernel.
    """
    if not isinstance(model, GPT):
        return "the network's own", {}
    config, device = model.config, trainer.strategy.root_device
    try:
        with trainer.precision_plugin.forward_context():
            kernel, error = compilation.attention_kernel(model, device, T, dropout)
        note = f"PyTorch's own, the kernel for this CPU cannot be built: {error}"
        return kernel, {"kernel": note} if error else {}
    except NoKernelError as error:
        raise UserError(
            f"model.config.attention {config.attention} on {device.type} in "
            f"{trainer.precision} with dropout {dropout:g} and "
            f"{config.n_embd // config.n_head} channels per head: {error} Set it to auto"
        ) from error


def flops_per_token(module: "GPTModule") -> float:
    """Return the FLOPs of a training token, forward and backward; see flops.py.

    A frozen weight has no gradient, and no gradient flows through blocks below the first trained
    parameter.
    """
    model = module.model
    block_size = context(module)
    if module.network:
        return count_flops(model, block_size)[0]
    C = model.config.n_embd
    tables = model.transformer.modules()
    flows = any(m.weight.requires_grad for m in tables if isinstance(m, nn.Embedding))
    total = 0
    for part in (*model.transformer.h, model.transformer.ln_f, model.lm_head):
        is_block = part in model.transformer.h
        n = sum(p.numel() for p in part.parameters())
        trained = sum(p.numel() for p in part.parameters() if p.requires_grad)
        attention = 4 * C * block_size * is_block
        through = flows or (is_block and trained > 0)  # the gradient of its input
        total += 2 * n + attention + 2 * trained + through * (2 * n + 2 * attention)
        flows = flows or trained > 0
    return total


# ---- a run ---------------------------------------------------------------------------------------


def decay_steps(module: "GPTModule") -> int:
    """Return the optimizer step at which the decay of the rate ends; 0 if nothing decays."""
    settings = module.settings
    constant = settings.schedule == "constant" or module.overrides("configure_optimizers")
    if constant or not run_state.is_fitting(module.trainer):
        return 0
    return last_step(module.trainer) if settings.decay_steps is None else settings.decay_steps


def last_step(trainer: Trainer) -> int:
    """Return the optimizer step at which a run ends, by max_steps, max_epochs or both.

    The loaders of the run need not be set up yet.

    Raises:
        UserError: The run has no end, or it is unknown in a resume.
    """
    epochs = trainer.max_epochs is not None and trainer.max_epochs >= 0
    if not epochs and trainer.max_steps < 0:
        raise UserError(
            "the decay of the learning rate has no end: set trainer.max_steps, trainer.max_epochs "
            "or model.decay_steps, or model.schedule to constant"
        )
    data = token_data(trainer)
    batches = trainer.num_training_batches  # infinite before the loader is set up
    if data is not None and data.makes("train"):
        batches = limited(len(data.reader.train_loader), trainer.limit_train_batches)
    if not epochs or not math.isinf(batches):
        return run_state.total_steps(trainer, batches)
    if trainer.ckpt_path:  # Lightning would set up the loader without its saved position
        raise UserError("the last step of a resumed run is unknown: set model.decay_steps")
    return int(trainer.estimated_stepping_batches)
