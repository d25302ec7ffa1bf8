"""nanoGPT's draws, against its program's loop written out."""

from pathlib import Path

import lightning as L
import pytest
import torch
from tiny_fit import quiet_trainer, tiny_data

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.data.readers import NanoGPTLoader
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule

T, B, EVALS = 8, 3, 2


class Recorder(L.Callback):
    """Every batch that the loop sees, in the order in which it sees them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, torch.Tensor]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.seen.append(("training", batch[0]))

    def on_validation_batch_start(
        self, trainer, pl_module, batch, batch_idx, dataloader_idx=0
    ) -> None:
        self.seen.append((("val", "train")[dataloader_idx], batch[0]))


def config(**changes) -> GPTConfig:
    return GPTConfig(
        **{"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": T, "init": "nanogpt", **changes}
    )


def datamodule(text_file, **changes) -> TokenDataModule:
    settings = {"order": "nanogpt", "eval_batches": EVALS, "block_size": T, "batch_size": B}
    return tiny_data(text_file, **settings | changes)


def streams(data: TokenDataModule) -> dict[str, TokenStream]:
    dataset = TokenDataset(data.address, Path(data.settings.data_dir))
    return {split: dataset.stream(split, T) for split in ("train", "val")}


def trainer(*callbacks, **changes) -> L.Trainer:
    settings = {"max_steps": 4, "val_check_interval": 2, "num_sanity_val_steps": -1, **changes}
    settings |= {"check_val_every_n_epoch": None, "use_distributed_sampler": False}
    return quiet_trainer(callbacks=list(callbacks), **settings)


def nanogpts_draws(data: TokenDataModule, steps: int, every: int) -> list[tuple[str, torch.Tensor]]:
    """nanoGPT's program: seed, model, a batch; evaluations at step 0, `every`, ...; batches."""
    tokens = {
        split: torch.tensor(stream.windows([0], len(stream))[0])
        for split, stream in streams(data).items()
    }

    def get_batch(split: str) -> torch.Tensor:
        ix = torch.randint(len(tokens[split]) - T, (B,))
        return torch.stack([tokens[split][i : i + T] for i in ix])

    L.seed_everything(1337)
    GPT(config(vocab_size=data.vocab_size))
    seen, x = [], get_batch("train")
    for step in range(steps + 1):
        if step % every == 0:
            evaluation = {s: [get_batch(s) for _ in range(EVALS)] for s in ("train", "val")}
            # the loop here looks at the validation split first; the draws are made before
            seen += [(s, batch) for s in ("val", "train") for batch in evaluation[s]]
        if step < steps:
            seen.append(("training", x))
            x = get_batch("train")
    return seen


@pytest.mark.parametrize("part", [None, 1])
def test_batches_are_those_of_nanogpts_program(text_file, part):
    """Neither dropout nor a part of the evaluation moves the draws."""
    recorder, data = Recorder(), datamodule(text_file, eval_train_batches=part)
    L.seed_everything(1337)
    module = GPTModule(config(vocab_size=None, dropout=0.5), schedule="constant", compile=False)
    trainer(recorder).fit(module, data)
    expected = nanogpts_draws(data, steps=4, every=2)
    if part:  # the first that are drawn
        train = iter(range(len(expected)))
        expected = [(s, x) for s, x in expected if s != "train" or next(train) % EVALS == 0]
    assert [name for name, _ in recorder.seen] == [name for name, _ in expected]
    for (_, ours), (_, theirs) in zip(recorder.seen, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_the_state_goes_on_where_it_was(text_file):
    data = datamodule(text_file)
    data.prepare_data()
    torch.manual_seed(1)
    draws = NanoGPTLoader(streams(data), data.settings)
    draws.training_batch()
    draws.evaluation_batch("val", 0)
    state = draws.state_dict()
    expected = [draws.training_batch()[0] for _ in range(3)]
    torch.manual_seed(2)
    resumed = NanoGPTLoader(streams(data), data.settings)
    resumed.load_state_dict(state)
    for batch in expected:
        assert torch.equal(resumed.training_batch()[0], batch)
    with pytest.raises(UserError, match=r"another data.order than nanogpt"):
        resumed.load_state_dict({"epoch": 0, "window": 4})


def test_other_orders_evaluate_on_the_same_batches_each_time(text_file):
    recorder, data = Recorder(), datamodule(text_file, order="shuffled")
    trainer(recorder).fit(GPTModule(config(vocab_size=None), schedule="constant"), data)
    evaluations = [batch for name, batch in recorder.seen if name != "training"]
    assert len(evaluations) == 3 * 2 * EVALS
    for later in range(2 * EVALS, len(evaluations)):
        assert torch.equal(evaluations[later], evaluations[later % (2 * EVALS)])
    assert not torch.equal(evaluations[0], evaluations[1])


def test_an_epoch_is_whole_steps_of_the_windows_that_there_are(text_file):
    data = datamodule(text_file)
    data.prepare_data()
    windows = (len(streams(data)["train"]) - 1) // T
    for accumulate in (1, 4, 7):
        loader = NanoGPTLoader(streams(data), data.settings, accumulate)
        assert len(loader) == windows // (B * accumulate) * accumulate
        assert len(list(loader)) == len(loader)
    assert len(NanoGPTLoader(streams(data), data.settings, windows)) == windows  # one step at least


def test_what_cannot_be_nanogpts_is_refused(text_file):
    with pytest.raises(UserError, match=r"set data.num_workers to 0"):
        datamodule(text_file, num_workers=1)
    with pytest.raises(UserError, match=r"data.eval_batches is 0"):
        datamodule(text_file, eval_batches=0)
    data = datamodule(text_file)
    data.prepare_data()
    data.trainer = L.Trainer(accelerator="cpu", devices=2, logger=False, barebones=True)
    with pytest.raises(UserError, match=r"one process"):
        data.setup("fit")
