"""Two processes, real ranks over gloo, train the same model as one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_fit import rows

from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.distributed import LoopbackEnvironment, check_group, environment

CONFIG = """
trainer: {accelerator: cpu, max_steps: 10, val_check_interval: 10, check_val_every_n_epoch: null}
model:
  config: {n_layer: 2, n_head: 2, n_embd: 32, block_size: 16, vocab_size: null}
  learning_rate: 1.0e-3
  decay_steps: 10
data: {text_file: text.txt, tokenizer: char}
samples: {max_new_tokens: 30}
speed: {warmup_steps: 0}
"""


TWICE = """
from pathlib import Path
from gpt_lightning.training.fit import run_cli
if __name__ == "__main__":
    for steps in (4, 10):
        ranks = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=4"]
        options = ["--run_name=two", f"--trainer.max_steps={steps}", "--resume=auto"]
        done = run_cli(["fit", "--config", "run.yaml", *ranks, *options])
        Path(f"rank-{done.trainer.local_rank}-{done.trainer.global_step}").touch()
"""


@pytest.mark.slow
def test_two_ranks_train_on_the_batches_of_one_in_two_runs_of_a_process(
    text_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    Path("twice.py").write_text(TWICE)
    done = subprocess.run([sys.executable, "twice.py"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "sync_dist" not in done.stderr + done.stdout  # perf/tokens is of all ranks
    assert "Traceback" not in done.stderr
    assert done.stdout.count("resume      no checkpoint in") == 1
    ended = sorted(path.name for path in Path().glob("rank-*"))
    assert ended == ["rank-0-10", "rank-0-4", "rank-1-10", "rank-1-4"]
    one = ["--run_name=one", "--trainer.devices=1", "--data.batch_size=8"]
    assert main(["fit", "--config", "run.yaml", *one]) == 0
    one, two = rows("one"), rows("two")
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        # the same rows, their gradients averaged in another order
        for key in {"train/loss", "val/loss", "optim/grad_norm"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
    assert one[0]["perf/tokens"] == two[0]["perf/tokens"] == 10 * 8 * 16


@pytest.mark.parametrize("interface", [None, "eth7"])
def test_runs_of_one_process_share_a_store(interface, monkeypatch):
    for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, interface or "")
    if interface is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(LoopbackEnvironment, "_store", None)
    first = LoopbackEnvironment()
    port = first.main_port
    first.teardown()
    assert LoopbackEnvironment().main_port == port == LoopbackEnvironment._store.port
    own = "lo0" if sys.platform == "darwin" else "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == (interface or own)


def test_a_process_group_of_an_earlier_run_must_have_the_same_ranks(monkeypatch):
    check_group(2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    check_group(2)
    with pytest.raises(UserError, match="has connected 2 ranks, and this run has 1: start it in"):
        check_group(1)


def test_other_nodes_need_a_launcher_or_an_address(monkeypatch):
    for name in ("LOCAL_RANK", "MASTER_ADDR", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="num_nodes is 2, but nothing names the other nodes"):
        environment(2, [])
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("NODE_RANK", "0")
    assert environment(2, []) == []
