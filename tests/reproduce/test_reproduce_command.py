"""`gpt-lightning reproduce` as a person types it."""

import json

import pytest

from gpt_lightning.cli import main
from gpt_lightning.reproduce import command
from gpt_lightning.reproduce.cases import CASES, CURVES, REPORTS, Options


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def results(name: str) -> dict:
    return json.loads((command.ROOT / name / "version_0" / "results.json").read_text())


@pytest.mark.slow
def test_a_rung_is_the_published_one(tinyshakespeare, capsys):
    assert main(["reproduce", "lecture-ladder", "--rungs", "gpt2-init,timed", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 losses within their tolerance" in out
    data = results("lecture-ladder")
    assert [row["verdict"] for row in data["rungs"]] == ["ok", "ok"]
    assert all(abs(row["difference"]) < 1e-4 for row in data["losses"])
    assert data["rungs"][1]["speedup"] > 0
    assert data["machine"]["command"].endswith("--rungs gpt2-init,timed --steps 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        ["--model.learning_rate", "9.09e-2"],
        ["--seed_everything=1338"],
        ["--model.config.init", "default"],
    ],
    ids=["learning rate 1% off", "another seed", "another initialization"],
)
def test_a_wrong_setting_is_red(wrong, tinyshakespeare, capsys):
    # 1% of the learning rate shows at step 1: 4e-3
    assert main(["reproduce", "lecture-ladder", "--rungs=gpt2-init", "--steps=2", *wrong]) == 1
    out = capsys.readouterr().out
    assert "FAIL: gpt2-init, " in out
    assert f"changed: {' '.join(wrong)}" in out


@pytest.mark.slow
def test_step_0_is_nanogpts_to_the_digit(tinyshakespeare, capsys):
    assert main(["reproduce", "shakespeare-char-small", "--max-steps", "0"]) == 0
    rows = results("shakespeare-char-small")["losses"]
    assert [round(row["ours"], 4) for row in rows[:2]] in ([4.1649, 4.1676], [4.1676, 4.1649])


@pytest.mark.slow
def test_a_run_that_ends_early_is_no_success(tinyshakespeare, capsys):
    args = ["reproduce", "shakespeare-char-small", "--max-steps", "2"]
    assert main([*args, "--trainer.num_sanity_val_steps=0"]) == 1
    assert "2 published losses have no counterpart" in capsys.readouterr().out


@pytest.mark.slow
def test_a_rung_that_breaks_is_a_row_and_the_others_run(tinyshakespeare, monkeypatch, capsys):
    monkeypatch.setattr("torch.nn.Module.compile", lambda self, **_: 1 / 0)
    args = ["--rungs", "compile,gpt2-init", "--steps", "2", "--accelerator", "cpu"]
    monkeypatch.setattr("gpt_lightning.hardware.device.memory_gib", lambda: 64.0)
    # a small batch: the rung breaks before it trains, gpt2-init does not care
    assert main(["reproduce", "lecture-ladder", *args]) == 2
    rungs = {row["rung"]: row for row in results("lecture-ladder")["rungs"]}
    assert rungs["gpt2-init"]["verdict"] == "ok"
    assert rungs["compile"]["verdict"] == "error"
    assert rungs["compile"]["note"].startswith("ZeroDivisionError")


@pytest.mark.slow
def test_evaluations_and_the_best_of_them(tinyshakespeare, capsys):
    # a small model for speed: other numbers than nanoGPT's, so red, and the machinery is the same
    small = ["--model.config.n_layer=1", "--model.config.n_embd=24", "--data.eval_batches=2"]
    args = ["reproduce", "shakespeare-char", "--variant", "cpu", "--max-steps", "0", *small]
    assert main(args) == 1
    rows = results("shakespeare-char")["losses"]
    assert [(row["step"], row["split"]) for row in rows] == [(0, "train"), (0, "val"), (0, "best")]
    assert [row["theirs"] for row in rows] == [4.2874, 4.2823, 4.2823]
    assert {row["phase"] for row in results("shakespeare-char")["phases"]} >= {"validation"}


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "error: reproduce needs a table: give one of lecture-ladder"),
        (["lecture-lader"], "error: no published table 'lecture-lader': did you mean"),
        (["lecture-ladder", "--rungs", "tmed"], "error: lecture-ladder has no rung 'tmed': did"),
        (
            ["lecture-ladder", "--steps", "0"],
            "error: --steps is 0, which leaves lecture-ladder no loss",
        ),
        (["lecture-ladder", "--stepz", "1"], "error: unknown key 'stepz': did you mean 'steps'"),
        (["lecture-ladder", "--steps", "x"], "error: steps is 'x'; expected"),
    ],
)
def test_mistakes_take_one_line(args, line, capsys):
    assert main(["reproduce", *args]) == 2
    assert capsys.readouterr().err.startswith(line)
    assert not command.ROOT.exists()


def test_what_cannot_run_here_is_refused_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(command, "available_devices", lambda: {"any", "cpu"})
    assert main(["reproduce", "shakespeare-char", "--variant", "gpu"]) == 2
    assert "gpu: needs an NVIDIA GPU, which this machine does not have" in capsys.readouterr().err
    monkeypatch.setattr("gpt_lightning.hardware.device.memory_gib", lambda: 4.0)
    assert main(["reproduce", "precision-ladder", "--rungs", "cpu-fp32"]) == 2
    assert "needs 17 GiB of memory, this machine has 4.0" in capsys.readouterr().err


def test_by_default_everything_runs_that_can_be_timed(monkeypatch):
    monkeypatch.setattr("gpt_lightning.hardware.device.memory_gib", lambda: 64.0)

    def chosen(name: str, devices: set[str], **options) -> list[str]:
        monkeypatch.setattr(command, "available_devices", lambda: devices)
        return [r.name for r in command.choose_rungs(CASES[name], None, Options(**options))]

    cpu, gpu, mac = {"any", "cpu"}, {"any", "cpu", "gpu"}, {"any", "cpu", "mps"}
    assert chosen("lecture-ladder", cpu)[-1] == "matmul-high"
    assert chosen("lecture-ladder", gpu)[-1] == "vocab-50304"
    assert "matmul-high" not in chosen("lecture-ladder", gpu)  # there the switch is TF32
    assert chosen("lecture-ladder", gpu, accelerator="cpu")[-1] == "matmul-high"
    assert chosen("precision-ladder", cpu) == ["cpu-fp32", "cpu-bf16"]
    assert chosen("precision-ladder", gpu, accelerator="gpu")[0] == "gpu-fp32"
    assert chosen("shakespeare-char", mac, accelerator="cpu") == ["cpu"]
    assert len(chosen("precision-ladder", gpu)) == 6
    assert [chosen("shakespeare-char", d) for d in (cpu, gpu, mac)] == [["cpu"], ["gpu"], ["mps"]]


def test_list_names_every_rung_source_and_curve(capsys):
    assert main(["reproduce", "--list"]) == 0
    out = capsys.readouterr().out
    rungs = [f" {rung.name} " for case in CASES.values() for rung in case.rungs]
    curves = [f"--against RUN {name} " for name in CURVES]
    assert all(name in out for name in [*rungs, *curves, *REPORTS, "needs a Mac with MPS"])
