"""The stream in bfloat16: dtypes, and loss and gradients of float32's."""

import dataclasses

import pytest
import torch

from gpt_lightning.model.gpt import GPT, GPTConfig

WIDE = GPTConfig(n_layer=3, n_head=4, n_embd=128, block_size=64, vocab_size=512)
NARROW = dataclasses.replace(WIDE, residual="bfloat16")


def trained(config, autocast=True):
    torch.manual_seed(0)
    model = GPT(config)
    idx = torch.randint(0, 512, (4, 65))
    dtypes = []
    for block in model.transformer.h:
        block.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
        block.ln_1.register_forward_hook(lambda module, inputs, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()]), set(dtypes)


def test_the_stream_and_its_norms_are_bfloat16():
    assert trained(NARROW)[2] == {torch.bfloat16}
    assert torch.float32 in trained(WIDE)[2]


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_as_near_to_float32_as_mixed_precision_is(bias):
    exact_loss, exact, _ = trained(dataclasses.replace(WIDE, bias=bias), autocast=False)
    errors = []
    for config in (WIDE, NARROW):
        loss, gradients, _ = trained(dataclasses.replace(config, bias=bias))
        assert loss == pytest.approx(exact_loss, abs=2e-3)
        errors.append(((gradients - exact).norm() / exact.norm()).item())
    assert errors[1] < 3 * errors[0] < 0.1  # rounded once more for each layer, and no worse


def test_outside_autocast_it_is_the_plain_model():
    narrow, plain = trained(NARROW, autocast=False), trained(WIDE, autocast=False)
    assert narrow[0] == plain[0]
    assert torch.equal(narrow[1], plain[1])
