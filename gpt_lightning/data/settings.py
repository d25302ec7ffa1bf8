"""Data arguments: name, type with its bounds, default and help, each in one place."""

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveInt

from gpt_lightning.data.order import OrderName
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import Seed, checked

SOURCES = ("dataset", "corpus", "text_file")


@checked("data")
@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Arguments of TokenDataModule. Exactly one of dataset, corpus, text_file is set.

    The fields are the keys `data.*` of the command line and the keyword arguments of
    TokenDataModule. The text of an argument is its help. Values from Python are checked against the
    types as those from the command line are.

    Args:
        dataset: Folder of shards (from `gpt-lightning prepare`, nanoGPT, llm.c or
            build-nanogpt), its name under data_dir, or a URL (s3://, gs://, hf://, https://) of
            such shards.
        corpus: tinyshakespeare, shakespeare-plays or shakespeare-plays-all; prepared on first use.
        text_file: Path of a UTF-8 text; prepared on first use.
        tokenizer: Tokenizer of corpus or text_file: char, byte, a tiktoken encoding, or bpe:8192,
            of its own.
        val_fraction: Share of corpus or text_file, at its end, that is held out for validation.
        val_text_file: Path of a UTF-8 text that is evaluated as a whole in place of the validation
            split, with the tokenizer of the data; prepared on first use.
        data_dir: Folder of corpora and prepared datasets; the shards of URLs are kept in its folder
            cache/.
        block_size: Tokens T per sequence; null: model.config.block_size.
        batch_size: Sequences B per micro-batch and rank.
        tokens_per_step: Tokens per optimizer step over all ranks, B x T x accumulation x ranks; it
            sets trainer.accumulate_grad_batches. null: trainer.accumulate_grad_batches decides.
        eval_batch_size: Sequences per validation batch and rank; null: batch_size.
        eval_batches: Evaluate on this number of random batches from the validation split, and as
            many from the training split, as nanoGPT does. null: evaluate on every token of the
            validation split.
        eval_train_batches: Number of those batches from the training split that are evaluated;
            null: eval_batches. With data.order nanogpt all are drawn, so that the draws after an
            evaluation stay nanoGPT's.
        order: sequential: front to back; random: random positions, as in nanoGPT; shuffled: each
            window once per epoch, with other borders in every epoch; repeat: the first batch again
            and again; nanogpt: random positions, drawn from the run's generator as nanoGPT's
            program does.
        patience: Seconds to wait for a shard of a URL whose server does not answer. The run then
            saves a checkpoint and ends with 75.
        num_workers: Number of processes that read ahead; 0: the training process reads.
        seed: Seed of the order; null: seed_everything.
        allow_changes: Resume with other data, another order or another number of sequences per step
            than the checkpoint. The result then differs from that of an uninterrupted run.

    Raises:
        UserError: A value is of another type or out of bounds, or two values contradict each other.
    """

    dataset: str | None = None
    corpus: str | None = None
    text_file: str | None = None
    tokenizer: str = "gpt2"
    val_fraction: ClosedUnitInterval = 0.1
    val_text_file: str | None = None
    data_dir: str = "data"
    block_size: PositiveInt | None = None
    batch_size: PositiveInt = 16
    tokens_per_step: PositiveInt | None = None
    eval_batch_size: PositiveInt | None = None
    eval_batches: PositiveInt | None = None
    eval_train_batches: PositiveInt | None = None
    order: OrderName | Literal["nanogpt"] = "shuffled"
    patience: NonNegativeFloat = 600.0
    num_workers: NonNegativeInt = 0
    seed: Seed | None = None
    allow_changes: bool = False

    def __post_init__(self) -> None:
        given = [f"data.{name}" for name in SOURCES if getattr(self, name)]
        if len(given) != 1:
            fix = " or ".join(f"--{key} null" for key in given) or "--config quickstart"
            raise UserError(
                f"{' and '.join(given) or 'no data'} given: set exactly one of "
                f"{', '.join(f'data.{name}' for name in SOURCES)}, as with {fix}"
            )
        if (self.eval_train_batches or 0) > (self.eval_batches or 0):
            raise UserError(
                f"data.eval_train_batches is {self.eval_train_batches}, data.eval_batches "
                f"{self.eval_batches or 'null'}: the first is a part of the second, lower it"
            )
        if self.order == "nanogpt" and (
            self.num_workers or self.eval_batch_size not in (None, self.batch_size)
        ):
            raise UserError(
                "data.order nanogpt draws batches of one size in the training process: set "
                "data.num_workers to 0 and data.eval_batch_size to null"
            )
