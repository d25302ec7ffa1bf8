"""data.val_text_file: another text in place of the validation split."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from gpt_lightning.cli import main
from gpt_lightning.runs.sources import load_model
from tests.tiny_fit import TINY_MODEL

RUN = [*TINY_MODEL, "--trainer.max_steps=2", "--run_name=run", "--trainer.limit_val_batches=1.0"]
OTHER = "the cat sat, the mat was flat; and then the rat \u00e9tait l\u00e0 " * 7


def validate(*options: str) -> dict[str, float]:
    """Return the metrics of `validate lightning_logs/run`."""
    assert main(["validate", "lightning_logs/run", *options]) == 0
    folders = Path("lightning_logs/run").glob("validate_*")
    newest = max(folders, key=lambda path: int(path.name.partition("_")[2]))
    return json.loads((newest / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_a_text_is_validated_from_its_first_token_to_its_last(tokenizer, own_folder, capsys):
    fit = ["fit", *RUN, "--data.text_file=text.txt", f"--data.tokenizer={tokenizer}"]
    assert main(fit) == 0
    Path("other.txt").write_text(OTHER)
    found = validate("--data.val_text_file=other.txt")
    model, its_tokenizer = load_model("lightning_logs/run")
    tokens = torch.from_numpy(its_tokenizer.encode(OTHER).astype(int))
    losses = []
    for x, y in zip(tokens[:-1].split(16), tokens[1:].split(16), strict=True):
        with torch.no_grad():
            losses.append(cross_entropy(model(x[None])[0], y, reduction="none"))
    loss = float(torch.cat(losses).mean())
    bits = loss * len(tokens) / len(OTHER.encode()) / math.log(2)
    assert found["val/loss"] == pytest.approx(loss, rel=1e-6)
    assert found["val/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["val/bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    printed = capsys.readouterr().out
    assert f"validation loss {loss:.4f}, perplexity {found['val/perplexity']:.2f}" in printed
    assert f", {bits:.4f} bits per byte\n" in printed
    assert validate()["val/loss"] != found["val/loss"]  # the run's own split


def test_the_vocabulary_is_the_run_s(own_folder, capsys):
    assert main(["fit", *RUN, "--data.text_file=text.txt", "--data.tokenizer=char"]) == 0
    words = Path("text.txt").read_text()
    Path("other.txt").write_text(words[:300])
    assert validate("--data.val_text_file=other.txt")["val/loss"] > 0
    wrong = {
        "accent": (words[:300] + "\u00e9", "character '\u00e9' at position 300 is not among"),
        "empty": ("", "empty.txt: the train split has 0 tokens"),
        "short": ("the", "has 3 tokens, fewer than a window"),
        "other": (words[:200], "data/other-text-char-val0 was prepared with SHA-256"),
    }
    for name, (text, reason) in wrong.items():
        Path(f"{name}.txt").write_text(text, encoding="utf-8")
        capsys.readouterr()
        assert main(["validate", "lightning_logs/run", f"--data.val_text_file={name}.txt"]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1
    assert main(["validate", "lightning_logs/run", "--data.val_text_file=nowhere.txt"]) == 2
    assert "nowhere.txt: no such file" in capsys.readouterr().err


def test_a_training_without_a_validation_split_validates_on_the_text(own_folder):
    Path("other.txt").write_text(OTHER)
    data = ["--data.text_file=text.txt", "--data.tokenizer=byte", "--data.val_fraction=0"]
    every = ["--trainer.val_check_interval=1", "--data.val_text_file=other.txt"]
    assert main(["fit", *RUN, *data, *every]) == 0
    trained = Path("lightning_logs/run/version_0/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, trained) if "val/loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert validate("--ckpt_path=last")["val/loss"] == rows[-1]["val/loss"]
