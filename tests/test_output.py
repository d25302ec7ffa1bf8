"""Output that is lost: a reader that goes away, a full disk, a closed descriptor."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_fit import RUN, TINY_RUN

from gpt_lightning import cli, output
from gpt_lightning.cli import main
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.runs.folders import RunPaths


@pytest.mark.parametrize(("rank", "line"), [("0", "error: interrupted\n"), ("1", "")])
def test_ctrl_c_of_all_ranks_prints_one_line(monkeypatch, capsys, rank, line):
    def dispatch(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "dispatch", dispatch)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert cli.main(["fit"]) == 130
    assert capsys.readouterr().err == line


def test_sigterm_lets_a_command_clean_up(monkeypatch, capsys):
    cleaned = []

    def dispatch(argv):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            cleaned.append(argv)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "dispatch", dispatch)
    assert cli.main(["prepare"]) == 143
    assert cleaned == [["prepare"]]
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], True),
        (["fit", "--help"], True),
        (["fit", "--print_config"], True),
        (["reproduce", "--list"], True),
        (["data", "inspect", "set"], True),
        (["fit", "--data.text_file", "help.txt"], False),
        (["data", "verify", "set"], False),
    ],
)
def test_which_commands_only_print(argv, expected):
    assert cli.prints_only(argv) is expected


CODE = """
import os, sys
from gpt_lightning.output import open_closed_streams
open_closed_streams()
file = open("checkpoint", "w")
os.write(1, b"a print of C++")
print("step 1", flush=True)
assert file.fileno() > 2 and not sys.stdin.closed
"""


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_descriptor_takes_no_file(tmp_path, closed):
    command = f"{sys.executable} -c '{CODE}' {closed}"
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "checkpoint").read_bytes() == b""


@pytest.mark.parametrize("wait_s", [0.0, 10.0])
def test_a_log_gets_a_bar_of_long_work_alone(wait_s, monkeypatch, capsys):
    monkeypatch.setattr(output, "LOG_S", wait_s)
    with output.progress_bar(200, 100) as bar:
        bar.update(100)
    assert ("100%" in capsys.readouterr().err) == (wait_s == 0)


GPT = f"{sys.executable} -m gpt_lightning"


@pytest.mark.parametrize(
    ("command", "code"),
    [("--help | head -n 0", 0), ("--help > /dev/full", 2), ("--help >&- 2>&-", 0)],
)
def test_a_command_that_only_prints_ends_with_its_reader(command, code):
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {GPT} {command}"], capture_output=True, text=True
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("command", ["FIT | head -n 3", "FIT > /dev/full", "FIT 2>&1 | head -n 1"])
def test_a_run_whose_output_is_lost_has_a_checkpoint_and_resumes(command):
    options = [*TINY_RUN, "--data.batch_size=4", "--model.config.dropout=0.1"]
    assert main(["fit", *options, "--run_name=whole", "--trainer.max_steps=8"]) == 0
    fit = shlex.join(["fit", *options, "--trainer.max_steps=8"])
    text = f"set -o pipefail; {command.replace('FIT', f'{GPT} {fit}')}"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert done.returncode == 129, done.stderr
    assert "Traceback" not in done.stderr
    saved = RunPaths(RUN).saved()[0]
    assert 1 <= saved.step < 8
    assert main(["resume", str(RUN)]) == 0
    runs = (RUN, Path("lightning_logs/whole/version_0"))
    ours, theirs = (read_checkpoint(RunPaths(run).saved()[0].path).weights for run in runs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
