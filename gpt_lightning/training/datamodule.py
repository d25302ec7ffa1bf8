"""TokenDataModule: from a name, a text or a prepared folder to batches."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.data.loader import EVALUATION, Batch, EvalBatches, TrainBatches, TrainLoader
from gpt_lightning.data.mixture import DatasetWindows, Mixture, WindowSource
from gpt_lightning.data.nanogpt_batches import NanoGPTDraws, NanoGPTEvalBatches, NanoGPTLoader
from gpt_lightning.data.order import SHUFFLE_WINDOWS, OrderName, WindowOrder
from gpt_lightning.data.shards import Manifest, TokenStream
from gpt_lightning.data.tokenizers import Tokenizer, tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.command import dataset_folder, prepare_source
from gpt_lightning.training.step_shape import accumulation

DEFAULT_SEED = 1337


class TokenDataModule(L.LightningDataModule):
    """Batches of token windows, (B, T) inputs and the (B, T) tokens that follow them.

    Exactly one of dataset, mixture, corpus and text_file says what is read; the last two are
    prepared on first use.

    Args:
        dataset: Folder of shards (of `gpt-lightning prepare`, nanoGPT, llm.c or build-nanogpt), its
            name under data_dir, or a URL (s3://, gs://, hf://, https://) of what `prepare` made.
        mixture: Several datasets, as for dataset, each with its weight; validation is on the first.
        corpus: tinyshakespeare, shakespeare-plays or shakespeare-plays-all.
        text_file: Path of a UTF-8 text.
        tokenizer: Of corpus or text_file: char, byte or a tiktoken encoding such as gpt2.
        val_fraction: Of corpus or text_file: the share at the end that is held out for validation.
        data_dir: Where corpora and prepared datasets lie.
        block_size: Tokens T a sequence; null: model.config.block_size.
        batch_size: Sequences B a micro-batch and rank.
        tokens_per_step: Of an optimizer step over all ranks, B x T x accumulation x ranks, from
            which trainer.accumulate_grad_batches follows; null: that is what is set.
        eval_batch_size: Sequences a validation batch and rank; null: batch_size.
        eval_batches: Evaluate on this many random batches of the validation split and as many of
            the training split, as nanoGPT does; null: on every token of the validation split.
        order: sequential: front to back; random: windows anywhere, as nanoGPT; shuffled: each
            window once an epoch, shard by shard where there are many; repeat: the first batch again
            and again; nanogpt: random, and drawn from the run's generator in the very order in
            which nanoGPT draws.
        shuffle_windows: Windows that shuffled permutes together.
        cache_limit_gb: Most that is kept of shards from a URL, in data_dir/cache.
        num_workers: Processes that read ahead; 0 reads in the training process.
        seed: Of the order; null: seed_everything.
        allow_changes: Go on from a checkpoint of other data, another order or another number of
            sequences a step; the run is then no longer the one that was begun.

    Raises:
        UserError: settings or files that cannot work, before the first step.
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
        block_size: int | None = None,
        batch_size: int = 16,
        tokens_per_step: int | None = None,
        eval_batch_size: int | None = None,
        eval_batches: int | None = None,
        order: OrderName | Literal["nanogpt"] = "shuffled",
        shuffle_windows: int = SHUFFLE_WINDOWS,
        cache_limit_gb: float = 20.0,
        num_workers: int = 0,
        seed: int | None = None,
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
        settings = {
            "batch_size": (batch_size, 1),
            "tokens_per_step": (tokens_per_step, 1),
            "eval_batch_size": (eval_batch_size, 1),
            "eval_batches": (eval_batches, 1),
            "shuffle_windows": (shuffle_windows, 1),
            "cache_limit_gb": (cache_limit_gb, 0),
            "num_workers": (num_workers, 0),
            "seed": (seed, 0),
        }
        for key, (value, least) in settings.items():
            if value is not None and value < least:
                raise UserError(f"data.{key} is {value}; it must be at least {least}")
        self.dataset = dataset
        self.mixture = mixture
        self._source = corpus or text_file or ""
        self.tokenizer_name = tokenizer
        self.val_fraction = val_fraction
        self.data_dir = Path(data_dir)
        self._block_size = block_size
        self.batch_size = batch_size
        self.tokens_per_step = tokens_per_step
        self.eval_batch_size = eval_batch_size or batch_size
        self.eval_batches = eval_batches
        self.order = order
        self.shuffle_windows = shuffle_windows
        self.cache_limit_gb = cache_limit_gb
        self.num_workers = num_workers
        self.seed = seed
        self.allow_changes = allow_changes
        self._datasets: dict[str, TokenDataset] = {}  # by address, opened at first use
        self.between_batches: Callable[[], None] | None = None  # see TrainLoader
        self._draws: NanoGPTDraws | None = None
        self._loader_in_use: TrainLoader | NanoGPTLoader | None = None
        if order == "nanogpt" and (num_workers or mixture or self.eval_batch_size != batch_size):
            raise UserError(
                "data.order nanogpt draws batches of one size from one dataset in the training "
                "process: set data.num_workers to 0, data.mixture and data.eval_batch_size to null"
            )

    # ---- what is read --------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """Of the datasets, the first of which is validated on."""
        if self.mixture:
            return list(self.mixture)
        if self.dataset:
            return [self.dataset]
        settings = (self._source, self.tokenizer_name, self.data_dir, self.val_fraction)
        return [str(dataset_folder(*settings))]

    @property
    def address(self) -> str:
        """What is read, for people."""
        return " + ".join(self.addresses)

    @property
    def block_size(self) -> int:
        """Tokens T a sequence."""
        if self._block_size is None:
            raise UserError("data.block_size is not set")
        return self._block_size

    def use_block_size(self, longest: int) -> None:
        """Takes the model's context where none was given, and refuses one that is longer."""
        if self._block_size is None:
            self._block_size = longest
        if self._block_size > longest:
            raise UserError(
                f"data.block_size is {self._block_size}, but model.config.block_size is {longest}: "
                "lower the first or raise the second"
            )

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows."""
        return self.manifest.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the dataset."""
        return tokenizer_from_spec(self.manifest.tokenizer)

    @property
    def manifest(self) -> Manifest:
        """What the first dataset holds; read and checked at first use."""
        return self._dataset(self.addresses[0]).manifest

    def training_tokens(self) -> int:
        """Of all datasets."""
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

    def _stream(self, split: str, address: str | None = None) -> TokenStream:
        return self._dataset(address or self.addresses[0]).stream(split, self.block_size)

    def _training_source(self) -> WindowSource:
        assert self.order != "nanogpt"
        corpora = {address: self._corpus(address, self.order) for address in self.addresses}
        if self.mixture is None:
            return corpora[self.addresses[0]]
        return Mixture(corpora, self.mixture, self._seed)

    def _corpus(self, address: str, order: OrderName) -> DatasetWindows:
        stream = self._stream("train", address)
        window_order = WindowOrder(
            order,
            len(stream),
            self.block_size,
            self._seed,
            stream.shard_tokens,
            self.shuffle_windows,
        )
        return DatasetWindows(stream, window_order)

    def use_trainer(self, trainer: L.Trainer) -> None:
        """Sets the accumulation that tokens_per_step means with this trainer's devices.

        Raises:
            UserError: there is none, or the trainer was told another one.
        """
        if self.tokens_per_step is None:
            return
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

    # ---- Lightning's hooks ---------------------------------------------------------------------

    def prepare_data(self) -> None:
        if self._source:
            prepare_source(self._source, self.tokenizer_name, self.data_dir, self.val_fraction)

    def setup(self, stage: str) -> None:
        # whatever is wrong is said here, before anything is built or written
        if stage == "fit":
            assert self.trainer is not None
            self.use_trainer(self.trainer)
            self.train_dataloader()
            if "val" in self.manifest.splits:
                self._stream("val")
        else:
            self._stream("test" if stage == "test" else "val")

    def train_dataloader(self) -> TrainLoader | NanoGPTLoader:
        if self.order == "nanogpt":
            assert self.trainer is not None
            self._loader_in_use = NanoGPTLoader(
                self._nanogpt_draws(),
                self.trainer.accumulate_grad_batches,
                self.allow_changes,
                self._between,
            )
            return self._loader_in_use
        assert self.trainer is not None
        accumulate, world = self.trainer.accumulate_grad_batches, self.trainer.world_size
        loader = TrainLoader(
            self._training_source(),
            batch_size=self.batch_size,
            accumulate=accumulate,
            rank=self.trainer.global_rank,
            world=world,
            num_workers=self.num_workers,
            pin_memory=self._pin_memory,
            allow_changes=self.allow_changes,
            between=self._between,
        )
        if len(loader) == 0:
            raise UserError(
                f"a step takes {self.batch_size} x {accumulate} x {world} windows "
                "(data.batch_size x accumulation x ranks), but the train split of "
                f"{self.address} has {loader.source.n_windows}: lower data.batch_size"
            )
        self._loader_in_use = loader
        return loader

    def _between(self) -> None:
        if self.between_batches is not None:
            self.between_batches()

    @property
    def wait_s(self) -> float:
        """Seconds that training has waited for batches, in this process."""
        return 0.0 if self._loader_in_use is None else self._loader_in_use.wait_s

    def position(self) -> dict[str, int]:
        """Where training is in the data: epoch, and windows of the epoch that are done."""
        loader = self._loader_in_use
        if not isinstance(loader, TrainLoader):
            return {}
        return {"epoch": loader.epoch, "window": loader.window}

    def shares(self) -> dict[str, float]:
        """Share of each dataset of a mixture in what has been trained on, by name; else nothing."""
        loader = self._loader_in_use
        if not isinstance(loader, TrainLoader) or not isinstance(loader.source, Mixture):
            return {}
        mixture = loader.source
        samples = loader.epoch * mixture.n_windows + loader.window
        counts = mixture.counts(samples)
        return dict(zip(mixture.names, (counts / max(1, samples)).tolist(), strict=True))

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        # training without a validation split is fine, evaluating without one is not
        assert self.trainer is not None
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and "val" not in self.manifest.splits:
            return []
        if self.eval_batches is None:
            return [self._eval_loader("val")]
        return [self._sample_loader("val"), self._sample_loader("train")]

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self._eval_loader("val")

    def _eval_loader(self, split: str) -> DataLoader[Batch]:
        assert self.trainer is not None
        batches = EvalBatches(
            self._stream(split),
            self.block_size,
            self.eval_batch_size,
            rank=self.trainer.global_rank,
            world=self.trainer.world_size,
        )
        return self._data_loader(batches, range(len(batches)))

    def _sample_loader(self, split: str) -> DataLoader[Batch]:
        """Random batches of a split, the same ones at every evaluation unless nanoGPT draws."""
        assert self.trainer is not None
        assert self.eval_batches is not None
        if self.order == "nanogpt":
            draws = self._nanogpt_draws()
            return self._data_loader(NanoGPTEvalBatches(draws, split), range(self.eval_batches))
        stream = self._stream(split)
        batches = TrainBatches(
            DatasetWindows(stream, WindowOrder("random", len(stream), self.block_size, self._seed)),
            epoch=EVALUATION,
            batch_size=self.eval_batch_size,
            rank=self.trainer.global_rank,
            world=self.trainer.world_size,
        )
        return self._data_loader(batches, range(self.eval_batches))

    def _data_loader(self, batches: Dataset[Batch], indices: range) -> DataLoader[Batch]:
        return DataLoader(
            batches,
            batch_size=None,  # an item is a batch already
            sampler=indices,
            num_workers=self.num_workers,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # its own: evaluation must not move the run's dropout
        )

    def _nanogpt_draws(self) -> NanoGPTDraws:
        assert self.trainer is not None
        if self.trainer.world_size > 1:
            raise UserError("data.order nanogpt is one process's: use --data.order random")
        if self._draws is None:
            self._draws = NanoGPTDraws(
                {"train": self._stream("train"), "val": self._stream("val")},
                self.block_size,
                self.batch_size,
                self.eval_batches or 0,
            )
        return self._draws

    @property
    def _pin_memory(self) -> bool:
        assert self.trainer is not None
        return self.trainer.strategy.root_device.type == "cuda"

    @property
    def _seed(self) -> int:
        # Lightning's seed_everything leaves its number here, for all ranks
        return (
            int(os.environ.get("PL_GLOBAL_SEED", DEFAULT_SEED)) if self.seed is None else self.seed
        )
