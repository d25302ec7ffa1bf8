"""TrainingCLI: LightningCLI over GPTModule and TokenDataModule, for fit and evaluations."""

import logging
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from enum import Enum
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import torch
import yaml
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gpt_lightning import errors, parsing
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, write_atomic
from gpt_lightning.hardware.device import machine_record, version
from gpt_lightning.hardware.precision import resolve_precision
from gpt_lightning.remote.attempts import on_file_system
from gpt_lightning.runs import mirror
from gpt_lightning.runs.checkpoint import RunRecord, read_checkpoint
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.runs.folders import RunPaths, run_folders
from gpt_lightning.runs.logger import RunEvents, RunLogger, continue_logger
from gpt_lightning.runs.settings import RunSettings
from gpt_lightning.training import ranks, run_state, step_shape
from gpt_lightning.training import trainer as ours
from gpt_lightning.training.between_steps import with_hook
from gpt_lightning.training.callbacks import EVERY_RUN
from gpt_lightning.training.callbacks.report import RunReport
from gpt_lightning.training.callbacks.samples import write_text
from gpt_lightning.training.callbacks.signals import STOP_SIGNALS
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.datamodule import DEFAULT_SEED, TokenDataModule
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.trainer import TABLES, as_list, check_monitors, check_supported

TRAINER_DEFAULTS: Fields = {
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # TrainLoader reads its rank's share
    "enable_model_summary": False,  # the banner has it
    "log_every_n_steps": 10,
}
COMPILERS = ("torch._dynamo.", "torch._inductor.")  # modules of errors of torch.compile


class TrainingParser(parsing.OneLineParser, LightningArgumentParser):
    """Parser of Lightning with errors of one line."""


# ---- settings and the command line --------------------------------------------------------------


class SaveConfig(SaveConfigCallback):
    """Write config.yaml once, when the work begins: a command with an error leaves no folder.

    timeline.jsonl gets the settings of each session of training too, with the banner, the command,
    the commit and the machine; TensorBoard gets them with the command and the commit.
    """

    def __init__(self, *args: Any, argv: list[str], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.argv = argv
        self.text = ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pass

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not self.text:
            self.text = self.parser.dump(self.config, skip_none=False)
            if folder := run_state.run_folder(trainer):
                write_atomic(folder / self.config_filename, self.text.encode())

    on_validation_start = on_predict_start = on_test_start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_test_start(trainer, pl_module)
        speed = run_state.find_callback(trainer, SpeedMonitor)
        if speed and speed.timeline:
            banner = run_state.find_callback(trainer, RunReport)
            device = trainer.strategy.root_device
            facts = (banner.facts if banner else {}) | machine_record(self.argv, device)
            facts["devices"] = str(trainer.world_size)
            settings = yaml.safe_load(self.text)
            speed.timeline.write("settings", trainer.global_step, settings=settings, facts=facts)
        if trainer.is_global_zero:
            head = f"# {parsing.shell_command(self.argv)}\n# gpt_lightning {version()}\n"
            write_text(trainer, "run/config", head + self.text)


class TrainingCLI(LightningCLI):
    """LightningCLI with our classes, the callbacks of every run, and a run folder by name.

    The methods are in the order in which LightningCLI calls them:

    1. add_arguments_to_parser: keys in addition to those of the classes;
    2. parse_arguments, then _parse_ckpt_path: files and flags become `self.config`;
    3. before_instantiate_classes: `auto`, `--resume` and `--ckpt_path` are resolved;
    4. instantiate_trainer, with the logger, plugins and callbacks of the run;
    5. after_instantiate_classes: module and data exist, nothing has run;
    6. _run_subcommand: Trainer.fit, validate, test or predict.

    Args:
        model_class: GPTModule, or a subclass.
        datamodule_class: TokenDataModule, or a subclass.
        args: Arguments of the command line, `fit` first.
        callbacks: Callbacks instead of the banner and summary.
        folder: Folder of the run; None: a new one, lightning_logs/RUN_NAME/version_N.
        trainer_defaults: Arguments of the Trainer that files and flags replace; its `callbacks` are
            added to those of every run.

    Raises:
        UserError: Settings, data or files are wrong.
        MemoryExhaustedError: The run needs more memory than there is.
    """

    def __init__(
        self,
        model_class: type[GPTModule] = GPTModule,
        datamodule_class: type[TokenDataModule] = TokenDataModule,
        *,
        args: list[str],
        callbacks: list[Callback] | None = None,
        folder: Path | None = None,
        trainer_defaults: Fields | None = None,
    ):
        self.run_folder = folder  # given, or the folder of the run that is resumed
        self.ckpt_path: Path | None = None  # found by --resume, or given
        self.resume_step: int | None = None  # None: a new run
        self.resume_rows: int | None = None  # rows of metrics.jsonl at that step
        self.resume_record: RunRecord | None = None
        self.argv = args
        words = parsing.joined(args)
        self.configs = [w.removeprefix("--config=") for w in words if w.startswith("--config=")]
        self.classes = model_class, datamodule_class
        for kind, base in zip(self.classes, (GPTModule, TokenDataModule), strict=True):
            if not issubclass(kind, base):
                raise UserError(
                    f"{kind.__name__} is not a subclass of gpt_lightning.{base.__name__}"
                )
        defaults = TRAINER_DEFAULTS | (trainer_defaults or {})
        every_run = default_callbacks(args[0]) if callbacks is None else callbacks
        defaults["callbacks"] = [*every_run, *as_list(defaults.get("callbacks", []))]
        try:
            # jsonargparse keeps its last parser in a context variable, and the parser the model
            with quiet_process():
                copy_context().run(
                    super().__init__,
                    model_class,
                    datamodule_class,
                    trainer_class=ours.Trainer,
                    args=args,
                    save_config_callback=SaveConfig,
                    save_config_kwargs={"argv": args},
                    trainer_defaults=defaults,
                    seed_everything_default=DEFAULT_SEED,
                    parser_class=TrainingParser,
                    parser_kwargs={"prog": "gpt-lightning"},
                    auto_configure_optimizers=False,
                )
        except MisconfigurationException as error:
            text = str(error)
            if any("overfit_batches" in arg for arg in args):  # which sets both limits
                text = re.sub(r"limit_\w+(?=[`=])", "overfit_batches", text)
            raise UserError(text) from error
        except (ValueError, ModuleNotFoundError) as error:  # of a logger's or a callback's class
            reason = ours.construction_error(error)
            if isinstance(error, UserError) or reason is None:
                raise
            raise reason from error

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # a static method there
        """Return the command that runs, as the parser of each takes 60 ms; all of them for help."""
        known = super().subcommands()
        return known if "--help" in self.argv else {self.argv[0]: known[self.argv[0]]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for key, name in EVERY_RUN.items():
            callback = resolve_name(f"gpt_lightning.training.callbacks.{name}")
            parser.add_lightning_class_args(callback, key)
        known = parsing.known_keys(parser)[0]
        for kind, key in zip(self.classes, ("model.init_from", "data.dataset"), strict=True):
            if key not in known:
                raise UserError(
                    f"{kind.__name__}.__init__: take **settings and pass them to super().__init__"
                )
        parser.add_class_arguments(RunSettings, as_group=False, instantiate=False)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        args = parsing.resolve_configs(args, parsing.known_keys(parser)[0])
        if any(arg.startswith("--model.network.") for arg in args):
            raise UserError(
                "model.network is in parts: give '{class_path: my_gpt.MyGPT, init_args: {wide: 8}}'"
            )
        typed = parsing.typed_values(args)
        try:
            super().parse_arguments(parser, args)
        except UserError:  # the key may be of the class that has trained the run
            for key in ("ckpt_path", "resume"):
                path = Path(typed.get(key, ""))
                saved = [s.path for run in run_folders(path) for s in RunPaths(run).saved()]
                for file in [path] if path.is_file() else saved[:1]:
                    self._check_classes(file, read_checkpoint(file, check=False).record)
            raise
        config = self.config[self.config.subcommand]
        # config.yaml of a run has the ckpt_path that the run began with; a flag is newer
        begins = "ckpt_path" in typed and config.ckpt_path
        if begins and config.resume not in ("auto", "never") and self.config.subcommand == "fit":
            raise UserError(
                f"--resume {config.resume} continues a run, and --ckpt_path {begins} begins a new "
                "one from a checkpoint: leave out one of the two"
            )

    def _parse_ckpt_path(self) -> None:
        # Lightning lets a checkpoint's hyperparameters override the command line, and classes that
        # the file names are imported (PL#21455). Here configuration comes from files and flags
        # alone.
        pass

    def before_instantiate_classes(self) -> None:
        config = self.config[str(self.subcommand)]
        trainer = config.trainer
        config.run_name = self.run_name(config)  # config.yaml has it, to run it again
        self.runs = Path(trainer.default_root_dir or ".") / "lightning_logs"
        for line in ranks.take_world(trainer, self.argv):
            rank_zero_only(print)(line)
        resolve_precision(trainer)
        limit = f"limit_{str(self.subcommand).replace('validate', 'val')}_batches"
        if self.subcommand != "fit" and trainer[limit] == 0:
            raise UserError(f"trainer.{limit} is 0, which leaves no batch: set it to 1 or more")
        for callback in as_list(trainer.callbacks or []):
            for key, value in callback.get("init_args", {}).items():
                if isinstance(value, Enum):  # Timer's default, which config.yaml cannot hold
                    callback.init_args[key] = value.value
        if self.subcommand == "fit" and config.checkpoint.folder is not None:
            if trainer.enable_checkpointing is False or not config.checkpoint.enabled:
                raise UserError(
                    "checkpoint.folder is for copies of checkpoints, and this run saves none: "
                    "leave it out, or turn trainer.enable_checkpointing and checkpoint.enabled on"
                )
            on_file_system(config.checkpoint.folder)  # raises for a missing package
            if config.resume == "auto":
                mirror.restore(config.checkpoint.folder, self._name_folder(config))
        if config.resume != "never":
            self._resume(config)
        if not self.ckpt_path and config.ckpt_path is not None:
            from gpt_lightning.runs.sources import find_model  # not for runs from random weights

            self.ckpt_path = find_model(config.ckpt_path)
            config.ckpt_path = str(self.ckpt_path)
            checkpoint = read_checkpoint(self.ckpt_path)  # raises before anything is built
            self._check_classes(self.ckpt_path, checkpoint.record)
            if self.subcommand == "fit" and not checkpoint.can_resume:
                raise UserError(
                    f"{self.ckpt_path} has no optimizer's state: give it as --model.init_from"
                )
        if not self.ckpt_path and self.subcommand != "fit" and config.model.init_from is None:
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

        found, self.run_folder = resume.find(config.resume, self._name_folder(config))
        run, typed = self.run_folder, "run_name" in parsing.typed_values(self.argv)
        # no copy elsewhere
        inside = run and Path(os.path.abspath(run)).parents[1] == self.runs.absolute()
        if run and inside and typed and config.run_name != run.parent.name:
            raise UserError(f"--run_name has no effect on {run}: leave it out")
        if run and not typed:
            config.run_name = RunPaths(run).name_folder().resolve().name  # it may have been renamed
        config.resume = "never"
        if found:
            checkpoint = read_checkpoint(found)
            self._check_classes(found, checkpoint.record)
            self.ckpt_path, self.resume_step = found, checkpoint.step
            self.resume_record = checkpoint.record
            self.resume_rows = checkpoint.record.metrics_rows
        elif self.run_folder:  # killed before its first checkpoint
            self.resume_step = 0

    def _check_classes(self, path: Path, record: RunRecord) -> None:
        """Check that this command runs the classes of a checkpoint, or subclasses of them.

        Raises:
            UserError: It does not; the message names the script that does.
        """
        trained: dict[str, type] = {"model.class_path": self.classes[0]}
        if record.tokenizer:  # its data were a TokenDataModule's
            trained["data.class_path"] = self.classes[1]
        for key, kind in trained.items():
            theirs = str(record.run_identity.get(key, kind.__name__))
            name = theirs.rpartition(".")[2]
            if name not in [base.__name__ for base in kind.__mro__]:
                found = RunPaths.of_checkpoint(path)
                run = os.path.relpath(found.run if found else path)
                command = "resume" if self.argv[0] == "fit" else self.argv[0]
                again = f"a script with GPTCLI({name}), see docs/python.md"
                if record.script:
                    again = f"`{record.script} {command} {shlex.quote(run)}`"
                raise UserError(f"{run} was trained by {name}, a class of a script: use {again}")

    def run_name(self, config: Any) -> str:
        """Return --run_name, else the name of the first configuration file, else gpt."""
        first = self.configs[0] if self.configs else "gpt"
        name = config.run_name or Path(first).stem
        plain = name.isprintable() and name == name.strip() and name != ".."
        if name != Path(name).name or not plain:
            raise UserError(
                f"--run_name {name!r}: give a folder's name, without /, .., control characters or "
                "space at its ends"
            )
        return name

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[str(self.subcommand)]
        kwargs["logger"] = self._loggers(config)
        chosen = as_list(config.trainer.plugins or [])
        environment = ranks.environment(config.trainer.num_nodes, chosen)
        kwargs["plugins"] = [*chosen, *environment, DurableCheckpointIO()]
        if config.trainer.enable_checkpointing is False:  # StopSignals still ends the run
            config.checkpoint.enabled = False
        trainer = super().instantiate_trainer(**kwargs)
        ranks.check_group(trainer.world_size)
        return trainer

    def _name_folder(self, config: Any) -> Path:
        """Return the folder of the runs of a name; that of a run if config.yaml is the run's.

        The run's folder may have been renamed or moved. What this command says has precedence.
        """
        named = self.runs / config.run_name
        first = Path(self.configs[0]) if self.configs else named
        run, fits = RunPaths(first.parent), self.subcommand == "fit"
        is_run = run.identity.exists() or (run.checkpoints.is_dir() and not fits)
        if first.name != run.config.name or not is_run:
            return named
        own = parsing.read_config(run.config)
        root = (own.get("trainer") or {}).get("default_root_dir")
        changed = (own.get("run_name"), root) != (config.run_name, config.trainer.default_root_dir)
        typed = parsing.typed_values(self.argv)
        if changed or "run_name" in typed or "trainer.default_root_dir" in typed:
            return named
        folder = run.name_folder()
        # a run of another place is no place for new runs
        elsewhere = fits and not root and folder.resolve().parent != self.runs.resolve()
        return named if elsewhere else folder

    def _loggers(self, config: Any) -> list[Logger]:
        """Return TensorBoard's logger or the loggers of trainer.logger, and the run's own."""
        kind = "version" if self.subcommand == "fit" else str(self.subcommand)
        runs = self.run_folder.parent if self.run_folder else self._name_folder(config)
        run = RunLogger(runs, kind, self.run_folder, self.resume_step, self.resume_rows)
        setting = config.trainer.logger
        if setting is None or isinstance(setting, bool):
            return [run] if setting is False else [RunEvents(run), run]
        return [*as_list(setting), run]

    def after_instantiate_classes(self) -> None:
        data, run = self.datamodule, cast(Any, self.trainer)
        check_monitors(run.callbacks, run.log_every_n_steps > 0, self.model, data)
        if not data.makes("train"):
            data.train_dataloader = partial(with_hook, data.train_dataloader, self.trainer)
        for logger in self.trainer.loggers:
            continue_logger(logger, self.resume_step)
        if self.model.settings.optimizer == "muon":
            for callback in run.callbacks:
                check_supported(callback, "unsupported_with_muon")
        config = self.config_init[str(self.subcommand)]
        config["weights_only"] = True  # loading runs no code
        config["ckpt_path"] = str(self.ckpt_path) if self.ckpt_path else None
        record, settings = self.resume_record, data.settings
        if record and settings.tokens_per_step and not settings.allow_changes:
            from gpt_lightning.runs.resume import batch_size_on  # only a resume needs it

            if batch := batch_size_on(record, run.world_size):
                data.batch_size = self.config[str(self.subcommand)].data.batch_size = batch
        if run.world_size > 1:
            ranks.compare_settings(run, vars(self.config[str(self.subcommand)].as_flat()))
            ranks.supervise(run.strategy.launcher)

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except Exception as error:
            ranks.leave(error)
            if type(error).__module__.startswith(COMPILERS):
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                reason = [line for line in lines[2:] if "error:" in line][:1]  # a compiler's own
                raise UserError(
                    f"compiling the model failed ({type(error).__name__}: "
                    f"{' '.join([*lines[:2], *reason])}): set --model.compile false, or repair the "
                    "compiler that torch.compile uses"
                ) from error
            if type(error).__module__.startswith("wandb."):  # no account, or no network
                raise UserError(
                    f"trainer.logger: {error} Without an account, set WANDB_MODE=offline"
                ) from error
            if not errors.is_out_of_memory(error):
                raise
            line = step_shape.out_of_memory_line(subcommand, self.model, self.datamodule)
            raise errors.MemoryExhaustedError(line) from error


def default_callbacks(subcommand: str) -> list[Callback]:
    """Return the banner and summary, and for predict the file of losses."""
    if subcommand != "predict":
        return [RunReport()]
    from gpt_lightning.training.callbacks.recorder import TokenLosses

    return [RunReport(), TokenLosses()]


# ---- the process --------------------------------------------------------------------------------


def quiet_lightning() -> None:
    """Silence messages that the banner replaces, and advice that does not apply."""
    for name, level in TABLES["quiet_loggers"].items():
        logging.getLogger(name).setLevel(level)
    for message in TABLES["ignored_warnings"]:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def quiet_process() -> Iterator[None]:
    """Silence what the banner replaces, and put back what a run has changed in this process.

    These are environment variables, the search path of modules, signal handlers, the hook for
    errors in threads, levels of loggers, warning filters, and PyTorch's precision, determinism and
    benchmark flags.
    docs/architecture.md lists what has no way back.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    variables = dict(os.environ)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings(), ExitStack() as stack:
        for logger in map(logging.getLogger, TABLES["quiet_loggers"]):
            stack.callback(logger.setLevel, logger.level)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        for module, name in ((torch.backends.cudnn, "benchmark"), (threading, "excepthook")):
            stack.callback(setattr, module, name, getattr(module, name))
        stack.callback(sys.path.__setitem__, slice(None), [*sys.path])
        # classes of one's own; jsonargparse works in the folder of a configuration meanwhile
        sys.path.append(os.getcwd())
        quiet_lightning()
        try:
            yield
        finally:
            for number, handler in handlers.items():
                if signal.getsignal(number) != handler is not None:  # None: not set by Python
                    signal.signal(number, handler)
            if os.environ != variables:
                os.environ.clear()
                os.environ.update(variables)
