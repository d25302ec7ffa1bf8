"""What StepProgress says of the time that is left."""

from types import SimpleNamespace

import pytest

from gpt_lightning.training.callbacks.progress import StepProgress, line_interval


def test_the_first_step_which_compiles_is_no_measure_of_the_others(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr("gpt_lightning.training.callbacks.progress.time.monotonic", lambda: now)
    trainer = SimpleNamespace(
        global_step=0,
        is_global_zero=True,
        callback_metrics={},
        log_every_n_steps=1,
        max_steps=10,
        max_epochs=None,
    )
    progress = StepProgress(plain_every_n_steps=1)
    progress.on_train_start(trainer, None)
    for seconds in (60.0, 2.0, 2.0):  # of each step
        now += seconds
        trainer.global_step += 1
        progress.on_train_batch_end(trainer, None, None, None, 0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit("| ")[-1] for line in lines] == [
        "time left unknown",
        "00:16 left",
        "00:14 left",
    ]


@pytest.mark.parametrize(
    ("total", "log_every", "interval"),
    [
        (2000, 10, 100),
        (2000, 30, 90),
        (40, 10, 10),
        (40, 40, 40),
        (40, 50, 2),  # no log in the run
        (40, 0, 2),
        (4, 0, 1),
        (0, 10, 100),  # no end
        (0, 500, 500),
        (0, 0, 100),
    ],
)
def test_lines_come_at_a_twentieth_of_the_run_with_or_without_logs(total, log_every, interval):
    assert line_interval(total, log_every) == interval
