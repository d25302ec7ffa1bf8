"""Each command on the pages runs, on a tiny model, unless its block names what it needs."""

import contextlib
import functools
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from shown import PAGES, ROOT, TITLE, blocks, words
from tiny_fit import TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.commands import doctor
from gpt_lightning.tables.worker import measured

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# What makes a run of a page tiny. It follows the page's own options, and the last value wins.
TINY = [
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--trainer.max_steps=2",
    "--trainer.accumulate_grad_batches=1",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--model.config.n_layer=1",
    "--model.config.n_head=1",
    "--model.config.n_embd=8",
    "--model.config.block_size=16",
    "--model.warmup_steps=0",
    "--model.compile=false",
    "--data.batch_size=2",
    "--data.eval_batch_size=2",
    "--data.num_workers=0",
    "--speed.peak_flops=1e12",
    "--samples.max_new_tokens=4",
]
TEXT = ["--data.corpus=null", "--data.dataset=null", "--data.text_file=my.txt"]
KNOWN = ("fit", "prepare", "data", "sample", "eval", "export", "configs", "checkpoint")
KNOWN += ("doctor", "resume", "validate", "runs", "plot", "report")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with the texts, datasets and runs that the pages name."""
    zstandard = pytest.importorskip("zstandard")
    folder = tmp_path_factory.mktemp("world")
    text = "".join(f"ROMEO: Once upon a time cat {i} sat on a mat. THE END\n" for i in range(400))
    (folder / "my.txt").write_text(text)
    (folder / "text.txt").write_text(text)
    (folder / "prompts.txt").write_text("ROMEO:\nOnce upon\n")
    (folder / "texts").mkdir()
    for name in ("a", "b"):
        documents = ({"text": f"{name} {i}: {text[:300]}"} for i in range(60))
        lines = "".join(f"{json.dumps(document)}\n" for document in documents)
        compressed = zstandard.ZstdCompressor().compress(lines.encode())
        (folder / "texts" / f"{name}.jsonl.zst").write_bytes(compressed)
    with contextlib.chdir(folder):
        for name in ("mine", "code"):
            command = f"prepare texts/a.jsonl.zst --out data/{name} --val_fraction 0.2"
            assert main(command.split()) == 0
        for name in ("mine", "quickstart"):
            own = ["--trainer.max_steps=4", "--data.batch_size=4", f"--run_name={name}"]
            # as long a context as the pages evaluate with
            assert main(["fit", *TINY_RUN, *own, "--model.config.block_size=256"]) == 0
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"with this `([\w.]+)`:\n\n```yaml\n(.*?)```", page, re.DOTALL):
        (folder / name).write_text(text)
    page = (ROOT / "docs" / "tutorials" / "own_network.md").read_text(encoding="utf-8")
    own = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert own is not None
    (folder / "my_gpt.py").write_text(own[1])
    return folder


@pytest.fixture
def copy(world, tmp_path, monkeypatch):
    # the kernels and the processes of `doctor` are the law of tests/commands/test_doctor.py
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(doctor, "isolated", lambda check, row, limit_s: measured(check, row))
    shutil.copytree(world, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")


def tiny(argv: list[str]) -> list[str]:
    """Return a command with the options that make its run tiny."""
    if argv[0] == "resume":
        return [*argv, "--trainer.max_steps=6"]
    if argv[0] != "fit":
        return argv
    given = " ".join(argv)
    text = any(f"data.{key}" in given for key in ("dataset", "text_file"))
    return [*argv, *TINY, *([] if text else TEXT)]


def shown(page: Path) -> list[str]:
    """Return the lines of a page that run, in order."""
    texts = [text for info, text in blocks(page) if not TITLE.fullmatch(info)]
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("gpt-lightning ") and "BASE" not in line]


RUNNING = [page for page in PAGES if shown(page)]


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_one_after_the_other(page, copy):
    for line in shown(page):
        argv = words(line)[1:]
        assert argv[0] in KNOWN, f"{line}: add a title that names what it needs, or run it here"
        for path in (Path("data/mine"), Path("texts.jsonl"), Path("my-gpt2")):
            if "--out" in argv and argv[argv.index("--out") + 1] == str(path) and path.exists():
                shutil.rmtree(path)  # made by an earlier command
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            code = main(tiny(argv))
        assert code == 0, f"{line}: {printed.getvalue()}"


def test_the_python_of_the_tutorial_for_lightning_trains(copy):
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    code, subclass = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert "max_steps=300" in code
    names: dict = {}
    exec(code.replace("max_steps=300", "max_steps=2, logger=False"), names)
    exec(subclass, names)
    assert names["MyModule"](config=names["module"].config).hparams["aux"] == 0.1
    assert names["data"].tokenizer.vocab_size == names["module"].model.config.vocab_size
