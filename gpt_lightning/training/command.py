"""GPTCLI: LightningCLI over GPTModule and TokenDataModule, for fit, validate, test and predict."""

import inspect
import logging
import os
import re
import signal
import sys
import threading
import warnings
from argparse import SUPPRESS
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import torch
import yaml
from lightning import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gpt_lightning import errors, parsing
from gpt_lightning.errors import UserError, one_line
from gpt_lightning.files import write_atomic
from gpt_lightning.hardware import distributed as ranks
from gpt_lightning.hardware.device import machine_record, version
from gpt_lightning.hardware.precision import resolve_precision
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.checkpoint import RunRecord, read_checkpoint
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.runs.logger import RunEvents, RunLogger, continue_logger
from gpt_lightning.runs.settings import RunSettings
from gpt_lightning.training import steps
from gpt_lightning.training.callbacks import EVERY_RUN
from gpt_lightning.training.callbacks.report import RunReport
from gpt_lightning.training.callbacks.samples import write_text
from gpt_lightning.training.callbacks.signals import STOP_SIGNALS
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.trainer import TABLES, as_list, check_monitors, check_supported

# section with a class -> what serves those whose class is not derived from ours
INSTEAD = {
    "model": "a network of your own is --model.network, see docs/tutorials/own_network.md",
    "data": "other data are for lightning.Trainer, see docs/python.md",
}
KEYS = {"model": "model.init_from", "data": "data.dataset"}  # one of our class, by section
OWN = "Subclass of yours, by import path; its arguments are keys, too."
COMPILERS = ("torch._dynamo.", "torch._inductor.")  # modules of errors of torch.compile


class TrainingParser(parsing.OneLineParser, LightningArgumentParser):
    """Parser of Lightning with errors of one line."""

    def parse_string(self, cfg_str: str, *args: Any, **kwargs: Any) -> Any:
        return super().parse_string(flat(cfg_str), *args, **kwargs)


# ---- subclasses of our classes ------------------------------------------------------------------


def class_of(section: str, base: type, words: list[str]) -> type:
    """Return the class of a section: the subclass that its class_path names, or our own.

    Args:
        section: model or data.
        base: Our class.
        words: Arguments of the command, from as_key.

    Raises:
        UserError: The class cannot be imported, or is no subclass of ours.
    """
    name = base.__name__
    for option, _, value in (word.partition("=") for word in words):
        if option == "--config":
            keys = parsing.read_config(parsing.config_file(value)).get(section)
            name = keys.get("class_path", name) if isinstance(keys, dict) else name
        elif option == f"--{section}.class_path":
            name = value
    try:
        kind: Any = base if name == base.__name__ else resolve_name(name)
        if not issubclass(kind, base):
            raise TypeError(f"it is no {base.__name__}")
        for each in inspect.signature(kind).parameters.values():
            known = each.name == "config" or each.kind is each.VAR_KEYWORD
            if each.annotation is each.default is each.empty and not known:
                raise TypeError(f"its argument {each.name} has no type and no default")
    except (Exception, SystemExit) as error:  # any code may raise any error
        raise UserError(
            f"{section}.class_path {name} cannot be used ({one_line(error)}): name a subclass of "
            f"gpt_lightning.{base.__name__}, of an installed package or of a file in the current "
            f"folder, such as my_file.MyClass; {INSTEAD[section]}"
        ) from error
    if section == "model":  # the parser finds the keys model.config.* by it
        kind.__init__.__annotations__.setdefault("config", GPTConfig)
    return kind


def as_key(word: str) -> str:
    """Return an option of LightningCLI's subclass mode, such as --model=my.Module, as a key."""
    word = re.sub(r"^--(model|data)=(?=[A-Za-z_][\w.]*$)(?!.*\.ya?ml$)", r"--\1.class_path=", word)
    return re.sub(r"^--(model|data)\.init_args\.", r"--\1.", word)


def flat(config: str) -> str:
    """Return the YAML of a configuration with the sections' init_args beside their class_path."""
    settings = yaml.safe_load(config) if "init_args" in config else {}
    sections = [settings[name] for name in INSTEAD if "init_args" in settings.get(name, ())]
    for section in sections:
        section |= section.pop("init_args") or {}
    return yaml.safe_dump(settings, sort_keys=False) if sections else config


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
            if folder := steps.run_folder(trainer):
                write_atomic(folder / self.config_filename, self.text.encode())

    on_validation_start = on_predict_start = on_test_start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_test_start(trainer, pl_module)
        speed = steps.find_callback(trainer, SpeedMonitor)
        if speed and speed.timeline:
            banner = steps.find_callback(trainer, RunReport)
            device = trainer.strategy.root_device
            facts = (banner.facts if banner else {}) | machine_record(self.argv, device)
            facts["devices"] = str(trainer.world_size)
            settings = yaml.safe_load(self.text)
            speed.timeline.write("settings", trainer.global_step, settings=settings, facts=facts)
        if trainer.is_global_zero:
            head = f"# {parsing.shell_command(self.argv)}\n# gpt_lightning {version()}\n"
            write_text(trainer, "run/config", head + self.text)


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
        args: GPTModule and TokenDataModule, from which the classes of the run are derived.
        folder: Folder of the run; None: a new one, lightning_logs/RUN_NAME/version_N.
        kwargs: Keyword arguments of LightningCLI.
    """

    def __init__(self, *args: Any, folder: Path | None = None, **kwargs: Any):
        self.run_folder = folder  # given, or the folder of the run that is resumed
        self.ckpt_path: Path | None = None  # found by --resume, or given
        self.resume_step: int | None = None  # None: a new run
        self.resume_rows: int | None = None  # rows of metrics.jsonl at that step
        self.resume_record: RunRecord | None = None
        self.argv: list[str] = kwargs["args"]
        words = parsing.joined(self.argv)
        self.configs = [w.removeprefix("--config=") for w in words if w.startswith("--config=")]
        kwargs["save_config_kwargs"] = {"argv": self.argv}
        kwargs["args"] = keys = [as_key(word) for word in parsing.joined(self.argv)]
        self.classes = [class_of(*each, keys) for each in zip(INSTEAD, args, strict=True)]
        super().__init__(*cast(Any, self.classes), **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # a static method there
        """Return the command that runs, as the parser of each takes 60 ms; all of them for help."""
        known = super().subcommands()
        return known if "--help" in self.argv else {self.argv[0]: known[self.argv[0]]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for key, name in EVERY_RUN.items():
            callback = resolve_name(f"gpt_lightning.training.callbacks.{name}")
            parser.add_lightning_class_args(callback, key)
        known = parsing.known_keys(parser)[0]
        for (section, key), kind in zip(KEYS.items(), self.classes, strict=True):
            if key not in known:
                name = f"{kind.__module__}.{kind.__name__}"
                raise UserError(f"{name}: take **settings and pass them to super().__init__")
            parser.add_argument(f"--{section}.class_path", type=str, default=SUPPRESS, help=OWN)
        parser.add_class_arguments(RunSettings, as_group=False, instantiate=False)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        args = parsing.resolve_configs(args, parsing.known_keys(parser)[0])
        if any(arg.startswith("--model.network.") for arg in args):
            raise UserError(
                "model.network is in parts: give '{class_path: my_gpt.MyGPT, init_args: {wide: 8}}'"
            )
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand]
        # config.yaml of a run has the ckpt_path that the run began with; a flag is newer
        begins = "ckpt_path" in parsing.typed_values(args) and config.ckpt_path
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
        # Lightning would take the section for one of its subclass mode
        self.class_paths = {name: config[name].pop("class_path", None) for name in INSTEAD}
        for (section, path), kind in zip(self.class_paths.items(), self.classes, strict=True):
            if path and path.rpartition(".")[2] != kind.__name__:  # it stands in {...}
                raise UserError(f"{section}.class_path {path}: give it as --{section}.class_path")
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
        if not self.ckpt_path and config.ckpt_path is not None:
            from gpt_lightning.runs.sources import find_model  # not for runs from random weights

            self.ckpt_path = find_model(config.ckpt_path)
            config.ckpt_path = str(self.ckpt_path)
            checkpoint = read_checkpoint(self.ckpt_path)  # raises before anything is built
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

        found, self.run_folder = resume.find(config.resume, self.runs / config.run_name)
        run, typed = self.run_folder, "run_name" in parsing.typed_values(self.argv)
        inside = run and run.absolute().parents[1] == self.runs.absolute()  # no copy elsewhere
        if run and inside and typed and config.run_name != run.parent.name:
            raise UserError(f"--run_name has no effect on {run}: leave it out")
        if run and not typed:
            config.run_name = RunPaths(run).name_folder().name  # it may have been renamed
        config.resume = "never"
        if found:
            checkpoint = read_checkpoint(found)
            self.ckpt_path, self.resume_step = found, checkpoint.step
            self.resume_record = checkpoint.record
            self.resume_rows = checkpoint.record.metrics_rows
        elif self.run_folder:  # killed before its first checkpoint
            self.resume_step = 0

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
        ranks.supervise(trainer.strategy)
        return trainer

    def _name_folder(self, config: Any) -> Path:
        """Return the folder of a new run: that of its name, or of the run that is evaluated."""
        named = self.runs / config.run_name
        run = RunPaths.of_checkpoint(self.ckpt_path) if self.ckpt_path else None
        if not run or self.subcommand == "fit" or not run.config.exists() or not self.configs:
            return named
        if Path(self.configs[0]).resolve() != run.config.resolve():  # only its weights are used
            return named
        # the run's folder may have been renamed or moved; what this command says has precedence
        own = parsing.read_config(run.config)
        root = (own.get("trainer") or {}).get("default_root_dir")
        changed = (own.get("run_name"), root) != (config.run_name, config.trainer.default_root_dir)
        typed = parsing.typed_values(self.argv)
        if changed or "run_name" in typed or "trainer.default_root_dir" in typed:
            return named
        return run.name_folder()

    def _loggers(self, config: Any) -> list[Logger]:
        """Return TensorBoard's logger or the loggers of trainer.logger, and the run's own."""
        kind = "version" if self.subcommand == "fit" else str(self.subcommand)
        runs = self.run_folder.parent if self.run_folder else self._name_folder(config)
        claim = None
        if self.mirrored and not config.trainer.fast_dev_run:
            from gpt_lightning.runs.mirror import mirror_of

            claim = lambda new: mirror_of(config.checkpoint.folder, new).claim(new)  # noqa: E731
        run = RunLogger(runs, kind, self.run_folder, self.resume_step, self.resume_rows, claim)
        setting = config.trainer.logger
        if setting is None or isinstance(setting, bool):
            return [run] if setting is False else [RunEvents(run), run]
        return [*as_list(setting), run]

    def after_instantiate_classes(self) -> None:
        data, run = self.datamodule, cast(Any, self.trainer)
        check_monitors(run.callbacks, run.log_every_n_steps > 0, self.model, data)
        if not data.makes("train"):
            data.train_dataloader = partial(steps.with_hook, data.train_dataloader, self.trainer)
        for logger in self.trainer.loggers:
            continue_logger(logger, self.resume_step)
        if self.model.settings.optimizer == "muon":
            for callback in run.callbacks:
                check_supported(callback, "unsupported_with_muon")
        for section, path in self.class_paths.items():
            if path:  # config.yaml has it
                self.config[str(self.subcommand)][section]["class_path"] = path
        config = self.config_init[str(self.subcommand)]
        config["weights_only"] = True  # loading runs no code
        config["ckpt_path"] = str(self.ckpt_path) if self.ckpt_path else None
        record, settings = self.resume_record, data.settings
        if record and settings.tokens_per_step and not settings.allow_changes:
            from gpt_lightning.runs.resume import batch_size_on  # only a resume needs it

            if batch := batch_size_on(record, run.world_size):
                data.batch_size = self.config[str(self.subcommand)].data.batch_size = batch
        if run.world_size > 1:
            from gpt_lightning.hardware.agreement import agree  # not for one rank

            agree(run, vars(self.config[str(self.subcommand)].as_flat()))

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
                raise errors.PeerError(
                    f"the connection to another rank is lost; {errors.CONTINUE}"
                ) from error
            if type(error).__module__.startswith("wandb."):  # no account, or no network
                raise UserError(
                    f"trainer.logger: {error} Without an account, set WANDB_MODE=offline"
                ) from error
            if not errors.is_out_of_memory(error):
                raise
            line = steps.out_of_memory_line(subcommand, self.model, self.datamodule)
            raise errors.MemoryExhaustedError(line) from error


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
