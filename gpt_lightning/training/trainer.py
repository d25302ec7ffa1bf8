"""Trainer: Lightning's Trainer, whose arguments are checked before anything is written.

docs/lightning.md lists each argument, stock callback and logger with its verdict. An argument that
Lightning accepts, but would handle wrongly in a run of ours, is an error here. Lightning's own
errors about arguments become user errors.
"""

import math
import re
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch import callbacks as stock
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.distributed import NO_COMMAND
from gpt_lightning.parsing import nearest
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.report import StepProgress

# a float is a fraction of the batches, an int a number of them
LIMITS = tuple(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict"))
FRACTIONS = (*LIMITS, "overfit_batches", "val_check_interval")
FIND_UNUSED = ("ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")
STRATEGIES = ("auto", "single_device", "ddp", *FIND_UNUSED, "fsdp2")
EVALUATION_METRICS = ("val/loss", "val/perplexity", "train/eval_loss")
STEP_METRICS = ("train/loss", "optim/grad_norm", "optim/lr")  # logged at log steps
TIME = (str, dict, timedelta)
DURATION = r"\d+:\d\d:\d\d:\d\d"
DEVICES = r"auto|-1|[1-9]\d*|\[\d+(, ?\d+)*\]|\d+(, ?\d+)+"  # "0" alone is no device
ARGUMENT_ERRORS = (TypeError, ValueError, RuntimeError, ImportError, MisconfigurationException)
# trainer.yaml: argument -> least value, argument -> its words, stock callback -> why it cannot work
_TABLES: Any = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
AT_LEAST: dict[str, int] = _TABLES["at_least"]
CHOICES: dict[str, list[str]] = _TABLES["choices"]
UNSUPPORTED_ARGUMENTS: dict[str, str] = _TABLES["unsupported_arguments"]
UNSUPPORTED: dict[str, str] = _TABLES["unsupported_callbacks"]
UNSUPPORTED_IN_SHARDS: dict[str, str] = _TABLES["unsupported_under_fsdp2"]
UNSUPPORTED_ON_RANKS: dict[str, str] = _TABLES["unsupported_on_several_ranks"]
SHARDED_PRECISIONS = ("32-true", "bf16-mixed", "32", "bf16", "None")


class Trainer(L.Trainer):
    """Lightning's Trainer, whose arguments are checked and whose precision may be auto.

    Args:
        precision: Precision of training. auto: the fastest that is safe on the device, resolved
            before the Trainer is made. null: 32-true.
        kwargs: Arguments of Lightning's Trainer.

    Raises:
        UserError: An argument has no meaning, or would silently have another effect.
    """

    def __init__(self, *, precision: str | int | None = None, **kwargs: Any) -> None:
        given = {key: value for key, value in kwargs.items() if value is not None}
        check_numbers({"check_val_every_n_epoch": 1} | kwargs)
        check_names(given | {"precision": precision})
        callbacks = as_list(given.get("callbacks", []))
        check_callbacks(callbacks, given)
        kwargs.update(changed_arguments(callbacks, given))
        if given.get("strategy") == "fsdp2" and str(precision) not in SHARDED_PRECISIONS:
            raise UserError(
                f"trainer.precision {precision} does not run with trainer.strategy fsdp2: "
                f"set it to {' or '.join(SHARDED_PRECISIONS[:2])}"
            )
        try:
            super().__init__(precision=precision, **kwargs)  # type: ignore[arg-type]  # never auto
        except ARGUMENT_ERRORS as error:
            raise argument_error(error) from error
        if getattr(self.strategy, "_start_method", "popen") != "popen":  # Lightning's auto
            raise UserError(NO_COMMAND)
        if self.world_size > 1:
            check_callbacks_of_ranks(callbacks)
        # DDPStrategy's: gradients are views of the buckets, not copies
        getattr(self.strategy, "_ddp_kwargs", {}).setdefault("gradient_as_bucket_view", True)
        if isinstance(given.get("val_check_interval"), TIME) and self.world_size > 1:
            raise UserError(
                "trainer.val_check_interval is a time, which ends at other steps on each of the "
                f"{self.world_size} ranks: set it to a number of micro-batches"
            )


def as_list(value: Any) -> list[Any]:
    """Return the value of an argument that accepts a list or a single object, as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def argument_error(error: Exception) -> UserError:
    """Return Lightning's error about an argument, without its advertisements, as a user error."""
    text = " ".join(str(error).split())
    package = re.search(r"pip install (?:-U )?'?([\w.\[\]<>=-]+)", text)
    if package:
        needed = re.sub(r"[<>=].*", "", package[1])
        return UserError(f"trainer: {needed} is not installed: pip install '{package[1]}'")
    return UserError("trainer: " + re.sub(r"[^.]*https?://\S+", "", text).strip())


def construction_error(error: Exception) -> UserError | None:
    """Return the error of a callback's or a logger's constructor as a user error, if it is one.

    jsonargparse's message lists all types that it has tried.
    """
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) or "pip install" in text:
        return argument_error(error)
    tried = text.partition("Errors: - ")[2].split(" - ")
    reasons = [reason for reason in tried if not reason.startswith(("Expected", "Not a"))]
    names = re.findall(r"class_path='[\w.]*?(\w+)'", text)
    return UserError(f"trainer: {', '.join(names)}: {reasons[0]}") if names and reasons else None


def check_numbers(given: dict[str, Any]) -> None:
    """Check that every number is finite, within its bounds, and consistent with the others."""
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"trainer.{key} is {value}; expected a finite number")
    for key, least in AT_LEAST.items():
        value = given.get(key)
        if isinstance(value, int | float) and value < least:
            raise UserError(f"trainer.{key} is {value}; it must be at least {least}")
        if key in FRACTIONS and isinstance(value, float) and value > 1 and value % 1:
            raise UserError(
                f"trainer.{key} is {value}; expected a fraction from 0 to 1 or a whole number"
            )
    for key in ("max_steps", "max_epochs", "limit_train_batches"):
        evaluates = (
            key == "max_steps" and given.get("num_sanity_val_steps") == -1
        )  # an evaluation of step 0
        if given.get(key) == 0 and not given.get("fast_dev_run") and not evaluates:
            raise UserError(f"trainer.{key} is 0, so there is nothing to train: raise it")
    for unit in ("steps", "epochs"):
        low, high = given.get(f"min_{unit}") or 0, given.get(f"max_{unit}")
        if high is not None and 0 <= high < low:
            raise UserError(f"trainer.min_{unit} {low} is above trainer.max_{unit} {high}")
    interval = given.get("val_check_interval")
    if interval == 0:
        raise UserError(
            "trainer.val_check_interval is 0; set the micro-batches between validations, or "
            "trainer.limit_val_batches 0 for no validation"
        )
    if isinstance(interval, float) and given.get("check_val_every_n_epoch") is None:
        raise UserError(
            f"trainer.val_check_interval {interval} is a fraction of an epoch, and "
            "trainer.check_val_every_n_epoch is null: set one of the two to a whole number"
        )
    for key in ("max_time", "val_check_interval"):
        if isinstance(given.get(key), str | dict):
            check_duration(f"trainer.{key}", given[key])


def check_duration(key: str, value: str | dict[str, Any]) -> None:
    """Check that a time is DD:HH:MM:SS, or a mapping of timedelta's units, and above zero."""
    if isinstance(value, str):
        above_zero = bool(re.fullmatch(DURATION, value) and re.search("[1-9]", value))
    else:
        known = value.keys() <= {"weeks", "days", "hours", "minutes", "seconds", "milliseconds"}
        above_zero = known and timedelta(**value) > timedelta()
    if above_zero:
        return
    raise UserError(
        f"{key} is {value!r}; expected a time above zero as DD:HH:MM:SS, such as 00:01:00:00 for "
        "an hour, or as a mapping such as {hours: 1}"
    )


def check_names(given: dict[str, Any]) -> None:
    """Check the strategy, the devices, and other arguments whose values are names."""
    strategy, devices = given.get("strategy", "auto"), given.get("devices", "auto")
    if isinstance(strategy, str):
        known = strategy in STRATEGIES
    else:  # other start methods would start ranks without the command line
        known = isinstance(strategy, DDPStrategy | SingleDeviceStrategy)
        known = known or hasattr(strategy, "whole_weights")
        known &= getattr(strategy, "_start_method", None) in (None, "popen")
    if not known:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise UserError(
            f"trainer.strategy {name} is not supported: expected {', '.join(STRATEGIES)}"
            f"{nearest(name, STRATEGIES)}"
        )
    if strategy == "single_device" and devices not in ("auto", 1, "1"):
        raise UserError(
            f"trainer.strategy single_device has 1 device; trainer.devices is {devices}"
        )
    if isinstance(devices, int | str) and not re.fullmatch(DEVICES, str(devices)):
        raise UserError(
            f"trainer.devices is {devices!r}; expected auto, a number of devices, -1 for all GPUs, "
            "or a list of GPUs such as [0,1]"
        )
    for key, choices in CHOICES.items():
        word = given.get(key)
        if isinstance(word, str) and word not in choices:
            raise UserError(
                f"trainer.{key} is {word!r}; expected {', '.join(choices)}{nearest(word, choices)}"
            )
    for key, reason in UNSUPPORTED_ARGUMENTS.items():
        if given.get(key):
            raise UserError(f"trainer.{key} {reason}")


def check_callbacks(callbacks: list[L.Callback], given: dict[str, Any]) -> None:
    """Check that each callback can do its work in a run of ours."""
    ours = any(isinstance(callback, RunCheckpoint) for callback in callbacks)
    metrics = EVALUATION_METRICS + (STEP_METRICS if given.get("log_every_n_steps", 1) else ())
    in_shards = UNSUPPORTED_IN_SHARDS if given.get("strategy") == "fsdp2" else {}
    modules = {type(callback).__module__.partition(".")[0] for callback in callbacks}
    others = not modules <= {"lightning", "gpt_lightning"}  # may log metrics of their own
    for callback in callbacks:
        name = type(callback).__name__
        for kind, reason in (UNSUPPORTED | in_shards).items():
            if ours and isinstance(callback, getattr(stock, kind)):
                raise UserError(f"trainer.callbacks: {name} {reason}")
        monitor = getattr(callback, "monitor", None)
        if ours and isinstance(monitor, str) and not others and monitor not in metrics:
            raise UserError(
                f"trainer.callbacks: {name} monitors {monitor!r}; this run logs "
                f"{', '.join(metrics)}{nearest(monitor, metrics)}"
            )
        if isinstance(callback, stock.EarlyStopping) and monitor in EVALUATION_METRICS:
            # An epoch may end early and without a validation.
            callback._check_on_train_epoch_end = False
        if isinstance(callback, stock.DeviceStatsMonitor) and not find_spec("psutil"):
            raise UserError(f"trainer.callbacks: {name} needs psutil: pip install psutil")
    for plugin in as_list(given.get("plugins", [])) if ours else ():
        if isinstance(plugin, CheckpointIO) and not isinstance(plugin, DurableCheckpointIO):
            raise UserError(
                f"trainer.plugins: {type(plugin).__name__} would write checkpoints without their "
                "digests: leave it out"
            )


def check_callbacks_of_ranks(callbacks: list[L.Callback]) -> None:
    """Check that each callback can do its work on several ranks."""
    for callback in callbacks:
        for kind, reason in UNSUPPORTED_ON_RANKS.items():
            theirs = isinstance(callback, getattr(stock, kind))
            if theirs and getattr(callback, "save_on_exception", True):  # ModelCheckpoint has it
                raise UserError(f"trainer.callbacks: {type(callback).__name__} {reason}")


def changed_arguments(callbacks: list[L.Callback], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that Lightning gets instead of those that were given."""
    changes: dict[str, Any] = {}
    if given.get("strategy") == "single_device":  # Lightning's is the CPU whatever the accelerator
        changes = {"strategy": "auto", "devices": 1}
    if given.get("strategy") == "fsdp2":
        from gpt_lightning.training.sharding import ShardedStrategy  # not for whole models

        changes = {"strategy": ShardedStrategy()}
    bars = [callback for callback in callbacks if isinstance(callback, stock.ProgressBar)]
    if len(bars) > 1 or given.get("enable_progress_bar") is False:  # the user's bar, or none
        callbacks = [callback for callback in callbacks if not isinstance(callback, StepProgress)]
    if any(isinstance(callback, RunCheckpoint) for callback in callbacks):
        # Lightning's own would be in addition to ours
        theirs = [callback for callback in callbacks if isinstance(callback, stock.Checkpoint)]
        if theirs and given.get("enable_checkpointing") is False:
            raise UserError(
                "trainer.enable_checkpointing is false, and trainer.callbacks has "
                f"{type(theirs[0]).__name__}: leave out one of the two"
            )
        changes["enable_checkpointing"] = bool(theirs)
    return changes | {"callbacks": callbacks}
