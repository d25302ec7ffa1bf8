"""Checkpoints of `gpt-lightning fit`: their content, and reading them safely.

A file holds Lightning's dict of tensors, numbers and words: `state_dict`, `optimizer_states`,
`loops`, `callbacks`, `global_step`. `loops` has the state of the training loader, which is the
position in the data: `{"epoch", "window"}`, or `{"generator", "next"}` for nanoGPT's draws. Two
keys are written from RunRecord:

`hyper_parameters`: arguments of GPTModule: `config`, a dict of GPTConfig's fields, and the fields
of Settings; and what a subclass of GPTModule keeps with save_hyperparameters().

`gpt_lightning`, with "schema": 4:

| key | value |
| --- | --- |
| schema | number of this table |
| version | version of gpt_lightning that wrote the file |
| tokenizer | spec of the tokenizer of the data, for tokenizer_from_spec |
| data_position | epoch and windows of it that are done, for people |
| data_identity | digests and settings that decide the order of the batches |
| shards | digest of the shards' sizes, inodes and times, to detect replaced shards |
| run_identity | settings of the Trainer that decide the numbers, seed, classes of model and data |
| environment | versions, device, threads, ranks: equal for a bit-exact resume |
| network | class path and arguments of a network of one's own; null or missing: GPT |
| micro_batches | micro-batches done of an unfinished step; above 0 there is no resume |
| run_id | identity of the run, as in run.json of its folder |
| metrics_rows | rows of metrics.jsonl when the file was saved |
| script | words that start the script with GPTCLI that trains the run; "" for gpt-lightning |
| figures | figures of the training of an imported model; empty for a run's |
| own | names of a subclass's hyperparameters; missing without any |
"""

import dataclasses
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from lightning import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from gpt_lightning import __version__
from gpt_lightning.errors import UserError, one_line, reason_of, warn
from gpt_lightning.files import Fields
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.folders import check_digest, check_regular, sidecar
from gpt_lightning.runs.settings import Settings

SCHEMA = 4


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Description of a run in its checkpoints: what two sessions of a run must share.

    Attributes:
        config: Shape of the model.
        settings: Training arguments.
        version: Version of gpt_lightning.
        tokenizer: Spec of the data's tokenizer; None without a TokenDataModule.
        data_position: Epoch and windows of it that are done.
        data_identity: Digests and settings that decide the order of the batches; empty if the file
            does not have them.
        shards: Digest of the training shards' sizes, inodes and times.
        run_identity: Settings of the Trainer that decide the numbers, the seed, and the classes of
            model and data.
        environment: Versions, device, threads, ranks.
        network: Class path and arguments of a network of one's own; None: GPT.
        run_id: Identity of the run folder; None without one.
        micro_batches: Micro-batches done of an unfinished step.
        metrics_rows: Rows in the run's metrics file; None without one.
        script: Words that start the script with GPTCLI that trains the run, such as python my.py.
        figures: Step, tokens and validation loss of an imported model; empty for a run's.
    """

    config: GPTConfig
    settings: Settings
    version: str = __version__
    tokenizer: Fields | None = None
    data_position: dict[str, int] = field(default_factory=dict)
    data_identity: Fields = field(default_factory=dict)
    shards: str = ""
    run_identity: Fields = field(default_factory=dict)
    environment: Fields = field(default_factory=dict)
    network: Fields | None = None
    micro_batches: int = 0
    run_id: str | None = None
    metrics_rows: int | None = None
    script: str = ""
    figures: Fields = field(default_factory=dict)

    def hyperparameters(self) -> Fields:
        """Return the arguments of GPTModule as plain values."""
        return {"config": dataclasses.asdict(self.config), **self.settings.hyperparameters()}

    def write(self, checkpoint: Fields) -> None:
        """Write the record into Lightning's dict of a checkpoint, which keeps a subclass's keys."""
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[2:]}
        ours = self.hyperparameters()
        # a checkpoint has the weights, and names no class to import
        own = own_hyperparameters(checkpoint, {*ours, "init_from", "network"})
        checkpoint["hyper_parameters"] = own | ours
        checkpoint["gpt_lightning"] = {"schema": SCHEMA, **facts}
        if own:
            checkpoint["gpt_lightning"]["own"] = list(own)

    @classmethod
    def read(cls, checkpoint: Fields) -> "RunRecord":
        """Return the record in Lightning's dict of a checkpoint."""
        arguments = dict(checkpoint["hyper_parameters"])
        config = GPTConfig(**arguments.pop("config"))
        facts = dict(checkpoint["gpt_lightning"])
        for name in facts.pop("own", ()):
            arguments.pop(name, None)
        if (schema := facts.pop("schema")) != SCHEMA:
            raise ValueError(f"schema {schema} of another gpt_lightning, this one reads {SCHEMA}")
        for name in ("tokenizer", "network", "figures"):
            if not isinstance(facts.get(name) or {}, dict):
                raise TypeError(f"{name} is no dict")
        return cls(config=config, settings=Settings(**arguments), **facts)


def own_hyperparameters(checkpoint: Fields, others: set[str]) -> Fields:
    """Return what save_hyperparameters() has put into Lightning's dict, by argument.

    Values that only running code could read back are left out with a warning.

    Args:
        checkpoint: Lightning's dict.
        others: Arguments that are left out without one.
    """
    found = checkpoint.get("hyper_parameters", {})
    argument = checkpoint.pop("hparams_name", None)  # name of a dict that was saved as a whole
    if argument not in (None, "kwargs"):
        found = {argument: found}
    # LightningCLI adds names with _ for a class that a load would import
    own = {k: value for k, value in found.items() if k not in others and k[:1] != "_"}
    for name in [*own]:
        if not is_plain(own[name]):
            rank_zero_warn(
                f"checkpoints do not keep hyperparameter {name}, a {type(own.pop(name)).__name__}: "
                f"give it to load_from_checkpoint, and {name!r} to save_hyperparameters as `ignore`"
            )
    return own


def is_plain(value: Any) -> bool:
    """Return whether a value is made of tensors, numbers and words, as all in a checkpoint is."""
    if type(value) is dict:
        return all(map(is_plain, (*value, *value.values())))
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return type(value) in (type(None), bool, int, float, str, torch.Tensor)


def run_identity(trainer: Trainer, seed: int, decay_steps: int) -> Fields:
    """Return the settings outside of the module that decide the numbers of a run."""
    algorithm = trainer.gradient_clip_algorithm
    model, data = type(trainer.lightning_module), type(cast(Any, trainer).datamodule)
    return {
        "model.class_path": f"{model.__module__}.{model.__name__}",
        "data.class_path": f"{data.__module__}.{data.__name__}",
        "seed_everything": seed,
        "gradient_clip_val": trainer.gradient_clip_val,
        # a plain string: no checkpoint with an enum can be read
        "gradient_clip_algorithm": algorithm and str(algorithm.value),
        "decay_steps": decay_steps,
    }


def environment(trainer: Trainer, compiled: bool, attention: str) -> Fields:
    """Return versions, device, kernels and ranks, which must match for a bit-exact resume."""
    return {
        "torch": str(torch.__version__),
        "device": trainer.strategy.root_device.type,
        "threads": torch.get_num_threads(),
        "ranks": trainer.world_size,
        "sharded": isinstance(trainer.strategy, ModelParallelStrategy),
        "precision": str(trainer.precision),
        "compile": compiled,
        "attention": attention,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint file.

    Args:
        record: Description of the run.
        weights: Tensors by their name in `GPT.state_dict()`, on the CPU, mapped from the file.
        step: Optimizer steps done.
        tokens: Tokens trained on; None if the run did not count them.
        can_resume: False without an optimizer's state, as in an imported model.
    """

    record: RunRecord
    weights: dict[str, torch.Tensor]
    step: int
    tokens: int | None
    can_resume: bool = True

    @classmethod
    def of(cls, raw: Fields, path: Path) -> "Checkpoint":
        """Return the content of Lightning's dict.

        Args:
            raw: Dict that was loaded.
            path: File that it was loaded from.

        Raises:
            UserError: the dict is not one of gpt-lightning.
        """
        try:
            return cls(
                record=RunRecord.read(raw),
                weights={
                    name.removeprefix("model."): tensor
                    for name, tensor in raw["state_dict"].items()
                    if name.startswith("model.")
                },
                step=int(raw.get("global_step", 0)),
                tokens=raw.get("callbacks", {}).get("SpeedMonitor", {}).get("tokens"),
                can_resume=bool(raw.get("optimizer_states")),
            )
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        except Exception as error:  # any content may raise any error
            raise not_ours(path, error) from error


# ---- reading -------------------------------------------------------------------------------------


def read_checkpoint(path: Path, check: bool = True) -> Checkpoint:
    """Read tensors, numbers and words; nothing in the file is run or imported.

    Args:
        path: File of the checkpoint.
        check: Argument of `read_content`.

    Raises:
        UserError: the file is missing, damaged, would run code, or is not one of ours.
    """
    return Checkpoint.of(read_content(path, check=check), path)


def read_content(
    path: Path, map_location: Any = "cpu", mmap: bool = True, check: bool = True
) -> Any:
    """Return the content of a file.

    The environment cannot change that nothing in the file is run.

    Args:
        path: File that torch.save has written.
        map_location: Argument of torch.load.
        mmap: True to map the tensors from the file; False to read them.
        check: True to compare the file with its digest. If that cannot be read, a warning is
            printed for a checkpoint of ours.

    Raises:
        UserError: the file is missing, damaged, or would run code. Or its records are compressed:
            torch.load would read compressed bytes as numbers.
    """
    check_regular(path)
    has_digest = not check or check_digest(path, required=False)
    try:
        with zipfile.ZipFile(path) as archive:
            if any(r.compress_type != zipfile.ZIP_STORED for r in archive.infolist()):
                raise ValueError("its records are compressed")
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:  # any content may raise any error
        raise not_ours(path, error) from error
    if not has_digest and isinstance(content, dict) and "gpt_lightning" in content:
        where, name = path.resolve(), sidecar(path.resolve()).name
        rank_zero_only(warn)(f"{where} has no readable digest in {name}: damage would go unnoticed")
    return content


# ---- errors --------------------------------------------------------------------------------------


def not_ours(path: Path, error: Exception) -> UserError:
    """Return the error for a file that is damaged or not a checkpoint of ours.

    Args:
        path: File that was read.
        error: Reason.
    """
    return UserError(
        f"{path} is not a checkpoint of gpt-lightning fit, or is damaged ({reason_of(error)}): "
        "copy it again; `gpt-lightning import SOURCE --out new.ckpt` makes a checkpoint of ckpt.pt "
        "of nanoGPT, or of a folder of config.json and model.safetensors or pytorch_model.bin"
    )


def cannot_write(path: Path, error: BaseException) -> UserError:
    """Return the error for a checkpoint that cannot be written.

    Args:
        path: File.
        error: Reason.
    """
    # torch raises a RuntimeError while it handles the OSError of our file
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    reason = one_line(getattr(cause, "strerror", None) or cause)
    return UserError(
        f"cannot write {path}: {reason[:200]}; the checkpoints before it are untouched: free "
        "some space or choose another folder with --trainer.default_root_dir"
    )
