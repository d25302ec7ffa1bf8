"""The mean loss of an evaluation: over tokens, batches, loaders and ranks."""

import copy
import math

import pytest
import torch
from tiny_fit import quiet_trainer

from gpt_lightning.data.loader import IGNORE_INDEX
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.training.metrics import TokenLoss
from gpt_lightning.training.module import GPTModule

CONFIG = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=9)
LOSSES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 128.0, 0.5], [0.25, 7.0, 3.0]])
TARGETS = torch.tensor([[0, 1, 2], [0, IGNORE_INDEX, 2], [0, 1, 2], [IGNORE_INDEX] * 3])
MEAN = float((LOSSES * (TARGETS != IGNORE_INDEX)).sum() / 8)  # of eight targets


def batch_loss(rows: slice) -> torch.Tensor:
    """The mean loss of a batch as a model returns it: NaN for padding alone."""
    counted = TARGETS[rows] != IGNORE_INDEX
    return LOSSES[rows][counted].mean()


def mean_of(*batches: slice, dtype: torch.dtype = torch.float32) -> TokenLoss:
    metric = TokenLoss()
    for rows in batches:
        metric.update(batch_loss(rows).to(dtype), TARGETS[rows])
    return metric


@pytest.mark.parametrize(
    "batches",
    [
        [slice(0, 4)],
        [slice(0, 1), slice(1, 4)],
        [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)],
    ],
)
def test_a_mean_is_over_tokens_however_they_are_batched(batches):
    assert float(mean_of(*batches).compute()) == MEAN


def test_a_mean_is_over_the_tokens_of_all_ranks():
    """Ranks with unequal batches; one ends with padding alone. test_python_use.py has real ones."""
    ranks = mean_of(slice(0, 1), slice(1, 2)), mean_of(slice(2, 3), slice(3, 4))

    def gather(value: torch.Tensor, group: None) -> list[torch.Tensor]:
        name = "nats" if value.is_floating_point() else "tokens"
        return [getattr(metric, name) for metric in ranks]

    for metric in ranks:
        metric.distributed_available_fn = lambda: True
        metric.dist_sync_fn = gather
        assert float(metric.compute()) == MEAN
    assert [int(metric.tokens) for metric in ranks] == [5, 3]


def test_a_loss_that_is_no_number_stays_one_and_no_target_is_no_number():
    metric = mean_of(slice(0, 1))
    metric.update(torch.tensor(math.nan), TARGETS[:1])
    metric.update(torch.tensor(1.0), TARGETS[:1])
    assert metric.compute().isnan()
    assert mean_of(slice(3, 4)).compute().isnan()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_sums_are_in_float32_at_least_and_in_float64_only_of_such_losses(given, kept):
    metric = mean_of(slice(0, 1), slice(2, 3), dtype=given)
    assert metric.compute().dtype == metric.nats.dtype == kept
    assert metric.tokens == 6


def test_a_batch_does_not_wait_for_the_device():
    """A tensor of the device meta has no value that the host could read."""
    metric = TokenLoss().to("meta")
    metric.update(torch.zeros((), device="meta"), TARGETS.to("meta"))
    assert metric.compute().device.type == "meta"


def pairs(rows: int) -> torch.utils.data.DataLoader:
    tokens = torch.randint(9, (rows, 9))
    dataset = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:].clone())
    return torch.utils.data.DataLoader(dataset, batch_size=2)


def test_each_loader_of_each_evaluation_has_a_mean_of_its_own():
    module = GPTModule(CONFIG, compile=False)
    trainer = quiet_trainer()
    loaders = [pairs(rows) for rows in (5, 3, 1)]
    for given in (loaders, loaders[:1], loaders[1:]):
        trainer.validate(module, given, verbose=False)
        found = {k: float(v) for k, v in trainer.callback_metrics.items() if "loss" in k}
        names = ["val/loss", "val/loss/dataloader_idx_1", "val/loss/dataloader_idx_2"]
        assert list(found) == names[: len(given)]
        for loader, loss in zip(given, found.values(), strict=True):
            x, y = loader.dataset.tensors
            with torch.no_grad():
                assert loss == pytest.approx(float(module.model(x, y)), rel=1e-6)


def test_an_evaluation_adds_nothing_to_the_weights_and_the_module_can_be_copied():
    module = GPTModule(CONFIG, compile=False)
    module.configure_model()
    before = list(module.state_dict())
    quiet_trainer().validate(module, [pairs(3), pairs(2)], verbose=False)
    assert list(module.state_dict()) == before
    assert list(copy.deepcopy(module).state_dict()) == before
    assert not mean_of(slice(0, 1)).state_dict()


@pytest.mark.parametrize(
    ("label", "fix"), [(IGNORE_INDEX, "give the split a label other than -100"), (1, "lower model")]
)
def test_an_evaluation_without_a_finite_loss_is_one_line(label, fix):
    module = GPTModule(CONFIG, compile=False)
    module.configure_model()
    if label == 1:
        module.model.transformer.ln_f.weight.data.fill_(math.nan)
    loader = pairs(3)
    loader.dataset.tensors[1].fill_(label)
    with pytest.raises(UserError, match=f"^the val loss is nan at step 0: {fix}"):
        quiet_trainer().validate(module, loader, verbose=False)
