"""fit, validate, test and predict: LightningCLI over GPTModule and TokenDataModule."""

from collections.abc import Callable
from contextvars import copy_context
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import lightning as L
import torch
from jsonargparse import capture_parser
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gpt_lightning import parsing, removed
from gpt_lightning.errors import (
    CONTINUE,
    MemoryExhaustedError,
    PeerError,
    UserError,
    is_out_of_memory,
)
from gpt_lightning.hardware import distributed as ranks
from gpt_lightning.hardware.device import version
from gpt_lightning.hardware.precision import resolve_precision
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.runs.logger import RunEvents, RunLogger, continue_logger
from gpt_lightning.runs.settings import TaskSettings
from gpt_lightning.training.callbacks import EVERY_RUN
from gpt_lightning.training.callbacks.report import RunReport
from gpt_lightning.training.callbacks.samples import write_text
from gpt_lightning.training.datamodule import DEFAULT_SEED, TokenDataModule
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.process import quiet_process
from gpt_lightning.training.steps import check_accumulation, find_callback, run_folder
from gpt_lightning.training.trainer import Trainer, as_list, construction_error

COMPILERS = ("torch._dynamo.", "torch._inductor.")  # modules of errors of torch.compile


class TrainingParser(parsing.OneLineParser, LightningArgumentParser):
    """Parser of Lightning with errors of one line, which reads runs of earlier versions."""

    def parse_string(self, cfg_str: str, *args: Any, **kwargs: Any) -> Any:
        return super().parse_string(removed.edited(cfg_str), *args, **kwargs)


class SaveConfig(SaveConfigCallback):
    """Write config.yaml when the work begins, so that a command with an error leaves no folder."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        pass

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = run_folder(trainer)
        if trainer.is_global_zero and folder is not None:
            path = folder / self.config_filename
            self.parser.save(self.config, path, skip_none=False, overwrite=True, multifile=False)

    on_validation_start = on_predict_start = on_test_start

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_test_start(trainer, pl_module)
        folder = run_folder(trainer)
        if trainer.is_global_zero and folder is not None:
            command = parsing.shell_command(getattr(trainer, "argv", []))
            software = f"gpt_lightning {version()}, torch {torch.__version__}"
            settings = (folder / self.config_filename).read_text(encoding="utf-8")
            write_text(trainer, "run/config", f"# {command}\n# {software}\n{settings}")


class GPTCLI(LightningCLI):
    """LightningCLI with our classes, the callbacks of every run, and a run folder by name.

    The methods are in the order in which LightningCLI calls them:

    1. add_arguments_to_parser: keys in addition to those of the classes;
    2. parse_arguments, then _parse_ckpt_path: files and flags become `self.config`;
    3. before_instantiate_classes: `auto`, `--resume` and `--ckpt_path` are resolved;
    4. instantiate_trainer, with the logger, plugins and callbacks of the run;
    5. after_instantiate_classes: module and data exist, nothing has run;
    6. _run_subcommand: Trainer.fit, validate, test or predict.

    Args:
        args: Arguments of LightningCLI.
        folder: Folder of the run; None: a new one, lightning_logs/RUN_NAME/version_N.
        kwargs: Keyword arguments of LightningCLI.
    """

    def __init__(self, *args: Any, folder: Path | None = None, **kwargs: Any) -> None:
        self.run_folder = folder  # given, or the folder of the run that is resumed
        self.ckpt_path: Path | None = None  # found by --resume, or given
        self.resume_step: int | None = None  # None: a new run
        self.resume_rows: int | None = None  # rows of metrics.jsonl at that step
        self.argv: list[str] = kwargs["args"]  # TensorBoard's text run/config has it
        super().__init__(*args, **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # a static method there
        """Return the command that runs, as the parser of each takes 60 ms; all of them for help."""
        known = super().subcommands()
        return known if "--help" in self.argv else {self.argv[0]: known[self.argv[0]]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for key, name in EVERY_RUN.items():
            callback = resolve_name(f"gpt_lightning.training.callbacks.{name}")
            parser.add_lightning_class_args(callback, key)
        parser.add_class_arguments(TaskSettings, "evaluation")
        parser.add_argument(
            "--run_name",
            type=str | None,
            default=None,
            help="Run folder: lightning_logs/RUN_NAME/version_N; null: the configuration's name.",
        )
        parser.add_argument(
            "--resume",
            type=str,
            default="never",
            help="Only for fit. never: start a new run. auto: continue the newest run of this "
            "name from its newest undamaged checkpoint, or start a new run if there is none. "
            "A path: continue this run folder, the newest run of this folder, or this checkpoint "
            "in its run folder.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        removed.check_options(args)
        args = parsing.resolve_configs(args, parsing.known_keys(parser)[0])
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand]
        # config.yaml of a run has the ckpt_path that the run began with; a flag is newer
        begins = any(arg.partition("=")[0] == "--ckpt_path" for arg in args) and config.ckpt_path
        if begins and config.resume not in ("auto", "never") and self.config.subcommand == "fit":
            raise UserError(
                f"--resume {config.resume} continues a run, and --ckpt_path {begins} begins a new "
                "one from a checkpoint: leave out one of the two"
            )
        seed = config.seed_everything
        if seed is not True and not 0 <= seed < 2**32:
            raise UserError(f"seed_everything is {seed}; expected an integer from 0 to 4294967295")

    def _parse_ckpt_path(self) -> None:
        # In Lightning a checkpoint's hyperparameters override the command line, and classes that
        # the file names are imported (PL#21455). Here configuration comes from files and flags
        # alone.
        pass

    def before_instantiate_classes(self) -> None:
        config = self.config[str(self.subcommand)]
        trainer = config.trainer
        config.run_name = self.run_name()  # config.yaml has it, to run it again
        self.runs = Path(trainer.default_root_dir or ".") / "lightning_logs"
        for line in ranks.take_world(trainer, self.argv):
            rank_zero_only(print)(line)
        resolve_precision(trainer)
        if config.model.network is not None:
            beside = [Path(path).absolute().parent for path in config.config or []]
            config.model.network = config.model.network.located(beside)
        for callback in as_list(trainer.callbacks or []):
            for key, value in callback.get("init_args", {}).items():
                if isinstance(value, Enum):  # Timer's default, which config.yaml cannot hold
                    callback.init_args[key] = value.value
        check_accumulation(trainer.accumulate_grad_batches, trainer.val_check_interval)
        self.mirrored = self.subcommand == "fit" and config.checkpoint.folder is not None
        if self.mirrored:
            from gpt_lightning.runs import mirror  # most runs do not need it

            if trainer.enable_checkpointing is False or not config.checkpoint.enabled:
                raise UserError(
                    "checkpoint.folder is for copies of checkpoints, and this run saves none: "
                    "leave it out, or turn trainer.enable_checkpointing and checkpoint.enabled on"
                )
            mirror.check_folder(config.checkpoint.folder, self.runs)
            if config.resume == "auto":
                mirror.restore(config.checkpoint.folder, self.runs / config.run_name)
        if config.resume != "never":
            self._resume(config)
        if self.ckpt_path is None and config.ckpt_path is not None:
            from gpt_lightning.runs.sources import find_model  # not for runs from random weights

            self.ckpt_path = find_model(config.ckpt_path)
            config.ckpt_path = str(self.ckpt_path)
            checkpoint = read_checkpoint(self.ckpt_path)  # raises before anything is built
            if self.subcommand == "fit" and not checkpoint.can_resume:
                raise UserError(
                    f"{self.ckpt_path} has no optimizer's state: give it as --model.init_from"
                )
        if self.ckpt_path is None and self.subcommand != "fit" and config.model.init_from is None:
            raise UserError(
                f"{self.subcommand} has no model: give a run, `{self.subcommand} "
                "lightning_logs/NAME`, or --ckpt_path with a checkpoint or a run folder"
            )

    def _resume(self, config: Any) -> None:
        """Find the run and the checkpoint that `--resume` continues.

        config.yaml names neither of them, so that it can start or continue the run again.
        """
        if self.subcommand != "fit":
            raise UserError(
                f"--resume is for fit: give {self.subcommand} --resume never, and --ckpt_path with "
                "a checkpoint or a run folder"
            )
        from gpt_lightning.runs import resume  # only a resume needs it

        found, self.run_folder = resume.find(config.resume, self.runs / config.run_name)
        config.resume = "never"
        if found is not None:
            checkpoint = read_checkpoint(found)
            self.ckpt_path, self.resume_step = found, checkpoint.step
            self.resume_rows = checkpoint.record.metrics_rows
        elif self.run_folder is not None:  # killed before its first checkpoint
            self.resume_step = 0

    def run_name(self) -> str:
        """Return --run_name, else the name of the first configuration file, else gpt."""
        config = self.config[str(self.subcommand)]
        stem = Path(config.config[0]).stem if config.config else "gpt"
        name: str = config.run_name or stem
        plain = name.isprintable() and name == name.strip() and name != ".."
        if name != Path(name).name or not plain:
            raise UserError(
                f"--run_name {name!r}: give a folder's name, without /, .., control characters or "
                "space at its ends"
            )
        return name

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = self.config_init[str(self.subcommand)]
        kwargs["logger"] = self._loggers(config)
        chosen = as_list(config.trainer.plugins or [])
        environment = ranks.environment(config.trainer.num_nodes, chosen)
        kwargs["plugins"] = [*chosen, *environment, DurableCheckpointIO()]
        if config.trainer.enable_checkpointing is False:  # StopSignals still ends the run
            config.checkpoint.enabled = False
        trainer = super().instantiate_trainer(**kwargs)
        if config.evaluation.tasks is not None and self.subcommand == "fit":
            from gpt_lightning.training.callbacks.samples import EvaluateTasks

            trainer.callbacks.append(EvaluateTasks(config.evaluation))  # type: ignore[attr-defined]
        ranks.check_group(trainer.world_size)
        ranks.supervise(trainer.strategy)
        trainer.argv = self.argv  # type: ignore[attr-defined]
        return trainer

    def _loggers(self, config: Any) -> list[Logger]:
        """Return TensorBoard's logger or the loggers of trainer.logger, and the run's own."""
        kind = "version" if self.subcommand == "fit" else str(self.subcommand)
        runs = self.runs / config.run_name if self.run_folder is None else self.run_folder.parent
        claim: Callable[[Path], bool] | None = None
        if self.mirrored and config.checkpoint.enabled and not config.trainer.fast_dev_run:
            from gpt_lightning.runs.mirror import mirror_of

            def claim(folder: Path) -> bool:
                return mirror_of(config.checkpoint.folder, folder).claim(folder)

        run = RunLogger(runs, kind, self.run_folder, self.resume_step, self.resume_rows, claim)
        setting = config.trainer.logger
        if setting is None or isinstance(setting, bool):
            return [run] if setting is False else [RunEvents(run), run]
        return [*as_list(setting), run]

    def after_instantiate_classes(self) -> None:
        for logger in self.trainer.loggers:
            continue_logger(logger, self.resume_step)
        freezing = find_callback(self.trainer, BaseFinetuning)
        if freezing is not None and self.model.settings.optimizer == "muon":
            raise UserError(
                f"trainer.callbacks: {type(freezing).__name__} adds parameter groups, which "
                "model.optimizer muon does not take: use model.optimizer adamw"
            )
        config = self.config_init[str(self.subcommand)]
        config["weights_only"] = True  # loading runs no code
        config["ckpt_path"] = None if self.ckpt_path is None else str(self.ckpt_path)

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except Exception as error:
            if type(error).__module__.startswith(COMPILERS):
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                reason = [line for line in lines[2:] if "error:" in line][:1]  # a compiler's own
                raise UserError(
                    f"compiling the model failed ({type(error).__name__}: "
                    f"{' '.join([*lines[:2], *reason])}): set --model.compile false, or repair the "
                    "compiler that torch.compile uses"
                ) from error
            if ranks.is_lost_peer(error):
                ranks.leave_to_launcher(self.trainer)
                raise PeerError(f"the connection to another rank is lost; {CONTINUE}") from error
            if type(error).__module__.startswith("wandb."):  # no account, or no network
                raise UserError(
                    f"trainer.logger: {error} Without an account, set WANDB_MODE=offline"
                ) from error
            if not is_out_of_memory(error):
                raise
            from gpt_lightning.training.memory_advice import out_of_memory_line

            line = out_of_memory_line(subcommand, self.trainer, self.model, self.datamodule)
            raise MemoryExhaustedError(line) from error


def run(argv: list[str]) -> None:
    """Run `fit ...`, `validate ...`, `test ...`, `predict ...` or `resume ...`."""
    wanted = [arg for arg in argv if arg in ("-h", "--help") or arg.startswith("--help=")]
    if argv[0] == "fit" and argv[1:] and argv[1] in parsing.config_names():
        raise UserError(f"unknown argument {argv[1]!r}: did you mean '--config {argv[1]}'?")
    if argv[0] != "fit":
        from gpt_lightning.training import rerun  # not for fit

        print(rerun.__doc__ if wanted else "", end="")
        argv = ["fit"] if wanted and argv[0] == "resume" else rerun.with_run(argv)
    if wanted:
        from gpt_lightning.training.help import help_text  # only help needs it

        print(help_text(training_parser(), argv[0], wanted[0].partition("=")[2]))
    else:
        run_cli(argv)


def run_cli(
    argv: list[str], callbacks: list[L.Callback] | None = None, folder: Path | None = None
) -> GPTCLI:
    """Run a training command and return its CLI, with the trainer, the model and the data.

    Args:
        argv: Arguments of the command line, `fit` first.
        callbacks: Callbacks instead of the banner and summary.
        folder: Folder of the run; None: a new one, lightning_logs/RUN_NAME/version_N.

    Raises:
        UserError: Settings, data or files are wrong.
        MemoryExhaustedError: The run needs more memory than there is.
    """
    try:
        # jsonargparse keeps its last parser in a context variable, and the parser the model
        with quiet_process():
            return copy_context().run(
                GPTCLI,
                GPTModule,
                TokenDataModule,
                trainer_class=Trainer,
                args=argv,
                folder=folder,
                save_config_callback=SaveConfig,
                trainer_defaults={
                    "num_sanity_val_steps": 0,
                    "use_distributed_sampler": False,  # TrainLoader reads its rank's share
                    "enable_model_summary": False,  # the banner has it
                    "log_every_n_steps": 10,
                    "callbacks": default_callbacks(argv[0]) if callbacks is None else callbacks,
                },
                seed_everything_default=DEFAULT_SEED,
                parser_class=TrainingParser,
                parser_kwargs={"prog": "gpt-lightning"},
                auto_configure_optimizers=False,
            )
    except MisconfigurationException as error:
        raise UserError(str(error)) from error
    except (ValueError, ModuleNotFoundError) as error:  # a constructor's, of a logger or a callback
        reason = construction_error(error)
        if isinstance(error, UserError) or reason is None:
            raise
        raise reason from error


def default_callbacks(subcommand: str) -> list[L.Callback]:
    """Return the banner and summary, and for predict the file of losses."""
    if subcommand != "predict":
        return [RunReport()]
    from gpt_lightning.training.callbacks.token_losses import TokenLosses

    return [RunReport(), TokenLosses()]


def training_parser() -> LightningArgumentParser:
    """Return the parser of the four training commands, without running one."""
    parser = capture_parser(lambda: run_cli(["fit", "--help"]))
    assert isinstance(parser, LightningArgumentParser)
    return parser
