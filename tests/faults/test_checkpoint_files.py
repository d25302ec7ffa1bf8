"""Checkpoints that cannot be written, or are not what was written: R06 to R09."""

import os
import random
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from exact import checkpoints, finite, must_equal, newest, step_of
from folders import contents, leftovers, run_folder
from harness import RESUME, fit, gpt, refusals, start_fit

pytestmark = pytest.mark.faults
IN_A_THREAD = ("--checkpoint.asynchronous", "true")


# ---- disks ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("limit", "saving"),
    [
        *(pytest.param(n, (), marks=pytest.mark.case("R06")) for n in (0, 1000, 200_000)),
        *(pytest.param(n, IN_A_THREAD, marks=pytest.mark.case("R58")) for n in (0, 200_000)),
    ],
)
def test_no_room_for_the_next_file(whole, folder, case, limit, saving):
    """A limit on files' size fails as a full disk does; it comes while the run is running."""
    step, faults = (11, {"slow": [0.1]}) if saving else (9, None)
    with start_fit(folder, *saving, faults=faults) as process:
        process.wait_for(step)
        hard = resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (limit, hard))
        ended = process.end()
    # TensorBoard's thread may print a warning after it
    (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert "lightning_logs/run/version_0" in line
    assert "File too large" in line
    case.saw(line.removeprefix("error: "))
    kept = newest(run_folder(folder))
    assert step_of(kept) >= 8
    assert finite(kept)
    assert leftovers(folder) == []
    fit(folder, *saving, *RESUME).ok()
    must_equal(whole, folder)


@pytest.mark.case("R06")
def test_a_disk_that_fills_up(whole, folder, case, small_disk):
    root = ("--trainer.default_root_dir", str(small_disk))
    with start_fit(folder, *root) as process:
        process.wait_for(9)
        filler = (small_disk / "filler").open("wb", buffering=0)
        try:
            while filler.write(bytes(4096)) == 4096:
                pass
        except OSError:
            filler.close()
        ended = process.end()
    line = ended.refused(str(small_disk), "No space left")
    case.saw("tmpfs of 4 MiB: " + line.removeprefix("error: "))
    assert finite(newest(run_folder(small_disk)))
    (small_disk / "filler").unlink()
    fit(folder, *root, *RESUME).ok()
    must_equal(whole, small_disk)


@pytest.mark.case("R06")
def test_a_full_disk_is_refused_before_the_first_step(folder, case, small_disk):
    (small_disk / "filler").write_bytes(bytes(3_500_000))
    ended = fit(folder, "--trainer.default_root_dir", str(small_disk))
    line = ended.refused(str(small_disk), "MB")
    assert "step  1/" not in ended.out
    case.saw(line.removeprefix("error: "))


def without_privilege() -> list[str]:
    """Return the command that takes root's right to write everywhere; empty for other users."""
    if os.geteuid() != 0:
        return []
    if not shutil.which("setpriv"):
        pytest.skip("root without setpriv: a read-only folder is no obstacle")
    rights = "-dac_override,-dac_read_search"
    return ["setpriv", f"--inh-caps={rights}", f"--bounding-set={rights}"]


@pytest.mark.case("R07")
@pytest.mark.parametrize("what", ["a new run", "a resumed run"])
def test_a_read_only_folder_is_refused_before_the_first_step(stopped, case, what):
    wrap = without_privilege()
    place, args = run_folder(stopped) / "checkpoints", RESUME
    if what == "a new run":
        place, args = stopped / "lightning_logs", ("--run_name", "other")
    place.chmod(0o555)
    try:
        ended = fit(stopped, *args, wrap=wrap)
    finally:
        place.chmod(0o755)
    line = ended.refused(place.name, "[Pp]ermission")
    assert "loss" not in ended.out.split("step ")[-1], ended.out
    case.saw(f"{what}: {line.removeprefix('error: ')}")


# ---- damage --------------------------------------------------------------------------------------

DAMAGE = {
    "cut in half": lambda content: content[: len(content) // 2],
    "cut by a byte": lambda content: content[:-1],
    "empty": lambda content: b"",
    "a text": lambda content: b"not a checkpoint\n" * 100,
    "of zeros": lambda content: bytes(len(content)),
}


@pytest.mark.case("R08")
@pytest.mark.parametrize("kind", DAMAGE)
def test_auto_takes_the_older_file(every, stopped, case, kind):
    path = newest(run_folder(stopped))
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    ended = fit(stopped, *RESUME).ok()
    assert path.name in ended.err, ended.err
    assert re.search(r"step 9\b", ended.out), ended.out[:1500]
    case.saw(f"{kind}: went on from 9")
    must_equal(every, stopped)


@pytest.mark.case("R08")
def test_a_file_without_its_digest_is_resumed_by_name(every, stopped, case):
    path = newest(run_folder(stopped))
    path.with_name(path.name + ".sha256").unlink()
    fit(stopped, *RESUME).refused(path.name, "sha256", f"--resume {path}")
    fit(stopped, "--resume", str(path)).ok()
    case.saw("without its digest: refused by auto, which names the command that went on")
    must_equal(every, stopped)


def resumed_by_name(folder: Path, tmp_path: Path, contents: list[bytes]) -> list[int]:
    """Return the exit codes of `fit --resume FILE`: each file has the newest one's name, digest."""
    path = newest(run_folder(folder))
    commands, names = [], []
    for number, content in enumerate(contents):
        place = tmp_path / str(number) / "checkpoints"
        place.mkdir(parents=True)
        shutil.copy(path.with_name(path.name + ".sha256"), place)
        (place / path.name).write_bytes(content)
        names.append(str(place / path.name))
        commands.append(["fit", "--config", "run.yaml", "--resume", names[-1]])
    return refusals(folder, commands, names)


@pytest.mark.case("R08")
def test_a_damaged_file_by_name_is_refused(stopped, tmp_path, case):
    content = newest(run_folder(stopped)).read_bytes()
    codes = resumed_by_name(stopped, tmp_path, [change(content) for change in DAMAGE.values()])
    case.saw(f"by name: {codes.count(2)} of {len(codes)} refused")
    assert set(codes) == {2}


@pytest.mark.case("R08")
def test_all_files_are_damaged(stopped, case):
    """auto must not begin anew where there is a run whose files are merely damaged, unsaid."""
    names = []
    for path in checkpoints(run_folder(stopped)):
        path.write_bytes(b"")
        names.append(path.name)
    before = contents(run_folder(stopped))
    ended = fit(stopped, *RESUME, "--trainer.max_steps", "2", "--model.decay_steps", "30")
    assert max(names) in ended.last_line, ended.err  # one line, with the newest of them
    case.saw(f"all damaged: exit {ended.code}, {ended.last_line[:80]}")
    assert contents(stopped / "lightning_logs" / "run" / "version_0") == before


@pytest.mark.case("R09")
def test_one_flipped_bit(stopped, tmp_path, case):
    seed, n_flips = 9, 60
    rng = random.Random(seed)
    damaged = [bytearray(newest(run_folder(stopped)).read_bytes()) for _ in range(n_flips)]
    for content in damaged:
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
    codes = resumed_by_name(stopped, tmp_path, damaged)
    case.saw(f"seed {seed}: {codes.count(2)} of {n_flips} refused")
    assert codes == [2] * n_flips


@pytest.mark.case("R09")
def test_whole_files_are_said_to_be_whole(stopped, case):
    path = newest(run_folder(stopped))
    verified = gpt(stopped, "checkpoint", "verify", str(path)).ok()
    inspected = gpt(stopped, "checkpoint", "inspect", str(path)).ok()
    assert path.name in verified.out
    assert re.search(r"step\D+10\b", inspected.out), inspected.out
    case.saw("a whole file verifies")
