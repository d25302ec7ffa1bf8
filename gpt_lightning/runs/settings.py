"""Training arguments: name, type with its bounds, default and help, each in one place."""

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.parsing import HalfOpen, checked

Switch = bool | Literal["auto"]


@checked("model")
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Training arguments of GPTModule, besides the model's shape and its initial weights.

    The fields are the keys `model.*` of the command line, the keyword arguments of GPTModule and
    the hyperparameters in a checkpoint. The text of an argument is its help. Values from Python and
    from checkpoints are checked against the types as those from the command line are.

    Args:
        optimizer: Name of a file in training/optimizers, such as adamw, or muon: Muon for the
            blocks' matrices and AdamW for the rest.
        learning_rate: Peak of AdamW's learning rate.
        min_learning_rate: End of the decay; null: a tenth of the peak.
        schedule: Warm-up, then cosine: half a cosine; linear: a line; constant: the peak.
        warmup_steps: Optimizer steps of linear warm-up.
        decay_start: Optimizer step at which the decay begins; until then the rate stays at its
            peak. 0: at the end of the warm-up.
        decay_steps: Optimizer step at which the decay ends; null: trainer.max_steps.
        weight_decay: Decoupled weight decay.
        decay: matrices: only tensors of two or more dimensions decay. all: every tensor decays,
            PyTorch's default.
        betas: AdamW's averaging coefficients.
        muon_learning_rate: Peak of Muon's learning rate; it follows the same schedule.
        muon_momentum: Muon's momentum.
        freeze: Parameters that are not trained, by name or pattern: transformer.wte.weight,
            transformer.h.0.*; *.bias.
        learning_rate_factors: Factors of the learning rate by name or pattern of the parameters,
            the first that matches: {"transformer.h.[0-5].*": 0.1}; null: none.
        lora_rank: Train matrices of this rank beside frozen ones (LoRA); null: train the model
            itself.
        lora_alpha: LoRA's update is multiplied by this number over the rank.
        lora_targets: Layers of the blocks that LoRA changes: c_attn, attn.c_proj, c_fc, mlp.c_proj;
            * for all.
        fused: Use AdamW's fused kernel; auto: if the device has one.
        compile: Compile the model with torch.compile; auto: on CUDA, and on a CPU in bfloat16 or
            with dropout.
        compile_scope: model: compile one graph. block: one for all blocks and one for the head,
            which takes a fraction of the time to compile and runs a little slower.
        pad_head: Multiply the output head of a compiled model in a multiple of 64 rows; auto: on a
            CPU. A vocabulary that is a multiple of 64 needs no padding.
        matmul_precision: Precision of float32 matrix products. highest: float32; high: TF32 on
            NVIDIA GPUs; medium: as high, and bfloat16 on CPUs that support it.

    Raises:
        UserError: a value is of another type or out of bounds.
    """

    optimizer: str = "adamw"
    learning_rate: PositiveFloat = 6.0e-4
    min_learning_rate: NonNegativeFloat | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_start: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    weight_decay: NonNegativeFloat = 0.1
    decay: Literal["matrices", "all"] = "matrices"
    betas: tuple[HalfOpen, HalfOpen] = (0.9, 0.95)
    muon_learning_rate: PositiveFloat = 0.02
    muon_momentum: HalfOpen = 0.95
    freeze: tuple[str, ...] = ()
    learning_rate_factors: dict[str, PositiveFloat] | None = None
    lora_rank: PositiveInt | None = None
    lora_alpha: PositiveFloat = 16.0
    lora_targets: tuple[str, ...] = ("c_attn",)
    fused: Switch = "auto"
    compile: Switch = "auto"
    compile_scope: Literal["model", "block"] = "model"
    pad_head: Switch = "auto"
    matmul_precision: Literal["highest", "high", "medium"] = "highest"

    def __post_init__(self) -> None:
        if self.min_learning_rate is None:
            object.__setattr__(self, "min_learning_rate", self.learning_rate / 10)
        elif self.min_learning_rate > self.learning_rate:
            raise UserError(
                f"model.min_learning_rate {self.min_learning_rate} is above "
                f"model.learning_rate {self.learning_rate}: lower it, or set it to null"
            )
        lora = self.lora_alpha, self.lora_targets
        if not self.lora_rank and lora != (16.0, ("c_attn",)):
            raise UserError(
                "model.lora_alpha and lora_targets need model.lora_rank: set it, or leave them out"
            )

    def hyperparameters(self) -> Fields:
        """Return the fields as a checkpoint has them: lists for tuples, compared by `==`."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Arguments of the command line that name the run.

    Args:
        run_name: Run folder: lightning_logs/RUN_NAME/version_N; null: the configuration's name.
        resume: Only for fit. never: start a new run. auto: continue the newest run of this name
            from its newest undamaged checkpoint, or start a new run if there is none. A path:
            continue this run folder, the newest run of this folder, or this checkpoint in its run
            folder.
    """

    run_name: str | None = None
    resume: str = "never"
