"""The command `gpt-lightning eval`: the harness has the numbers of our own model.

The harness is not among the development tools (it needs 36 packages, 440 MB, and a second more for
each import of Lightning): pip install '.[eval]'.
"""

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch

from gpt_lightning.cli import main
from gpt_lightning.runs.sources import load_model
from tests.tiny_fit import TINY_MODEL

TEXT = "the cat sat on a mat and then it slept near an old grey house by two small rivers"
WORDS = TEXT.split()
EVAL = ["eval", "lightning_logs/run", "--data=items"]


@pytest.mark.parametrize("package", ["accelerate", "lm_eval"])
def test_a_missing_package_is_named(package, monkeypatch, capsys):
    for name in ("accelerate", "lm_eval"):
        monkeypatch.setitem(sys.modules, name, None if name == package else sys)
    assert main(["eval", "gpt2"]) == 2
    expected = f"error: {package} is missing: pip install 'gpt-lightning[eval]'\n"
    assert capsys.readouterr().err == expected


# ---- with the harness --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manager():
    """Index of the harness's tasks, which takes seconds to make."""
    pytest.importorskip("accelerate", reason="the extra eval is not installed")
    tasks = pytest.importorskip("lm_eval.tasks", reason="the extra eval is not installed")
    return tasks.TaskManager()


@pytest.fixture
def harness(manager, own_folder, monkeypatch):
    """A run that has learned the most frequent words, and a folder for items."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: manager)
    fit = ["--data.text_file=text.txt", "--data.tokenizer=gpt2", "--model.config.block_size=48"]
    rates = ["--model.learning_rate=0.03", "--trainer.max_steps=20", "--run_name=run"]
    assert main(["fit", *TINY_MODEL, *fit, *rates]) == 0
    Path("items").mkdir()


def write(task: str, items: list[dict]) -> None:
    Path(f"items/{task}.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))


def log_probs(model, context: list[int], text: list[int]) -> tuple[float, bool]:
    """Return the log-likelihood of tokens after others, and whether they are the most likely."""
    tokens = torch.tensor([*context, *text])[None]
    with torch.no_grad():
        logits = model(tokens[:, :-1])[0, len(context) - 1 :]
    targets = tokens[0, len(context) :]
    scores = logits.log_softmax(1).gather(1, targets[:, None])
    return float(scores.sum()), bool((logits.argmax(1) == targets).all())


@pytest.mark.slow
def test_the_harness_has_the_numbers_of_our_model(harness, capsys):
    """Its protocols of three tasks in a few lines; no text is longer than the context."""
    rng = random.Random(0)
    model, tokenizer = load_model("lightning_logs/run")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).tolist()

    def sentence(least: int, most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))

    choices, hits, normed = [], 0, 0
    for _ in range(30):
        endings = [sentence(1, 6) for _ in range(4)]
        label = rng.randrange(4)
        item = {"activity_label": "Cats", "ctx_a": sentence(2, 9), "ctx_b": sentence(1, 3)}
        choices.append(item | {"endings": endings, "label": str(label)})
        context = encode(f"Cats: {item['ctx_a']} {item['ctx_b'].capitalize()}")
        sums = [log_probs(model, context, encode(f" {ending}"))[0] for ending in endings]
        means = [total / len(text) for total, text in zip(sums, endings, strict=True)]
        hits += sums.index(max(sums)) == label
        normed += means.index(max(means)) == label
    write("hellaswag", choices)
    texts, words, greedy = [], 0.0, 0
    for number in range(20):
        context, word = sentence(3, 20), rng.choice(WORDS)
        if number % 4 == 0:  # the word that the model chooses
            with torch.no_grad():
                logits = model(torch.tensor([encode(context)]))
            word = tokenizer.decode([int(logits[0, -1].argmax())]).strip() or word
        texts.append({"text": f"{context} {word}"})
        score, is_greedy = log_probs(model, encode(context), encode(f" {word}"))
        words += score
        greedy += is_greedy
    write("lambada_openai", texts)
    pages = [f"{sentence(5, 30)} ." for _ in range(8)]
    write("wikitext", [{"page": page} for page in pages])
    nats = -sum(log_probs(model, [tokenizer.eot_token], encode(page))[0] for page in pages)
    capsys.readouterr()
    assert main([*EVAL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    n_bytes = sum(len(page) for page in pages)
    n_words = sum(len(page.split()) for page in pages)
    expected = {
        "hellaswag": {"acc": hits / 30, "acc_norm": normed / 30},
        "lambada_openai": {"acc": greedy / 20, "perplexity": math.exp(-words / 20)},
        "wikitext": {
            "bits_per_byte": nats / n_bytes / math.log(2),
            "word_perplexity": math.exp(nats / n_words),
        },
    }
    assert found.keys() == expected.keys()
    assert 0 < greedy < 20
    for task, numbers in expected.items():
        for name, number in numbers.items():
            assert found[task][f"{name},none"] == pytest.approx(number, rel=1e-5), (task, name)
    assert main([*EVAL, "--tasks=wikitext", "--dtype=bf16", "--limit=8"]) == 0
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith(", bf16 on cpu")
    assert titles.split() == ["task", "metric", "value", "stderr"]
    _, _, bits = next(row.split() for row in rows if "bits_per_byte" in row)
    assert float(bits) == pytest.approx(found["wikitext"]["bits_per_byte,none"], rel=0.05)


@pytest.mark.slow
def test_what_cannot_be_scored_is_one_line(manager, harness, monkeypatch, capsys):
    write("lambada_openai", [{"text": "a cat " + "sat" * 200}])
    Path("items/hellaswag.jsonl").write_text('{"ctx')

    def error(*options: str) -> str:
        capsys.readouterr()
        assert main(["eval", "lightning_logs/run", *options]) == 2
        _, _, message = capsys.readouterr().err.rpartition("error: ")  # behind a progress bar
        return message.splitlines()[0]

    assert error("--tasks=helaswag").endswith(
        "no task 'helaswag': did you mean 'hellaswag'?; `lm_eval ls tasks` lists them"
    )
    assert "items/wikitext.jsonl: no such file" in error("--tasks=wikitext", "--data=items")
    assert "mmlu is a group" in error("--tasks=mmlu", "--data=items")
    assert "cannot read the items of hellaswag" in error("--tasks=hellaswag", "--data=items")
    assert "longer than the model's context of 48" in error("--tasks=lambada_openai", *EVAL[2:])

    def unreachable(name: str) -> None:
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr(manager, "load", unreachable)
    assert error("--tasks=wikitext").endswith(
        "(Couldn't reach 'wikitext' on the Hub): connect to the network, or give --data a folder "
        "with wikitext.jsonl"
    )
