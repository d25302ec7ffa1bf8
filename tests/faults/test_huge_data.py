"""Memory and start with much data: R24."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from folders import write_inputs
from harness import Ended, gpt, start_fit
from test_damaged_data import SET

pytestmark = pytest.mark.faults


def sparse(folder: Path, n_shards: int, shard_bytes: int) -> Path:
    """A dataset of zeros that takes no room: files with holes."""
    write_inputs(folder)
    gpt(folder, "prepare", "text.txt", "--tokenizer", "char", "--out", "data/set").ok()
    path = folder / "data" / "set" / "manifest.json"
    manifest = json.loads(path.read_text())
    (folder / "data" / "set" / "train-00000.npy").unlink()
    entries = []
    for number in range(n_shards):
        file, tokens = f"train-{number:05d}.npy", shard_bytes // 2
        with (folder / "data" / "set" / file).open("wb") as stream:
            header = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
            np.lib.format.write_array_header_1_0(stream, header)
            stream.truncate(stream.tell() + shard_bytes)
        entries.append({"file": file, "tokens": tokens, "sha256": "0" * 64})
    manifest["splits"]["train"] = entries
    path.write_text(json.dumps(manifest))
    return folder


def measured(folder: Path) -> tuple[Ended, float, float]:
    """A run of 20 steps: most anonymous memory in MB, and seconds to its first step."""
    began, most = time.monotonic(), 0
    with start_fit(folder, *SET, "--trainer.max_steps", "20") as process:
        status = Path(f"/proc/{process.process.pid}/status")
        process.wait_for(1)
        first_s = time.monotonic() - began
        while process.process.poll() is None:
            found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
            most = max(most, int(found[1]) if found else 0)
            time.sleep(0.005)
        return process.end().ok(), most / 1024, first_s


@pytest.mark.case("R24")
def test_memory_and_start_do_not_grow_with_the_data(tmp_path, case):
    _, base_mb, base_s = measured(sparse(tmp_path / "small", 1, 10_000_000))
    for n_shards, size in ((1, 10 * 10**9), (20, 10**9)):
        _, mb, s = measured(sparse(tmp_path / f"huge{n_shards}", n_shards, size))
        case.saw(f"{n_shards} x {size // 10**9} GB: {mb - base_mb:+.0f} MB, {s - base_s:+.1f} s")
        assert mb - base_mb < 64
        assert s - base_s < 2
