"""Ranks that Python and the files of examples/ start train as one does; srun is made up."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_fit import rows

from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.training import ranks
from gpt_lightning.training.ranks import take_world

ROOT = Path(__file__).resolve().parents[2]
SAME = {"train/loss", "val/loss", "val/tokens", "optim/grad_norm", "perf/tokens"}
ELASTIC = {
    "TORCHELASTIC_RUN_ID": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "0",
    "GROUP_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
}
CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 8
  val_check_interval: 8
  check_val_every_n_epoch: null
  limit_val_batches: 3
  log_every_n_steps: 1
model:
  config: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16, vocab_size: null}
  learning_rate: 1.0e-3
data: {text_file: text.txt, tokenizer: char, batch_size: 4}
samples: {max_new_tokens: 0}
checkpoint: {every_n_steps: 1}
"""
CRASH = """
import os
import signal
import time
from pathlib import Path

import lightning as L


class Crash(L.Callback):
    def on_train_batch_end(self, trainer, *args):
        first = not Path("killed").exists()
        if first and trainer.global_rank == 1 and trainer.global_step == 5:
            Path("killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
"""
MACHINES = """
import os
import signal
import time

import lightning as L


class Machines(L.Callback):
    def on_train_batch_end(self, trainer, *args):
        if "LOST" in os.environ and trainer.global_step == 5:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        alone = trainer.world_size == 1
        while alone and trainer.global_step == 10 and not any(
            getattr(callback, "_signal", 0) for callback in trainer.callbacks
        ):
            time.sleep(0.1)
"""
TWICE = """
from pathlib import Path
from gpt_lightning.training.fit import run_cli
if __name__ == "__main__":
    for steps in (4, 8):
        ranks = ["--trainer.devices=2", "--trainer.strategy=ddp", "--model.decay_steps=8"]
        options = ["--run_name=two", f"--trainer.max_steps={steps}", "--resume=auto"]
        done = run_cli(["fit", "--config", "run.yaml", *ranks, *options])
        Path(f"rank-{done.trainer.local_rank}-{done.trainer.global_step}").touch()
"""
# forks its tasks, so that they import once
SRUN = """#!{python}
import os
import sys

from gpt_lightning import cli
from gpt_lightning.training import fit

ranks, per_node = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = []
for rank in range(ranks):
    place = {{"PROCID": rank, "LOCALID": rank % per_node, "NODEID": rank // per_node}}
    tasks.append(os.fork())
    if not tasks[-1]:
        os.environ.update({{f"SLURM_{{key}}": str(value) for key, value in place.items()}})
        sys.exit(cli.main(sys.argv[3:]))
while tasks:
    task, status = os.wait()
    tasks.remove(task)
    if status:  # --kill-on-bad-exit=1
        [os.kill(other, 9) for other in tasks]
        sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.fixture
def folder(text_file, tmp_path, monkeypatch):
    """A folder with a configuration of one rank, and the environment of a machine."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    return port


def start(file, *options, **variables):
    command = ["sh", str(ROOT / "examples" / file), "--config", "run.yaml", *options]
    environment = os.environ | {key: str(value) for key, value in variables.items()}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def skip_check():
    """Leave out the check of the settings, which has a test of its own."""
    Path("python").write_text(f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\n')
    Path("python").chmod(0o755)


def assert_the_losses_of_one_process(name, *options):
    one = ["--run_name=one", "--data.batch_size=8"]
    assert main(["fit", "--config", "run.yaml", *one, *options]) == 0
    one, other = rows("one"), rows(name)
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for a, b in zip(one, other, strict=True):
        for key in SAME & a.keys():  # gradients are averaged in another order
            assert b[key] == pytest.approx(a[key], rel=1e-5), key


@pytest.mark.slow
def test_two_ranks_train_on_the_batches_of_one_in_two_runs_of_a_process(folder):
    Path("twice.py").write_text(TWICE)
    done = subprocess.run([sys.executable, "twice.py"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "sync_dist" not in done.stderr + done.stdout  # perf/tokens is of all ranks
    assert "Traceback" not in done.stderr
    assert done.stdout.count("resume      no checkpoint in") == 1
    ended = sorted(path.name for path in Path().glob("rank-*"))
    assert ended == ["rank-0-4", "rank-0-8", "rank-1-4", "rank-1-8"]
    assert_the_losses_of_one_process("two")


@pytest.mark.long  # two nodes start twice; the others of this file are slow ones
def test_two_nodes_train_a_configuration_of_one_rank_and_a_killed_one_is_started_again(folder):
    Path("crash.py").write_text(CRASH)
    options = ("--run_name=again", "--trainer.callbacks+=crash.Crash")
    shared = {"NNODES": 2, "NPROC": 1, "HOST": "127.0.0.1", "PORT": folder, "RESTARTS": 2}
    nodes = [start("torchrun.sh", *options, **shared) for _ in range(2)]
    ends = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ends
    output = "".join(out for out, _ in ends)
    assert "started     2 machines: trainer.num_nodes 1 -> 2\n" in output
    assert re.search(r"resume .*step-000000[45]\.ckpt", output)
    assert_the_losses_of_one_process("again")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_goes_on_when_a_machine_is_lost_and_when_one_is_added(folder):
    Path("machines.py").write_text(MACHINES)
    own = ("--data.tokens_per_step=128", "--trainer.max_steps=15", "--trainer.limit_val_batches=0")
    options = ("--run_name=elastic", "--trainer.callbacks+=machines.Machines", *own)
    shared = {"NNODES": "1:2", "NPROC": 1, "HOST": "127.0.0.1", "PORT": folder}
    first = start("torchrun.sh", *options, **shared)
    time.sleep(2)  # it opens the store
    lost = start("torchrun.sh", *options, **shared, LOST=1)
    assert lost.wait(timeout=100) == -9
    metrics = Path("lightning_logs/elastic/version_0/metrics.jsonl")
    until = time.monotonic() + 200
    while '"step": 9' not in metrics.read_text() and time.monotonic() < until:
        time.sleep(0.5)
    added = start("torchrun.sh", *options, **shared)
    ends = [node.communicate(timeout=200) for node in (first, added)]
    assert [first.returncode, added.returncode] == [0, 0], ends
    output = "".join(out for out, _ in ends)
    shapes = re.findall(r"(\d) sequences x 16 tokens x 1 accumulated x (\d) ranks", output)
    assert shapes == [("4", "2"), ("8", "1"), ("4", "2")]
    assert_the_losses_of_one_process("elastic", *own)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_within_seconds(folder):
    Path("crash.py").write_text(CRASH)
    skip_check()
    options = ("--run_name=end", "--trainer.callbacks+=crash.Crash")
    run = start("torchrun.sh", *options, NPROC=2, RESTARTS=0, PORT=folder)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 75
    assert time.time() - float(Path("killed").read_text()) < 30
    assert "rank 1 has ended with exit code -9\n" in err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) <= 1
    assert all("--resume auto to continue" in line for line in lines)


@pytest.mark.slow
def test_a_missing_machine_is_one_line(folder):
    skip_check()
    wait = {ranks.LIMIT: 2, "NNODES": 2, "NPROC": 1, "PORT": folder}
    run = start("torchrun.sh", **wait)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 75
    assert re.fullmatch(f"error: fewer machines than NNODES 2 at localhost:.*{ranks.LIMIT}\n", err)


@pytest.mark.slow
def test_a_wrong_setting_is_not_started_again(folder):
    run = start("torchrun.sh", "--trainer.max_stepss=3", NPROC=2, PORT=folder)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 2
    assert err == "error: unknown key 'trainer.max_stepss': did you mean 'trainer.max_steps'?\n"


@pytest.mark.slow
def test_tasks_of_slurm(folder, tmp_path):
    (tmp_path / "srun").write_text(SRUN.format(python=sys.executable))
    (tmp_path / "srun").chmod(0o755)
    nodes = {f"SLURM_{name}": 2 for name in ("JOB_NUM_NODES", "NNODES", "NTASKS")}
    job = {"SLURM_NTASKS_PER_NODE": 1, "SLURM_JOB_ID": 1234, "SLURM_JOB_NAME": "gpt"}
    place = {"SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": folder}
    run = start("slurm.sh", "--run_name=tasks", **nodes, **job, **place)
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err[-3000:]
    assert out.count("x 2 ranks") == 1
    assert_the_losses_of_one_process("tasks")
    one_node = {"SLURM_JOB_NUM_NODES": 1, "SLURM_NNODES": 1, "SLURM_NTASKS_PER_NODE": 2}
    run = start("slurm.sh", "--trainer.max_steps=0", **{**nodes, **job, **place, **one_node})
    assert run.communicate(timeout=100)[1].count("error: trainer.max_steps is 0") == 1
    assert run.returncode == 2


@pytest.fixture
def elastic(monkeypatch):
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)


def test_a_configuration_takes_the_world_of_torchrun(elastic):
    trainer = {"devices": 1, "num_nodes": 1}
    assert take_world(trainer, ["fit", "--config", "stock"]) == [
        "started     4 processes on this machine: trainer.devices 1 -> 4",
        "started     2 machines: trainer.num_nodes 1 -> 2",
    ]
    assert trainer == {"devices": 4, "num_nodes": 2}
    assert take_world(trainer, ["fit", "--trainer.devices=4"]) == []
    trainer = {"devices": "auto", "num_nodes": 2}
    assert take_world(trainer, ["fit", "--trainer.devices", "auto"]) == []
    assert trainer["devices"] == 4
    for option in (["--trainer.devices=1"], ["--trainer.devices", "1"]):
        with pytest.raises(UserError, match=r"--trainer\.devices 4"):
            take_world({"devices": 1, "num_nodes": 2}, ["fit", *option])
