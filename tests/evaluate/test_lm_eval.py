"""Our tasks beside EleutherAI's lm-evaluation-harness: its program, its tasks, the same items.

The harness is not among the development tools (it needs thirty packages): pip install lm_eval.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml

from gpt_lightning.data.tokenizers import TiktokenTokenizer, gpt2_file
from gpt_lightning.evaluate.scoring import Scorer
from gpt_lightning.evaluate.tasks import HARNESS, Task, pages
from gpt_lightning.model.gpt import GPT
from gpt_lightning.runs.sources import load_model
from tests.evaluate import made_up

lm_eval = pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed")
pytestmark = pytest.mark.slow  # imports datasets and transformers, and scores 600 requests twice

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32}
T = 48  # shorter than some items
TASKS = {
    "hellaswag": ("hellaswag", "validation", "hellaswag_val.jsonl"),
    "lambada_openai": ("lambada", "test", "lambada_test.jsonl"),
    "wikitext": ("wikitext", "test", "wikitext_test.jsonl"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder with a random GPT-2 and its tokenizer, written by transformers."""
    import transformers

    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=T, initializer_range=0.2, **SHAPE)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    vocabulary = [str(gpt2_file(name)) for name in ("encoder.json", "vocab.bpe")]
    transformers.GPT2Tokenizer(*vocabulary).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(exported) -> GPT:
    return load_model(exported)[0]


def greedy_texts(model: GPT) -> list[dict]:
    """Return texts whose last word is the most likely one, where that is one word."""
    tokenizer, found = TiktokenTokenizer("gpt2"), []
    for item in made_up.lambada_items(20, seed=1):
        with torch.no_grad():
            logits = model(torch.from_numpy(tokenizer.encode(item["text"]).astype(int))[None, -T:])
        word = tokenizer.decode([int(logits[0, -1].argmax())])
        if word.startswith(" ") and word[1:].isascii() and word[1:].isalpha():
            found.append({"text": item["text"] + word})
    return found


@pytest.fixture(scope="module")
def items(model, tmp_path_factory) -> Path:
    folder = made_up.write_files(tmp_path_factory.mktemp("items"), 50)
    with (folder / "lambada_test.jsonl").open("a") as file:
        file.writelines(json.dumps(item) + "\n" for item in greedy_texts(model))
    lines = (json.dumps({"page": page}) for page in pages(made_up.wikitext(20)))
    (folder / "wikitext_test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "wiki.test.raw").unlink()
    return folder


@pytest.fixture(scope="module")
def theirs(exported, items, tmp_path_factory) -> dict:
    """Results of the harness for its own tasks with our items in place of theirs."""
    from lm_eval.models.huggingface import HFLM

    folder, tasks = Path(lm_eval.__file__).parent / "tasks", []
    for name, (_, split, file) in TASKS.items():
        (config,) = folder.glob(f"*/{name}.yaml")
        changed = {
            "include": str(config),
            "task": f"own_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(items / file)}},
            **{f"{other}_split": None for other in ("training", "validation") if other != split},
        }
        tasks.append(tmp_path_factory.mktemp("task") / f"own_{name}.yaml")
        tasks[-1].write_text(yaml.safe_dump(changed))
    model = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=8)
    return lm_eval.simple_evaluate(model, tasks=list(map(str, tasks)), bootstrap_iters=10)


@pytest.mark.parametrize("name", TASKS)
def test_every_number_of_the_harness(name, model, items, theirs):
    scorer = Scorer(model, TiktokenTokenizer("gpt2"), batch_size=8)
    result = Task(TASKS[name][0], scorer, str(items)).run()
    ours = {metric.name: metric for metric in result.metrics if metric.protocol == HARNESS}
    found, printed = theirs["results"][f"own_{name}"], set()
    for metric in ours.values():
        # sums of float32 log-likelihoods, ours are added in float64
        expected = found[f"{metric.name},none"]
        assert metric.value == pytest.approx(expected, rel=1e-6)
        if expected < 500:  # a random model's perplexity of words has more digits than float32
            assert f"{metric.value:.4f}" == f"{expected:.4f}"  # the digits that it prints
            printed.add(metric.name)
        if metric.stderr is not None:
            assert metric.stderr == pytest.approx(found[f"{metric.name}_stderr,none"], rel=1e-12)
    assert {f"{name},none" for name in ours} == {
        key for key in found if key.endswith(",none") and "stderr" not in key
    }
    assert name != "lambada_openai" or ours["acc"].value > 0.1
    assert name != "wikitext" or printed >= {"byte_perplexity", "bits_per_byte"}
    # and of each item
    for sample in theirs["samples"][f"own_{name}"]:
        own = result.scores[sample["doc_id"]]
        for (log_prob, _, greedy), response in zip(own[-4:], sample["resps"], strict=True):
            value, is_greedy = (
                response[0] if isinstance(response[0], tuple | list) else (response[0], None)
            )
            assert log_prob == pytest.approx(float(value), rel=1e-5)
            assert is_greedy is None or str(is_greedy) == str(greedy)
