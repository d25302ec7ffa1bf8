"""TokenDataModule: LightningDataModule over a named corpus, a text or prepared shards."""

import functools
import os
from pathlib import Path
from typing import Literal

import lightning as L
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.data.loader import Batch
from gpt_lightning.data.manifest import Manifest
from gpt_lightning.data.order import SHUFFLE_WINDOWS, OrderName
from gpt_lightning.data.readers import Batching, Reader, WindowReader
from gpt_lightning.data.tokenizers import Tokenizer, tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import check_arguments
from gpt_lightning.training.between_steps import BetweenSteps, call_between_batches
from gpt_lightning.training.step_shape import accumulation, check_accumulation

DEFAULT_SEED = 1337


class TokenDataModule(L.LightningDataModule):
    """Batches of token windows: (B, T) inputs and the (B, T) tokens that follow them.

    Exactly one of dataset, mixture, corpus and text_file names the data; a corpus and a text file
    are prepared on first use.

    Args:
        dataset: Folder of shards (of `gpt-lightning prepare`, nanoGPT, llm.c or build-nanogpt), its
            name under data_dir, or a URL (s3://, gs://, hf://, https://) of a prepared dataset.
        mixture: Several datasets, each with its weight; validation uses the first.
        corpus: tinyshakespeare, shakespeare-plays or shakespeare-plays-all.
        text_file: Path of a UTF-8 text.
        tokenizer: Tokenizer for corpus or text_file: char, byte or a tiktoken encoding such as
            gpt2.
        val_fraction: Share of corpus or text_file, at its end, that is held out for validation.
        data_dir: Folder of corpora and prepared datasets.
        block_size: Tokens T a sequence; null: model.config.block_size.
        batch_size: Sequences B a micro-batch and rank.
        tokens_per_step: Tokens an optimizer step over all ranks, B x T x accumulation x ranks; it
            sets trainer.accumulate_grad_batches. null: the Trainer's accumulation holds.
        eval_batch_size: Sequences a validation batch and rank; null: batch_size.
        eval_batches: Evaluate on this many random batches of the validation split and as many of
            the training split, as nanoGPT does; null: on every token of the validation split.
        order: sequential: front to back; random: windows anywhere, as in nanoGPT; shuffled: each
            window once an epoch, shard by shard in a large dataset; repeat: the first batch again
            and again; nanogpt: random, drawn from the run's generator in nanoGPT's sequence of
            draws.
        shuffle_windows: Windows that the order shuffled permutes together.
        cache_limit_gb: Size limit of data_dir/cache, which keeps shards from a URL.
        num_workers: Processes that read ahead; 0 reads in the training process.
        seed: Seed of the order; null: seed_everything.
        allow_changes: Resume a checkpoint of other data, another order or another number of
            sequences a step; the result then differs from an uninterrupted run.

    Raises:
        UserError: Settings or files that cannot work, before the first step.
    """

    def __init__(
        self,
        dataset: str | None = None,
        mixture: dict[str, float] | None = None,
        corpus: str | None = None,
        text_file: str | None = None,
        tokenizer: str = "gpt2",
        val_fraction: float = 0.1,
        data_dir: str = "data",
        block_size: PositiveInt | None = None,
        batch_size: PositiveInt = 16,
        tokens_per_step: PositiveInt | None = None,
        eval_batch_size: PositiveInt | None = None,
        eval_batches: PositiveInt | None = None,
        order: OrderName | Literal["nanogpt"] = "shuffled",
        shuffle_windows: PositiveInt = SHUFFLE_WINDOWS,
        cache_limit_gb: NonNegativeFloat = 20.0,
        num_workers: NonNegativeInt = 0,
        seed: NonNegativeInt | None = None,
        allow_changes: bool = False,
    ) -> None:
        super().__init__()
        sources = {
            "data.dataset": dataset,
            "data.mixture": mixture,
            "data.corpus": corpus,
            "data.text_file": text_file,
        }
        given = [key for key, value in sources.items() if value]
        if len(given) != 1:
            raise UserError(
                f"{' and '.join(given) or 'no data'} given: set exactly one of {', '.join(sources)}"
            )
        numbers = {
            "block_size": block_size,
            "batch_size": batch_size,
            "tokens_per_step": tokens_per_step,
            "eval_batch_size": eval_batch_size,
            "eval_batches": eval_batches,
            "shuffle_windows": shuffle_windows,
            "cache_limit_gb": cache_limit_gb,
            "num_workers": num_workers,
            "seed": seed,
        }
        numbers = check_arguments(TokenDataModule, "data", numbers)
        self.dataset, self.mixture = dataset, mixture
        self._source = corpus or text_file or ""
        self.tokenizer_name = tokenizer
        self.val_fraction = val_fraction
        self.data_dir = Path(data_dir)
        self._block_size: int | None = numbers["block_size"]
        self.batch_size: int = numbers["batch_size"]
        self.tokens_per_step: int | None = numbers["tokens_per_step"]
        self.eval_batch_size: int = numbers["eval_batch_size"] or self.batch_size
        self.eval_batches: int | None = numbers["eval_batches"]
        self.order = order
        self.shuffle_windows: int = numbers["shuffle_windows"]
        self.cache_limit_gb: float = numbers["cache_limit_gb"]
        self.num_workers: int = numbers["num_workers"]
        self.seed: int | None = numbers["seed"]
        self.allow_changes = allow_changes
        self._datasets: dict[str, TokenDataset] = {}  # by address, opened at first use
        self._reader: Reader | None = None
        if order == "nanogpt" and (num_workers or mixture or self.eval_batch_size != batch_size):
            raise UserError(
                "data.order nanogpt draws batches of one size from one dataset in the training "
                "process: set data.num_workers to 0, data.mixture and data.eval_batch_size to null"
            )

    # ---- the data ------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """Addresses of the datasets; validation uses the first."""
        if self.mixture:
            return list(self.mixture)
        if self.dataset:
            return [self.dataset]
        from gpt_lightning.prepare.command import dataset_folder  # not for ready shards

        settings = (self._source, self.tokenizer_name, self.data_dir, self.val_fraction)
        return [str(dataset_folder(*settings))]

    @property
    def address(self) -> str:
        """Human-readable name of the training data."""
        return " + ".join(self.addresses)

    @property
    def block_size(self) -> int:
        """Tokens T a sequence."""
        if self._block_size is None:
            raise UserError("data.block_size is not set")
        return self._block_size

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
        """Manifest of the first dataset, read and checked at first use."""
        return self._dataset(self.addresses[0]).manifest

    def training_tokens(self) -> int:
        """Return the tokens of the train splits of all datasets."""
        return sum(self._dataset(address).manifest.tokens("train") for address in self.addresses)

    def _dataset(self, address: str) -> TokenDataset:
        if address not in self._datasets:
            dataset = TokenDataset(address, self.data_dir, self.cache_limit_gb)
            self._check_same_tokens(address, dataset)
            self._datasets[address] = dataset
        return self._datasets[address]

    def _check_same_tokens(self, address: str, dataset: TokenDataset) -> None:
        for other, opened in self._datasets.items():
            if opened.manifest.tokenizer != dataset.manifest.tokenizer:
                raise UserError(
                    f"data.mixture: {address} and {other} are made of other tokens "
                    f"({dataset.manifest.tokenizer['name']}, {opened.manifest.tokenizer['name']}): "
                    "prepare both with one tokenizer"
                )

    # ---- Lightning's hooks, in the order in which it calls them --------------------------------

    def prepare_data(self) -> None:
        if self._source:
            from gpt_lightning.prepare.command import prepare_source  # not for ready shards

            prepare_source(self._source, self.tokenizer_name, self.data_dir, self.val_fraction)

    def setup(self, stage: str) -> None:
        # every mistake in the data raises here, before anything is built or written
        self._take_block_size()
        if stage == "fit":
            self._set_accumulation()
        self._reader = reader = self._open_reader(stage)
        if stage == "fit":
            len(reader.train_loader)
            if "val" in self.manifest.splits:
                reader.stream("val")
        else:
            reader.stream("test" if stage == "test" else "val")

    def train_dataloader(self) -> BetweenSteps:
        assert self.trainer is not None
        hook = functools.partial(call_between_batches, self.trainer)
        return BetweenSteps(self.reader.train_loader, hook)

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        # training without a validation split is fine, evaluating without one is not
        assert self.trainer is not None
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and "val" not in self.manifest.splits:
            return []
        return self.reader.eval_loaders()

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.reader.split_loader("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self.reader.split_loader("val")

    # ---- what setup decides --------------------------------------------------------------------

    @property
    def reader(self) -> Reader:
        """Reader that setup has opened."""
        assert self._reader is not None, "setup opens the reader"
        return self._reader

    def _take_block_size(self) -> None:
        """Use the model's context length by default.

        Raises:
            UserError: The sequences are longer than the model's context.
        """
        assert self.trainer is not None
        config = getattr(self.trainer.lightning_module, "config", None)
        longest: int | None = getattr(config, "block_size", None)  # None: another author's module
        self._block_size = self._block_size or longest
        if longest is not None and self.block_size > longest:
            raise UserError(
                f"data.block_size is {self._block_size}, but model.config.block_size is {longest}: "
                "lower the first or raise the second"
            )

    def _set_accumulation(self) -> None:
        """Set the Trainer's accumulation from tokens_per_step and its number of ranks.

        Raises:
            UserError: There is no whole number of micro-batches, the Trainer has another
                accumulation, or a validation would fall into the middle of a step.
        """
        trainer = self.trainer
        assert trainer is not None
        if self.tokens_per_step is not None:
            ranks = trainer.num_devices * trainer.num_nodes
            accumulate = accumulation(self.tokens_per_step, self.batch_size, self.block_size, ranks)
            if trainer.accumulate_grad_batches not in (1, accumulate):  # 1 is its default
                raise UserError(
                    f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, but "
                    f"data.tokens_per_step {self.tokens_per_step} means {accumulate} "
                    f"({self.batch_size} sequences x {self.block_size} tokens x {ranks} ranks): "
                    "leave one of the two out"
                )
            trainer.accumulate_grad_batches = accumulate
        check_accumulation(trainer.accumulate_grad_batches, trainer.val_check_interval)

    def _open_reader(self, stage: str) -> Reader:
        trainer = self.trainer
        assert trainer is not None
        batching = Batching(
            block_size=self.block_size,
            batch_size=self.batch_size,
            eval_batch_size=self.eval_batch_size,
            eval_batches=self.eval_batches,
            accumulate=trainer.accumulate_grad_batches,
            rank=trainer.global_rank,
            world=trainer.world_size,
            num_workers=self.num_workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
            allow_changes=self.allow_changes,
        )
        # an evaluation reads the first alone
        addresses = self.addresses if stage == "fit" else self.addresses[:1]
        datasets = {address: self._dataset(address) for address in addresses}
        if self.order == "nanogpt":
            from gpt_lightning.data.nanogpt_batches import NanoGPTReader

            return NanoGPTReader(datasets, batching)
        seed = self.seed
        if seed is None:  # seed_everything leaves its number here, for all ranks
            seed = int(os.environ.get("PL_GLOBAL_SEED", DEFAULT_SEED))
        return WindowReader(
            datasets, batching, self.mixture, self.order, seed, self.shuffle_windows
        )

    # ---- measurements of the training loader ---------------------------------------------------

    @property
    def wait_s(self) -> float:
        """Seconds that training has waited for batches, in this process."""
        return self.reader.train_loader.wait_s

    def position(self) -> dict[str, int]:
        """Return the position of training in the data: epoch, and windows of it that are done."""
        return self.reader.position()

    def shares(self) -> dict[str, float]:
        """Return each dataset's share of the samples so far, by name; empty without a mixture."""
        return self.reader.shares()
