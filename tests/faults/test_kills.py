"""A run that is killed or stopped, and resumed, is the uninterrupted run, byte for byte."""

import contextlib
import hashlib
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import (
    MODULE,
    RESUME,
    STEPS,
    checkpoints,
    fit,
    must_equal,
    run_of,
    start_fit,
    step_of,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt_lightning.commands.check_resume import compare

SCRIPT = Path(__file__).with_name("killed_at.py")
WAYS = {
    "plain": (),
    "workers": ("--data.num_workers", "2"),
    "shared": ("--checkpoint.folder", "shared"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_random_moments(whole, folder, way):
    """The next session starts at once, beside loader workers that are still alive.

    With a shared folder, each session is of a new machine, which has that folder alone.
    """
    rng = random.Random(way)
    with contextlib.ExitStack() as stack:  # at its end, workers that were left are killed
        for first in (2, 13):
            process = stack.enter_context(start_fit(folder, *RESUME, *WAYS[way]))
            process.wait_for(rng.randint(first, first + 10))
            time.sleep(rng.uniform(0, 0.02))
            process.process.kill()
            assert process.process.wait() == -signal.SIGKILL
            if way == "shared":
                shutil.rmtree(folder / "lightning_logs")
        fit(folder, *RESUME, *WAYS[way])
    must_equal(whole, folder)
    if way != "shared":  # events are not copied
        events = EventAccumulator(str(run_of(folder)), size_guidance={"scalars": 0}).Reload()
        steps = [event.step for event in events.Scalars("train/loss")]
        assert steps == [*range(1, STEPS + 1)]


@pytest.mark.long
def test_killed_in_compiled_bfloat16(folder, tmp_path):
    """With dropout's hashed masks and two threads, whose sums must not depend on who is first."""
    fast = ("--trainer.precision", "bf16-mixed", "--model.compile", "true")
    two = {"OMP_NUM_THREADS": "2"}
    left_alone = shutil.copytree(folder, tmp_path / "alone")
    fit(left_alone, *fast, env=two)
    with start_fit(folder, *fast, env=two) as process:
        process.wait_for(13)
        process.process.kill()
    fit(folder, *RESUME, *fast, env=two)
    must_equal(left_alone, folder)


@pytest.mark.slow
def test_the_comparison_can_fail(whole, tmp_path):
    other = shutil.copytree(whole, tmp_path / "other")
    path = checkpoints(other)[0]
    state = torch.load(path, weights_only=True)
    weight = next(iter(state["state_dict"].values()))
    weight.view(torch.int32).view(-1)[0] ^= 1
    torch.save(state, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name(f"{path.name}.sha256").write_text(f"{digest}  {path.name}\n")
    metrics = run_of(other) / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 7', '"step": 8'))
    found = compare(run_of(whole), run_of(other))
    assert found == {"weights": False, "optimizer": True, "data": True, "metrics": False}


@pytest.mark.parametrize(
    "number",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 6, 25)),
        *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 4, 5, 7, 8, 19)),
    ],
)
def test_killed_inside_a_save(whole, folder, number):
    entry = (str(SCRIPT), str(number))
    with start_fit(folder, entry=entry) as process:
        assert process.end() == -signal.SIGKILL, process.output[-2000:]
    left = [step_of(path) for path in checkpoints(folder)]
    output = fit(folder, *RESUME)
    if left:
        assert re.search(rf"step {max(left)}\b", output), output[:1500]
    must_equal(whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "number", "code"),
    [("workers", signal.SIGTERM, 143), ("plain", signal.SIGINT, 130)],
)
def test_stopped_by_a_signal(whole, folder, number, code, way):
    with start_fit(folder, *WAYS[way]) as process:
        process.wait_for(11)
        process.process.send_signal(number)
        assert process.end() == code, process.output[-2000:]
    steps = [int(step) for step in re.findall(r"^step +(\d+)/", process.output, re.MULTILINE)]
    assert step_of(checkpoints(folder)[0]) == max(steps)  # the step under way was finished
    fit(folder, *RESUME, *WAYS[way])
    must_equal(whole, folder)


@pytest.mark.long
def test_two_resumes_at_once(whole, folder):
    with start_fit(folder) as first:
        first.wait_for(8)
        first.process.send_signal(signal.SIGSTOP)
        output = fit(folder, *RESUME, code=2)
        first.process.send_signal(signal.SIGCONT)
        assert first.end() == 0, first.output[-2000:]
    assert "another process" in output.splitlines()[-1]
    must_equal(whole, folder)


@pytest.mark.long
@pytest.mark.parametrize("command", ["FIT | head -n 12", "FIT >&-", "FIT <&- >&- 2>&-"])
def test_output_that_nobody_reads(whole, folder, command):
    command = command.replace("FIT", f"{sys.executable} -m gpt_lightning fit --config run.yaml")
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    fit(folder, *RESUME)
    must_equal(whole, folder)


@pytest.mark.slow
def test_a_terminal_that_goes_away(whole, folder):
    ours, theirs = pty.openpty()
    command = [sys.executable, *MODULE, "fit", "--config", "run.yaml"]
    with subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        printed = b""
        while not re.search(rf"\b[3-9]/{STEPS}\b".encode(), printed):  # the progress bar
            printed += os.read(ours, 4096)
        os.close(ours)  # writing gives EIO from now on
    assert process.returncode == 129
    fit(folder, *RESUME)
    must_equal(whole, folder)
