"""Log-likelihoods of texts under a GPT: batched by length, in one precision, over all ranks.

A request is a sequence of tokens whose end is scored. `windows` cuts it into pieces that fit into
the model's context; a window of T + 1 tokens is T inputs and T targets, as in training. Windows are
padded at their right end, which causal attention never sees, so the size of a batch changes
rounding errors alone. The output head runs at scored positions only.

The rules for long texts are those of the lm-evaluation-harness at 4e7e0d47
(https://github.com/EleutherAI/lm-evaluation-harness, lm_eval/models/huggingface.py and
lm_eval/utils.py, get_rolling_token_windows).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from gpt_lightning.data.tokenizers import Ids, Tokenizer, start_tokens
from gpt_lightning.errors import MemoryExhaustedError, UserError, is_out_of_memory
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.loss import IGNORE_INDEX, chunks, log_probabilities, pad_columns
from gpt_lightning.model.network import has_our_forward

CHUNK_TOKENS = 1024  # positions whose logits are held at a time: 206 MB of float32 for V = 50,257


class Request(NamedTuple):
    """Tokens of which the last ones are scored.

    Attributes:
        tokens: Token ids, integers (n,), context first.
        first: Index of the first scored token, at least 1.
        stride: Tokens that each window after the first one scores; None: block_size.
    """

    tokens: np.ndarray
    first: int
    stride: int | None = None


class Score(NamedTuple):
    """Score of a request, summed over its windows.

    Attributes:
        log_prob: Log-likelihood of the scored tokens in nats.
        n_tokens: Number of scored tokens.
        greedy: True if each scored token is the most likely one at its position.
    """

    log_prob: float
    n_tokens: int
    greedy: bool


Window = tuple[int, np.ndarray, int]  # index of its request, tokens, how many of them it scores
Scored = tuple[int, float, int, bool]  # index of a request, and a Score of one of its windows


def windows(request: Request, block_size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Cut a request into windows that score each of its tokens once.

    The first window scores up to block_size tokens, each later one up to `stride`. A window is
    filled to its left with as much context as fits, so that from the second window on each token
    has at least block_size - stride tokens of context.

    Yields:
        Up to block_size + 1 tokens, and the number of tokens at their end that are scored.
    """
    tokens, begin, n = request.tokens, request.first, block_size
    while begin < len(tokens):
        end = min(begin + n, len(tokens))
        yield tokens[max(0, end - block_size - 1) : end], end - begin
        begin, n = end, request.stride or block_size


@dataclass(eq=False)
class Scorer:
    """Compute log-likelihoods of requests under a model.

    Args:
        model: The model, on its device; its mode and weights stay.
        tokenizer: Tokenizer of the model. Rows of the head beyond its vocabulary (padding) have no
            share in the softmax.
        batch_size: Windows per batch.
        dtype: dtype of matrix products under autocast; None: that of the weights.

    Attributes:
        beat: Function that is called before each batch.
    """

    model: nn.Module
    tokenizer: Tokenizer
    batch_size: int = 16
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.beat: Callable[[], None] = lambda: None
        self._start = np.array(start_tokens(self.tokenizer, ""))  # context of a text without any
        self.block_size = cast(GPTConfig, self.model.config).block_size
        self._ours = has_our_forward(self.model)
        self._body: Any = self.model.transformer if self._ours else self.model

    def after(self, context: Ids, tokens: np.ndarray) -> Request:
        """Return the request that scores tokens, (n,), after those of a context, (m,)."""
        context = context if len(context) else self._start
        return Request(np.concatenate([context, tokens]), len(context))

    def continuation(self, context: str, text: str) -> Request:
        """Return the request that scores a text after a context, cut as in the harness.

        Spaces at the end of the context belong to the text. The text's tokens are those that follow
        as many tokens as the context alone has.
        """
        before = self.tokenizer.encode(context.rstrip())
        return self.after(before, self.tokenizer.encode(context + text)[len(before) :])

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the scores of requests, in their order, on all ranks.

        Rank r of W scores every W-th window, beginning at r, the longest windows first.

        Raises:
            MemoryExhaustedError: A batch does not fit into the memory of the device.
            UserError: A log-likelihood is not finite.
        """
        todo = [(i, *w) for i, r in enumerate(requests) for w in windows(r, self.block_size)]
        todo.sort(key=lambda window: -len(window[1]))
        rank, ranks = 0, 1
        if dist.is_initialized():
            rank, ranks = dist.get_rank(), dist.get_world_size()
        own = self._score_windows(todo[rank::ranks], hidden=rank > 0)
        found = [own] * ranks
        if ranks > 1:
            dist.all_gather_object(found, own)
        sums = [Score(0.0, 0, True)] * len(requests)
        for i, log_prob, n, greedy in chain(*found):
            before = sums[i]
            all_greedy = before.greedy and greedy
            sums[i] = Score(before.log_prob + log_prob, before.n_tokens + n, all_greedy)
        if not all(math.isfinite(score.log_prob) for score in sums):
            raise UserError("a log-likelihood is not finite: the model's weights are NaN or huge")
        return sums

    def _score_windows(self, todo: list[Window], hidden: bool) -> list[Scored]:
        done: list[Scored] = []
        batches = chunks(len(todo), self.batch_size)
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            # disable=None: shown on a terminal
            for part in tqdm(batches, leave=False, disable=hidden or None):
                self.beat()
                done += self._score_batch(todo[part])
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryExhaustedError("too little memory: lower batch_size") from error
            raise
        finally:
            for module in training:
                module.training = True
        return done

    @torch.no_grad()
    def _score_batch(self, batch: list[Window]) -> list[Scored]:
        T = max(len(tokens) for _, tokens, _ in batch) - 1
        idx = torch.zeros(len(batch), T, dtype=torch.int64)
        targets = torch.full_like(idx, IGNORE_INDEX)  # (B, T), as idx
        for row, (_, tokens, n) in enumerate(batch):
            window, end = torch.tensor(tokens), len(tokens) - 1
            idx[row, :end] = window[:-1]
            targets[row, end - n : end] = window[-n:]
        device, V = next(self.model.parameters()).device, self.tokenizer.vocab_size
        scored = (targets.flatten() != IGNORE_INDEX).nonzero().flatten()  # found without the device
        y, found = targets.flatten()[scored].to(device), []
        with torch.autocast(device.type, self.dtype, enabled=self.dtype is not None):
            x = self._body(idx.to(device)).flatten(0, 1)[scored.to(device)]  # (N, C or V)
            if self._ours:
                x, weight = pad_columns(x, cast(GPT, self.model).lm_head.weight[:V])
            for part in chunks(len(x), CHUNK_TOKENS):
                if self._ours:
                    log_probs = log_probabilities(x[part], weight)  # (n, V)
                else:
                    log_probs = x[part, :V].float().log_softmax(dim=1)
                own = log_probs.gather(1, y[part, None])[:, 0]
                found.append(torch.stack([own, log_probs.argmax(1) == y[part]]).cpu())  # (2, n)
        parts = torch.cat(found, 1).double().split([n for _, _, n in batch], 1)
        return [
            (i, float(part[0].sum()), n, bool(part[1].all()))
            for (i, _, n), part in zip(batch, parts, strict=True)
        ]
