import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prepared import random_tokens, write_dataset

from gpt_lightning.cli import main
from gpt_lightning.data.dataset import load_manifest, verify
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import UserError

VOCAB = 500


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path, [random_tokens(n, vocab=VOCAB) for n in (3000, 1, 2000)], VOCAB)


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def complaint(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        verify(folder)
    return str(caught.value)


def test_a_whole_dataset(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify(dataset)
    said = "is whole: 3 shards, 5,001 tokens, all below the vocabulary of 500"
    assert said in capsys.readouterr().out


def test_the_first_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, [np.array([0, 1, 2, VOCAB - 1] * 4, np.uint16)], VOCAB)
    stream = TokenStream(folder, load_manifest(folder), "train")
    assert stream.windows(np.array([12]), 4)[0, 3] == VOCAB - 1
    with open(folder / "train-00000.npy", "r+b") as file:  # while a run reads it
        file.seek(-2, 2)
        file.write(VOCAB.to_bytes(2, "little"))
    with pytest.raises(UserError, match=f"holds token {VOCAB}"):
        stream.windows(np.array([12]), 4)
    assert f"tokens below the vocabulary of {VOCAB}" in complaint(folder)


@pytest.mark.filterwarnings("ignore:Reading `.npy`")  # numpy's word for a header of Python 2
@pytest.mark.parametrize("piece_tokens", [128, 2**21])
def test_every_flipped_bit_is_found(dataset, monkeypatch, piece_tokens):
    monkeypatch.setattr("gpt_lightning.data.shards.PIECE_TOKENS", piece_tokens)
    path = dataset / "train-00002.npy"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for number in range(100):
        # every second one is in the header, whose flips raise errors of many kinds in numpy
        at, bit = rng.integers((128 if number % 2 else len(whole), 8)).tolist()
        flip(path, at, bit)
        found = complaint(dataset)
        assert "1 fault in 3 shards" in found, (at, bit)
        assert "train-00002.npy: expected" in found, (at, bit)
        path.write_bytes(whole)
    verify(dataset)


def test_all_damage_is_named_at_once(dataset: Path) -> None:
    (dataset / "train-00000.npy").unlink()
    flip(dataset / "train-00001.npy", 128)
    with open(dataset / "train-00002.npy", "ab") as file:
        file.write(b"00")
    np.save(dataset / "train-00009.npy", np.zeros(3, np.uint16))
    found = complaint(dataset)
    for part in (
        "4 faults in 3 shards",
        "train-00000.npy: expected 3,000 tokens of uint16, found: No such file",
        "train-00001.npy: expected SHA-256",
        "train-00002.npy: expected 2,000 tokens of uint16, found: 4,130 bytes",
        "train-00009.npy: the manifest does not list this shard",
    ):
        assert part in found


def test_another_programs_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    verify(tmp_path)
    assert "1 shards, which have no digests, 1,000 tokens" in capsys.readouterr().out
    np.array([1, 60_000], dtype=np.uint16).tofile(tmp_path / "train.bin")
    found = complaint(tmp_path)
    assert "found token 60,000 at position 1" in found
    assert "download the file again" in found


@pytest.mark.parametrize("left", [128, 30_001])
def test_truncation_while_reading_is_a_line_and_no_signal(tmp_path, monkeypatch, left):
    folder = write_dataset(tmp_path, [np.zeros(50_000, np.uint16)], VOCAB)

    def add(*_: object) -> None:
        with open(folder / "train-00000.npy", "r+b") as file:
            file.truncate(left)

    # more than Python's own buffer holds
    monkeypatch.setattr("gpt_lightning.data.shards.PIECE_TOKENS", 10_000)
    monkeypatch.setattr("tqdm.tqdm.update", add)
    assert "train-00000.npy: " in (found := complaint(folder))
    assert "it was truncated" in found


def test_command(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(dataset)]) == 0
    flip(dataset / "train-00001.npy", 128)
    assert main(["data", "verify", str(dataset)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "train-00001.npy" in captured.err
    assert captured.err.count("\n") == 1
    assert main(["data", "verify", str(dataset / "nowhere")]) == 2


@pytest.mark.slow
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(4 * 10**8)  # zeros, which are tokens
    code = f"""
import resource
from pathlib import Path
from gpt_lightning.data.dataset import load_manifest, verify
from gpt_lightning.data.shards import TokenStream
resource.setrlimit(resource.RLIMIT_DATA, (2**28, {resource.RLIM_INFINITY}))
verify(Path({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "200,000,000 tokens" in done.stdout
