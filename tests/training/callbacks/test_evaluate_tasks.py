"""EvaluateTasks: when it evaluates, what it logs, and that the training does not change."""

import contextlib
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from gpt_lightning.cli import main
from gpt_lightning.evaluate.scoring import Scorer
from gpt_lightning.evaluate.tasks import Metric, Result, Task
from gpt_lightning.runs.sources import load_model
from gpt_lightning.training import fit
from gpt_lightning.training import module as module_file
from gpt_lightning.training.callbacks import evaluate_tasks
from gpt_lightning.training.callbacks.evaluate_tasks import EvaluateTasks
from gpt_lightning.training.callbacks.signals import Watchdog
from gpt_lightning.training.steps import find_callback
from tests.evaluate.made_up import write_files
from tests.tiny_fit import TINY_MODEL
from tests.tiny_fit import rows as all_rows

RUN = [
    "fit",
    *TINY_MODEL,
    *("--data.text_file=text.txt", "--data.tokenizer=byte", "--model.compile=false"),
    *("--data.batch_size=2", "--model.config.dropout=0.2"),
    *("--trainer.max_steps=6", "--trainer.accumulate_grad_batches=2"),
    *("--trainer.val_check_interval=8", "--trainer.check_val_every_n_epoch=null"),
]
TASKS = ["--evaluation.tasks=hellaswag,lambada", "--evaluation.data=items", "--evaluation.limit=3"]


@pytest.fixture
def items(own_folder) -> Path:
    return write_files(Path("items"))


def rows(name: str) -> dict[int, dict]:
    """Return the rows of a run that have a task's number, by step."""
    found = [row for row in all_rows(name) if "val/hellaswag" in row]
    by_step = {row["step"]: row for row in found}
    assert len(by_step) == len(found)
    return by_step


def weights(name: str) -> dict[str, torch.Tensor]:
    return load_model(Path("lightning_logs", name))[0].state_dict()


@pytest.mark.slow  # four fits
def test_the_training_is_the_same_and_a_resume_repeats_the_evaluation(items, capsys):
    own = [*TASKS, "--evaluation.every_n_steps=2", "--checkpoint.every_n_steps=4"]
    assert main([*RUN, "--run_name=plain"]) == 0
    assert main([*RUN, *own, "--run_name=whole"]) == 0
    printed, found = capsys.readouterr().out, rows("whole")
    assert list(found) == [2, 4, 6]  # the validation is at 4
    assert "evaluation  hellaswag: partial: the first 3 of 8 items" in printed
    for (name, a), b in zip(weights("plain").items(), weights("whole").values(), strict=True):
        assert torch.equal(a, b), name
    folder = Path("lightning_logs/whole/version_0/checkpoints")
    model, tokenizer = load_model(next(folder.glob("step-0000006*.ckpt")))
    for task in ("hellaswag", "lambada"):
        result = Task(task, Scorer(model, tokenizer), "items", limit=3).run()
        assert found[6][f"val/{task}"] == result.metrics[0].value
    assert f"step 6 | val/hellaswag {found[6]['val/hellaswag']:.4f}, val/lambada" in printed
    assert "evaluation 0." in printed.split("\ntime  ")[-1]  # a phase of its own
    assert main([*RUN, *own, "--run_name=cut", "--trainer.max_steps=4"]) == 0
    assert main([*RUN, *own, "--run_name=cut", "--resume=auto"]) == 0
    assert [{**row, "time": 0} for row in rows("cut").values()] == [
        {**row, "time": 0} for row in found.values()
    ]


def test_without_an_interval_it_follows_each_validation(items):
    assert main([*RUN, *TASKS, "--run_name=after", "--trainer.num_sanity_val_steps=1"]) == 0
    assert list(rows("after")) == [4]


def test_an_evaluation_has_the_weights_of_val_loss_and_compiles_nothing(items, monkeypatch):
    """The model counts as compiled here, without a compiler's work."""
    inside, found = [], []

    @contextlib.contextmanager
    def averaged(trainer):
        inside.append(trainer.global_step)
        yield
        inside.clear()

    def run(task):
        watchdog = find_callback(task.trainer, Watchdog)
        stance = torch._dynamo.eval_frame._stance.stance
        found.append((*inside, stance, task.scorer.beat == watchdog.beat))
        return Result(task.name, [Metric("", "", 0.0)], [], [])

    class Own(Callback):
        def on_train_start(self, trainer, pl_module):
            for task in find_callback(trainer, EvaluateTasks)._tasks:
                task.trainer = trainer

    monkeypatch.setattr(evaluate_tasks, "evaluated_weights", averaged)
    monkeypatch.setattr(Task, "run", run)
    monkeypatch.setattr(module_file, "compile_in_place", lambda *args: None)
    own = [*TASKS, "--model.compile=true", "--trainer.max_steps=2", "--run_name=inside"]
    cli = fit.run_cli([*RUN, *own, "--evaluation.every_n_steps=2"], callbacks=[Own()])
    assert found == [(2, "force_eager", True)] * 2
    callback = find_callback(cli.trainer, EvaluateTasks)
    assert callback.state_dict() == {}  # else Lightning warns of a resume without the tasks
    callback.load_state_dict({"due": True})
    assert callback.state_dict() == {"due": True}


def test_a_signal_does_not_wait_for_an_evaluation(items, monkeypatch):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 2

    runs = []
    monkeypatch.setattr(Task, "run", lambda task: runs.append(task.name))
    fit.run_cli([*RUN, *TASKS, "--evaluation.every_n_steps=2"], callbacks=[Stop()])
    assert runs == []
