"""Protocols of the tasks against few-line scorers of their own, files, notes and errors."""

import contextlib
import json
import math
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gpt_lightning.data.tokenizers import ByteTokenizer, CharTokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.evaluate import tasks
from gpt_lightning.evaluate.scoring import Score, Scorer
from gpt_lightning.evaluate.tasks import (
    FILES,
    HARNESS,
    TASKS,
    Lambada,
    Result,
    Task,
    accuracy,
    exp,
    find_file,
    pages,
    report,
    task_names,
)
from gpt_lightning.model.gpt import SIZES
from tests.evaluate import made_up
from tests.evaluate.made_up import hellaswag_items, lambada_items, tiny_gpt, wikitext, write_files

MODEL = tiny_gpt(block_size=256)  # longer than every item: nothing is cut


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("items"), 20)


@pytest.fixture
def scorer():
    return Scorer(MODEL, ByteTokenizer(), batch_size=32)


def losses(text: str, n: int) -> torch.Tensor:
    """Return the losses of the last n bytes of a text, one forward without a batch."""
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        return F.cross_entropy(MODEL(ids[:, :-1])[0], ids[0, 1:], reduction="none")[-n:]


def numbers(result: Result) -> dict[tuple[str, str], float]:
    return {(metric.protocol, metric.name): metric.value for metric in result.metrics}


def test_hellaswag_by_both_protocols(folder, scorer):
    right = dict.fromkeys(("sum", "mean", "harness", "harness_norm"), 0)
    result = Task("hellaswag", scorer, str(folder)).run()
    for item, scores in zip(hellaswag_items(20), result.scores, strict=True):
        endings, label = item["endings"], int(item["label"])
        own = [losses(f"{item['ctx']} {e}", len(e) + 1) for e in endings]
        query = f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"
        marked = re.compile(r"\[[^]]*\]")
        query, *endings = (
            marked.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")
            for text in (query, *endings)
        )
        spaces = len(query) - len(query.rstrip())
        theirs = [float(losses(f"{query} {e}", len(e) + 1 + spaces).sum()) for e in endings]
        shares = [loss / len(e) for loss, e in zip(theirs, endings, strict=True)]
        expected = [-float(loss.sum()) for loss in own] + [-loss for loss in theirs]
        assert [score.log_prob for score in scores] == pytest.approx(expected, rel=1e-5)
        right["sum"] += np.argmin([float(loss.sum()) for loss in own]) == label
        right["mean"] += np.argmin([float(loss.mean()) for loss in own]) == label
        right["harness"] += np.argmin(theirs) == label
        right["harness_norm"] += np.argmin(shares) == label
    found = numbers(result)
    assert found == {
        ("build-nanogpt", "acc_norm"): right["mean"] / 20,
        (HARNESS, "acc_norm"): right["harness_norm"] / 20,
        ("build-nanogpt", "acc"): right["sum"] / 20,
        (HARNESS, "acc"): right["harness"] / 20,
    }
    assert len(set(found.values())) > 1  # the protocols differ on these items


def test_an_ending_of_marks_alone_is_never_chosen_by_characters(tmp_path, scorer):
    item = hellaswag_items(2)[1] | {"endings": ["the cat sat.", "[x]"], "label": 1}
    (tmp_path / "hellaswag_val.jsonl").write_text(json.dumps(item))
    result = Task("hellaswag", scorer, str(tmp_path)).run()
    assert numbers(result)[HARNESS, "acc_norm"] == 0


def test_lambada(folder, scorer):
    nats = 0.0
    for item in lambada_items(20):
        *_, word = item["text"].split(" ")
        context = item["text"][: -len(word)].rstrip()
        text = item["text"] if context else "\n" + item["text"]
        nats += float(losses(text, len(item["text"]) - len(context)).sum())
    result = Task("lambada", scorer, str(folder)).run()
    found = numbers(result)
    assert found[HARNESS, "perplexity"] == pytest.approx(math.exp(nats / 20), rel=1e-5)
    assert found[HARNESS, "acc"] == 0
    assert result.metrics[0].name == "acc"  # val/lambada


def test_the_greedy_last_word_counts():
    scores = [[Score(-1.0, 1, True)], [Score(-2.0, 2, False)]]
    acc, perplexity = Lambada().metrics([{}, {}], scores)
    assert (acc.value, perplexity.value) == (0.5, math.exp(1.5))


def test_wikitext(folder, scorer):
    result = Task("wikitext", scorer, str(folder)).run()
    text = wikitext(20)
    assert len(result.scores) == 20
    nats = -sum(score.log_prob for (score,) in result.scores)
    n_bytes = len(text.encode()) - len(" \n") - 19  # the lines before the first title, page ends
    words = sum(len(re.split(r"\s+", page)) for page in pages(text))
    found = numbers(result)
    assert found[HARNESS, "word_perplexity"] == pytest.approx(math.exp(nats / words))
    assert found[HARNESS, "byte_perplexity"] == pytest.approx(math.exp(nats / n_bytes))
    assert found[HARNESS, "bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2))
    # every byte of the page without marks, after the start of a text
    for page, (score,) in zip(pages(text), result.scores, strict=True):
        assert score.n_tokens < len(page.encode())


def test_pages_begin_with_their_titles():
    found = pages(wikitext(3))
    assert [page.split("\n")[0] for page in found] == [f" = Page {n} = " for n in range(3)]
    no_titles = "text\n = = Section = = \n = = = Part = = = \n= = half =\n= half = =\n =  \n"
    assert pages(no_titles) == [no_titles]
    assert len(pages(" = A = B = \n text\n = C = ")) == 2
    assert pages("\n \n") == []


def test_the_detokenizer(scorer, tmp_path):
    """Each rule on a text of its own: what the model scores."""
    expected = {
        "the dogs ' bone": "the dogs' bone",
        "a well @-@ known 1 @,@ 200 or 2 @.@ 5": "a well-known 1,200 or 2.5",
        "a : b ; c . d ! e ? f , g": "a: b; c. d! e? f, g",
        "( a ) [ b ] { c } \" d \" ' e '": "(a) [b] {c} \"d\" 'e'",
        "= = = = x = = = y = = z": "==== x === y == z",
        "20 ° north \n next N page it 's": "20°north\nnext 1 page it's",
    }
    lines = "".join(json.dumps({"page": page}) + "\n" for page in expected)
    (tmp_path / "wikitext_test.jsonl").write_text(lines)
    task = Task("wikitext", scorer, str(tmp_path))
    scored = [bytes(r.tokens[r.first :].tolist()).decode() for (r,) in task._requests]
    assert scored == list(expected.values())


def test_jsonl_of_wikitext_gives_the_same(tmp_path, folder, scorer):
    whole = [{"page": page} for page in pages(wikitext(20))]
    (tmp_path / "wikitext_test.jsonl").write_text("\n\n".join(map(json.dumps, whole)))
    requests = Task("wikitext", scorer, str(tmp_path))._requests
    expected = Task("wikitext", scorer, str(folder))._requests
    assert [r.tokens.tolist() for (r,) in requests] == [r.tokens.tolist() for (r,) in expected]


# ---- perplexity ----------------------------------------------------------------------------------


def test_perplexity_of_a_text(tmp_path):
    model = tiny_gpt()  # 64 tokens of context
    text = "Grüße, " + made_up.sentence(random.Random(3), 60)
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    scorer, n_bytes = Scorer(model, ByteTokenizer()), len(text.encode())
    result = Task("perplexity", scorer, text=str(tmp_path / "t.txt")).run()
    ids = torch.tensor(list(b"\n" + text.encode()))
    nats = 0.0
    for begin in range(0, n_bytes, 64):
        end = min(begin + 64, n_bytes)
        window = ids[max(0, end - 64) : end + 1]
        with torch.no_grad():
            each = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        nats += float(each[begin - end :].sum())
    expected = {
        "perplexity": math.exp(nats / n_bytes),
        "nats_per_token": nats / n_bytes,
        "bits_per_byte": nats / n_bytes / math.log(2),
        "bits_per_character": nats / len(text) / math.log(2),
    }
    found = {metric.name: metric.value for metric in result.metrics}
    assert found == pytest.approx(expected, rel=1e-6)
    assert {metric.protocol for metric in result.metrics} == {"no overlap"}
    assert result.scores[0][0].n_tokens == n_bytes


def test_a_sliding_window_gives_every_token_its_context(tmp_path):
    model = tiny_gpt()
    text = wikitext(1)[:120]
    (tmp_path / "t.txt").write_text(text)
    n = 1 + len(text)
    result = Task(
        "perplexity", Scorer(model, ByteTokenizer()), text=str(tmp_path / "t.txt"), stride=1
    )
    ids, nats = torch.tensor(list(b"\n" + text.encode())), 0.0
    with torch.no_grad():
        for end in range(1, n):
            window = ids[max(0, end - 64) : end]
            nats -= float(F.log_softmax(model(window[None])[0, -1], -1)[ids[end]])
    (found,) = (m.value for m in result.run().metrics if m.name == "nats_per_token")
    assert found == pytest.approx(nats / (n - 1), rel=1e-6)


def test_separators_of_documents_are_scored_and_have_no_bytes(tmp_path):
    class Separated(ByteTokenizer):
        eot_token = 0

    (tmp_path / "t.txt").write_text("ab\0cd")
    scorer = Scorer(tiny_gpt(), Separated())
    result = Task("perplexity", scorer, text=str(tmp_path / "t.txt")).run()
    ((score,),), (_, nats, bits, _) = result.scores, result.metrics
    assert (score.n_tokens, nats.value) == (5, -score.log_prob / 5)
    assert bits.value == pytest.approx(-score.log_prob / math.log(2) / 4)


def test_a_part_of_a_text_is_labelled(tmp_path):
    (tmp_path / "t.txt").write_text("abcd" * 100)
    scorer = Scorer(tiny_gpt(), ByteTokenizer())
    task = Task("perplexity", scorer, text=str(tmp_path / "t.txt"), limit=3, stride=16)
    assert task.notes == ["partial: the first 96 of 400 tokens"]
    assert task.run().scores[0][0].n_tokens == 64 + 2 * 16
    assert Task("perplexity", scorer, text=str(tmp_path / "t.txt"), limit=100).notes == []


def test_perplexity_of_a_dataset_is_the_loss_of_validate(tmp_path, text_file, monkeypatch):
    from gpt_lightning.cli import main
    from gpt_lightning.data.dataset import TokenDataset

    monkeypatch.chdir(tmp_path)
    assert main(["prepare", str(text_file), "--out", "data/shards", "--tokenizer", "byte"]) == 0
    model = tiny_gpt()
    scorer = Scorer(model, ByteTokenizer())
    result = Task("perplexity", scorer, text="shards", limit=5).run()
    tokens = TokenDataset("data/shards", tmp_path, 1.0).stream("val", 64).windows(np.zeros(1), 321)
    with torch.no_grad():
        x = torch.from_numpy(tokens)
        loss = model(x[:, :-1].reshape(5, 64), x[:, 1:].reshape(5, 64))
    assert result.metrics[1].value == pytest.approx(float(loss), rel=1e-6)
    with pytest.raises(
        UserError, match=r"was made with byte, the model's tokens are those of char"
    ):
        Task("perplexity", Scorer(model, CharTokenizer("ab")), text="shards")


# ---- what is wrong -------------------------------------------------------------------------------

GOOD = hellaswag_items(2)[1]


WRONG = {
    "no items": ("hellaswag", b""),
    "line 2": ("hellaswag", b'{"ctx": 1}\n{"ctx'),
    "line 2 is": ("hellaswag", b"\n\xff"),
    "'endings' is missing": ("hellaswag", b'{"text": "a b"}'),
    "line 1, an item of hellaswag": ("hellaswag", b"[1, 2]"),
    "index of one": ("hellaswag", json.dumps(GOOD | {"label": 4}).encode()),
    "invalid literal": ("hellaswag", json.dumps(GOOD | {"label": ""}).encode()),
    "list of endings": ("hellaswag", json.dumps(GOOD | {"endings": "abcd"}).encode()),
    "another form": ("hellaswag", json.dumps(GOOD | {"ctx": None}).encode()),
    "an item of lambada": ("lambada", b'{"text": 7}'),
    "wiki.test.raw has": ("wikitext", b" \n"),
    "wiki.test.raw is damaged": ("wikitext", b"\xff"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_file_of_another_form(message, tmp_path, scorer):
    task, content = WRONG[message]
    (tmp_path / FILES[task]["names"][0]).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        Task(task, scorer, str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_a_character_outside_the_vocabulary(folder):
    scorer = Scorer(
        tiny_gpt(vocab_size=27), CharTokenizer("\n" + "".join(map(chr, range(97, 123))))
    )
    with pytest.raises(UserError, match=r"line 1, an item of hellaswag: character .* is not among"):
        Task("hellaswag", scorer, str(folder))


def test_a_continuation_longer_than_the_block_is_scored_in_windows(tmp_path):
    model = tiny_gpt(block_size=8)
    (tmp_path / "lambada_test.jsonl").write_text(json.dumps({"text": "a cat " + "b" * 30}))
    result = Task("lambada", Scorer(model, ByteTokenizer()), str(tmp_path)).run()
    assert result.scores[0][0].n_tokens == 31


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty: give it some text"), (b"\xff", "give UTF-8 that byte can encode")],
)
def test_a_text_without_text(content, message, tmp_path, scorer):
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        Task("perplexity", scorer, text=str(tmp_path / "t.txt"))


def test_a_task_that_does_not_exist():
    assert task_names("lambada,hellaswag,lambada") == ["lambada", "hellaswag"]
    with pytest.raises(UserError, match=r"no task 'helaswag': did you mean 'hellaswag'"):
        task_names("lambada,helaswag")


# ---- files ---------------------------------------------------------------------------------------


def test_other_items_and_a_part_of_them_are_labelled(folder, scorer):
    task = Task("hellaswag", scorer, str(folder), limit=5)
    own, part = task.notes
    assert own.endswith("hellaswag_val.jsonl is not the file of the published figures")
    assert part == "partial: the first 5 of 20 items"
    assert len(task.run().scores) == 5


def test_a_file_is_downloaded_once_and_checked(tmp_path, folder, monkeypatch, capsys):
    from gpt_lightning.files import file_sha256
    from gpt_lightning.remote import attempts

    source, cache = folder / "lambada_test.jsonl", tmp_path / "cache"
    monkeypatch.setattr(tasks.platformdirs, "user_cache_dir", lambda name: str(cache / name))
    facts = FILES["lambada"]
    monkeypatch.setitem(facts, "url", f"file://{source}")
    monkeypatch.setitem(facts, "sha256", "0" * 64)
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.0)
    place = cache / "gpt-lightning/evaluate"
    with pytest.raises(UserError, match=rf"lambada needs lambada_test.jsonl in {place} \(.*--data"):
        find_file("lambada", None)
    monkeypatch.setitem(facts, "sha256", file_sha256(source))
    path = find_file("lambada", None)
    assert path == place / "lambada_test.jsonl"
    assert path.read_bytes() == source.read_bytes()
    monkeypatch.setitem(facts, "url", "file:///nowhere")
    assert find_file("lambada", None) == path


def test_two_ranks_download_a_file_once(tmp_path, monkeypatch):
    """The other rank has the lock first, and downloads."""
    path = tmp_path / "evaluate/lambada_test.jsonl"

    @contextlib.contextmanager
    def locked(lock):
        path.parent.mkdir()
        path.write_text("{}")
        yield

    monkeypatch.setattr(tasks.platformdirs, "user_cache_dir", lambda name: str(tmp_path))
    monkeypatch.setattr(tasks, "locked", locked)
    monkeypatch.setitem(FILES["lambada"], "url", "file:///nowhere")
    assert find_file("lambada", None) == path


def test_wikitext_comes_from_an_archive(tmp_path, monkeypatch):
    """The address is that of a file inside a .zip."""
    import zipfile

    from gpt_lightning.files import file_sha256
    from gpt_lightning.remote.files import fetch_file

    member, _, archive = FILES["wikitext"]["url"].removeprefix("zip://").partition("::")
    assert archive.endswith(".zip")
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        archive.writestr(member, wikitext(1))
    (tmp_path / "own").write_text(wikitext(1))
    url = f"zip://{member}::file://{tmp_path}/w.zip"
    fetch_file(url, tmp_path / "wiki.test.raw", file_sha256(tmp_path / "own"))
    assert (tmp_path / "wiki.test.raw").read_text() == wikitext(1)


def test_a_folder_without_the_file(tmp_path):
    with pytest.raises(UserError, match=r"needs wiki.test.raw or .*https://huggingface.co"):
        find_file("wikitext", str(tmp_path))


# ---- results -------------------------------------------------------------------------------------


def test_the_standard_error_is_that_of_the_sample():
    metric = accuracy("p", "acc", [True, False, False, True, True])
    assert metric.value == 0.6
    assert metric.stderr == pytest.approx(np.std([1, 0, 0, 1, 1], ddof=1) / math.sqrt(5))
    assert accuracy("p", "acc", [True]).stderr is None
    assert exp(2.0) == math.exp(2.0)
    assert exp(1e4) == math.inf


def test_published_figures_have_sources_and_the_names_of_ours(folder, scorer):
    assert FILES.keys() <= TASKS.keys()
    for task, facts in FILES.items():
        entries = facts["published"]
        names = [(entry["protocol"], entry["metric"]) for entry in entries]
        assert len(names) == len(set(names))
        for entry in entries:
            sizes = SIZES.keys() & entry.keys()
            assert sizes
            assert entry.keys() - sizes == {"protocol", "metric", "sources"}
            assert entry["sources"].keys() in ({"all"}, sizes)
        ours = numbers(Task(task, scorer, str(folder), limit=1).run())
        protocols = {protocol for protocol, _ in ours}
        assert {name for name in names if name[0] in protocols} == ours.keys()


def test_the_report_has_every_number_and_the_published_ones(folder, scorer, tmp_path, capsys):
    tasks = [Task(name, scorer, str(folder), limit=3) for name in ("hellaswag", "lambada")]
    report(tasks, "the model", SIZES["gpt2-large"], tmp_path / "out.json")
    printed = capsys.readouterr().out
    assert printed.startswith("# the model, shape 36/20/1280\ntask ")
    assert re.search(
        r"^lambada +paper, stop words +acc +0.4599 +0.5548 +0.6012 +0.6324$", printed, re.M
    )
    assert printed.count("partial: the first 3 of 20 items") == 2
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["shape"] == "36/20/1280"
    for task in tasks:
        result, own = found["tasks"][task.name], task.run()
        assert result["metrics"] == [vars(metric) for metric in own.metrics]
        assert [len(scores) for scores in result["scores"]] == [len(s) for s in own.scores]
        value = f"{own.metrics[0].value:.4f}"
        assert re.search(rf"^{task.name} .* {value} ", printed, re.M)
