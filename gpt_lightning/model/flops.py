"""FLOPs of a training token, and model FLOPs utilization (MFU).

The convention is PaLM's (Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311) as
nanoGPT counts it (`estimate_mfu` in https://github.com/karpathy/nanoGPT/blob/master/model.py), so
that our MFU compares with theirs. Peaks are in hardware/peaks.py.
"""


def flops_per_token(n_params: int, n_layer: int, n_embd: int, block_size: int) -> int:
    """Return the FLOPs of one token in one training step: 6 N + 12 n_layer n_embd T.

    A multiply-add is 2 FLOPs, and the backward pass does each matrix product twice (once for the
    gradient of either factor), so a product costs 3 times its forward.

        weights    each of N weights does one multiply-add per token    2 N    forward
        q k^T      n_head heads x T keys x n_embd/n_head channels       2 T C  forward, per layer
        weights v  n_head heads x T values x n_embd/n_head channels     2 T C  forward, per layer
        sum x 3                                                         6 N + 12 n_layer C T

    Attention counts as the full T x T square although half of it is masked. Elementwise work, the
    optimizer and recomputed activations do not count: the numerator is the work that the model
    needs, not the work that an implementation does. Biases and layer norms are inside N although
    they are not matrix products: 0.1% of N at n_embd = 768.

    Args:
        n_params: N, all parameters except the tables that are only looked up: `wpe`, and `wte` if
            the output head has its own matrix. A tied `wte` counts once, as the head.
        n_layer: Transformer blocks.
        n_embd: Width C of the residual stream.
        block_size: Context length T of the step, in tokens.

    Returns:
        FLOPs per token; times B T these are the FLOPs of a micro-batch.
    """
    return 6 * n_params + 12 * n_layer * n_embd * block_size


def mfu(
    tokens_per_sec: float, flops_per_token: float, peak_flops: float, n_devices: int = 1
) -> float:
    """Return the model FLOPs utilization: the model's FLOP/s over the peak of the hardware.

    Args:
        tokens_per_sec: Tokens per second of all devices together.
        flops_per_token: FLOPs of forward and backward, from `flops_per_token`.
        peak_flops: Peak of one device in FLOP/s; nanoGPT's is `peaks.A100_BF16_PEAK_FLOPS`.
        n_devices: Number of devices that share the tokens.

    Returns:
        A fraction, 0.4 for 40%. Above 1 if the peak is another device's, for example under
        nanoGPT's convention on a faster chip.
    """
    return tokens_per_sec * flops_per_token / (peak_flops * n_devices)
