"""Trainer: Lightning's Trainer, whose arguments are checked before anything is written.

docs/lightning.md lists each argument, stock callback and logger with its verdict. An argument that
Lightning accepts, but would handle wrongly in a run of ours, is an error here. Lightning's own
errors about arguments become user errors.
"""

import re
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _OUT_DICT
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from gpt_lightning.errors import UserError, one_line
from gpt_lightning.files import Fields, yaml_beside
from gpt_lightning.parsing import nearest, pick
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.runs.logger import GLOBAL_STEP
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.report import StepProgress
from gpt_lightning.training.ranks import NO_COMMAND
from gpt_lightning.training.sharding import ShardedStrategy

EVALUATION_METRICS = ("val/loss", "val/perplexity", "val/bits_per_byte", "train/eval_loss")
STEP_METRICS = ("train/loss", "optim/grad_norm", "optim/lr")  # logged at log steps
DURATION = r"\d+:\d\d:\d\d:\d\d"
UNITS = {"weeks", "days", "hours", "minutes", "seconds", "milliseconds"}
DEVICES = r"auto|-1|[1-9]\d*|\[\d+(, ?\d+)*\]|\d+(, ?\d+)+"  # "0" alone is no device
ARGUMENT_ERRORS = (TypeError, ValueError, RuntimeError, ImportError, MisconfigurationException)
# limits of arguments and callbacks, and the reasons
TABLES: Any = yaml_beside(__file__)


class GlobalStepConnector(_LoggerConnector):
    """Logs the rows of a fit at trainer.global_step, in every logger: the first step is 1.

    Lightning's own x is one lower, also that of a validation's row. It takes another x from a
    metric named `step` only, which ModelCheckpoint then takes for the step of its files. RunLogger
    has the true step beside such a metric.
    """

    def log_metrics(self, metrics: _OUT_DICT, step: int | None = None) -> None:
        if step is None and self.trainer.state.fn == TrainerFn.FITTING:
            if "step" in metrics:
                metrics = {**metrics, GLOBAL_STEP: torch.tensor(self.trainer.global_step)}
            else:
                step = self.trainer.global_step
        super().log_metrics(metrics, step)


class Trainer(L.Trainer):
    """Lightning's Trainer with checked arguments, and precision auto.

    Args:
        precision: Precision of training. auto: the fastest that is safe on the device, resolved
            before the Trainer is made. null: 32-true.
        kwargs: Arguments of Lightning's Trainer.

    Raises:
        UserError: An argument has no meaning, or would silently have another effect.
    """

    def __init__(self, *, precision: str | int | None = None, **kwargs: Any):
        given = {key: value for key, value in kwargs.items() if value is not None}
        check_numbers({"check_val_every_n_epoch": 1} | kwargs)
        check_names(given | {"precision": precision})
        callbacks = as_list(given.get("callbacks", []))
        check_callbacks(callbacks, given)
        kwargs.update(changed_arguments(callbacks, given))
        try:
            super().__init__(precision=precision, **kwargs)  # type: ignore[arg-type]  # never auto
        except ARGUMENT_ERRORS as error:
            raise argument_error(error) from error
        self._logger_connector = GlobalStepConnector(self)
        if getattr(self.strategy, "_start_method", "popen") != "popen":  # Lightning's auto
            raise UserError(NO_COMMAND)
        # DDPStrategy's: gradients are views of the buckets, not copies
        getattr(self.strategy, "_ddp_kwargs", {}).setdefault("gradient_as_bucket_view", True)
        for callback in callbacks if self.world_size > 1 else ():
            if getattr(callback, "save_on_exception", True):  # ModelCheckpoint has it
                check_supported(callback, "unsupported_on_several_ranks")


def as_list(value: Any) -> list[Any]:
    """Return the value of an argument that accepts a list or a single object, as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def argument_error(error: Exception) -> UserError:
    """Return Lightning's error about an argument, without its advertisements, as a user error."""
    text = one_line(error)
    package = re.search(r"pip install (?:-U )?'?([\w.\[\]<>=-]+)", text)
    if package:
        needed = re.sub(r"[<>=].*", "", package[1])
        return UserError(f"trainer: {needed} is not installed: pip install '{package[1]}'")
    return UserError("trainer: " + re.sub(r"[^.]*https?://\S+", "", text).strip())


def construction_error(error: Exception) -> UserError | None:
    """Return the error of a callback's or a logger's constructor as a user error, if it is one.

    jsonargparse's message lists all types that it has tried.
    """
    text = one_line(error)
    if isinstance(error, ModuleNotFoundError) or "pip install" in text:
        return argument_error(error)
    tried = text.partition("Errors: - ")[2].split(" - ")
    reasons = [reason for reason in tried if not reason.startswith(("Expected", "Not a"))]
    names = re.findall(r"class_path='[\w.]*?(\w+)'", text)
    return UserError(f"trainer: {', '.join(names)}: {reasons[0]}") if names and reasons else None


def check_numbers(given: Fields) -> None:
    """Check that every number is within its bounds, and consistent with the others."""
    for key, least in TABLES["at_least"].items():
        value = given.get(key)
        if isinstance(value, int | float) and not value >= least:  # also nan
            raise UserError(f"trainer.{key} is {value}; it must be at least {least}")
    evaluates = given.get("num_sanity_val_steps") == -1  # the evaluation at step 0
    for key, fix in TABLES["not_zero"].items():
        may_be = given.get("fast_dev_run") or (evaluates and key == "max_steps")
        if given.get(key) == 0 and not may_be:
            raise UserError(f"trainer.{key} is 0{fix}")
    for unit in ("steps", "epochs"):
        low, high = given.get(f"min_{unit}") or 0, given.get(f"max_{unit}")
        if high is not None and 0 <= high < low:
            raise UserError(f"trainer.min_{unit} {low} is above trainer.max_{unit} {high}")
    time = given.get("max_time")
    unknown = isinstance(time, dict) and not time.keys() <= UNITS
    if unknown or (isinstance(time, str) and not re.fullmatch(DURATION, time)):
        raise UserError(
            f"trainer.max_time is {time!r}; expected a time as DD:HH:MM:SS, such as 00:01:00:00 "
            "for an hour, or as a mapping such as {hours: 1}"
        )


def check_names(given: Fields) -> None:
    """Check the strategy, the devices, and other arguments whose values are names."""
    strategy, devices = given.get("strategy", "auto"), given.get("devices", "auto")
    if not isinstance(strategy, str):  # other start methods would start ranks without a command
        ours = isinstance(strategy, DDPStrategy | SingleDeviceStrategy)
        usable = ours and getattr(strategy, "_start_method", None) in (None, "popen")
        given = given | {"strategy": "auto" if usable else type(strategy).__name__}
    for key, choices in TABLES["choices"].items():
        word = given.get(key)
        if isinstance(word, str) and word not in choices:
            raise UserError(
                f"trainer.{key} is {word!r}; expected {', '.join(choices)}{nearest(word, choices)}"
            )
    if isinstance(devices, int | str) and not re.fullmatch(DEVICES, str(devices)):
        raise UserError(
            f"trainer.devices is {devices!r}; expected auto, a number of devices, -1 for all GPUs, "
            "or a list of GPUs such as [0,1]"
        )
    precisions = TABLES["precisions_of_fsdp2"]
    if strategy == "fsdp2" and (name := str(given.get("precision"))) not in precisions:
        raise UserError(
            f"trainer.precision {name} does not run with trainer.strategy fsdp2: set it to "
            f"{' or '.join(precisions[:2])}"
        )
    for key, reason in TABLES["unsupported_arguments"].items():
        if given.get(key):
            raise UserError(f"trainer.{key} {reason}")


def check_supported(callback: L.Callback, table: str) -> None:
    """Raise a UserError for a callback whose class, or base class, a table of reasons names."""
    for kind, reason in TABLES[table].items():
        if isinstance(callback, getattr(stock, kind)):
            raise UserError(f"trainer.callbacks: {type(callback).__name__} {reason}")


def check_callbacks(callbacks: list[L.Callback], given: Fields) -> None:
    """Check that each callback can do its work in a run of ours."""
    if not any(isinstance(callback, RunCheckpoint) for callback in callbacks):
        return
    for callback in callbacks:
        check_supported(callback, "unsupported_callbacks")
        if given.get("strategy") == "fsdp2":
            check_supported(callback, "unsupported_under_fsdp2")
        if isinstance(callback, stock.EarlyStopping) and callback.monitor in EVALUATION_METRICS:
            # An epoch may end early and without a validation.
            callback._check_on_train_epoch_end = False
    for plugin in as_list(given.get("plugins", [])):
        if isinstance(plugin, CheckpointIO) and not isinstance(plugin, DurableCheckpointIO):
            raise UserError(
                f"trainer.plugins: {type(plugin).__name__} would write checkpoints without their "
                "digests: leave it out"
            )


def check_monitors(callbacks: list[L.Callback], log_steps: bool, *others: Any) -> None:
    """Check that callbacks monitor metrics of ours, unless others may log metrics of their own.

    Args:
        callbacks: Callbacks of a run.
        log_steps: True if there are log steps.
        others: Module and data of the run.
    """
    metrics = EVALUATION_METRICS + (STEP_METRICS if log_steps else ())
    origins = {type(each).__module__.partition(".")[0] for each in (*callbacks, *others)}
    for callback in callbacks if origins <= {"lightning", "gpt_lightning"} else ():
        if isinstance(monitor := getattr(callback, "monitor", None), str):
            pick(monitor, metrics, f"trainer.callbacks: {type(callback).__name__} monitors")


def changed_arguments(callbacks: list[L.Callback], given: Fields) -> Fields:
    """Return the arguments that Lightning gets instead of those that were given."""
    changes: Fields = {}
    if given.get("strategy") == "fsdp2":
        changes = {"strategy": ShardedStrategy()}
    bars = [callback for callback in callbacks if isinstance(callback, stock.ProgressBar)]
    if len(bars) > 1 or given.get("enable_progress_bar") is False:  # the user's bar, or none
        callbacks = [callback for callback in callbacks if not isinstance(callback, StepProgress)]
    if any(isinstance(callback, RunCheckpoint) for callback in callbacks):
        # Lightning's own would be in addition to ours
        theirs = any(isinstance(callback, stock.Checkpoint) for callback in callbacks)
        changes["enable_checkpointing"] = theirs and given.get("enable_checkpointing", True)
    return changes | {"callbacks": callbacks}
