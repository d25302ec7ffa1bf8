"""A callback of one rank sets trainer.should_stop: all ranks stop at one step, with one save."""

import json
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from ranks import run_commands, run_ranks
from tiny_fit import TINY_MODEL

from gpt_lightning.training.callbacks.signals import StopSignals


class Stop(L.Callback):
    """Ask for a stop in one rank, in a hook, from a micro-batch on."""

    def __init__(self, rank: int, hook: str, batch: int) -> None:
        self.rank, self.batch = rank, batch
        setattr(self, hook, self.stop)

    def stop(self, trainer, *args, **kwargs) -> None:
        done = trainer.fit_loop.total_batch_idx + 1 >= self.batch
        trainer.should_stop |= trainer.global_rank == self.rank and done


def fit(name, rank, hook, batch, *options):
    config = {"class_path": f"{__name__}.Stop"}
    config["init_args"] = {"rank": rank, "hook": hook, "batch": batch}
    Path(f"{name}.yaml").write_text(json.dumps({"trainer": {"callbacks": [config]}}))
    shape = ("--trainer.devices=2", "--data.batch_size=16", "--trainer.accumulate_grad_batches=2")
    steps = ("--trainer.max_steps=60", "--trainer.log_every_n_steps=1", "--trainer.accelerator=cpu")
    text = ("--data.text_file=text.txt", "--data.tokenizer=char", f"--run_name={name}")
    return ["fit", f"--config={name}.yaml", *TINY_MODEL, *shape, *steps, *text, *options]


@pytest.mark.slow
def test_all_ranks_stop_for_one(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    late = "--trainer.min_steps=15"
    cases = {
        "batch_of_1": (1, "on_train_batch_end", 8),
        "epoch": (1, "on_train_epoch_end", 1),
        "minimum": (1, "on_train_batch_start", 7, late),
    }
    _, err = run_ranks(2, run_commands, *(fit(name, *case) for name, case in cases.items()))
    lines = [line for line in err.splitlines() if "stopped after step" in line]
    epoch = lines[1].split()[4].rstrip(";")
    expected = ["4", epoch, "15"]
    assert [line.split()[4].rstrip(";") for line in lines] == expected, lines
    for name, step in zip(cases, expected, strict=True):
        saved = Path("lightning_logs", name, "version_0/checkpoints").glob("*.ckpt")
        assert f"step-{int(step):07}" in max(path.stem for path in saved)


def test_ranks_agree_on_signals_and_requests():
    pair = []
    for _ in range(2):
        device = torch.device("cpu")
        module = SimpleNamespace(stop_requested=False, micro_batches=0, device=device)
        strategy = SimpleNamespace(root_device=device)
        trainer = SimpleNamespace(world_size=2, lightning_module=module, strategy=strategy)
        pair.append((StopSignals(), trainer))

    def vote(signals=(0, 0), requests=(False, False)):
        for (callback, trainer), number, request in zip(pair, signals, requests, strict=True):
            callback._signal |= number
            trainer.lightning_module.stop_requested |= request
        every = [2.0 * c._signal + t.lightning_module.stop_requested for c, t in pair]
        for callback, trainer in pair:
            trainer.strategy.all_gather = lambda vote: torch.tensor([[each, 0] for each in every])
            callback.before_batches(trainer)
        return [(c._agreed, t.lightning_module.stop_requested) for c, t in pair]

    pair[0][0].on_before_backward(*pair[0][1:], None, None)  # data without BetweenSteps
    assert vote() == [(0, False)] * 2
    assert vote(requests=(False, True)) == [(0, True)] * 2
    assert vote() == [(0, True)] * 2  # trainer.min_steps may make the request wait
    assert [signal for signal, _ in vote(signals=(15, 0))] == [15, 15]
