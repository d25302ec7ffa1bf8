"""A callback of one rank sets trainer.should_stop: all ranks stop at one step, with one save."""

import json
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from ranks import run_commands, run_ranks
from tiny_fit import TINY_MODEL
from torch.multiprocessing import ProcessRaisedException

from gpt_lightning.data.loader import TrainLoader
from gpt_lightning.errors import OutageError
from gpt_lightning.training.callbacks.signals import StopSignals


class Stop(L.Callback):
    """Ask for a stop in one rank, in a hook, from a micro-batch on."""

    def __init__(self, rank: int, hook: str, batch: int) -> None:
        self.rank, self.batch = rank, batch
        setattr(self, hook, self.stop)

    def stop(self, trainer, *args, **kwargs) -> None:
        done = trainer.fit_loop.total_batch_idx + 1 >= self.batch
        trainer.should_stop |= trainer.global_rank == self.rank and done


def no_data() -> None:
    raise OutageError("no data")


class Lost(Stop):
    """Let the data of one rank stay away."""

    def stop(self, trainer, *args, **kwargs) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.batch:
            trainer.train_dataloader.loader.fetch_step = no_data


def fit(name, rank, hook, batch, *options, kind="Stop"):
    config = {"class_path": f"{__name__}.{kind}"}
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


@pytest.mark.slow
def test_an_outage_of_one_rank_saves_the_step_of_all(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lost = fit("lost", 1, "on_train_batch_end", 3, kind="Lost")
    with pytest.raises(ProcessRaisedException, match="OutageError: no data"):
        run_ranks(2, run_commands, lost)
    (saved,) = Path("lightning_logs/lost/version_0/checkpoints").glob("*.ckpt")
    assert saved.stem == "step-0000003"


def test_ranks_agree_on_signals_and_requests():
    pair = []
    for _ in range(2):
        device = torch.device("cpu")
        module = SimpleNamespace(stop_requested=False, micro_batches=0, device=device)
        strategy = SimpleNamespace(root_device=device)
        trainer = SimpleNamespace(world_size=2, lightning_module=module, strategy=strategy)
        trainer.train_dataloader = SimpleNamespace(loader=object.__new__(TrainLoader))
        trainer.train_dataloader.loader.fetch_step = lambda: None
        pair.append((StopSignals(), trainer))

    def vote(signals=(0, 0), requests=(False, False)):
        for (callback, trainer), number, request in zip(pair, signals, requests, strict=True):
            callback._signal |= number
            trainer.lightning_module.stop_requested |= request
        votes = []
        for gather in (lambda vote: votes.append(vote) or vote[None], lambda _: torch.stack(votes)):
            for callback, trainer in pair:  # first the vote of each, then with those of both
                trainer.strategy.all_gather = gather
                callback.before_batches(trainer)
        return [(c._agreed, t.lightning_module.stop_requested) for c, t in pair]

    module = pair[0][1].lightning_module
    pair[0][0].on_before_backward(pair[0][1], module, None)  # data without BetweenSteps
    assert vote() == [(0, False)] * 2
    assert vote(requests=(False, True)) == [(0, True)] * 2
    assert vote() == [(0, True)] * 2  # trainer.min_steps may make the request wait
    second, loader = pair[1][0], pair[1][1].train_dataloader.loader
    loader.fetch_step = no_data
    assert [stop for stop, _ in vote()] == [75, 75]
    loader.fetch_step = lambda: second._on_signal(15, None)  # ends the wait for data
    assert [signal for signal, _ in vote()] == [15, 15]
    loader.fetch_step, second._signal = lambda: None, 0
    assert vote() == [(0, True)] * 2
    assert [signal for signal, _ in vote(signals=(15, 0))] == [15, 15]
