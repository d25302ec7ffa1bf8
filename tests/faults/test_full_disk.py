"""Disks that are full or read-only: one line names the path, and no checkpoint is lost."""

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import RESUME, checkpoints, fit, leftovers, must_equal, start_fit, step_of

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB in memory, where one may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("limit", [0, 200_000])
def test_no_room_for_the_next_file(whole, folder, limit):
    """A limit on files' size fails as a full disk does; it comes while the run is running."""
    with start_fit(folder) as process:
        process.wait_for(11)
        hard = resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (limit, hard))
        assert process.end() == 2, process.output[-2000:]
    (line,) = process.errors()
    assert "lightning_logs/run/version_0" in line
    assert "File too large" in line
    assert step_of(checkpoints(folder)[0]) >= 8
    assert leftovers(folder) == []
    fit(folder, *RESUME)
    must_equal(whole, folder)


def test_a_disk_that_fills_up(whole, folder, small_disk):
    root = ("--trainer.default_root_dir", str(small_disk))
    with start_fit(folder, *root) as process:
        process.wait_for(9)
        filler = (small_disk / "filler").open("wb", buffering=0)
        try:
            while filler.write(bytes(4096)) == 4096:
                pass
        except OSError:
            filler.close()
        assert process.end() == 2, process.output[-2000:]
    (line,) = process.errors()
    assert str(small_disk) in line
    assert "No space left" in line
    (small_disk / "filler").unlink()
    fit(folder, *root, *RESUME)
    must_equal(whole, small_disk)


def test_a_full_disk_is_an_error_before_the_first_step(folder, small_disk):
    (small_disk / "filler").write_bytes(bytes(3_500_000))
    output = fit(folder, "--trainer.default_root_dir", str(small_disk), code=2)
    assert re.search(rf"error: .*{small_disk}.*MB", output)
    assert "step  1/" not in output


@pytest.mark.parametrize("place", ["lightning_logs", "lightning_logs/run/version_0/checkpoints"])
def test_a_read_only_folder_is_an_error_before_the_first_step(stopped, place):
    """A new run cannot make its folder, a resumed one cannot save in its own."""
    args = ("--run_name", "other") if place == "lightning_logs" else RESUME
    wrap = []
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("root without setpriv: a read-only folder is no obstacle")
        rights = "-dac_override,-dac_read_search"
        wrap = ["setpriv", f"--inh-caps={rights}", f"--bounding-set={rights}"]
    (stopped / place).chmod(0o555)
    try:
        output = fit(stopped, *args, code=2, wrap=wrap)
    finally:
        (stopped / place).chmod(0o755)
    assert re.search(rf"error: .*{Path(place).name}.*[Pp]ermission", output), output
    assert "loss" not in output.split("step ")[-1]
