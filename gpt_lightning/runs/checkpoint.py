"""Checkpoints of `gpt-lightning fit`: their content, and reading them safely.

A file holds Lightning's dict of tensors, numbers and words: `state_dict`, `optimizer_states`,
`loops`, `callbacks`, `global_step`. `loops` has the state of the training loader, which is the
position in the data: `{"epoch", "window"}`, or `{"generator", "next"}` for nanoGPT's draws. Two
keys are written from RunRecord:

`hyper_parameters`: arguments of GPTModule: `config`, a dict of GPTConfig's fields, and the fields
of Settings.

`gpt_lightning`, with "schema": 4:

| key | value |
| --- | --- |
| schema | number of this table |
| version | version of gpt_lightning that wrote the file |
| tokenizer | spec of the tokenizer of the data, for tokenizer_from_spec |
| data_position | epoch and windows of it that are done, for people |
| data_identity | digests and settings that decide the order of the batches |
| shards | digest of the shards' sizes, inodes and times, to detect replaced shards |
| run_identity | settings of the Trainer that decide the numbers, and the seed |
| environment | versions, device, threads, ranks: equal for a bit-exact resume |
| network | class path and arguments of a network of one's own; null or missing: GPT |
| spikes | windows of SpikeGuard and its count of skipped steps; empty without model.skip_spikes |
| micro_batches | micro-batches done of an unfinished step; above 0 there is no resume |
| run_id | identity of the run, as in run.json of its folder |
| metrics_rows | rows of metrics.jsonl when the file was saved |
| figures | figures of the training of an imported model; empty for a run's |
"""

import dataclasses
import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch

from gpt_lightning import __version__
from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.removed import without_removed
from gpt_lightning.runs.digests import check_digest, check_regular, warn_without_digest
from gpt_lightning.runs.folders import run_id
from gpt_lightning.runs.settings import Settings

SCHEMA = 4
PLACE = "in the folder of its config.json, and give that folder"
HEAD_BYTES = 64


def is_of_another_run(path: Path, run: Path) -> bool:
    """Return whether another run has saved a checkpoint; False for a damaged file."""
    try:
        return load_checkpoint(path).record.run_id != run_id(run)
    except UserError:
        return False


# ---- content -------------------------------------------------------------------------------------


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
        run_identity: Settings of the Trainer that decide the numbers, and the seed.
        environment: Versions, device, threads, ranks.
        network: Class path and arguments of a network of one's own; None: GPT.
        run_id: Identity of the run folder; None without one.
        spikes: State of SpikeGuard; empty without model.skip_spikes.
        micro_batches: Micro-batches done of an unfinished step.
        metrics_rows: Rows in the run's metrics file; None without one.
        figures: Step, tokens and validation loss of an imported model; empty for a run's.
    """

    config: GPTConfig
    settings: Settings
    version: str = __version__
    tokenizer: dict[str, Any] | None = None
    data_position: dict[str, int] = field(default_factory=dict)
    data_identity: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, Any] = field(default_factory=dict)
    run_identity: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] | None = None
    spikes: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 0
    run_id: str | None = None
    metrics_rows: int | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def hyperparameters(self) -> dict[str, Any]:
        """Return the arguments of GPTModule as plain values."""
        return {"config": dataclasses.asdict(self.config), **self.settings.hyperparameters()}

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Write the record into Lightning's dict of a checkpoint."""
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[2:]}
        checkpoint["hyper_parameters"] = self.hyperparameters()
        checkpoint["gpt_lightning"] = {"schema": SCHEMA, **facts}

    @classmethod
    def read(cls, checkpoint: dict[str, Any]) -> "RunRecord":
        """Return the record in Lightning's dict of a checkpoint."""
        arguments = without_removed(checkpoint["hyper_parameters"], "model.", trained=True)
        config = GPTConfig(**arguments.pop("config"))
        facts = dict(checkpoint["gpt_lightning"])
        if (schema := facts.pop("schema")) != SCHEMA:
            raise ValueError(f"schema {schema} of another gpt_lightning, this one reads {SCHEMA}")
        return cls(config=config, settings=Settings(**arguments), **facts)


def run_identity(trainer: L.Trainer, seed: int, decay_steps: int) -> dict[str, Any]:
    """Return the settings outside of the module that decide the numbers of a run."""
    algorithm = trainer.gradient_clip_algorithm
    return {
        "seed_everything": seed,
        "gradient_clip_val": trainer.gradient_clip_val,
        # a plain string: no checkpoint with an enum can be read
        "gradient_clip_algorithm": algorithm and str(algorithm.value),
        "decay_steps": decay_steps,
    }


def environment(trainer: L.Trainer, compiled: bool, attention: str) -> dict[str, Any]:
    """Return versions, device, kernels and ranks, which must match for a bit-exact resume."""
    return {
        "torch": str(torch.__version__),
        "device": trainer.strategy.root_device.type,
        "threads": torch.get_num_threads(),
        "ranks": trainer.world_size,
        "sharded": hasattr(trainer.strategy, "whole_weights"),
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
    def of(cls, raw: dict[str, Any], path: Path) -> "Checkpoint":
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
                can_resume="optimizer_states" in raw,
            )
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        except Exception as error:  # any content may raise any error
            raise not_ours(path, error, raw) from error


# ---- reading -------------------------------------------------------------------------------------


def read_checkpoint(path: Path) -> Checkpoint:
    """Read tensors, numbers and words; nothing in the file is run or imported.

    Without a digest beside the file, a warning is printed.

    Raises:
        UserError: the file is missing, damaged, would run code, or is not one of ours.
    """
    return Checkpoint.of(read_content(path), path)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint without checking its digest.

    Raises:
        UserError: the file is missing, would run code, or is not one of ours.
    """
    return Checkpoint.of(load_content(path), path)


def read_content(path: Path, map_location: Any = "cpu", mmap: bool = True) -> Any:
    """Return the content of a file that matches its digest, or has none.

    Without one, a warning is printed if it is a checkpoint of ours.

    Args:
        path: File that torch.save has written.
        map_location: Argument of torch.load.
        mmap: True to map the tensors from the file; False to read them.

    Raises:
        UserError: the file is missing, damaged, or would run code.
    """
    has_digest = check_digest(path, required=False)
    content = load_content(path, map_location, mmap)
    if not has_digest and isinstance(content, dict) and "gpt_lightning" in content:
        warn_without_digest(path.resolve())
    return content


def load_content(path: Path, map_location: Any = "cpu", mmap: bool = True) -> Any:
    """Return the content of a file as `read_content`, without checking its digest.

    The environment cannot change that nothing in the file is run.
    """
    check_archive(path)
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:  # torch.load raises many kinds of errors
        raise not_ours(path, error) from error


def check_archive(path: Path) -> None:
    """Check that a file is an archive whose records torch can map.

    Raises:
        UserError: The file is no archive, or its records are compressed: torch.load would read
            compressed bytes as numbers.
    """
    check_regular(path)
    problem = None
    try:
        with zipfile.ZipFile(path) as archive:
            if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                problem = "its records are compressed; take the file as it was saved"
    except Exception:  # any content may raise any error
        problem = describe_file(path)
    if problem is not None:
        raise UserError(f"{path} is not a checkpoint of gpt-lightning fit: {problem}")


# ---- files of other programs ---------------------------------------------------------------------


def not_ours(path: Path, error: Exception, content: Any = None) -> UserError:
    """Return the error for a file that is damaged or not a checkpoint of ours.

    Args:
        path: File that was read.
        error: Reason.
        content: Content, if it was loaded.
    """
    known = None if content is None else describe_content(content)
    if known is not None:
        return UserError(f"{path} is not a checkpoint of gpt-lightning fit: {known}")
    return UserError(
        f"{path} is not a checkpoint of gpt-lightning fit, or is damaged ({reason_of(error)})"
    )


def describe_file(path: Path) -> str:
    """Return the likely kind of a file that torch.save has not written, and the fix."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head:
        return "it is empty, so its copy was interrupted; copy it again, or take another checkpoint"
    if head.startswith(b"PK"):
        return "its end is missing or damaged; copy it again, or take another checkpoint"
    if is_safetensors(head, path.stat().st_size):
        return f"it is a safetensors file: name it model.safetensors, {PLACE}"
    if head.startswith(b"GGUF"):
        return "it is llama.cpp's GGUF; give the weights that it was converted from"
    if head.startswith(b"\x80"):
        return f"it is a pickle: if it is an old pytorch_model.bin, name it so, {PLACE}"
    try:
        head.decode("utf-8")
    except UnicodeDecodeError:
        return "it is no file of torch.save"
    return "it is a text file; give a file of checkpoints/, or a run folder"


def is_safetensors(head: bytes, n_bytes: int) -> bool:
    """Return whether a file begins with the length of a JSON header, and the header."""
    if len(head) < 9 or head[8:9] != b"{":
        return False
    (length,) = struct.unpack("<Q", head[:8])
    return bool(length <= n_bytes - 8)


def describe_content(content: Any) -> str | None:
    """Return the likely content of another program's torch.save, and the fix; None if unknown."""
    if not isinstance(content, dict):
        return f"it holds an object of type {type(content).__name__}"
    if {"model", "model_args"} <= content.keys():
        return "it is a checkpoint of nanoGPT's train.py: give it as --model.init_from"
    if "state_dict" in content and "gpt_lightning" not in content:
        return "it is a checkpoint of another Lightning program"
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return f"it holds weights alone: name it pytorch_model.bin, {PLACE}"
    return None
