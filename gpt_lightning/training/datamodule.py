"""TokenDataModule: LightningDataModule over a named corpus, a text or prepared shards."""

import dataclasses
import functools
import math
import os
import shlex
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from lightning import LightningDataModule, Trainer

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.data.loader import EvalLoader, Place, TrainLoader
from gpt_lightning.data.manifest import Manifest
from gpt_lightning.data.readers import Reader
from gpt_lightning.data.settings import DataSettings
from gpt_lightning.data.tokenizers import Tokenizer, tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.training import between_steps, ranks, run_state, step_shape

if TYPE_CHECKING:
    from gpt_lightning.training.keywords import DataArguments

DEFAULT_SEED = 1337


class TokenDataModule(LightningDataModule):
    """Batches of token windows, (B, T).

    A batch is the inputs, (B, T), and the tokens that follow them, (B, T). A corpus and a text file
    are prepared on first use. Without a Trainer, prepare_data() and setup("fit") make the loaders
    of one process, to look at batches.

    Args:
        settings: Data arguments, the fields of gpt_lightning.data.settings.DataSettings.

    Raises:
        UserError: Settings or files that cannot work, before the first step.
    """

    trainer: Trainer  # set by the Trainer, before it calls a hook; None before that

    def __init__(self, **settings: "Unpack[DataArguments]"):
        super().__init__()
        self.settings = DataSettings(**settings)  # type: ignore[arg-type]  # lists too
        self._reader: Reader | None = None

    # ---- the data ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Address of the dataset."""
        if self.settings.dataset:
            return self.settings.dataset
        from gpt_lightning.prepare.command import dataset_folder  # not for ready shards

        return str(dataset_folder(*self._preparation()))

    @property
    def block_size(self) -> int:
        """Tokens T per sequence."""
        if self._reader:
            return self._reader.block_size
        return block_size_of(self.settings)

    @property
    def batch_size(self) -> int:
        """Sequences a micro-batch and rank, which Tuner.scale_batch_size sets."""
        return int(self.settings.batch_size)

    @batch_size.setter
    def batch_size(self, sequences: int) -> None:
        self.settings = dataclasses.replace(self.settings, batch_size=sequences)
        if self._reader:
            self.setup("fit")

    @property
    def eval_batch_size(self) -> int:
        """Sequences a validation batch and rank."""
        return int(self.settings.eval_batch_size or self.settings.batch_size)

    @property
    def step_shape(self) -> step_shape.StepShape:
        """Sizes of the optimizer step of the Trainer's run."""
        B, trainer = self.settings.batch_size, self.trainer
        ranks = trainer.num_devices * trainer.num_nodes
        return step_shape.StepShape(B, self.block_size, trainer.accumulate_grad_batches, ranks)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer."""
        return self.manifest.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that made the dataset."""
        return tokenizer_from_spec(self.manifest.tokenizer)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the dataset, read and checked at first use."""
        return self._dataset.manifest

    def training_tokens(self) -> int:
        """Return the tokens of the train split."""
        return self.manifest.tokens("train")

    @functools.cached_property
    def _dataset(self) -> TokenDataset:
        """Dataset, opened at first use."""
        settings = self.settings
        folder = Path(settings.data_dir)
        return TokenDataset(self.address, folder, settings.patience)

    def _preparation(self) -> tuple[str, str, str, float]:
        """Return source, tokenizer, data_dir and val_fraction, as `prepare` takes them."""
        settings = self.settings
        source = str(settings.corpus or settings.text_file)
        return source, settings.tokenizer, settings.data_dir, settings.val_fraction

    def _val_preparation(self) -> tuple[str, str, str, float]:
        """Return the same of val_text_file, whose train split is the whole text."""
        (tokenizer,) = shlex.split(self._dataset.tokenizer)
        return str(self.settings.val_text_file), tokenizer, self.settings.data_dir, 0.0

    def _has_validation(self) -> bool:
        return bool(self.settings.val_text_file) or "val" in self.manifest.splits

    # ---- Lightning's hooks, in the order in which it calls them --------------------------------

    def prepare_data(self) -> None:
        if self.trainer and run_state.is_fitting(self.trainer):
            self._set_accumulation(self._with_defaults())  # raises before a text is prepared
        if self.settings.corpus or self.settings.text_file:
            from gpt_lightning.prepare.command import prepare_source  # not for ready shards

            prepare_source(*self._preparation())
        if self.settings.val_text_file:
            from gpt_lightning.prepare.command import prepare_source  # not for ready shards

            prepare_source(*self._val_preparation())

    def setup(self, stage: str) -> None:
        if not is_read(self.trainer, self):
            return
        if not (self.settings.dataset or Path(self.address).exists()):
            raise UserError(f"{self.address} does not exist: call prepare_data() first")
        # every mistake in the data raises here, before anything is built or written
        settings = self._with_defaults()
        if stage == "fit" and self.trainer:
            self._set_accumulation(settings)
        self._reader = reader = self._open_reader(settings)
        if stage == "fit":
            batches = len(reader.train_loader)  # opens the train split
            if self.trainer and self.makes("train"):
                step_shape.check_epoch(self.trainer, batches)
            if self._has_validation():
                reader.stream("val")
        else:
            reader.stream("test" if stage == "test" else "val")
        if self.trainer and self.trainer.world_size > 1:
            ranks.compare_data(self.trainer, self.record())

    def train_dataloader(self) -> between_steps.BetweenSteps:
        hook = functools.partial(between_steps.call_between_batches, self.trainer)
        if not self.trainer:
            hook = functools.partial(bool, True)
        return between_steps.BetweenSteps(self.reader.train_loader, hook)

    def val_dataloader(self) -> EvalLoader | list[EvalLoader]:
        # training without a validation split is fine, evaluating without one is not
        fitting = not self.trainer or run_state.is_fitting(self.trainer)
        if fitting and not self._has_validation():
            return []
        loaders = self.reader.eval_loaders()
        return loaders[0] if len(loaders) == 1 else loaders

    def test_dataloader(self) -> EvalLoader:
        return self.reader.split_loader("test")

    def predict_dataloader(self) -> EvalLoader:
        return self.reader.split_loader("val")

    def makes(self, split: str) -> bool:
        """Return whether the loader of a split is made here, not by a subclass."""
        name = f"{split}_dataloader"
        return getattr(type(self), name) is getattr(TokenDataModule, name)

    def evaluated_part(self, split: str, positions: int) -> Fields:
        """Return the metrics of an evaluation that say on how many tokens it is.

        Args:
            split: Split that was evaluated.
            positions: Positions of all batches and ranks; only the last batch is padded.

        Returns:
            `SPLIT/tokens` and, unless they are random, `SPLIT/split_tokens`; empty for a whole
            split, and for a subclass's own loader.
        """
        if not self.makes(split):
            return {}
        whole = len(self.reader.stream(split)) - 1
        if split == "val" and self.settings.eval_batches is not None:
            return {"val/tokens": positions}
        if positions >= whole:
            return {}
        return {f"{split}/tokens": positions, f"{split}/split_tokens": whole}

    def bits_per_byte(self, split: str, loss: float) -> Fields:
        """Return `SPLIT/bits_per_byte` of a split's mean loss in nats per token.

        It is the loss times the tokens for each byte of the split's text, over ln 2, by which
        models of different tokens compare. Empty for data whose manifest does not count the bytes,
        and for a subclass's own loader.
        """
        manifest = self.manifest
        part = split
        if split == "val" and self.reader.val_text:
            manifest = self.reader.val_text.manifest
            part = "train"
        n_bytes = self.makes(split) and manifest.text_bytes.get(part)
        if not n_bytes:
            return {}
        return {f"{split}/bits_per_byte": loss * manifest.tokens(part) / n_bytes / math.log(2)}

    # ---- what setup decides --------------------------------------------------------------------

    @property
    def reader(self) -> Reader:
        """Reader that setup has opened."""
        if not self._reader:
            raise UserError("the data are not open: call prepare_data() and setup('fit') first")
        return self._reader

    def _with_defaults(self) -> DataSettings:
        """Return the settings, with the model's context length and the run's seed by default.

        Raises:
            UserError: The sequences are longer than the model's context.
        """
        config = getattr(getattr(self.trainer, "lightning_module", None), "config", None)
        longest = getattr(config, "block_size", None)  # None: another author's module
        seed = self.settings.seed
        if seed is None:  # seed_everything leaves its number here, for all ranks
            seed = int(os.environ.get("PL_GLOBAL_SEED", DEFAULT_SEED))
        block_size = self.settings.block_size or longest
        settings = dataclasses.replace(self.settings, block_size=block_size, seed=seed)
        if block_size_of(settings) > (longest or float("inf")):
            raise UserError(
                f"data.block_size is {block_size}, but model.config.block_size is {longest}: "
                "lower the first or raise the second"
            )
        return settings

    def _set_accumulation(self, settings: DataSettings) -> None:
        """Set the Trainer's accumulation from tokens_per_step and its number of ranks.

        Raises:
            UserError: There is no whole number of micro-batches, the Trainer has another
                accumulation, or a validation would fall into the middle of a step.
        """
        trainer = self.trainer
        tokens = settings.tokens_per_step
        B = settings.batch_size
        if tokens is not None:
            T, ranks = block_size_of(settings), trainer.num_devices * trainer.num_nodes
            accumulate = step_shape.accumulation(tokens, B, T, ranks)
            if trainer.accumulate_grad_batches not in (1, accumulate):  # 1 is its default
                raise UserError(
                    f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, but "
                    f"data.tokens_per_step {tokens} means {accumulate} "
                    f"({B} sequences x {T} tokens x {ranks} ranks): leave one of the two out"
                )
            trainer.accumulate_grad_batches = accumulate
        interval = getattr(trainer, "val_check_interval", timedelta())  # a time is elsewhere
        step_shape.check_accumulation(trainer.accumulate_grad_batches, interval)

    def _open_reader(self, settings: DataSettings) -> Reader:
        trainer = self.trainer
        val_text = None
        if settings.val_text_file:
            from gpt_lightning.prepare.command import dataset_folder  # not for ready shards

            address = str(dataset_folder(*self._val_preparation()))
            val_text = TokenDataset(address, Path(settings.data_dir))
        if not trainer:
            return Reader(self._dataset, settings, Place(), val_text)
        place = Place(
            accumulate=trainer.accumulate_grad_batches,
            rank=trainer.global_rank,
            world=trainer.world_size,
            pin_memory=trainer.strategy.root_device.type == "cuda",
            limit=trainer.limit_train_batches,
            overfit=trainer.overfit_batches > 0,  # type: ignore[attr-defined]
        )
        return Reader(self._dataset, settings, place, val_text)

    def record(self) -> Fields:
        """Return the fields of a checkpoint's RunRecord that describe the data."""
        facts = {"tokenizer": self.tokenizer.spec()}
        if not run_state.is_fitting(self.trainer):
            return facts
        loader = self.reader.train_loader
        return facts | {
            "data_position": loader.state_dict() if isinstance(loader, TrainLoader) else {},
            "data_identity": loader.identity(),
            "shards": self.reader.train_stream.stamp,
        }


def block_size_of(settings: DataSettings) -> int:
    """Return data.block_size; raise UserError if neither it nor a model's context is known."""
    if settings.block_size is None:
        raise UserError("data.block_size is not set: set it to the number of tokens per sequence")
    return int(settings.block_size)


def token_data(trainer: Trainer | None) -> TokenDataModule | None:
    """Return the run's TokenDataModule; None for data of another class, or without a run."""
    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, TokenDataModule) and is_read(trainer, data) else None


def is_read(trainer: Trainer | None, data: LightningDataModule) -> bool:
    """Return False for the data of an earlier call: Lightning keeps them beside own loaders."""
    source = getattr(getattr(trainer, "_active_loop", None), "_data_source", None)
    return source is None or source.instance is data
