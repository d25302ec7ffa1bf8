"""gpt_lightning.training.evaluation of a part of a split says of which part, wherever it prints."""

import contextlib
import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from gpt_lightning.cli import main
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.loader import IGNORE_INDEX, EvalBatches
from gpt_lightning.training.datamodule import TokenDataModule
from tests.tiny_fit import TINY_RUN

RUN = [*TINY_RUN, "--data.batch_size=4"]  # validates a batch of 4 x 16 tokens


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder with a run of four steps, and what it printed."""
    folder, out = tmp_path_factory.mktemp("run"), io.StringIO()
    (folder / "text.txt").write_text("the cat sat on a mat\n" * 800)
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        assert main(["fit", *RUN, "--trainer.max_steps=4"]) == 0
    return folder, out.getvalue()


@pytest.fixture
def call(trained, monkeypatch, capsys):
    """Function that runs a command on the run's checkpoint and returns its output."""
    monkeypatch.chdir(trained[0])

    def call(command, *options, code=0):
        assert main([command, *RUN, "--ckpt_path=lightning_logs/run", *options]) == code
        return "".join(capsys.readouterr())

    return call


@pytest.fixture
def whole(trained):
    """Predictions of the validation split."""
    return load_manifest(trained[0] / "data/text-char").tokens("val") - 1


def test_a_partial_validation_is_named_on_the_console_and_in_the_files(trained, whole):
    folder, out = trained
    loss, part = r"loss \d\.\d{4}", f"on 64 of {whole:,} tokens"
    assert re.search(rf"^step 4/4 \| validation {loss} {part}, perplexity \d+\.", out, re.M)
    assert re.search(rf"^loss .*val/{loss} {part}", out, re.M)
    lines = (folder / "lightning_logs/run/version_0/metrics.jsonl").read_text().splitlines()
    (row,) = [row for row in map(json.loads, lines) if "val/loss" in row]
    assert (row["val/tokens"], row["val/split_tokens"]) == (64, whole)


def test_a_whole_validation_has_a_padded_last_batch_and_no_note(call, whole):
    out = call("validate", "--trainer.limit_val_batches=1.0")
    assert re.search(r"validation loss \d\.\d{4}, perplexity", out)
    assert "val/tokens" not in out
    assert whole % 64, "the last batch must be padded for this to say anything"


class Zeros:
    def __len__(self) -> int:
        return 333

    def windows(self, starts, length):
        return np.zeros((len(starts), length), np.int64)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batches", [1, 3, 4, 7])
def test_the_tokens_are_counted_over_ranks_without_padding(ranks, batches):
    stream = Zeros()
    data = TokenDataModule(text_file="text.txt", tokenizer="char")
    data._reader = SimpleNamespace(stream=lambda split: stream)
    shares = [EvalBatches(stream, 8, 3, rank, ranks) for rank in range(ranks)]
    batches = min(batches, len(shares[0]))
    targets = [share[i][1] for share in shares for i in range(batches)]
    counted = sum(int((y != IGNORE_INDEX).sum()) for y in targets)
    part = data.evaluated_part("val", sum(y.numel() for y in targets))
    assert part.get("val/tokens", 332) == counted
    assert (counted == 332) == (batches == len(shares[0]))


def test_predict_counts_what_it_wrote(call, whole):
    out = call("predict", "--trainer.limit_predict_batches=3", "--return_predictions=false")
    line = rf"^(.*npy): 192 of {whole:,} token losses, mean (\S+) nats$"
    path, mean = re.search(line, out, re.M).groups()
    losses = np.load(path)
    assert losses.shape == (192,)
    assert losses.mean() == pytest.approx(float(mean), abs=1e-4)
    assert "batch indices" not in out
