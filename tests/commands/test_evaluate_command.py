"""The command `gpt-lightning eval`."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import run_ranks

from gpt_lightning.cli import main
from gpt_lightning.data.tokenizers import ByteTokenizer
from gpt_lightning.runs import sources
from tests.evaluate.made_up import tiny_gpt, write_files
from tests.tiny_fit import TINY_MODEL


@pytest.fixture
def model(own_folder, monkeypatch) -> None:
    """A model behind the path `run`, and the items of the tasks."""
    write_files(Path("items"))
    found = SimpleNamespace(source="run", model=tiny_gpt)
    monkeypatch.setattr(sources, "read_source", lambda *given: found)
    monkeypatch.setattr(sources, "tokenizer_of", lambda found: ByteTokenizer())


def test_the_default_tasks_and_the_file(model, capsys):
    assert main(["eval", "run", "--data", "items", "--limit", "3", "--out", "new/out.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# run, fp32 on cpu, shape 2/2/16\n")
    for task in ("hellaswag", "lambada", "wikitext"):
        assert f"\n{task} " in printed
    found = json.loads(Path("new/out.json").read_text())
    assert list(found["tasks"]) == ["hellaswag", "lambada", "wikitext"]
    (value,) = (
        metric["value"]
        for metric in found["tasks"]["wikitext"]["metrics"]
        if metric["name"] == "bits_per_byte"
    )
    assert f" {value:.4f} " in printed


def test_perplexity_of_a_text_in_both_precisions(model, capsys):
    Path("t.txt").write_text("the cat sat on a mat " * 9)
    own = ["--tasks", "perplexity", "--text", "t.txt", "--stride", "8", "--batch-size", "2"]
    values = []
    for dtype in ("fp32", "bf16"):
        assert main(["eval", "run", *own, "--dtype", dtype, "--out", "out.json"]) == 0
        assert f"# run, {dtype} on cpu" in capsys.readouterr().out
        metrics = json.loads(Path("out.json").read_text())["tasks"]["perplexity"]["metrics"]
        assert {metric["protocol"] for metric in metrics} == {"stride 8"}
        values.append(metrics[1]["value"])
    assert values[0] == pytest.approx(values[1], rel=0.05)
    assert values[0] != values[1]


def evaluate_rank() -> None:
    """Run `eval` with the variables of torchrun."""
    os.environ.update(RANK=os.environ["LOCAL_RANK"], WORLD_SIZE="2")
    assert main(["eval", "lightning_logs/run", "--data", "items", "--out", "two.json"]) == 0


@pytest.mark.slow
def test_two_ranks_of_torchrun_give_the_numbers_of_one(own_folder):
    fit = [*TINY_MODEL, "--data.text_file=text.txt", "--data.tokenizer=byte"]
    assert main(["fit", *fit, "--trainer.max_steps=2", "--run_name=run"]) == 0
    write_files(Path("items"), 20)
    assert main(["eval", "lightning_logs/run", "--data", "items", "--out", "one.json"]) == 0
    out, _ = run_ranks(2, evaluate_rank)
    assert out.count("# lightning_logs/run") == 1
    one, two = (json.loads(Path(f"{name}.json").read_text())["tasks"] for name in ("one", "two"))
    for task, result in one.items():
        for a, b in zip(result["metrics"], two[task]["metrics"], strict=True):
            assert a["value"] == pytest.approx(b["value"], rel=1e-5)
