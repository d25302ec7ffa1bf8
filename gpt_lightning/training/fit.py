"""fit, validate, test and predict: LightningCLI over GPTModule and TokenDataModule."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
from jsonargparse import capture_parser, set_parsing_settings
from lightning.fabric.connector import _PRECISION_INPUT
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch._dynamo.exc import TorchDynamoException

from gpt_lightning.errors import MemoryExhaustedError, UserError, is_out_of_memory
from gpt_lightning.hardware import distributed as ranks
from gpt_lightning.hardware.precision import resolve_precision
from gpt_lightning.parsing import OneLine, config_paths, resolve_configs
from gpt_lightning.runs.checkpoint import (
    Checkpoint,
    differences,
    find_checkpoint,
    newest_checkpoint,
    newest_run,
    read_checkpoint,
    saved_checkpoints,
)
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO, check_digest
from gpt_lightning.runs.logger import RunLogger
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.progress import StepProgress
from gpt_lightning.training.callbacks.report import RunReport
from gpt_lightning.training.callbacks.samples import SampleText
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.callbacks.token_losses import TokenLosses
from gpt_lightning.training.datamodule import DEFAULT_SEED, TokenDataModule
from gpt_lightning.training.memory_advice import out_of_memory_line
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.step_shape import check_accumulation

# callbacks that every run has; their arguments are keys of their own
FORCED_CALLBACKS: dict[str, type[L.Callback]] = {
    "speed": SpeedMonitor,
    "progress": StepProgress,
    "samples": SampleText,
    "checkpoint": RunCheckpoint,
}


class TrainingParser(OneLine, LightningArgumentParser):
    """Lightning's parser with errors of one line."""


class Trainer(L.Trainer):
    """Lightning's Trainer with one more value of an argument, for the parser.

    Args:
        precision: Precision of training. auto: the fastest that is safe on the device, resolved
            before the Trainer is made. null: 32-true.
        kwargs: Arguments of Lightning's Trainer.
    """

    def __init__(
        self, *, precision: _PRECISION_INPUT | Literal["auto"] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(precision=precision, **kwargs)  # type: ignore[arg-type]  # never auto


class SaveConfig(SaveConfigCallback):
    """Writes config.yaml when the work begins, so that a run that is refused leaves no folder."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        pass

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().setup(trainer, pl_module, "validate")

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().setup(trainer, pl_module, "test")

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().setup(trainer, pl_module, "predict")


class GPTCLI(LightningCLI):
    """LightningCLI with our classes, the callbacks of every run, and a run folder by name.

    Args:
        logger: Says where the run lands; None: in lightning_logs/RUN_NAME/version_N.
    """

    def __init__(self, *args: Any, logger: RunLogger | None = None, **kwargs: Any) -> None:
        self.run_logger = logger
        self.resumed: Path | None = None  # the checkpoint that the run goes on from
        self.run_folder: Path | None = None  # the run that goes on
        super().__init__(*args, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for key, callback in FORCED_CALLBACKS.items():
            parser.add_lightning_class_args(callback, key)
        parser.add_argument(
            "--run_name",
            type=str | None,
            default=None,
            help="Runs land in lightning_logs/RUN_NAME/version_N; null: the configuration's name.",
        )
        parser.add_argument(
            "--resume",
            type=str,
            default="never",
            help="fit: never: a new run folder. auto: go on with the newest run of this name from "
            "its newest whole checkpoint, if there is one. Or a run folder or checkpoint to go on "
            "from, in its folder.",
        )

    def _parse_ckpt_path(self) -> None:
        # Lightning's lets a checkpoint's hyperparameters win over the command line and imports
        # classes that the file names (PL#21455). Ours does neither: configuration comes from files
        # and flags alone.
        pass

    def before_instantiate_classes(self) -> None:
        config = self.config[str(self.subcommand)]
        config.run_name = self.run_name()  # in config.yaml, for whoever runs it again
        resolve_precision(config.trainer)
        check_accumulation(
            config.trainer.accumulate_grad_batches, config.trainer.val_check_interval
        )
        if config.resume != "never":
            self.resumed = self._resumed_checkpoint(config)
            config.ckpt_path = None if self.resumed is None else str(self.resumed)
        elif config.ckpt_path:
            config.ckpt_path = str(find_checkpoint(Path(config.ckpt_path)))
        elif self.subcommand != "fit" and config.model.init_from is None:
            raise UserError(
                f"{self.subcommand} of what? give --ckpt_path CHECKPOINT, or a run folder"
            )

    def _resumed_checkpoint(self, config: Any) -> Path | None:
        """What --resume means; None: there is nothing to go on from."""
        if self.subcommand != "fit" or config.ckpt_path:
            raise UserError("--resume is for fit, without --ckpt_path: give one of the two")
        if config.trainer.logger is False:
            raise UserError("--resume needs a run folder: leave out --trainer.logger false")
        auto = config.resume == "auto"
        path = self._runs_folder(config) / config.run_name if auto else Path(config.resume)
        if path.is_file():
            return self._resumed_file(path)
        run = newest_run(path)
        found = newest_checkpoint(run)
        if found is None and not auto:
            raise UserError(
                f"--resume {path}: no whole checkpoint there; give a checkpoint, a run folder, or "
                "auto"
            )
        if found is None and saved_checkpoints(run / "checkpoints"):
            raise UserError(
                f"--resume auto: no checkpoint of {run} is whole: restore one, or begin a new run "
                "with --resume never"
            )
        if found is None:
            print(f"resume      no checkpoint in {run}: starting at step 0")
        self.run_folder = run if run != path or found is not None else None
        return found

    def _resumed_file(self, path: Path) -> Path:
        check_digest(path)
        if path.resolve().parent.name != "checkpoints":
            raise UserError(
                f"--resume {path} is in no run's folder checkpoints/: begin a new run from it with "
                "--ckpt_path"
            )
        self.run_folder = path.resolve().parent.parent
        return path

    @staticmethod
    def _runs_folder(config: Any) -> Path:
        return Path(config.trainer.default_root_dir or ".") / "lightning_logs"

    def after_instantiate_classes(self) -> None:
        self.config_init[str(self.subcommand)]["weights_only"] = True  # loading runs no code
        ckpt_path = self.config_init[str(self.subcommand)].ckpt_path
        if ckpt_path:
            checkpoint = read_checkpoint(Path(ckpt_path))
            module = self.model
            checkpoint.check_fits(module.config, module.settings.optimizer, module.settings.decay)
            print_resumption(Path(ckpt_path), checkpoint, self.model)
            if self.subcommand != "fit":  # fit says it as it loads: GPTModule._compare_run
                trained = checkpoint.facts.get("machine", {})
                for line in differences(trained, {"precision": str(self.trainer.precision)}):
                    print(f"changed     {line}")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = self.config_init[str(self.subcommand)]
        if self.run_logger is not None:
            kwargs["logger"] = self.run_logger
        elif config.trainer.logger in (None, True):
            kwargs["logger"] = self._make_logger(config)
        chosen = plugins(config.trainer.plugins)
        meeting = ranks.environment(config.trainer.num_nodes, chosen)
        kwargs["plugins"] = [*chosen, *meeting, DurableCheckpointIO()]
        # Lightning refuses "off" for what is among the callbacks
        callback_keys = self._parser(self.subcommand).callback_keys
        if config.trainer.enable_progress_bar is False:
            callback_keys.remove("progress")
        if config.trainer.enable_checkpointing is False:  # its signals are still answered
            config.checkpoint.enabled = False
        kwargs["enable_checkpointing"] = False  # Lightning's own, beside ours
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, ZeroDivisionError) as error:  # Trainer's own checks of its arguments
            raise UserError(f"trainer: {error}") from error

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except TorchDynamoException as error:
            raise UserError(
                f"compiling the model failed ({first_line(error)}): set --model.compile false, or "
                "mend the C++ compiler that torch.compile uses"
            ) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            line = out_of_memory_line(subcommand, self.trainer, self.model, self.datamodule)
            raise MemoryExhaustedError(line) from error

    def _make_logger(self, config: Any) -> RunLogger:
        if self.run_folder is None:
            return RunLogger(str(self._runs_folder(config)), name=config.run_name)
        run = self.run_folder
        step = 0 if self.resumed is None else read_checkpoint(self.resumed).step
        return RunLogger(str(run.parent.parent), run.parent.name, run.name, resume_step=step)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.argv: list[str] = args
        super().parse_arguments(parser, args)
        seed = self.config[self.config.subcommand].seed_everything
        if seed is not True and seed < 0:
            raise UserError(f"--seed_everything is {seed}; it must be at least 0")

    def run_name(self) -> str:
        """--run_name, else the first configuration file's name, else gpt."""
        name: str | None = self.config[str(self.subcommand)].run_name
        if name is not None and name != Path(name).name:
            raise UserError(f"--run_name {name}: give a folder's name, without / or ..")
        stems = [path.stem for path in config_paths(self.argv)]
        return name or next(iter(stems), "gpt")


def first_line(error: BaseException) -> str:
    """An error's name and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def plugins(setting: Any) -> list[Any]:
    """Trainer's plugins as a list."""
    return [] if setting is None else setting if isinstance(setting, list) else [setting]


def print_resumption(path: Path, checkpoint: Checkpoint, module: GPTModule) -> None:
    """Says where a run goes on, and what is set otherwise than in the checkpoint."""
    position = checkpoint.facts.get("position", {})
    where = [f"step {checkpoint.step:,}"]
    where += [] if checkpoint.tokens is None else [f"{checkpoint.tokens:,} tokens"]
    where += [f"{key} {value:,}" for key, value in position.items()]
    print(f"resume      {path}: {', '.join(where)}")
    for line in differences(checkpoint.hyperparameters, module.hyperparameters()):
        print(f"changed     model.{line}")


def run(
    argv: list[str],
    callbacks: Sequence[L.Callback] | None = None,
    logger: RunLogger | None = None,
) -> None:
    """Run `fit ...`, `validate ...`, `test ...` or `predict ...`; arguments as make_cli's."""
    run_cli(argv, callbacks, logger)


def run_cli(
    argv: list[str],
    callbacks: Sequence[L.Callback] | None = None,
    logger: RunLogger | None = None,
) -> GPTCLI:
    """Run a training command and return its CLI, with the trainer, the model and the data."""
    argv = resolve_configs(argv)
    quiet_lightning()
    try:
        return make_cli(argv, callbacks, logger)
    except MisconfigurationException as error:
        raise UserError(str(error)) from error


def make_cli(
    argv: list[str],
    callbacks: Sequence[L.Callback] | None = None,
    logger: RunLogger | None = None,
) -> GPTCLI:
    """Parses the arguments of a training command and runs it.

    Args:
        argv: As on the command line, `fit` first.
        callbacks: Instead of the banner and summary.
        logger: As GPTCLI's.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)  # runs/settings.py's help
    return GPTCLI(
        GPTModule,
        TokenDataModule,
        trainer_class=Trainer,
        args=argv,
        logger=logger,
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,  # TrainLoader knows its rank
            "enable_model_summary": False,  # the banner says it
            "log_every_n_steps": 10,
            "callbacks": [RunReport(), TokenLosses()] if callbacks is None else list(callbacks),
        },
        seed_everything_default=DEFAULT_SEED,
        parser_class=TrainingParser,
        parser_kwargs={"prog": "gpt-lightning", "allow_abbrev": False}
        | {name: {"allow_abbrev": False} for name in LightningCLI.subcommands()},
        auto_configure_optimizers=False,
    )


def training_parser() -> LightningArgumentParser:
    """The parser of the four training commands, without running one."""
    parser = capture_parser(lambda: make_cli(["fit"]))
    assert isinstance(parser, LightningArgumentParser)
    return parser


def quiet_lightning() -> None:
    """Keeps back what the banner says better, and advice that does not apply."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "LightningCLI's args parameter",  # main() takes arguments so that tests can call it
        ".*does not have many workers",  # reading a memory map is not what a step waits for
        "The dirpath has changed",  # a resumed run has a folder of its own
        ".*LeafSpec.* is deprecated",  # Lightning's own use of PyTorch
        "Total length of `list` across ranks is zero",  # a dataset without a validation split
    ):
        warnings.filterwarnings("ignore", message=message)
