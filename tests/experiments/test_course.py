"""`python -m experiments.course`: sections, answers, other machines."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.course import answers
from experiments.course import report as command
from gpt_lightning.bench import memory_meter
from gpt_lightning.bench import sizes as subject
from gpt_lightning.cli import main
from gpt_lightning.tables import pictures, sweep
from gpt_lightning.tables.worker import call, failure

FOLDER = Path("lightning_logs/report/course-quick")
PNG = b"\x89PNG\r\n\x1a\n"
RTX = {"device": "a GPU", "CPU": "a CPU", "memory": "9 GiB", "software": "x<4>", "date": "y"}


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Rows are measured in this process, pictures are stubs; returns the measured rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory_meter, "limit_memory", lambda *args: None)
    monkeypatch.setattr(subject, "rates", lambda *args: {"tokens_per_sec": 1.0, "mfu": 0.5})
    monkeypatch.setattr(pictures, "plot_rows", lambda path, *what: path.write_bytes(PNG))
    found: list[dict] = []

    def isolated(address, configuration, timeout_s):
        found.append(configuration)
        module, function = address.split(":")
        try:
            measure = getattr(importlib.import_module(module), function)
            return {"status": "ok", "note": "", **call(measure, configuration)}
        except Exception as error:
            return failure(error)

    monkeypatch.setattr(sweep, "isolated", isolated)
    return found


def report(*more: str) -> int:
    return main(["--quick", "--device", "cpu", *more], command.run)


def part(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_rows_of_other_machines_are_beside_ours(calls, tmp_path):
    assert report("--sections", "no-warm-up") == 0
    other = tmp_path / "other" / "no-warm-up"
    other.mkdir(parents=True)
    data = json.loads((FOLDER / "no-warm-up" / "results.json").read_text())
    data["machine"] = RTX | {"command": "gpt-lightning bench sizes --device cuda"}
    data["rows"][0]["device"] = "cuda"
    (other / "results.json").write_text(json.dumps(data))
    before = len(calls)
    assert report("--sections", "no-warm-up", "--machines", "other") == 0
    assert len(calls) == before
    own = part((FOLDER / "report.md").read_text(), "No warm-up")
    assert (
        own.index("| cpu |") < own.index("a GPU; a CPU; 9 GiB; x&lt;4>; y") < own.index("| cuda |")
    )
    page = (FOLDER / "report.html").read_text()
    assert "x&lt;4&gt;; y" in page  # as the names of CUDA's kernels have it, and no tag


def test_a_failed_row_is_in_the_report_and_in_the_exit_code(calls, monkeypatch):
    crash = {"status": "crashed", "note": "planted"}
    monkeypatch.setattr(sweep, "isolated", lambda *args: crash)
    assert report("--sections", "profile,memory,no-warm-up,checkpoints,attention") == 1
    text = (FOLDER / "report.md").read_text()
    assert text.count("| crashed | planted |") == 2 + 2 + 1 + 2 + 1
    monkeypatch.setattr(
        sweep, "isolated", lambda address, *_: crash if "sizes" in address else {"status": "ok"}
    )
    assert report("--sections", "no-warm-up,accumulation") == 1  # not the last section's alone


def test_sizes_suit_the_device_and_sections_take_their_part():
    args = command.make_parser().parse_args([])
    options = {name: command.SECTIONS[name] for name in ("end-to-end", "profile", "memory")}
    for device, sizes in (("cpu", "small,medium"), ("cuda", "small,medium,large,xl,2.7B")):
        words = {name: command.filled(s, args, device) for name, s in options.items()}
        assert words["end-to-end"][:4] == ["--device", device, "--model", "course"]
        found = [words[name][words[name].index("--sizes") + 1] for name in options]
        assert found == [sizes, "small", sizes.split(",")[-1]]
    dtypes = command.filled(command.SECTIONS["dtypes"], args, "mps")
    assert dtypes[:4] == ["--device", "mps,cuda-rules", "--models", "toy,gpt"]
    args = command.make_parser().parse_args(["--sizes", "large", "--passes", "7"])
    assert "large" in command.filled(command.SECTIONS["end-to-end"], args, "cpu")
    assert command.filled(command.SECTIONS["attention"], args, "cpu")[-1] == "7"


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_every_section_can_be_typed(quick):
    args = command.make_parser().parse_args(quick)
    for section in command.SECTIONS.values():
        bench, rows = command.read(section, command.filled(section, args, "cpu"))
        assert rows
        columns = bench.tables["rows"].columns()
        assert set(section.columns) <= set(columns), section.name
        assert set(section.tables) <= {*bench.tables, "published"}
        assert not section.answer or callable(getattr(answers, section.answer))


def test_mistakes_take_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for args, line in (
        (["course"], "error: "),
        (["--sections", "profil"], "error: --sections is 'profil': 'profil' is none of"),
        (["--machines", "nowhere"], "error: --machines: nowhere has no report; give a"),
    ):
        assert main(args, command.run) == 2
        errors = capsys.readouterr().err
        assert errors.startswith(line)
        assert errors.count("\n") == 1
    assert not Path("lightning_logs").exists()


# ---- answers -------------------------------------------------------------------------------------


def answered(function, **tables) -> str:
    rows = [{"status": "ok", "size": "S"} | row for row in tables.pop("rows")]
    return " ".join(f"{q} {a}" for q, a in function({"rows": rows, **tables}))


def test_answers_are_the_numbers_of_the_rows():
    times = {"forward_mean_ms": 20.0, "backward_mean_ms": 50.0, "forward_ms": 16.0}
    times |= {"backward_ms": 40.0, "forward_std_ms": 3.0, "backward_std_ms": 1.0}
    text = answered(answers.passes, rows=[times])
    assert "Forward 20.0 ms, backward 50.0 ms" in text
    assert "2.50 times the forward" in text
    assert "15.0% of the forward's mean and 2.0% of the backward's" in text
    text = answered(answers.first_call, rows=[times | {"first_forward_ms": 80.0}])
    assert "took 80.0 ms, 5.0 times the median of 16.0 ms; with it the mean is 20.0 ms" in text
    blocks = [{"blocks": n, "peak_mib": peak} for n, peak in ((1, 9.0), (3, 7.0), (6, 8.0))]
    assert "3 blocks per checkpoint, with 7.0 MiB" in answered(answers.checkpoints, rows=blocks)


@pytest.mark.slow
def test_the_quick_report_has_every_section_that_runs_here(calls):
    assert report() == 0
    text = (FOLDER / "report.md").read_text()
    measured = [name for name, s in command.SECTIONS.items() if not s.compiles]
    for name in measured:
        assert "| ok |" in part(text, command.SECTIONS[name].title), name
    assert text.count("Not measured:") == len(command.SECTIONS) - len(measured)
    rows = len(calls)
    assert rows == 18  # a process of two to three seconds each, without this fixture
    assert report() == 0
    assert len(calls) == rows


@pytest.mark.slow
def test_rows_have_processes_of_their_own(tmp_path):
    words = ["--quick", "--device", "cpu", "--sections", "bf16"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.course", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / FOLDER / "report.md").read_text().count("| ok |") == 1
