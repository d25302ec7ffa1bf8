"""Sampling from a GPT, one token at a time, with a key-value cache. Torch only."""

import torch
import torch.nn.functional as F

from gpt_lightning.model import GPT


def filter_top_k(logits: torch.Tensor, top_k: int | None) -> torch.Tensor:
    """Sets all but the top_k largest of each row of (B, V) to -inf; ties with the k-th stay."""
    if top_k is None or top_k >= logits.size(-1):
        return logits
    kth = logits.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < kth, -torch.inf)


@torch.no_grad()
def generate(
    model: GPT,
    idx: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Continues each sequence by max_new_tokens tokens.

    While the sequence fits into block_size, each step costs one token through the model (the cache
    holds the rest). Past that the window slides, every position embedding changes with it and
    nothing can be kept, so each step costs a forward over the last block_size tokens: nanoGPT's
    semantics, exactly.

    Args:
        model: the model; evaluated without dropout, its mode is restored.
        idx: prompts, int64 (B, T), T >= 1.
        max_new_tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: samples only among the k most likely tokens.
        generator: source of the random numbers, on the model's device.
        vocab_size: tokens that the tokenizer knows; rows beyond it (padding of the matrix) are
            never sampled.

    Returns:
        int64 (B, T + max_new_tokens), prompts included.
    """
    was_training = model.training
    model.eval()
    caches = model.make_caches()
    block_size = model.config.block_size
    fresh = idx[:, -block_size:]  # what the cache has not seen
    for _ in range(max_new_tokens):
        if len(caches[0]) + fresh.size(1) > block_size:
            caches, fresh = model.make_caches(), idx[:, -block_size:]
        # forward, not model(...): a compiled model would be compiled again for every length
        logits = model.forward(fresh, caches=caches)[:, -1, :vocab_size].float()  # (B, V)
        fresh = sample_token(logits, temperature, top_k, generator)
        idx = torch.cat((idx, fresh), dim=1)
    model.train(was_training)
    return idx


def sample_token(
    logits: torch.Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draws one token a row from (B, V) logits; returns int64 (B, 1)."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    probs = F.softmax(filter_top_k(logits / temperature, top_k), dim=-1)
    return torch.multinomial(probs, num_samples=1, generator=generator)
