"""The stream in bfloat16, products in float8: dtypes, and loss and gradients of float32's."""

import copy
import dataclasses

import pytest
import torch

from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.transforms import install_float8

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


def test_products_in_float8_are_near_those_in_bfloat16():
    pytest.importorskip("torchao", reason="make setup installs it")
    torch.manual_seed(0)
    models, idx = [GPT(WIDE)], torch.randint(0, 512, (4, 65))
    models.append(copy.deepcopy(models[0]))
    install_float8(models[1].transformer.h, emulate=True)
    assert [*models[0].state_dict()] == [*models[1].state_dict()]
    for model in models:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
    pairs = zip(*(model.transformer.h.parameters() for model in models), strict=True)
    errors = [((p.grad - q.grad).norm() / p.grad.norm()).item() for p, q in pairs]
    assert 0.02 < max(errors) < 0.2  # numbers of 4 significant bits, gradients of 3
    logits = [model(idx[:, :-1]) for model in models]
    assert (logits[0] - logits[1]).norm() < 0.1 * logits[0].norm()
