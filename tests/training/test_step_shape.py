"""One setting for the tokens of a step, and what follows from it."""

from types import SimpleNamespace

import lightning as L
import pytest
from tiny_fit import TINY_RUN, rows

from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.step_shape import StepShape, accumulation, options_for

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]  # CI runs them
TINY = [
    *TINY_RUN,
    "--data.batch_size=4",
    "--trainer.val_check_interval=8",
    "--trainer.log_every_n_steps=1",
]


def fit(steps: int, *args: str) -> int:
    return main(["fit", *TINY, f"--trainer.max_steps={steps}", *args])


def losses(run: str = "run") -> list[float]:
    return [row["train/loss"] for row in rows(run) if "train/loss" in row]


# ---- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_the_accumulation_gives_the_tokens(batch_size, ranks):
    k = accumulation(524_288, batch_size, 1024, ranks)
    step = StepShape(batch_size, 1024, k, ranks)
    assert step.tokens == 524_288
    assert step.with_batch_size(2).tokens == 524_288


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (500_000, "set it to 491520 or 524288"),
        (1000, "set it to 32768"),
        # 48 sequences: 24 of them are the most that divide it
        (49_152, "set it to 32768 or 65536, or data.batch_size to 24"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(tokens, line):
    with pytest.raises(UserError, match=line) as refusal:
        accumulation(tokens, 32, 1024, 1)
    for word in str(refusal.value).replace(",", "").replace(":", "").split():
        if word in ("491520", "524288", "65536"):
            assert accumulation(int(word), 32, 1024, 1)
    assert "32768 tokens of a micro-batch" in str(refusal.value)


def test_options_change_the_micro_batch_and_nothing_else():
    step = StepShape(32, 1024, 16, 1)

    def options(batch_size: int, tokens: int | None, evaluation: int | None, *limits) -> list[str]:
        data = SimpleNamespace(tokens_per_step=tokens, eval_batch_size=evaluation)
        trainer = SimpleNamespace(val_check_interval=limits[0], limit_val_batches=limits[1])
        return options_for(step, batch_size, data, trainer)

    assert options(16, None, None, 4000, 160) == [
        "--data.batch_size 16",
        "--trainer.accumulate_grad_batches 32",
        "--trainer.val_check_interval 8000",  # every 250 steps, as before
        "--trainer.limit_val_batches 320",  # as many tokens
    ]
    for evaluation in (32, 64):
        found = options(16, 524_288, evaluation, 1.0, 0.5)
        assert found == ["--data.batch_size 16", "--data.eval_batch_size 16"]
    assert options(64, None, 8, 4000, None) == [
        "--data.batch_size 64",
        "--trainer.accumulate_grad_batches 8",
        "--trainer.val_check_interval 2000",
    ]


# ---- runs ----------------------------------------------------------------------------------------


def test_a_run_accumulates_to_its_tokens_and_says_so(capsys):
    assert fit(4, "--data.tokens_per_step=128") == 0
    printed = capsys.readouterr().out
    assert "128 tokens = 4 sequences x 16 tokens x 2 accumulated x 1 ranks" in printed
    assert fit(4, "--trainer.accumulate_grad_batches=2", "--run_name=other") == 0
    assert losses() == losses("other")  # the same steps
    assert fit(8, "--data.tokens_per_step=128", "--resume=auto") == 0
    assert len(losses()) == 8


def test_the_same_tokens_in_other_micro_batches_are_the_same_run(capsys):
    assert fit(4, "--data.tokens_per_step=128") == 0
    assert fit(4, "--data.tokens_per_step=128", "--data.batch_size=8", "--run_name=other") == 0
    assert losses("other") == pytest.approx(losses(), rel=1e-5)  # float32 sums reordered
    # as the line for want of memory proposes: from a checkpoint, with half the batch
    half = ["--data.batch_size=2", "--trainer.val_check_interval=16", "--data.allow_changes=true"]
    assert fit(8, "--data.tokens_per_step=128", *half, "--resume=auto") == 0
    assert fit(8, "--data.tokens_per_step=128", "--run_name=whole") == 0
    assert losses() == pytest.approx(losses("whole"), rel=1e-4)


def test_ranks_count(monkeypatch):
    monkeypatch.setattr("gpt_lightning.training.ranks.compare_data", lambda *args: None)
    trainer = L.Trainer(accelerator="cpu", devices=2, num_nodes=3, logger=False, barebones=True)
    data = TokenDataModule(
        text_file="text.txt", tokenizer="char", block_size=16, batch_size=4, tokens_per_step=1152
    )
    data.trainer = trainer
    data.prepare_data()
    data.setup("fit")
    assert trainer.accumulate_grad_batches == 1152 // (4 * 16 * 2 * 3)


@pytest.mark.parametrize(
    "change", ["--model.config.loss_chunk=5", "--model.config.checkpointing=true"]
)
def test_a_run_goes_on_with_less_memory(change, capsys):
    assert fit(4) == 0
    assert fit(8, change, "--resume=auto") == 0
    name = change.removeprefix("--").partition("=")[0]
    assert f"changed     {name}" in capsys.readouterr().out
    assert fit(8, "--run_name=whole") == 0
    assert losses() == pytest.approx(losses("whole"), rel=1e-5)  # float32 sums in another order
