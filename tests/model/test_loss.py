"""Head and loss in chunks against the plain version: whole logits, then F.cross_entropy."""

import dataclasses
import inspect
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_lightning.data import loader
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.loss import IGNORE_INDEX, chunked_cross_entropy, log_probabilities

B, T, C, V = 3, 16, 32, 101
TINY = GPTConfig(n_layer=2, n_head=2, n_embd=C, block_size=T, vocab_size=V)


def plain(x, weight, targets, chunk_tokens=None):
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.float().view(-1, weight.size(0)), targets.view(-1))


def operands(ignored: int = 5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, C, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, C, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(V, (B, T), generator=generator)
    targets.view(-1)[torch.randperm(B * T, generator=generator)[:ignored]] = -100
    return x, weight, targets


def with_gradients(function, x, weight, targets, chunk_tokens, bf16=False):
    """Return the loss and both gradients; the loss is scaled, as by a GradScaler."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = function(x, weight, targets, chunk_tokens)
    assert loss.dtype == torch.float32
    return loss.detach(), *torch.autograd.grad(64.0 * loss, (x, weight))


@pytest.mark.parametrize("chunk_tokens", [1, 7, B * T, 1000])
def test_chunks_give_the_plain_loss_and_gradients(chunk_tokens):
    ours = with_gradients(chunked_cross_entropy, *operands(), chunk_tokens)
    theirs = with_gradients(plain, *operands(), chunk_tokens)
    # float32 sums of up to 101 terms of size 1 in another order; gradients are scaled by 64
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-6, rtol=1e-6)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=64 * 1e-7, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_chunks_under_autocast_are_as_exact_as_the_plain_version(chunk_tokens):
    exact = with_gradients(plain, *operands(), chunk_tokens)
    theirs = with_gradients(plain, *operands(), chunk_tokens, bf16=True)
    ours = with_gradients(chunked_cross_entropy, *operands(), chunk_tokens, bf16=True)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert a.dtype == torch.float32
        assert not torch.equal(a, c)  # products were in bfloat16
        # its rounding, 2^-9 of each operand, is the error of both versions
        assert (a - c).norm() < 1.5 * (b - c).norm() + 1e-3 * c.norm()
        assert (a - c).norm() < 0.01 * c.norm()


def test_the_gradient_of_the_weight_is_summed_in_float32():
    """A bfloat16 sum of 4,096 equal chunks would stop growing at 256 times a term."""
    n = 4096
    x = torch.full((1, n, 16), 1.0)
    weight = torch.zeros(2, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(x, weight, torch.zeros(1, n, dtype=torch.int64), 1)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient[0, 0] == -0.5  # softmax - one-hot = 1/2 - 1 at every position
    assert gradient[1, 0] == 0.5


def test_parameters_in_bfloat16_get_gradients_in_bfloat16():
    ours = with_gradients(chunked_cross_entropy, *operands(dtype=torch.bfloat16), 7)
    theirs = with_gradients(plain, *operands(dtype=torch.bfloat16), 7)
    assert [g.dtype for g in ours[1:]] == [torch.bfloat16] * 2
    # the same products, and a softmax in float32 whatever they are in
    torch.testing.assert_close(ours[0], theirs[0], atol=0, rtol=1e-6)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        # 2^-8: of bfloat16, once for the products and once for the result
        assert (a - b).norm() < 2**-7 * b.norm()


@pytest.mark.parametrize("grad", [True, False])
def test_without_any_target_the_loss_is_nan_as_the_plain_one(grad):
    x, weight, targets = operands(ignored=B * T)
    with torch.set_grad_enabled(grad):
        assert plain(x, weight, targets).isnan()
        assert chunked_cross_entropy(x, weight, targets, 7).isnan()


def test_a_weight_or_activations_alone_can_be_trained():
    x, weight, targets = operands()
    expected = torch.autograd.grad(plain(x, weight, targets), (x, weight))
    for index, wanted in enumerate((x, weight)):
        args = [x.detach(), weight.detach()]
        args[index] = wanted
        (found,) = torch.autograd.grad(chunked_cross_entropy(*args, targets, 7), wanted)
        torch.testing.assert_close(found, expected[index])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_gives_the_same_loss_and_computes_no_gradient(mode):
    x, weight, targets = operands()
    expected = chunked_cross_entropy(x, weight, targets, 7)
    with mode(), Products() as counted:
        found = chunked_cross_entropy(x, weight, targets, 7)
    assert found == expected
    assert not found.requires_grad
    assert counted.products == -(-B * T // 7)  # one a chunk, the logits


class Products(TorchDispatchMode):
    """Record the number of products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # in inference mode F.linear is not taken apart
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.linear)
        return func(*args, **(kwargs or {}))


def test_memory_does_not_grow_with_the_batch_but_for_activations():
    """At the peak live the gradients, and the log-probabilities and logits of one chunk."""
    from gpt_lightning.bench.memory_meter import profiled_phases

    rows, wide, n = 512, 5_000, 32

    def work(phase):
        with phase("setup"):
            x = torch.randn(1, rows, C, requires_grad=True)
            weight = torch.randn(wide, C, requires_grad=True)
            targets = torch.randint(wide, (1, rows))
        with phase("step"):
            chunked_cross_entropy(x, weight, targets, n).backward()

    step = profiled_phases(work)["step"]
    gradients = (rows * C + 2 * wide * C) * 4  # x, the weight, a chunk's part of it
    # three times a chunk's: logits, log-probabilities and what the softmax keeps for itself
    assert step.peak - step.begin < 1.1 * (gradients + 3 * n * wide * 4)
    assert step.peak - step.begin < rows * wide * 4


# ---- the model -----------------------------------------------------------------------------------


def trained(config: GPTConfig, bf16: bool = False):
    torch.manual_seed(0)
    model = GPT(config)
    x, y = torch.randint(V, (2, B, T))
    torch.manual_seed(1)  # seed of dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(x, y)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tie_weights", [True, False])
def test_a_model_has_the_same_gradients_with_its_loss_in_chunks(tie_weights):
    config = dataclasses.replace(TINY, tie_weights=tie_weights)
    loss, gradients = trained(config)
    chunked_loss, chunked = trained(dataclasses.replace(config, loss_chunk=7))
    assert chunked_loss == pytest.approx(loss, rel=1e-6)
    assert chunked.keys() == gradients.keys()
    for name, gradient in gradients.items():  # a tied matrix has the sum of both its uses
        # float32 sums in another order, through two blocks
        torch.testing.assert_close(chunked[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_narrow_models_are_padded_in_chunks_as_well(monkeypatch):
    widths = set()

    def spy(x, weight):
        widths.add((x.size(-1), weight.size(-1)))
        return log_probabilities(x, weight)

    monkeypatch.setattr("gpt_lightning.model.loss.log_probabilities", spy)
    config = dataclasses.replace(TINY, n_embd=6, loss_chunk=7)
    loss, gradients = trained(config)
    assert widths == {(16, 16)}
    plain_loss, expected = trained(dataclasses.replace(config, loss_chunk=None))
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("attention", "policy", "dropout", "bf16"),
    [
        ("sdpa", True, 0.2, True),
        ("sdpa", "products", 0.0, True),
        ("sdpa", "products", 0.2, False),
        ("naive", "products", 0.2, True),
    ],
)
def test_checkpointing_changes_no_gradient(dropout, bf16, policy, attention):
    config = dataclasses.replace(TINY, dropout=dropout, attention=attention)
    loss, gradients = trained(config, bf16)
    again, checkpointed = trained(dataclasses.replace(config, checkpointing=policy), bf16)
    assert again == loss
    for name, gradient in gradients.items():
        assert torch.equal(checkpointed[name], gradient), name  # the same operations, done twice


class Counted(TorchDispatchMode):
    """Count of the operations that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["sdpa", "naive"])
def test_kept_products_are_computed_once(attention):
    def operations(checkpointing: bool | str) -> Counter[str]:
        model = GPT(dataclasses.replace(TINY, attention=attention, checkpointing=checkpointing))
        with Counted() as counted:
            model(*torch.randint(V, (2, B, T))).backward()
        return counted.names

    none, whole, kept = map(operations, (False, True, "products"))
    for name in ("addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert none[name] == kept[name]
        assert (none[name] < whole[name]) == (none[name] > 0)
    assert none["native_layer_norm"] < kept["native_layer_norm"] == whole["native_layer_norm"]


@pytest.mark.slow
def test_the_model_compiles_whole():
    config = dataclasses.replace(TINY, n_layer=1, loss_chunk=20, checkpointing="products")
    x, y = torch.randint(V, (2, B, T))
    torch.manual_seed(0)
    model = GPT(config)
    expected = model(x, y)
    expected.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    torch.compiler.reset()  # other lengths compiled before would make this one symbolic
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(x, y)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.lm_head.weight.grad, gradient, atol=1e-6, rtol=1e-4)


def test_the_ignored_target_is_one_number():
    """Data cannot import the model; both name the default of F.cross_entropy."""
    default = inspect.signature(F.cross_entropy).parameters["ignore_index"].default
    assert default == IGNORE_INDEX == loader.IGNORE_INDEX
