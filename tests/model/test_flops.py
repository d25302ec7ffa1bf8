"""FLOPs against nanoGPT's published MFU and against PyTorch's own count."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpt_lightning.hardware.peaks import A100_BF16_PEAK_FLOPS
from gpt_lightning.model.flops import flops_per_token, mfu
from gpt_lightning.model.gpt import GPT, SIZES, GPTConfig


@pytest.mark.parametrize(("step_ms", "percent"), [(220.50, 1.69), (304.79, 1.22), (1973.80, 0.19)])
def test_mfu_of_nanogpt_runs(step_ms: float, percent: float) -> None:
    # shakespeare_char, 6/6/384, block 256, batch 64: the log lines of MPS eager, MPS compiled, CPU
    per_token = flops_per_token(n_params=10_646_784, n_layer=6, n_embd=384, block_size=256)
    tokens_per_sec = 64 * 256 / (step_ms / 1e3)
    fraction = mfu(tokens_per_sec, per_token, A100_BF16_PEAK_FLOPS)
    assert round(100 * fraction, 2) == percent  # two decimals were printed


def _counted_per_token(config: GPTConfig, batch_size: int, block_size: int) -> tuple[int, float]:
    """Return N, and PyTorch's FLOPs of forward and backward, counted on the meta device."""
    with torch.device("meta"):
        model = GPT(config)
        idx = torch.zeros(batch_size, block_size, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(idx, idx).backward()
    n_params = model.num_params(embeddings=False)
    return n_params, counter.get_total_flops() / (batch_size * block_size)


@pytest.mark.parametrize(
    ("config", "block_size"),
    [
        (SIZES["gpt2"], 1024),
        # a context below block_size
        pytest.param(SIZES["gpt2-xl"], 128, marks=pytest.mark.slow),
        (GPTConfig(6, 6, 384, 256, vocab_size=65, bias=False, dropout=0.2), 256),
        (GPTConfig(4, 4, 256, 2048, vocab_size=512), 2048),  # attention is most of it
        (GPTConfig(2, 4, 256, 64, vocab_size=5000, tie_weights=False), 64),
    ],
    ids=["124M", "xl-short", "baby", "long", "untied"],
)
def test_flops_agree_with_pytorch(config: GPTConfig, block_size: int) -> None:
    config = dataclasses.replace(config, attention="naive")  # the counter sees no fused kernel
    n_params, counted = _counted_per_token(config, batch_size=2, block_size=block_size)
    ours = flops_per_token(n_params, config.n_layer, config.n_embd, block_size)
    # 13 n_embd biases and gains stand beside 12 n_embd^2 weights in a block: at most 0.5% here
    assert ours == pytest.approx(counted, rel=0.01)
