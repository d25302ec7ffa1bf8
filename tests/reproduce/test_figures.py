"""`reproduce profile-report`, `systems-course` and `openwebtext`: tables of single figures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt_lightning.bench import accumulation, dtypes, profile, sizes
from gpt_lightning.cli import main
from gpt_lightning.files import numbered_folder, reference_rows
from gpt_lightning.model.gpt import GPT, SIZES, GPTConfig
from gpt_lightning.model.weights import Pretrained
from gpt_lightning.reproduce import command, figures
from gpt_lightning.reproduce.cases import REPORTS
from gpt_lightning.runs import sources
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import measured

BENCHES = {bench.name: bench for bench in (accumulation.BENCH, dtypes.BENCH, profile.BENCH)}
BENCHES["sizes"] = sizes.BENCH


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figures.bench_results.cache_clear()


def rows(name):
    path = command.ROOT / name / "version_0" / "results.json"
    return {row["figure"]: row for row in json.loads(path.read_text())["figures"]}


def test_dtypes_and_sums_have_a_verdict_and_the_rest_its_command(capsys, monkeypatch):
    monkeypatch.setattr(sweep, "isolated", lambda measure, row, _: measured(measure, row))
    assert main(["reproduce", "profile-report"]) == 0
    assert main(["reproduce", "systems-course"]) == 0
    out = capsys.readouterr().out
    found = rows("profile-report") | rows("systems-course")
    assert sum(row["verdict"] == "ok" for row in found.values()) == 7 + 4
    assert found["dtype of the layer norm"]["ours"] == "float32"
    assert float(found["float16"]["ours"]) == pytest.approx(9.9531, abs=5e-5)
    forward = found["forward ms"]
    assert (forward["verdict"], forward["theirs"]) == ("skipped", "33")
    assert forward["note"].startswith("needs an A100: gpt-lightning bench profile --model course")
    assert "needs an RTX PRO 6000: gpt-lightning bench sizes" in out


@pytest.fixture
def gpu(monkeypatch):
    """A machine with an A100 whose benchmarks have measured what the report has."""
    step = {"timer_ms": 33.0, "products": 0.52, "total_ms": 68.0, "products_calls": 37.0}
    speed_up = {"dtype": "fp16", "over_fp32": 2.1, "elementwise": 0.2}
    tables = {
        "rows": [step | speed_up],
        "ranges": [
            {"range": "step", "kernels_ms": 99.0, "span_ms": 99.0},
            {"range": "step / optimizer", "kernels_ms": 3.0, "span_ms": 25.0},
        ],
        "attention": [{"part": "softmax", "time_share": 0.25}],
    }
    calls = []

    def run_bench(argv):
        calls.append(argv)
        folder = numbered_folder(figures.sweep.ROOT / argv[1])
        (folder / "results.json").write_text(json.dumps(tables))

    monkeypatch.setattr(figures, "run_bench", run_bench)
    monkeypatch.setattr(figures, "machine_record", lambda argv: {"command": " ".join(argv)})
    monkeypatch.setattr(figures.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(figures.torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    tables["rows"][0] |= {
        row["field"]: row["published"]
        for row in reference_rows("figures.csv", "profile-report")
        if row["command"].startswith("dtypes ")
    }
    return tables, calls


def test_a_gpu_measures_each_command_once_and_compares(gpu):
    _, calls = gpu
    assert main(["reproduce", "profile-report"]) == 1
    found = rows("profile-report")
    verdicts = {name: row["verdict"] for name, row in found.items()}
    assert verdicts["forward ms"] == "ok"
    assert verdicts["products' share of the forward's kernels"] == "FAIL"  # 52%
    assert verdicts["products' share with backward and optimizer"] == "ok"
    assert verdicts["optimizer's kernels ms"] == "ok"
    assert verdicts["optimizer's span ms"] == "FAIL"  # 25 ms, theirs 16
    assert verdicts["softmax's share of the attention's time"] == "ok"
    assert verdicts["full step ms, 4 x 512, fp16"] == "ok"
    assert verdicts["full step ms, 16 x 1024, fp32"] == "FAIL"
    assert verdicts["products' calls in the forward"] == ""
    assert verdicts["speed-up of fp16 over fp32, 4 x 512"] == "FAIL"  # 47% less is 1.9 times
    assert verdicts["speed-up of fp16 over fp32, 16 x 1024"] == "ok"  # 55% less is 2.2 times
    assert found["optimizer's span ms"]["ours"] == "25"
    assert found["optimizer's span ms"]["note"] == "from 8 to 24"
    assert len(calls) == len({tuple(call) for call in calls}) == 11
    assert " ".join(calls[0]) == "bench profile --model course --shapes 4x512 --modes inference"


def test_another_gpu_has_figures_without_a_verdict(gpu, monkeypatch):
    monkeypatch.setattr(figures.torch.cuda, "get_device_name", lambda *_: "NVIDIA L4")
    assert main(["reproduce", "profile-report"]) == 0
    span = rows("profile-report")["optimizer's span ms"]
    assert (span["ours"], span["verdict"]) == ("25", "")
    assert span["note"] == "this is NVIDIA L4, theirs an A100"


@pytest.mark.parametrize("name", REPORTS)
def test_the_benches_have_the_options_and_the_columns(name, monkeypatch):
    monkeypatch.setattr(figures.torch.backends.mps, "is_available", lambda: True)
    for row in reference_rows("figures.csv", name):
        if row["measure"] != "bench":
            continue
        bench = BENCHES[row["command"].split()[0]]
        _, configurations = sweep.read_options(bench, row["command"].split()[1:])
        assert configurations, row
        columns = bench.tables[row["table"]].columns()
        conditions = [pair.partition("=")[0] for pair in row["where"].split(";") if pair]
        assert {row["field"], *conditions} <= columns.keys()
        if row["low"]:
            assert float(row["low"]) < float(row["high"])


@pytest.fixture
def openwebtext(tmp_path, monkeypatch):
    """Write a val.bin of random tokens, and put a tiny random model in place of each size."""
    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=50257)
    model = GPT(config).eval()
    tokens = torch.randint(50257, (4 * 16 + 1,))
    (tmp_path / "data/openwebtext").mkdir(parents=True)
    tokens.numpy().astype(np.uint16).tofile(tmp_path / "data/openwebtext/val.bin")
    found = []

    def read_source(name: str, *_: object) -> Pretrained:
        found.append(name)
        return Pretrained(name, model.state_dict(), vars(config), {"name": "gpt2"})

    for name in SIZES:
        monkeypatch.setitem(SIZES, name, config)
    monkeypatch.setattr(sources, "read_source", read_source)
    with torch.no_grad():
        loss = model(tokens[:-1].view(4, 16), tokens[1:].view(4, 16))
    return found, f"{loss.item():.6g}"


@pytest.mark.slow
def test_the_sizes_of_gpt2_have_their_losses_on_openwebtext(openwebtext, monkeypatch):
    names, loss = openwebtext
    Path("data").rename("elsewhere")
    assert main(["reproduce", "openwebtext"]) == 2
    assert names == []  # before a download of gigabytes
    Path("elsewhere").rename("data")
    assert main(["reproduce", "openwebtext"]) == 1  # a random model has 10.8
    found = rows("openwebtext").values()
    assert names == ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    assert [row["theirs"] for row in found] == ["3.12", "2.84", "2.67", "2.54"]
    assert {row["ours"] for row in found} == {loss}
    assert {row["verdict"] for row in found} == {"FAIL"}
    (row, *_) = reference_rows("figures.csv", "openwebtext")
    assert (row["low"], row["high"]) == ("3.10", "3.14")
    monkeypatch.setattr(
        figures, "reference_rows", lambda *names: [row | {"low": "10", "high": "12"}]
    )
    assert main(["reproduce", "openwebtext"]) == 0


def test_each_row_of_the_course_is_a_figure_with_the_hardware_that_it_needs(gpu, monkeypatch):
    ends = [row for row in reference_rows("figures.csv", "systems-course") if row["device"]]
    assert len({row["figure"] for row in ends}) == len(ends) == 32
    theirs = sorted(float(row["total_ms"]) for row in reference_rows("end_to_end.csv"))
    # figures.csv has six digits and, in two rows, five
    assert sorted(float(row["published"]) for row in ends) == pytest.approx(theirs, rel=3e-4)
    tables, calls = gpu
    tables["rows"] = [{"forward_backward_mean_ms": 500.0}]
    monkeypatch.setattr(figures.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(figures, "device_kind", lambda: "mps")
    monkeypatch.setattr(figures, "device_name", lambda device: f"Apple M3 on {device}")
    for figure in ends:
        calls.clear()
        ours, verdict, note = figures.bench_of(figure)
        if "RTX" in figure["device"]:
            needs = f"needs an RTX PRO 6000: gpt-lightning bench {figure['command']}"
            assert (ours, verdict, note) == ("", "skipped", needs)
        else:
            assert (ours, verdict) == ("500", "")
            assert note == "this is Apple M3 on mps, theirs an Apple MacBook Air"
            assert "--compile true" in figure["command"]  # their flag was ignored without it
