"""Two ranks under ddp: no step waits for the device, and views of DDP's buckets change nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("two_ranks.py")


def trained(*arguments: str):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_step_of_two_ranks_reads_nothing_of_the_device(text_file):
    """Lightning alone would read a flag of SIGTERM before each micro-batch (PL#21487)."""
    views = trained(str(text_file))
    during = [where for step, where in views["reads"] if 1 < step < 9]  # between start and end
    # the number that DelayedMax has copied to the host a step before
    assert during == ["distributed.py __call__"] * 7
    assert views["weights"] == trained(str(text_file), "copied")["weights"]


@pytest.mark.slow
def test_a_step_in_shards_reads_nothing_of_the_device(text_file):
    found = trained(str(text_file), "shards")["reads"]
    during = [where for step, where in found if 1 < step < 9]
    assert during == ["distributed.py __call__"] * 7


@pytest.mark.slow
def test_a_stop_that_one_rank_asks_for_is_late_by_a_step_and_reads_nothing(text_file):
    stopped = trained(str(text_file), "stop")
    assert stopped["step"] == 5  # asked for in step 4; the vote of a device is a step late
    during = [where for step, where in stopped["reads"] if 1 < step < 5]
    assert during == ["distributed.py __call__"] * 3
