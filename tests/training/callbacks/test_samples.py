"""SampleText in a real run: when a text is drawn, from which weights, and what is shown."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from tiny_fit import quiet_trainer, tiny_config, tiny_data

from gpt_lightning.errors import UserError
from gpt_lightning.training.callbacks import samples
from gpt_lightning.training.callbacks.samples import SampleText
from gpt_lightning.training.module import GPTModule

TINY = tiny_config(16)


@pytest.fixture
def fit(text_file, capsys):
    """Train 4 steps, validate after every second one, return module, Trainer and the samples."""

    def run(callback, learning_rate=1e-2, validate_only=False, **trainer):
        L.seed_everything(1337)
        settings = {"max_steps": 4, "limit_val_batches": 1, "val_check_interval": 2}
        loop = quiet_trainer(**settings | {"callbacks": [callback]} | trainer)
        data = tiny_data(text_file)
        module = GPTModule(TINY, learning_rate=learning_rate, schedule="constant", weight_decay=0.0)
        capsys.readouterr()
        (loop.validate if validate_only else loop.fit)(module, data)
        said = capsys.readouterr().out
        texts = "\n".join(line[4:] for line in said.splitlines() if line.startswith("    "))
        return module, loop, texts

    return run


def only_letters(text: str, trainer: L.Trainer) -> bool:
    return set(text) <= {*trainer.datamodule.tokenizer.decode(range(trainer.datamodule.vocab_size))}


def test_each_validation_of_a_fit_draws_one_text_and_the_check_before_it_none(fit, monkeypatch):
    drawn = []
    sample = SampleText._sample

    def noted(self, trainer, module):
        drawn.append((trainer.global_step, sample(self, trainer, module)))
        return drawn[-1][1]

    monkeypatch.setattr(SampleText, "_sample", noted)
    _, trainer, shown = fit(SampleText(30, prompt="the cat", seed=2), num_sanity_val_steps=1)
    assert [step for step, _ in drawn] == [2, 4]
    for _, text in drawn:
        assert text.startswith("the cat")
        assert len(text) == len("the cat") + 30
        assert only_letters(text, trainer)
    assert shown == "\n".join(text for _, text in drawn)
    drawn.clear()
    fit(SampleText(30), validate_only=True)
    fit(SampleText(0))
    assert drawn == []


def test_only_the_weights_change_the_text(fit, monkeypatch):
    texts = []
    sample = SampleText._sample
    monkeypatch.setattr(
        SampleText, "_sample", lambda *args: texts.append(sample(*args)) or texts[-1]
    )
    fit(SampleText(40, seed=5), learning_rate=1e-30)  # no bit of a weight changes
    assert texts[0] == texts[1]
    fit(SampleText(40, seed=6), learning_rate=1e-30)
    assert texts[2] == texts[3] != texts[1]  # other draws from the same weights
    fit(SampleText(40, seed=5), learning_rate=0.1)
    assert texts[4] != texts[5]


@pytest.mark.parametrize("greedy", [{"temperature": 0.0, "top_k": None}, {"top_k": 1}])
def test_the_most_likely_tokens_are_those_of_the_model(fit, greedy):
    module, trainer, shown = fit(SampleText(12, prompt="a", **greedy), val_check_interval=4)
    tokenizer = trainer.datamodule.tokenizer
    tokens = torch.tensor([tokenizer.encode("a").tolist()])
    module.eval()
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat([tokens, module(tokens)[:, -1:].argmax(-1)], dim=1)
    assert shown == tokenizer.decode(tokens[0].tolist())


def test_a_prompt_that_the_tokenizer_lacks_is_an_error_before_the_first_step(fit):
    with pytest.raises(UserError, match="Ü"):
        fit(SampleText(5, prompt="Ü"))


def test_an_error_leaves_the_weights_of_the_training(monkeypatch):
    calls = []
    average = SimpleNamespace(
        on_validation_epoch_start=lambda *_: calls.append("average"),
        on_validation_epoch_end=lambda *_: calls.append("own"),
    )
    monkeypatch.setattr(samples, "find_callback", lambda *_: average)
    trainer = SimpleNamespace(lightning_module=SimpleNamespace(model=torch.nn.Linear(1, 1)))
    with pytest.raises(ZeroDivisionError), samples.evaluated_weights(trainer):
        calls.append(1 // 0)
    assert calls == ["average", "own"]
