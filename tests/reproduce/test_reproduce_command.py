"""`gpt-lightning reproduce` as a person types it."""

import json

import pytest

from gpt_lightning.cli import main
from gpt_lightning.reproduce import command, runner
from gpt_lightning.reproduce.cases import CASES, CURVES, REPORTS


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "plot_losses", lambda *given: None)  # after each loss


def results(name: str) -> dict:
    return json.loads((command.ROOT / name / "version_0" / "results.json").read_text())


@pytest.mark.slow
def test_a_rung_is_the_published_one_and_one_that_breaks_is_a_row(
    tinyshakespeare, monkeypatch, capsys
):
    monkeypatch.setattr("torch.nn.Module.compile", lambda self, **_: 1 / 0)
    args = ["--rungs", "compile,gpt2-init,timed", "--steps", "2", "--accelerator", "cpu"]
    monkeypatch.setattr("gpt_lightning.hardware.device.memory_gib", lambda: 64.0)
    assert main(["reproduce", "lecture-ladder", *args]) == 2
    out = capsys.readouterr().out
    assert "4 of 4 losses within their tolerance" in out
    data = results("lecture-ladder")
    rungs = {row["rung"]: row for row in data["rungs"]}
    assert [row["verdict"] for row in rungs.values()] == ["ok", "ok", "error"]
    assert rungs["compile"]["note"].startswith("ZeroDivisionError")
    assert all(abs(row["difference"]) < 1e-4 for row in data["losses"])
    assert rungs["timed"]["speedup"] > 0
    assert data["machine"]["command"].endswith(" ".join(args))


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
    assert "FAIL: gpt2-init: " in out
    assert f"changed: --trainer.max_steps=2 {' '.join(wrong)}" in out


@pytest.mark.slow
def test_step_0_is_nanogpts_to_the_digit_and_a_run_that_ends_early_is_no_success(
    tinyshakespeare, capsys
):
    args = ["reproduce", "shakespeare-char-small", "--max-steps"]
    assert main([*args, "0"]) == 0
    rows = results("shakespeare-char-small")["losses"]
    assert [round(row["ours"], 4) for row in rows[:2]] in ([4.1649, 4.1676], [4.1676, 4.1649])
    assert main([*args, "2", "--trainer.num_sanity_val_steps=0"]) == 1
    assert "2 published losses have no counterpart" in capsys.readouterr().out


def test_what_cannot_run_here_is_refused_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(command, "best_device", lambda: "cpu")
    assert main(["reproduce", "shakespeare-char", "--variant", "gpu"]) == 2
    assert "gpu: needs an NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setattr("gpt_lightning.hardware.device.memory_gib", lambda: 4.0)
    assert main(["reproduce", "precision-ladder", "--rungs", "cpu-fp32"]) == 2
    assert "needs 17 GiB of memory, this machine has 4.0" in capsys.readouterr().err


def test_by_default_everything_runs_that_can_be_timed(monkeypatch):
    monkeypatch.setattr("gpt_lightning.hardware.device.memory_gib", lambda: 64.0)

    def chosen(name: str, device: str, accelerator: str | None = None) -> list[str]:
        monkeypatch.setattr(command, "best_device", lambda: device)
        return [r.name for r in command.choose_rungs(CASES[name], None, accelerator)]

    assert chosen("lecture-ladder", "cpu")[-1] == "matmul-high"
    assert chosen("lecture-ladder", "gpu")[-1] == "vocab-50304"
    assert "matmul-high" not in chosen("lecture-ladder", "gpu")  # there the switch is TF32
    assert chosen("lecture-ladder", "gpu", "cpu")[-1] == "matmul-high"
    assert chosen("precision-ladder", "cpu") == ["cpu-fp32", "cpu-bf16"]
    assert chosen("precision-ladder", "gpu", "gpu")[0] == "gpu-fp32"
    assert chosen("shakespeare-char", "mps", "cpu") == ["cpu"]
    assert len(chosen("precision-ladder", "gpu")) == 6
    for device in ("cpu", "gpu", "mps"):
        assert chosen("shakespeare-char", device) == [device]


def test_list_names_every_rung_source_and_curve(capsys):
    assert main(["reproduce", "--list"]) == 0
    out = capsys.readouterr().out
    rungs = [f" {rung.name} " for case in CASES.values() for rung in case.rungs]
    curves = [f"--against RUN {name} " for name in CURVES]
    assert all(name in out for name in [*rungs, *curves, *REPORTS, "needs a Mac with MPS"])
