"""Ranks that differ are refused before they train; ranks are forked, so that they import once."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_launchers import CONFIG, ELASTIC, SAME
from tiny_fit import rows

from gpt_lightning.cli import main

RANKS = """
import json
import os
import sys
import time

from gpt_lightning import cli
from gpt_lightning.training import fit

for case, (port, ranks) in json.load(sys.stdin).items():
    began, started = time.monotonic(), {}
    for rank, (code, *args) in enumerate(ranks):
        sys.stdout.flush()
        if pid := os.fork():
            started[pid] = rank
            continue
        place = {"RANK": rank, "GROUP_RANK": rank, "MASTER_PORT": port}
        place |= dict.fromkeys(("WORLD_SIZE", "GROUP_WORLD_SIZE"), len(ranks))
        os.environ.update({key: str(value) for key, value in place.items()})
        error = open(f"{case}.{rank}", "w")
        os.dup2(error.fileno(), 2)
        os.dup2(error.fileno(), 1)
        exec(code)
        code = cli.main(["fit", "--config", "run.yaml", f"--run_name={NAME or case}", *args])
        sys.stdout.flush()
        os._exit(code)
    codes = {}
    while started:
        pid, status = os.wait()
        codes[started.pop(pid)] = os.waitstatus_to_exitcode(status)
    print(case, time.monotonic() - began, *(codes[rank] for rank in sorted(codes)))
"""
KILL = """
from gpt_lightning.training.module import GPTModule

before = GPTModule.on_train_batch_start


def start(module, *args):
    if module.trainer.global_step == {step}:
        os.kill(os.getpid(), 9)
    before(module, *args)


GPTModule.on_train_batch_start = start
"""
NEWER = "from importlib import metadata; metadata.version = lambda name: '9.9'"
COMMIT = "from gpt_lightning.training import ranks; ranks.version = lambda: '0.1 (other)'"
# case -> (code of rank 1 before its command, its option, what rank 0 says)
WAYS = {
    "rate": ("", "--model.learning_rate=0.01", "model.learning_rate 0.01, rank 0 has 0.001"),
    "dataset": ("", "--data.text_file=other.txt", 'data: dataset "'),
    "seed": ("", "--seed_everything=5", "seed_everything 5, rank 0 has 1337"),
    "commit": (COMMIT, "", "gpt_lightning 0.1 (other), rank 0 has "),
    "precision": ("", "--trainer.precision=bf16-mixed", 'trainer.precision "bf16-mixed", rank 0'),
    "torch": (NEWER, "", "torch 9.9, rank 0 has "),
    "block": ("", "--data.block_size=8", "data.block_size 8, rank 0 has null"),
    "callbacks": ("", "--trainer.callbacks+=Timer", 'trainer.callbacks ["Namespace(class_path='),
    "strategy": ("", "--trainer.strategy=fsdp2", 'trainer.strategy "fsdp2", rank 0 has "auto"'),
    "accumulate": (
        "",
        "--trainer.accumulate_grad_batches=2",
        "trainer.accumulate_grad_batches 2, rank",
    ),
    "optimizer": ("", "--model.optimizer=muon", 'model.optimizer "muon", rank 0 has "adamw"'),
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_ranks(cases, name=""):
    """Run each case, a command of each rank, and return the seconds and exit codes of each."""
    elastic = ELASTIC | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", RANKS.replace("NAME or", f"{name!r} or")],
        input=json.dumps({case: [free_port(), ranks] for case, ranks in cases.items()}),
        env=os.environ | elastic | address | {"GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    return {case: (float(seconds), *map(int, codes)) for case, seconds, *codes in rows}


@pytest.fixture
def folder(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    Path("other.txt").write_text(Path("text.txt").read_text()[::-1])


@pytest.mark.slow
def test_ranks_that_differ_are_refused_in_one_line_of_rank_0(folder):
    found = run_ranks(
        {
            case: [["", "--seed_everything=1337"], [c, *filter(None, [option])]]
            for case, (c, option, _) in WAYS.items()
        }
    )
    for case, (*_, line) in WAYS.items():
        seconds, *codes = found[case]
        assert codes == [2, 2], case
        assert seconds < 10, case
        first = [each for each in Path(f"{case}.0").read_text().splitlines() if "error" in each]
        assert len(first) == 1, case
        assert f"error: rank 1 has {line}" in first[0]
        assert "error" not in Path(f"{case}.1").read_text()


@pytest.mark.slow
def test_fewer_and_more_ranks_continue_a_run_under_one_command(folder):
    options = ["--data.tokens_per_step=384", "--data.batch_size=3", "--resume=auto"]

    def session(ranks, killed, step):
        return [[KILL.format(step=step) if rank == killed else "", *options] for rank in ranks]

    cases = {
        "four": session(range(4), 3, 2),
        "two": session(range(2), 1, 4),
        "five": session(range(5), None, 0),
        "three": session(range(3), 2, 6),
        "one": session(range(1), None, 0),
    }
    found = run_ranks(cases, "fewer")
    codes = {case: [*codes] for case, (_, *codes) in found.items()}
    assert codes["one"] == [0]
    assert codes["four"][3] == codes["two"][1] == codes["three"][2] == -9
    assert codes["five"] == [2] * 5
    line = "5 ranks cannot share the 12 sequences of the checkpoint's micro-batches evenly"
    assert f"{line}: start 1, 2, 3, 4, 6 or 12" in Path("five.0").read_text()
    assert "ranks       3 -> 1: data.batch_size is 12" in Path("one.0").read_text()
    alone = ["fit", "--config", "run.yaml", "--run_name=alone", "--data.tokens_per_step=384"]
    assert main([*alone, "--data.batch_size=12"]) == 0
    for a, b in zip(rows("alone"), rows("fewer"), strict=True):
        for key in SAME & a.keys():
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
