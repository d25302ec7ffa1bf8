"""Two ranks under ddp: no step waits for the device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("two_ranks.py")


@pytest.mark.slow
def test_a_step_of_two_ranks_reads_nothing_of_the_device(text_file):
    """Lightning alone would read a flag of SIGTERM before each micro-batch (PL#21487)."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(text_file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reads = json.loads(done.stdout.splitlines()[-1])
    during = [where for step, where in reads if 1 < step < 9]  # between start and end
    # the number that DelayedMax has copied to the host a step before
    assert during == ["distributed.py __call__"] * 7
