"""BetweenSteps under a stock Trainer: when its hook runs, and that a resume loses no batch."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from tiny_fit import quiet_trainer, tiny_config

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.training.between_steps import BetweenSteps, StepCallback
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule


class Events(StepCallback):
    """Events in their order; `position` counts the micro-batches that the loader has returned."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def between_batches(self, trainer) -> None:
        loader = trainer.datamodule.reader.train_loader
        self.events.append(("between", loader.position, trainer.global_step))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.events.append(("trained", trainer.global_step))

    def on_validation_end(self, trainer, module) -> None:
        self.events.append(("validated", trainer.global_step))


def module(**changes) -> GPTModule:
    return GPTModule(tiny_config(), schedule="constant", **changes)


def data(text_file, tmp_path, **changes) -> TokenDataModule:
    settings = {"text_file": str(text_file), "tokenizer": "char", "batch_size": 2, **changes}
    return TokenDataModule(data_dir=str(tmp_path / "data"), **settings)


def trainer(*callbacks, **changes) -> L.Trainer:
    limits = {"num_sanity_val_steps": 0, "limit_val_batches": 1}
    return quiet_trainer(callbacks=list(callbacks), **limits, **changes)


def test_the_hook_runs_after_everything_that_belongs_to_the_last_batch(text_file, tmp_path):
    seen = Events()
    run = trainer(seen, max_steps=2, accumulate_grad_batches=2, val_check_interval=2)
    run.fit(module(), data(text_file, tmp_path))
    assert seen.events == [
        ("between", 0, 0),
        ("trained", 0),
        ("between", 1, 0),
        ("trained", 1),
        ("validated", 1),
        ("between", 2, 1),
        ("trained", 1),
        ("between", 3, 1),
        ("trained", 2),
        ("validated", 2),
    ]


def test_the_wrapper_adds_nothing_to_the_loader(text_file, tmp_path):
    tokens = data(text_file, tmp_path, block_size=16)
    run = trainer(max_steps=1)
    tokens.trainer = run
    tokens.prepare_data()
    tokens.setup("fit")
    inner, calls = tokens.reader.train_loader, []
    loader = BetweenSteps(inner, lambda: not calls.append(inner.position))
    assert len(loader) == len(inner) > 3
    read = [x for x, _ in loader]
    assert len(read) == len(inner)
    assert calls == list(range(len(inner) + 1))
    assert loader.state_dict() == inner.state_dict()
    loader.load_state_dict({**loader.state_dict(), "window": 2})
    assert inner.position == 1
    assert torch.equal(next(iter(loader))[0], read[1])


def test_a_stock_trainer_takes_the_models_block_size(text_file, tmp_path):
    tokens = data(text_file, tmp_path)
    trainer(max_steps=1).fit(module(), tokens)
    assert tokens.block_size == 16
    with pytest.raises(UserError, match=r"data.block_size is 17, but model.config.block_size is 1"):
        trainer(max_steps=1).fit(module(), data(text_file, tmp_path, block_size=17))


def test_a_checkpoint_is_evaluated_with_plain_loaders(tmp_path, capsys):
    """Loaders of one's own have no dataset that could be compared with the checkpoint's."""
    tokens = torch.randint(9, (8, 17), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2
    )
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=9)
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(GPTModule(config, compile=False), loader)
    trainer.save_checkpoint(path := tmp_path / "a.ckpt")
    found = [
        quiet_trainer().validate(module, loader, ckpt_path=checkpoint)
        for module, checkpoint in (
            (trainer.lightning_module, None),
            (GPTModule(config, compile=False), path),
        )
    ]
    assert found[0] == found[1]
    assert "step 2" in capsys.readouterr().out


def test_a_finder_on_a_resume_is_refused(text_file, tmp_path):
    run = trainer(max_steps=2)
    run.fit(module(), data(text_file, tmp_path))
    run.save_checkpoint(path := tmp_path / "2.ckpt")
    finding = trainer(LearningRateFinder(), max_steps=4)
    with pytest.raises(UserError, match="LearningRateFinder and BatchSizeFinder reset the step"):
        finding.fit(module(), data(text_file, tmp_path), ckpt_path=path, weights_only=True)
