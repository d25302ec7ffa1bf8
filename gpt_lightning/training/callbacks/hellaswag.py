"""HellaSwag: accuracy during training, by the protocol of build-nanogpt."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import platformdirs
import torch
import torch.nn.functional as F
from jsonargparse.typing import PositiveInt
from lightning import LightningModule, Trainer
from torch import Tensor

from gpt_lightning.data.loader import IGNORE_INDEX
from gpt_lightning.data.tokenizers import Tokenizer, start_tokens
from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.files import Fields, explained, locked
from gpt_lightning.hardware.precision import autocast_dtype
from gpt_lightning.model.gpt import GPT
from gpt_lightning.model.loss import sum_dtype
from gpt_lightning.remote.files import fetch_file
from gpt_lightning.training import between_steps, build, run_state
from gpt_lightning.training.between_steps import stop_due
from gpt_lightning.training.callbacks.samples import evaluated_weights, run_tokenizer
from gpt_lightning.training.callbacks.speed import phase

# the 10,042 items of the validation split (Zellers et al. 2019)
NAME = "hellaswag_val.jsonl"
COMMIT = "a29ff8e9a04bba4bd6588223785ce105328adc57"
URL = f"https://raw.githubusercontent.com/rowanz/hellaswag/{COMMIT}/data/{NAME}"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"


class Item(NamedTuple):
    """Text with four endings.

    Attributes:
        texts: Tokens of the context and of each ending, integers (n,).
        n_context: Number of tokens of the context.
        label: Index of the right ending.
    """

    texts: list[np.ndarray]
    n_context: int
    label: int


class HellaSwag(between_steps.StepCallback):
    """Log val/hellaswag, the share of texts whose right ending the model chooses among four.

    The text is `ctx`, a space and the ending, tokenized apart. The model chooses the ending with
    the lowest mean loss over its tokens. Of a text that is longer than the context the last tokens
    are read. Source: https://github.com/karpathy/build-nanogpt, hellaswag.py.

    The callback scores between two steps, on all ranks. The weights after the training are the same
    as without it, and its time is in no step. A resume from a checkpoint of the same step repeats
    it if it was not done.

    Args:
        every_n_steps: Optimizer steps between two evaluations; null: one after each validation.
        file: JSONL file of the items; null: the published ones, which are downloaded once.
        limit: Number of items; null: all.
        batch_size: Items per batch and rank, of four endings each.

    Raises:
        UserError: The file has no such items, or a character that the tokenizer lacks.
    """

    def __init__(
        self,
        every_n_steps: PositiveInt | None = None,
        file: str | None = None,
        limit: PositiveInt | None = None,
        batch_size: PositiveInt = 4,
    ):
        self.every_n_steps = every_n_steps
        self.file = file
        self.limit = limit
        self.batch_size = batch_size
        self._items: list[Item] = []
        self._due = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_steps is None and not trainer.limit_val_batches:
            raise UserError(
                "HellaSwag follows the validations, and trainer.limit_val_batches is 0: set its "
                "argument every_n_steps"
            )
        path = published_items() if self.file is None else Path(self.file)
        self._items = read_items(path, run_tokenizer(trainer), self.limit)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        every = self.every_n_steps
        if every is not None and run_state.at_step_boundary(trainer):
            self._due |= trainer.global_step % every == 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if run_state.is_fitting(trainer) and not trainer.sanity_checking:
            self._due |= self.every_n_steps is None

    def between_batches(self, trainer: Trainer) -> None:
        """Evaluate if it is time to."""
        if self._due and run_state.at_step_boundary(trainer) and not stop_due(trainer):
            self._evaluate(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._due and not trainer.should_stop:
            self._evaluate(trainer)

    def state_dict(self) -> Fields:
        return {"due": True} if self._due else {}  # an empty one leaves no trace in a checkpoint

    def load_state_dict(self, state_dict: Fields) -> None:
        self._due = state_dict["due"]

    def _evaluate(self, trainer: Trainer) -> None:
        self._due = False
        bar = trainer.progress_bar_callback
        module: Any = trainer.lightning_module
        # a batch of another shape would make the training's graph dynamic
        eager = (
            torch.compiler.set_stance("force_eager") if build.compiles(module)[0] else nullcontext()
        )
        with phase(trainer, "evaluation"), evaluated_weights(trainer), eager:
            hits = self._hits(trainer, module.model)
        accuracy = float(trainer.strategy.reduce(hits, reduce_op="sum")) / len(self._items)
        for logger in trainer.loggers:
            logger.log_metrics({"val/hellaswag": accuracy}, step=trainer.global_step)
        if trainer.is_global_zero:
            line = f"step {trainer.global_step} | val/hellaswag {accuracy:.4f}"
            (bar.print if bar else print)(line)

    @torch.no_grad()
    def _hits(self, trainer: Trainer, model: GPT) -> Tensor:
        """Return the number of items of this rank whose right ending is chosen, a scalar."""
        device = trainer.strategy.root_device
        dtype = autocast_dtype(trainer.precision)
        vocab_size = run_tokenizer(trainer).vocab_size  # rows beyond it are padding
        own = self._items[trainer.global_rank :: trainer.world_size]
        hits = torch.zeros((), device=device)
        training = [module for module in model.modules() if module.training]
        model.eval()
        for first in range(0, len(own), self.batch_size):
            part = own[first : first + self.batch_size]
            x, y = batch_of(part, model.config.block_size)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                logits = model(x.to(device))[..., :vocab_size]  # (4 items, T, V)
            means = mean_losses(logits, y.to(device))
            labels = torch.tensor([item.label for item in part], device=device)
            hits += (means.view(len(part), 4).argmin(1) == labels).sum()
        for module in training:
            module.training = True
        return hits


def published_items() -> Path:
    """Return the published items' file in the user's cache, into which it is downloaded once.

    Raises:
        UserError: It cannot be downloaded.
    """
    path = platformdirs.user_cache_path("gpt-lightning") / NAME
    try:
        with explained("write", path), locked(path.with_name(f".{NAME}.lock")):
            if not path.exists():  # another rank may have fetched it
                print(f"fetching {URL} to {path}", flush=True)
                fetch_file(URL, path, SHA256)
    except UserError as error:
        raise UserError(
            f"HellaSwag cannot fetch its items ({error.__cause__ or error}): get {URL}, and give "
            "its path as the callback's argument file"
        ) from error
    return path


def read_items(path: Path, tokenizer: Tokenizer, limit: int | None) -> list[Item]:
    """Return the items of a file, the shortest first.

    Args:
        path: JSONL file.
        tokenizer: Tokenizer of the model.
        limit: Number of items; None: all.

    Raises:
        UserError: The file has no such items, or a character that the tokenizer lacks.
    """
    with explained("read", path, f"give the path of {NAME} as the argument file"):
        lines = path.read_bytes().splitlines()
    items = []
    for number, line in enumerate(lines[:limit], 1):
        try:
            items.append(item_of(json.loads(line), tokenizer))
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: {reason_of(error)}; give HellaSwag's {NAME}"
            ) from error
    if not items:
        raise UserError(f"{path} has no items: give HellaSwag's {NAME}")
    return sorted(items, key=lambda item: max(map(len, item.texts)))


def item_of(fields: Fields, tokenizer: Tokenizer) -> Item:
    """Return the tokens of an item."""
    endings = fields["endings"]
    label = int(fields["label"])
    if not isinstance(endings, list) or len(endings) != 4 or label not in range(4):
        raise UserError("expected four endings, and the index of one as label")
    context = tokenizer.encode(fields["ctx"])
    if not len(context):
        context = np.array(start_tokens(tokenizer, ""))
    texts = [np.concatenate([context, tokenizer.encode(f" {ending}")]) for ending in endings]
    return Item(texts, len(context), label)


def batch_of(items: list[Item], block_size: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the endings of items, int64 (4 items, T) each.

    Targets are IGNORE_INDEX but for the tokens of the endings.
    """
    rows = [(text, item.n_context) for item in items for text in item.texts]
    T = min(block_size, max(len(text) for text, _ in rows) - 1)
    x = torch.zeros(len(rows), T, dtype=torch.int64)
    y = torch.full_like(x, IGNORE_INDEX)
    for row, (text, n_context) in enumerate(rows):
        window = torch.from_numpy(text[-T - 1 :].astype(np.int64))
        end = len(window) - 1
        begin = max(0, end - (len(text) - n_context))
        x[row, :end] = window[:-1]
        y[row, begin:end] = window[begin + 1 :]
    return x, y


def mean_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of the targets of each row, (B,), under logits (B, T, V)."""
    rows, positions = (targets != IGNORE_INDEX).nonzero(as_tuple=True)  # (N,) each
    scored = logits[rows, positions]  # (N, V)
    scored = scored.to(sum_dtype(scored.dtype))
    losses = F.cross_entropy(scored, targets[rows, positions], reduction="none")
    sums = losses.new_zeros(len(targets)).index_add(0, rows, losses)
    return sums / torch.bincount(rows, minlength=len(targets))
