"""HellaSwag: its accuracy, when it is logged, and that the training does not change."""

import contextlib
import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from gpt_lightning.cli import main
from gpt_lightning.data.tokenizers import ByteTokenizer, CharTokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.files import file_sha256
from gpt_lightning.model.fast import compilation
from gpt_lightning.remote import attempts
from gpt_lightning.runs.sources import load_model
from gpt_lightning.training import fit
from gpt_lightning.training.callbacks import hellaswag
from gpt_lightning.training.callbacks.hellaswag import (
    HellaSwag,
    batch_of,
    item_of,
    mean_losses,
    published_items,
    read_items,
)
from gpt_lightning.training.run_state import find_callback
from tests.tiny_fit import TINY_MODEL
from tests.tiny_fit import rows as all_rows

TEXT = "the cat sat on a mat and then it slept near an old grey house by two small rivers"
WORDS = TEXT.split()
RUN = [
    "fit",
    *TINY_MODEL,
    "--model.config.block_size=96",
    "--data.text_file=text.txt",
    "--data.tokenizer=byte",
    "--model.compile=false",
    "--data.batch_size=2",
    "--model.config.dropout=0.2",
    "--trainer.max_steps=6",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.val_check_interval=8",
    "--trainer.check_val_every_n_epoch=null",
]
NAME = "gpt_lightning.training.callbacks.hellaswag.HellaSwag"
OWN = [f"--trainer.callbacks+={NAME}", "--trainer.callbacks.file=items.jsonl"]
EVERY_2 = [*OWN, "--trainer.callbacks.every_n_steps=2", "--trainer.callbacks.limit=13"]


def made_up_items(n: int) -> list[dict]:
    """Return items whose texts have up to twice the context of the model."""
    rng = random.Random(0)
    return [
        {
            "ctx": " ".join(rng.choices(WORDS, k=rng.randint(0, 30))),
            "endings": [" ".join(rng.choices(WORDS, k=rng.randint(1, 7))) for _ in range(4)],
            "label": rng.choice([1, "2"]),
        }
        for _ in range(n)
    ]


@pytest.fixture
def items(own_folder) -> list[dict]:
    found = made_up_items(40)
    Path("items.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in found))
    return found


def rows(name: str) -> dict[int, dict]:
    """Return the rows of a run that have the accuracy, by step."""
    found = [row for row in all_rows(name) if "val/hellaswag" in row]
    by_step = {row["step"]: row for row in found}
    assert len(by_step) == len(found)
    return by_step


def plain_means(model, item: dict) -> list[float]:
    """Score one ending at a time, as build-nanogpt's program does."""
    means = []
    for ending in item["endings"]:
        end = len(f" {ending}".encode())
        context = item["ctx"] or "\n"
        tokens = torch.tensor([*f"{context} {ending}".encode()])[-97:]
        with torch.no_grad():
            losses = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none")
        means.append(float(losses[-end:].mean()))
    return means


def plain_accuracy(model, items: list[dict]) -> float:
    hits = 0
    for item in items:
        means = plain_means(model, item)
        hits += means.index(min(means)) == int(item["label"])
    return hits / len(items)


@pytest.mark.slow  # four fits
def test_the_training_is_the_same_and_a_resume_repeats_the_evaluation(items, capsys):
    own = [*EVERY_2, "--checkpoint.every_n_steps=4"]
    assert main([*RUN, "--run_name=plain"]) == 0
    assert main([*RUN, *own, "--run_name=whole"]) == 0
    printed = capsys.readouterr().out
    found = rows("whole")
    assert list(found) == [2, 4, 6]  # the validation is at 4
    models = [load_model(Path("lightning_logs", name))[0] for name in ("plain", "whole")]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
    folder = Path("lightning_logs/whole/version_0/checkpoints")
    model, _ = load_model(next(folder.glob("step-0000006*.ckpt")))
    assert found[6]["val/hellaswag"] == plain_accuracy(model, items[:13])
    assert f"step 6 | val/hellaswag {found[6]['val/hellaswag']:.4f}" in printed
    assert "evaluation 0." in printed.split("\ntime  ")[-1]  # a phase of its own
    assert main([*RUN, *own, "--run_name=cut", "--trainer.max_steps=4"]) == 0
    assert main([*RUN, *own, "--run_name=cut", "--resume=auto"]) == 0
    assert [{**row, "time": 0} for row in rows("cut").values()] == [
        {**row, "time": 0} for row in found.values()
    ]


def test_the_accuracy_is_that_of_the_plain_program(items, monkeypatch):
    """Random weights choose right and wrong endings; the batches end within the items."""
    found = {}

    class Randomized(Callback):
        def on_train_end(self, trainer, pl_module):
            torch.manual_seed(1)
            model = pl_module.model
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
            modes = [module.training for module in model.modules()]
            callback = find_callback(trainer, HellaSwag)
            found["hits"] = int(callback._hits(trainer, model))
            assert [module.training for module in model.modules()] == modes
            found["accuracy"] = plain_accuracy(model.eval(), items)
            own = [item_of(item, ByteTokenizer()) for item in items]
            x, y = batch_of(own, 96)
            found["means"] = mean_losses(model(x), y).tolist()
            found["plain"] = [mean for item in items for mean in plain_means(model, item)]

    own = [HellaSwag(file="items.jsonl", batch_size=3), Randomized()]
    fit.run_cli([*RUN, "--trainer.max_steps=1"], callbacks=own)
    assert found["hits"] / 40 == found["accuracy"]
    assert found["means"] == pytest.approx(found["plain"], rel=2e-6)
    assert 0.1 < found["accuracy"] < 0.9


def test_without_an_interval_it_follows_each_validation(items):
    assert main([*RUN, *OWN, "--run_name=after", "--trainer.num_sanity_val_steps=1"]) == 0
    assert list(rows("after")) == [4]
    no_validation = [*RUN, *OWN, "--trainer.limit_val_batches=0"]
    with pytest.raises(UserError, match="set its argument every_n_steps"):
        fit.run_cli(no_validation)


def test_an_evaluation_has_the_weights_of_val_loss_and_compiles_nothing(items, monkeypatch):
    """The model counts as compiled here, without a compiler's work."""
    inside, found = [], []

    @contextlib.contextmanager
    def averaged(trainer):
        inside.append(trainer.global_step)
        yield
        inside.clear()

    def hits(self, trainer, model):
        found.append((*inside, torch._dynamo.eval_frame._stance.stance))
        return torch.tensor(0.0)

    monkeypatch.setattr(hellaswag, "evaluated_weights", averaged)
    monkeypatch.setattr(HellaSwag, "_hits", hits)
    monkeypatch.setattr(compilation, "compile_in_place", lambda *args: None)
    callback = HellaSwag(every_n_steps=2, file="items.jsonl")
    fit.run_cli([*RUN, "--model.compile=true", "--trainer.max_steps=2"], callbacks=[callback])
    assert found == [(2, "force_eager")]
    assert callback.state_dict() == {}  # else Lightning warns of a resume without the callback
    callback.load_state_dict({"due": True})
    assert callback.state_dict() == {"due": True}


def test_a_stop_does_not_wait(items, monkeypatch):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 4

    callback = HellaSwag(every_n_steps=2, file="items.jsonl", batch_size=4)
    evaluate = HellaSwag._evaluate
    steps = []

    def counted(self, trainer):
        steps.append(trainer.global_step)
        evaluate(self, trainer)

    monkeypatch.setattr(HellaSwag, "_evaluate", counted)
    fit.run_cli(RUN, callbacks=[callback, Stop()])
    assert steps == [2]
    assert callback.state_dict() == {"due": True}  # a resume does it


GOOD = made_up_items(1)[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no items"),
        ('{"ctx', "line 2: Unterminated"),
        ("[1, 2]", "line 2: its content has another form"),
        ('{"text": "a b"}', "line 2: 'endings' is missing"),
        (json.dumps(GOOD | {"label": 4}), "index of one as label"),
        (json.dumps(GOOD | {"label": ""}), "invalid literal"),
        (json.dumps(GOOD | {"endings": ["a"]}), "expected four endings"),
        (json.dumps(GOOD | {"ctx": None}), "line 2: its content"),
        (json.dumps(GOOD | {"ctx": "A"}), "line 2: character 'A' .* is not among"),
    ],
)
def test_a_file_of_another_form(line, message, tmp_path):
    path = tmp_path / "items.jsonl"
    letters = CharTokenizer("\n " + "".join(map(chr, range(97, 123))))
    path.write_text(f"{json.dumps(GOOD)}\n{line}" if line else "")
    with pytest.raises(UserError, match=message) as error:
        read_items(path, letters, None)
    assert str(path) in str(error.value)
    with pytest.raises(UserError, match="cannot read"):
        read_items(tmp_path / "nowhere.jsonl", ByteTokenizer(), None)


def test_the_items_are_downloaded_once_and_checked(tmp_path, monkeypatch):
    source = tmp_path / "source.jsonl"
    source.write_text(json.dumps(GOOD))
    cache = tmp_path / "cache"
    monkeypatch.setattr(hellaswag.platformdirs, "user_cache_path", lambda name: cache / name)
    monkeypatch.setattr(hellaswag, "URL", f"file://{source}")
    monkeypatch.setattr(attempts, "PATIENCE_S", 0.0)
    with pytest.raises(UserError, match=r"cannot fetch its items \(.*argument file"):
        published_items()
    monkeypatch.setattr(hellaswag, "SHA256", file_sha256(source))
    path = published_items()
    assert path.read_bytes() == source.read_bytes()
    monkeypatch.setattr(hellaswag, "URL", "file:///nowhere")
    assert published_items() == path
