"""Each argument, stock callback and stock logger of Lightning's Trainer, with the verdict of `fit`.

test_lightning_table.py runs every row, and fails if Lightning has something without a row.
`python tests/training/lightning_table.py` writes docs/lightning.md from the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchSyncBatchNorm
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

DOCS = Path(__file__).resolve().parents[2] / "docs" / "lightning.md"


class Watch(L.Callback):
    """Notes of a run that Lightning's own attributes do not keep."""

    def __init__(self) -> None:
        self.steps: list[int] = []  # optimizer steps done at the end of each micro-batch
        self.validated: list[int] = []  # optimizer steps done at each validation
        self.sanity_batches = 0
        self.validation_batches = 0
        self.norms: list[float] = []  # of the gradients that an update has used
        self.largest: list[float] = []  # of their absolute values
        self.seen: list[torch.Tensor] = []  # inputs of each micro-batch
        self.flags: dict[str, bool] = {}

    def setup(self, trainer, module, stage):
        self.trainer = trainer

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append(batch[0].clone())
        self.flags |= {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "anomaly": torch.is_anomaly_enabled(),
        }

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(trainer.global_step)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
        self.largest.append(max(float(grad.abs().max()) for grad in grads))

    def on_validation_batch_start(self, trainer, *args, **kwargs):
        self.flags["inference_mode"] = torch.is_inference_mode_enabled()
        if trainer.sanity_checking:
            self.sanity_batches += 1
        else:
            self.validation_batches += 1

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


@dataclass
class Run:
    """Outcome of a `fit`.

    Attributes:
        trainer: Trainer after the run.
        module: GPTModule after the run.
        data: TokenDataModule after the run.
        watch: Notes of the run.
        output: Text on standard output and standard error.
        rows: Rows of metrics.jsonl.
        files: Files in the working folder, as relative paths.
    """

    trainer: Any
    module: Any
    data: Any
    watch: Watch
    output: str
    rows: list[dict[str, Any]]
    files: list[str]

    def logged(self, key: str) -> list[int]:
        """Return the steps whose rows have a metric."""
        return [row["step"] for row in self.rows if key in row]

    def callback(self, kind: type) -> Any:
        """Return the run's callback of a class."""
        return next(c for c in self.trainer.callbacks if isinstance(c, kind))


@dataclass(frozen=True)
class Row:
    """One way of using Lightning.

    Attributes:
        name: Argument of the Trainer, or class of a callback or logger.
        given: Arguments of the Trainer by name; objects where the command line names a class.
        verdict: works, or error: one line on standard error, exit code 2, nothing written.
        sentence: Explanation for people.
        says: error: part of the message.
        check: works: assertion over the run that the argument had its effect.
        also: Further options of the command line.
        label: Text for `given` in the document; None: the arguments.
        slow: True if the test is not part of the default suite.
        resumes: works: True if a run that is stopped after two steps and resumed equals the
            uninterrupted one; False with the reason beside it.
    """

    name: str
    given: dict[str, Any]
    verdict: Literal["works", "error"]
    sentence: str
    says: str = ""
    check: Callable[[Run], object] | None = None
    also: list[str] = field(default_factory=list)
    label: str | None = None
    slow: bool = False
    resumes: bool = True

    @property
    def shown(self) -> str:
        """Text for `given` in the document."""
        if self.label is not None:
            return self.label
        return ", ".join(f"{key} {shown(value)}" for key, value in self.given.items())


def shown(value: Any) -> str:
    """Return a value as YAML has it."""
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def works(
    name: str, given: dict[str, Any], check: Callable[[Run], object], sentence: str, **kwargs: Any
) -> Row:
    """Return a row whose run shows an effect."""
    return Row(name, given, "works", sentence, check=check, **kwargs)


def refused(name: str, given: dict[str, Any], says: str, sentence: str, **kwargs: Any) -> Row:
    """Return a row that is an error before anything is written."""
    return Row(name, given, "error", sentence, says=says, **kwargs)


# ---- checks of more than a line ------------------------------------------------------------------


class Stop(L.Callback):
    """Ask for a stop after the first step."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = True


class Halt(L.Callback):
    """Ask for a stop after the second step, as a preemption would."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop |= trainer.global_step == 2


class Sleep(L.Callback):
    """Make each micro-batch take a tenth of a second."""

    def on_train_batch_start(self, *args):
        import time

        time.sleep(0.1)


class Freeze(cb.BaseFinetuning):
    """Freeze the embedding, and train it from the second epoch on."""

    def freeze_before_training(self, pl_module):
        pl_module.configure_model()  # Lightning calls it later
        self.freeze(pl_module.model.transformer.wte)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.transformer.wte, optimizer, lr=1e-3)


class Writer(cb.BasePredictionWriter):
    """Print a prediction's shape."""

    def write_on_batch_end(self, trainer, pl_module, prediction, *args):
        print("written", *prediction.shape)


class Raise(L.Callback):
    """Fail in the third step."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("made to fail")


def evaluates(stage: str, batches: int) -> Callable[[Run], bool]:
    """Return a check that an evaluation after the run takes as many batches."""

    class Count(L.Callback):
        n = 0

        def on_test_batch_end(self, *args, **kwargs):
            self.n += 1

        on_predict_batch_end = on_test_batch_end

    def check(run: Run) -> bool:
        count = Count()
        run.trainer.callbacks.append(count)
        loader = run.data.val_dataloader()[0]
        run.trainer.datamodule = None  # the text has no test split
        getattr(run.trainer, stage)(run.module, loader)
        return count.n == batches

    return check


def all_cpu(run: Run) -> bool:
    """Return whether the weights are on the CPU."""
    return run.module.device.type == "cpu"


def steps(n: int) -> Callable[[Run], bool]:
    """Return a check for the number of optimizer steps."""
    return lambda run: run.trainer.global_step == n


def validated(*at: int) -> Callable[[Run], bool]:
    """Return a check for the steps at which validations were done."""
    return lambda run: run.watch.validated == list(at)


def says(text: str) -> Callable[[Run], bool]:
    """Return a check for a text on the console."""
    return lambda run: text in run.output


EPOCHS = {"max_steps": -1, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}

ARGUMENTS = [
    works("accelerator", {"accelerator": "cpu"}, all_cpu, "Trains on the CPU."),
    works(
        "accelerator",
        {"accelerator": "auto"},
        lambda run: run.module.device.type in ("cpu", "cuda", "mps"),
        "Takes the best device of the machine. `gpu`, `cuda` and `mps` are errors on a machine "
        "without one.",
    ),
    refused("accelerator", {"accelerator": "tpu"}, "expected auto, cpu, gpu", "No TPU or HPU."),
    works("strategy", {"strategy": "auto"}, all_cpu, "One device, or `ddp` on several."),
    works(
        "strategy",
        {"strategy": "single_device"},
        lambda run: type(run.trainer.strategy).__name__ == "SingleDeviceStrategy",
        "One device of the accelerator, also on a machine with several.",
    ),
    *[
        works(
            "strategy",
            {"strategy": strategy, "devices": 2},
            lambda run: max(row.get("perf/tokens", 0) for row in run.rows) == 4 * 2 * 2 * 16,
            sentence,
            slow=True,
        )
        for strategy, sentence in (
            ("ddp", "Each rank reads its own part of every step."),
            (
                "ddp_find_unused_parameters_true",
                "As `ddp`, also for a module that skips some of its weights.",
            ),
            (
                "fsdp2",
                "Each rank has a shard of the weights and of the optimizer's state; see "
                "[distributed.md](distributed.md).",
            ),
        )
    ],
    *[
        refused(
            "strategy",
            {"strategy": strategy},
            "expected auto, single_device, ddp",
            sentence,
            label=label,
        )
        for strategy, sentence, label in (
            ("ddp_spawn", "Ranks that inherit no command line; `ddp` starts them.", None),
            ("ddp_fork", "Ranks that are copies of a process with threads.", None),
            ("ddp_notebook", "As `ddp_fork`.", None),
            ("fsdp", "FSDP1; `fsdp2` shards the model.", None),
            ("deepspeed", "As `fsdp`.", None),
            ("xla", "No TPU.", None),
            (FSDPStrategy(), "As `fsdp`.", "strategy FSDPStrategy"),
            (
                ModelParallelStrategy(),
                "It would save checkpoints that no command reads; `fsdp2` is a subclass.",
                "strategy ModelParallelStrategy",
            ),
            (
                DDPStrategy(start_method="spawn"),
                "As `ddp_spawn`. DDPStrategy with other arguments works.",
                "strategy DDPStrategy, start_method spawn",
            ),
            ("zzz", "Unknown names.", None),
        )
    ],
    works("devices", {"devices": 1}, all_cpu, "Number of ranks; 2 on a CPU are two processes."),
    works("devices", {"devices": "auto"}, all_cpu, "All GPUs; on a CPU one rank."),
    *[
        refused("devices", {"devices": devices}, "expected auto, a number of devices", sentence)
        for devices, sentence in ((0, "No device."), (-3, "No number."), ("two", "No number."))
    ],
    works("num_nodes", {"num_nodes": 1}, all_cpu, "Machines of a cluster."),
    refused("num_nodes", {"num_nodes": 0}, "at least 1", "No machine."),
    works(
        "precision",
        {"precision": "32-true"},
        lambda run: run.module.dtype == torch.float32,
        "Also `bf16-mixed`, and `auto`: the fastest that is safe on the device.",
    ),
    works(
        "precision",
        {"precision": "bf16-true"},
        lambda run: run.module.model.lm_head.weight.dtype == torch.bfloat16,
        "Weights and optimizer state in bfloat16.",
    ),
    works(
        "precision",
        {"precision": "64-true"},
        lambda run: run.module.model.lm_head.weight.dtype == torch.float64,
        "Weights and optimizer state in float64.",
    ),
    refused(
        "precision",
        {"precision": "transformer-engine"},
        "transformer_engine is not installed: pip install",
        "Without the package. `16-mixed` on a CPU is an error too.",
    ),
    works(
        "logger",
        {"logger": True},
        lambda run: any("events.out" in name for name in run.files),
        "TensorBoard's events in the run folder, beside metrics.jsonl.",
    ),
    works(
        "logger",
        {"logger": False},
        lambda run: run.rows and not any("events.out" in name for name in run.files),
        "metrics.jsonl alone.",
    ),
    works(
        "callbacks",
        {"callbacks": lambda: [cb.Callback()]},
        lambda run: run.callback(cb.Callback),
        "Callbacks in addition to those of every run; the classes are below.",
        label="callbacks: a list",
    ),
    works(
        "fast_dev_run",
        {"fast_dev_run": True},
        lambda run: run.trainer.global_step == 1 and run.watch.validated == [1] and not run.files,
        "One batch of training and one of validation, no files; also with a warm-up that is "
        "longer.",
        also=["--model.schedule=cosine", "--model.warmup_steps=100"],
        resumes=False,  # it saves nothing
    ),
    works(
        "fast_dev_run",
        {"fast_dev_run": 3},
        steps(3),
        "Three batches of each.",
        resumes=False,  # it saves nothing
    ),
    refused("fast_dev_run", {"fast_dev_run": -1}, "at least 0", "No number of batches."),
    works(
        "max_epochs",
        {"max_epochs": 2, "limit_train_batches": 3, **EPOCHS},
        lambda run: run.trainer.global_step == 6 and run.watch.validated == [3, 6],
        "Epochs of the run. If the cosine ends later, a line at the start prints this.",
    ),
    works("max_epochs", {"max_epochs": -1, "max_steps": 3}, steps(3), "No limit of epochs."),
    refused("max_epochs", {"max_epochs": 0}, "nothing to train", "No run folder without a step."),
    works(
        "min_epochs",
        {
            **EPOCHS,
            "min_epochs": 2,
            "max_epochs": 3,
            "limit_train_batches": 2,
            "callbacks": lambda: [Stop()],
        },
        steps(4),
        "No callback stops the run earlier.",
        label="min_epochs 2, with a callback that stops",
        resumes=False,  # no stop at step 2
    ),
    refused("min_epochs", {"min_epochs": 3, "max_epochs": 2}, "is above trainer.max_epochs", ""),
    works("max_steps", {"max_steps": 3}, steps(3), "Optimizer steps, also below the warm-up."),
    refused(
        "max_steps",
        {"max_steps": 0},
        "nothing to train",
        "No run folder without a step; num_sanity_val_steps -1 evaluates at step 0.",
    ),
    refused("max_steps", {"max_steps": -5}, "at least -1", "-1 is no limit."),
    works(
        "min_steps",
        {
            **EPOCHS,
            "min_steps": 3,
            "max_epochs": 3,
            "limit_train_batches": 2,
            "callbacks": lambda: [Stop()],
        },
        steps(3),
        "No callback stops the run earlier, or in the first epoch.",
        label="min_steps 3, with a callback that stops",
        resumes=False,  # no stop at step 2
    ),
    refused("min_steps", {"min_steps": 8, "max_steps": 4}, "is above trainer.max_steps", ""),
    works(
        "max_time",
        {"max_time": {"milliseconds": 250}, "max_steps": 50, "callbacks": lambda: [Sleep()]},
        lambda run: 1 <= run.trainer.global_step < 40 and "max_time: stopped after" in run.output,
        "Stops between two steps and saves; the time of all sessions counts.",
        label="max_time {milliseconds: 250}",
        resumes=False,  # it ends with the time
    ),
    refused("max_time", {"max_time": "1 hour"}, "expected a time above zero as DD:HH", ""),
    refused("max_time", {"max_time": {"sec": 1}}, "expected a time above zero as DD:HH", ""),
    works(
        "limit_train_batches",
        {**EPOCHS, "limit_train_batches": 2, "max_epochs": 2},
        lambda run: run.trainer.global_step == 4 and run.trainer.current_epoch == 2,
        "Micro-batches of an epoch; a fraction counts those of the split.",
    ),
    refused("limit_train_batches", {"limit_train_batches": 1.5}, "a fraction from 0 to 1", ""),
    refused("limit_train_batches", {"limit_train_batches": 0}, "nothing to train", ""),
    refused(
        "limit_train_batches", {"limit_train_batches": float("nan")}, "a finite number", "Nor inf."
    ),
    works(
        "limit_val_batches",
        {"limit_val_batches": 3},
        lambda run: run.watch.validation_batches == 3,
        "Batches of each validation.",
    ),
    works(
        "limit_val_batches",
        {"limit_val_batches": 0},
        lambda run: not run.watch.validated and "validation  none" in run.output,
        "No validation; a line at the start prints this.",
    ),
    refused("limit_val_batches", {"limit_val_batches": -2}, "at least 0", ""),
    works(
        "limit_test_batches",
        {"limit_test_batches": 2},
        evaluates("test", 2),
        "Batches of `gpt-lightning test`.",
    ),
    works(
        "limit_predict_batches",
        {"limit_predict_batches": 2},
        evaluates("predict", 2),
        "Batches of `gpt-lightning predict`.",
    ),
    works(
        "overfit_batches",
        {"overfit_batches": 2},
        lambda run: (
            torch.equal(run.watch.seen[0], run.watch.seen[2])
            and torch.equal(run.watch.seen[1], run.watch.seen[3])
        ),
        "The same batches in each epoch.",
    ),
    refused("overfit_batches", {"overfit_batches": -1}, "at least 0", ""),
    works(
        "val_check_interval",
        {"val_check_interval": 2},
        validated(2, 4),
        "Micro-batches between validations, a multiple of the accumulation.",
    ),
    works(
        "val_check_interval",
        {**EPOCHS, "max_epochs": 1, "limit_train_batches": 4, "val_check_interval": 0.5},
        validated(2, 4),
        "Fraction of an epoch.",
    ),
    works(
        "val_check_interval",
        {"val_check_interval": {"milliseconds": 1}},
        validated(1, 2, 3, 4),
        "A time, on one rank and without accumulation.",
    ),
    works(
        "val_check_interval",
        {"val_check_interval": 100},
        says("validation  none: the first is due after 100 micro-batches, the run has 4"),
        "Beyond the run: no validation; a line at the start prints this.",
    ),
    refused("val_check_interval", {"val_check_interval": 0}, "trainer.limit_val_batches 0", ""),
    refused("val_check_interval", {"val_check_interval": -4}, "at least 0", ""),
    refused(
        "val_check_interval",
        {"val_check_interval": 0.5, "check_val_every_n_epoch": None},
        "set one of the two to a whole number",
        "A fraction of an epoch, and no epochs.",
    ),
    works(
        "check_val_every_n_epoch",
        {**EPOCHS, "check_val_every_n_epoch": 2, "max_epochs": 4, "limit_train_batches": 1},
        validated(2, 4),
        "Epochs between validations; null: val_check_interval counts across epochs.",
    ),
    refused("check_val_every_n_epoch", {"check_val_every_n_epoch": 0}, "at least 1", ""),
    works(
        "num_sanity_val_steps",
        {"num_sanity_val_steps": 2, "limit_val_batches": 3},
        lambda run: run.watch.sanity_batches == 2,
        "Validation batches before the first step; 0 by default here.",
    ),
    works(
        "num_sanity_val_steps",
        {"num_sanity_val_steps": -1, "limit_val_batches": 3},
        lambda run: run.watch.sanity_batches == 3,
        "A whole validation before the first step.",
    ),
    refused("num_sanity_val_steps", {"num_sanity_val_steps": -3}, "at least -1", ""),
    works(
        "log_every_n_steps",
        {"log_every_n_steps": 2},
        lambda run: run.logged("train/loss") == [2, 4],
        "Optimizer steps; 10 by default here.",
    ),
    works(
        "log_every_n_steps",
        {"log_every_n_steps": 0},
        lambda run: not run.logged("train/loss") and run.logged("val/loss") == [4],
        "No training metrics; validations are logged.",
    ),
    refused("log_every_n_steps", {"log_every_n_steps": -3}, "at least 0", ""),
    works(
        "enable_checkpointing",
        {"enable_checkpointing": False},
        lambda run: not any(name.endswith(".ckpt") for name in run.files),
        "No checkpoints, and no command that would need one.",
        resumes=False,  # it saves nothing
    ),
    works(
        "enable_progress_bar",
        {"enable_progress_bar": False},
        lambda run: "step 4/4" not in run.output,
        "No lines of steps.",
    ),
    works(
        "enable_model_summary",
        {"enable_model_summary": True},
        says("Total params"),
        "Lightning's table of the layers; off by default, the banner has the sizes.",
    ),
    works(
        "accumulate_grad_batches",
        {"accumulate_grad_batches": 2},
        lambda run: run.watch.steps == [0, 1, 1, 2, 2, 3, 3, 4],
        "Micro-batches of an optimizer step.",
    ),
    refused("accumulate_grad_batches", {"accumulate_grad_batches": 0}, "at least 1", ""),
    works(
        "gradient_clip_val",
        {"gradient_clip_val": 0.01},
        lambda run: (
            all(norm < 0.0101 for norm in run.watch.norms)
            and all(row["optim/grad_norm"] > 0.02 for row in run.rows if "optim/grad_norm" in row)
        ),
        "Largest norm of the gradients; optim/grad_norm is the norm before. 0: no clipping.",
    ),
    refused("gradient_clip_val", {"gradient_clip_val": -1}, "at least 0", ""),
    works(
        "gradient_clip_algorithm",
        {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.001},
        lambda run: (
            all(largest < 0.00101 for largest in run.watch.largest)
            and all(row["optim/grad_norm"] > 0.02 for row in run.rows if "optim/grad_norm" in row)
        ),
        "Largest value of a gradient; optim/grad_norm is the norm before.",
    ),
    refused("gradient_clip_algorithm", {"gradient_clip_algorithm": "max"}, "expected norm", ""),
    works(
        "deterministic",
        {"deterministic": True},
        lambda run: run.watch.flags["deterministic"],
        "PyTorch's deterministic kernels; `warn` where there is none.",
    ),
    works(
        "benchmark",
        {"benchmark": True},
        lambda run: run.watch.flags["benchmark"],
        "cuDNN's search for the fastest convolution; a GPT has none.",
    ),
    works(
        "inference_mode",
        {"inference_mode": False},
        lambda run: not run.watch.flags["inference_mode"],
        "torch.no_grad in evaluations.",
    ),
    works(
        "use_distributed_sampler",
        {"use_distributed_sampler": True},
        lambda run: run.logged("val/loss") == [4],
        "Nothing changes: our loaders read their rank's part themselves. False by default here.",
    ),
    works(
        "profiler",
        {"profiler": "simple"},
        says("run_training_epoch"),
        "Lightning's table of times at the end; also `advanced` and `pytorch`.",
    ),
    works(
        "profiler",
        {"profiler": "advanced"},
        says("cumulative time"),
        "Python's cProfile.",
        slow=True,
    ),
    works("profiler", {"profiler": "pytorch"}, says("aten::"), "PyTorch's profiler.", slow=True),
    refused("profiler", {"profiler": "smiple"}, "did you mean 'simple'", ""),
    works(
        "detect_anomaly",
        {"detect_anomaly": True},
        lambda run: run.watch.flags["anomaly"],
        "PyTorch's check of each backward function.",
    ),
    refused(
        "barebones",
        {"barebones": True},
        "L.Trainer(barebones=True).fit",
        "For `L.Trainer` in Python: no logger, no checkpoints, no callbacks.",
    ),
    works(
        "plugins",
        {"plugins": [LightningEnvironment()]},
        all_cpu,
        "Precision, environment and layer plugins.",
        label="plugins: LightningEnvironment",
    ),
    refused(
        "plugins",
        {"plugins": [AsyncCheckpointIO()]},
        "without their digests",
        "A CheckpointIO: our files have digests that are checked.",
        label="plugins: AsyncCheckpointIO",
    ),
    works(
        "sync_batchnorm",
        {"sync_batchnorm": True, "plugins": [TorchSyncBatchNorm()]},
        steps(4),
        "Nothing changes: a GPT has no batch norm.",
        label="sync_batchnorm true",
    ),
    works(
        "reload_dataloaders_every_n_epochs",
        {
            **EPOCHS,
            "reload_dataloaders_every_n_epochs": 1,
            "max_epochs": 2,
            "limit_train_batches": 2,
        },
        lambda run: not torch.equal(run.watch.seen[0], run.watch.seen[2]),
        "New loaders, which continue in the data where the old ones were.",
    ),
    refused(
        "reload_dataloaders_every_n_epochs",
        {"reload_dataloaders_every_n_epochs": -1},
        "at least 0",
        "",
    ),
    works(
        "default_root_dir",
        {"default_root_dir": "elsewhere"},
        lambda run: (
            run.files and all(name.startswith("elsewhere/lightning_logs/") for name in run.files)
        ),
        "Parent of lightning_logs/.",
    ),
    works(
        "enable_autolog_hparams",
        {"enable_autolog_hparams": False},
        lambda run: not run.trainer.loggers[0].hparams,
        "No hyperparameters in the loggers; config.yaml and the checkpoints have them.",
    ),
    refused(
        "model_registry",
        {"model_registry": "name"},
        "upload the run folder's checkpoints/",
        "It uploads files of Lightning's own checkpointing.",
    ),
]

LAST = "checkpoints/step-0000004-loss"

CALLBACKS = [
    refused(
        "BackboneFinetuning",
        {"callbacks": lambda: [cb.BackboneFinetuning()]},
        "subclass of BaseFinetuning",
        "GPTModule has no `backbone`.",
    ),
    refused(
        "BaseFinetuning",
        {"callbacks": lambda: [Freeze()], "strategy": "fsdp2"},
        "fsdp2 has sharded them by then",
        "Under `fsdp2`; `model.freeze` works.",
        label="strategy fsdp2",
    ),
    refused(
        "BaseFinetuning",
        {"callbacks": lambda: [Freeze()], "devices": 2},
        "set --trainer.devices 1, or leave it out and set --model.freeze",
        "On several ranks: DDP does not exchange gradients of weights that begin frozen; "
        "`model.freeze` works.",
        label="devices 2",
    ),
    works(
        "BaseFinetuning",
        {**EPOCHS, "max_epochs": 2, "limit_train_batches": 2, "callbacks": lambda: [Freeze()]},
        lambda run: (
            len(run.trainer.optimizers[0].param_groups) == 3
            and all(p.requires_grad for p in run.module.parameters())
        ),
        "A subclass of yours, on one rank and with AdamW; its freeze_before_training calls "
        "`pl_module.configure_model()` first. Groups that it adds keep its learning rates.",
    ),
    refused(
        "BaseFinetuning",
        {"callbacks": lambda: [Freeze()]},
        "model.optimizer adamw",
        "With Muon, which takes no groups later.",
        also=["--model.optimizer=muon"],
        label="model.optimizer muon",
    ),
    works(
        "BasePredictionWriter",
        {"callbacks": lambda: [Writer("batch")], "limit_predict_batches": 1},
        evaluates("predict", 1),
        "A subclass of yours, beside the file of `gpt-lightning predict`.",
    ),
    refused(
        "BatchSizeFinder",
        {"callbacks": lambda: [cb.BatchSizeFinder()]},
        "gpt-lightning bench memory",
        "`gpt-lightning bench memory` measures; the Tuner of Lightning works in Python.",
    ),
    works("Callback", {"callbacks": lambda: [cb.Callback()]}, steps(4), "Callbacks of your own."),
    works("Checkpoint", {"callbacks": lambda: [cb.Checkpoint()]}, steps(4), "A subclass of yours."),
    refused(
        "DeviceStatsMonitor",
        {"callbacks": lambda: [cb.DeviceStatsMonitor()]},
        "pip install psutil",
        "Works once psutil is installed.",
    ),
    works(
        "EarlyStopping",
        {
            "callbacks": lambda: [cb.EarlyStopping("val/loss", stopping_threshold=100.0)],
            "val_check_interval": 1,
        },
        lambda run: run.trainer.global_step == 1 and "EarlyStopping" in run.output,
        "Stops between two steps, and the run is saved.",
        label="monitor val/loss",
        resumes=False,  # it ends after step 1
    ),
    refused(
        "EarlyStopping",
        {"callbacks": lambda: [cb.EarlyStopping("val_loss")]},
        "did you mean 'val/loss'",
        "A metric that no run logs. train/loss is there at log steps.",
        label="monitor val_loss",
    ),
    refused(
        "GradientAccumulationScheduler",
        {"callbacks": lambda: [cb.GradientAccumulationScheduler({0: 1, 2: 2})]},
        "--resume auto",
        "Train in two commands, with two values of trainer.accumulate_grad_batches.",
    ),
    works(
        "LambdaCallback",
        {"callbacks": lambda: [cb.LambdaCallback(on_train_end=lambda *args: print("at the end"))]},
        says("at the end"),
        "Functions of your own.",
    ),
    works(
        "LearningRateFinder",
        {"callbacks": lambda: [cb.LearningRateFinder(num_training_steps=30)]},
        lambda run: run.module.learning_rate != 6e-4,
        "Sets the peak of the schedule. A resume without the callback continues with that rate as "
        "--model.learning_rate.",
        resumes=False,  # an error with its advice
    ),
    works(
        "LearningRateMonitor",
        {"callbacks": lambda: [cb.LearningRateMonitor()]},
        lambda run: (
            # an epoch's start, then each step
            [row["lr-AdamW/pg1"] for row in run.rows if "lr-AdamW/pg1" in row][1:]
            == pytest.approx([row["optim/lr"] for row in run.rows if "optim/lr" in row])
            and run.rows[0]["lr-AdamW/pg1"] == run.rows[1]["lr-AdamW/pg1"]
        ),
        "The rate of each group, its first row is step 0; optim/lr is logged in any case.",
        also=["--model.warmup_steps=10"],
    ),
    works(
        "ModelCheckpoint",
        {
            "callbacks": lambda: [
                cb.ModelCheckpoint(monitor="val/loss", dirpath="theirs", filename="best")
            ]
        },
        lambda run: (
            {"theirs/best.ckpt", "theirs/best.ckpt.sha256"} <= set(run.files)
            and any(LAST in name for name in run.files)
        ),
        "In addition to our checkpoints, with a digest; a resume takes ours.",
        label="monitor val/loss",
    ),
    refused(
        "ModelCheckpoint",
        {"callbacks": lambda: [cb.ModelCheckpoint(monitor="val_loss")]},
        "did you mean 'val/loss'",
        "A metric that no run logs.",
        label="monitor val_loss",
    ),
    refused(
        "ModelCheckpoint",
        {"callbacks": lambda: [cb.ModelCheckpoint()], "enable_checkpointing": False},
        "leave out one of the two",
        "",
        label="enable_checkpointing false",
    ),
    refused(
        "ModelCheckpoint",
        {"callbacks": lambda: [cb.ModelCheckpoint(save_on_exception=True)], "devices": 2},
        "set its save_on_exception to false",
        "As OnExceptionCheckpoint.",
        label="save_on_exception true, devices 2",
    ),
    refused(
        "ModelPruning",
        {"callbacks": lambda: [cb.ModelPruning("l1_unstructured")]},
        "gpt_lightning.load_model",
        "Its masks are in no checkpoint: no resume would be exact.",
    ),
    works(
        "ModelSummary",
        {"callbacks": lambda: [cb.ModelSummary()]},
        says("Total params"),
        "A table of the layers.",
    ),
    refused(
        "OnExceptionCheckpoint",
        {"callbacks": lambda: [cb.OnExceptionCheckpoint("theirs")], "devices": 2},
        "would wait for ranks without an exception",
        "On several ranks: a save is work of all ranks, and those without an exception do not "
        "join it.",
        label="devices 2",
    ),
    works(
        "OnExceptionCheckpoint",
        {"callbacks": lambda: [cb.OnExceptionCheckpoint("theirs"), Raise()]},
        lambda run: (
            {"theirs/on_exception.ckpt", "theirs/on_exception.ckpt.sha256"} <= set(run.files)
        ),
        "On one rank: the state at the error, with a digest; a resume takes our last checkpoint.",
        resumes=False,  # it ends with an error
    ),
    works(
        "ProgressBar",
        {"callbacks": lambda: [cb.ProgressBar()]},
        lambda run: "step 4/4 |" not in run.output,
        "A subclass of yours, in place of ours.",
    ),
    works(
        "RichModelSummary",
        {"callbacks": lambda: [cb.RichModelSummary()]},
        says("Total params"),
        "A table of the layers.",
    ),
    works(
        "RichProgressBar",
        {"callbacks": lambda: [cb.RichProgressBar()]},
        lambda run: "Epoch 0" in run.output and "step 4/4 |" not in run.output,
        "In place of ours; it counts micro-batches.",
    ),
    refused(
        "StochasticWeightAveraging",
        {"callbacks": lambda: [cb.StochasticWeightAveraging(1e-2)]},
        "EMAWeightAveraging",
        "Its learning rates would be replaced by the run's schedule.",
    ),
    refused(
        "SpikeDetection",
        {"callbacks": lambda: [cb.SpikeDetection()]},
        "model.skip_spikes",
        "It records batches to skip, and nothing skips them; model.skip_spikes does.",
    ),
    works(
        "ThroughputMonitor",
        {"callbacks": lambda: [cb.ThroughputMonitor(lambda batch: len(batch[0]))]},
        lambda run: [row["train/samples"] for row in run.rows if "train/samples" in row][-1] == 8,
        "Its rates beside perf/*; its first row is step 0, as Lightning counts.",
        resumes=False,  # its own rows count from the start of a session
    ),
    works(
        "Timer",
        {"callbacks": lambda: [cb.Timer({"milliseconds": 250}), Sleep()], "max_steps": 50},
        lambda run: 1 <= run.trainer.global_step < 40 and "max_time: stopped after" in run.output,
        "As trainer.max_time.",
        label="duration {milliseconds: 250}",
        resumes=False,  # it ends with the time
    ),
    works(
        "TQDMProgressBar",
        {"callbacks": lambda: [cb.TQDMProgressBar()]},
        lambda run: "Epoch 0" in run.output and "step 4/4 |" not in run.output,
        "In place of ours; it counts micro-batches.",
    ),
    works(
        "EMAWeightAveraging",
        {"callbacks": lambda: [cb.EMAWeightAveraging(decay=0.5)]},
        lambda run: run.rows[-1]["val/loss"] > run.rows[-2]["train/loss"] - 1,
        "Evaluations, samples and checkpoints for evaluation have the average; a resume continues "
        "from the weights themselves.",
    ),
    refused(
        "EMAWeightAveraging",
        {"callbacks": lambda: [cb.EMAWeightAveraging()], "strategy": "fsdp2"},
        "averages a whole model",
        "Under `fsdp2` no rank has a whole model.",
        label="strategy fsdp2",
    ),
    works(
        "EMAWeightAveraging",
        {"callbacks": lambda: [cb.EMAWeightAveraging(decay=0.5)], "precision": "64-true"},
        lambda run: run.module.model.lm_head.weight.dtype == torch.float64,
        "As above, in float64.",
        label="precision 64-true",
    ),
    works(
        "WeightAveraging",
        {"callbacks": lambda: [cb.WeightAveraging()]},
        steps(4),
        "As EMAWeightAveraging, with equal weights.",
    ),
]

LOGGERS = [
    refused(
        "LitLogger",
        {},
        "which is no Logger",
        "In Lightning 2.6 it is no subclass of Logger.",
        also=["--trainer.logger=lightning.pytorch.loggers.LitLogger"],
    ),
    refused(
        "CometLogger",
        {},
        "pip install 'comet-ml",
        "Works once comet-ml is installed.",
        also=["--trainer.logger=CometLogger"],
    ),
    works(
        "CSVLogger",
        {},
        lambda run: (
            any(name.endswith("csv/metrics.csv") for name in run.files) and run.logged("train/loss")
        ),
        "Beside metrics.jsonl.",
        also=[
            "--trainer.logger=CSVLogger",
            "--trainer.logger.save_dir=.",
            "--trainer.logger.version=csv",
        ],
        resumes=False,  # an error: this version has a file
    ),
    works(
        "Logger",
        {},
        lambda run: (
            isinstance(run.trainer.loggers[0], CSVLogger)
            and isinstance(run.trainer.loggers[1], TensorBoardLogger)
        ),
        "A subclass of yours, and several at once.",
        also=[
            '--trainer.logger=[{"class_path": "CSVLogger", "init_args": {"save_dir": "a"}}, '
            '{"class_path": "TensorBoardLogger", "init_args": {"save_dir": "b"}}]'
        ],
    ),
    refused(
        "MLFlowLogger",
        {},
        "pip install 'mlflow",
        "Works once mlflow is installed.",
        also=["--trainer.logger=MLFlowLogger"],
    ),
    works(
        "TensorBoardLogger",
        {},
        lambda run: any(name.startswith("board/") and "events.out" in name for name in run.files),
        "Its own folder; without it TensorBoard's events are in the run folder.",
        also=["--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=board"],
    ),
    refused(
        "WandbLogger",
        {},
        "pip install 'wandb",
        "Works once wandb is installed.",
        also=["--trainer.logger=WandbLogger"],
    ),
]

TABLES = {"Arguments": ARGUMENTS, "Callbacks": CALLBACKS, "Loggers": LOGGERS}
HEAD = """# Lightning's Trainer in `gpt-lightning fit`

Every argument of Lightning's Trainer, every callback and every logger that comes with Lightning,
and what `gpt-lightning fit` does with it. *works*: it does what Lightning documents. *error*: one
line on standard error, exit code 2, and nothing is written. The last column has the reason, or the
effect. `tests/training/lightning_table.py` holds these rows, and a test runs each of them. A key is
written `--trainer.NAME VALUE`, or below `trainer:` in YAML; [configuration.md](configuration.md)
has the other keys.
"""


def document() -> str:
    """Return the text of docs/lightning.md."""
    parts = [HEAD]
    for title, rows in TABLES.items():
        parts.append(f"## {title}\n")
        parts.append("| name | given | verdict | |\n| --- | --- | --- | --- |")
        parts += [
            f"| `{row.name}` | {given_text(row)} | {row.verdict} | {row.sentence} |" for row in rows
        ]
        parts.append("")
    return "\n".join(parts)


def given_text(row: Row) -> str:
    """Return the cell that says how a row is used."""
    text = row.shown if row.label is not None or "callbacks" not in row.given else ""
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    DOCS.write_text(document(), encoding="utf-8")
