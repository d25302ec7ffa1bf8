"""The recipes of docs/metrics.md and docs/python.md, run as they stand on the pages."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_fit import RUN, TINY_RUN, logged_steps, rows

import gpt_lightning
from gpt_lightning.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
TINY = [*TINY_RUN, "--data.batch_size=4", "--trainer.log_every_n_steps=1", "--model.compile=false"]
SCRIPT = """
import os, sys
sys.path[:0] = {path!r}
from gpt_lightning.cli import main
sys.exit(main({argv!r}))
"""


@pytest.fixture(autouse=True)
def recipes(own_folder, monkeypatch):
    """Write the YAML blocks of the page to the files that the page names."""
    for name, text in re.findall(r"with this `([\w.]+)`:\n\n```yaml\n(.*?)```", PAGE, re.DOTALL):
        Path(name).write_text(text)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def fit(steps, config, *args):
    return main(["fit", *TINY, f"--config={config}", f"--trainer.max_steps={steps}", *args])


def check_run(steps):
    """A run has its checkpoint, its metrics, and samples, and TensorBoard's files are not there."""
    assert logged_steps() == list(range(1, steps + 1))
    assert any("val/loss" in row for row in rows())
    assert list((RUN / "checkpoints").glob(f"step-{steps:07d}-loss-*.ckpt"))
    assert not list(RUN.glob("events.out.*"))
    assert not Path("checkpoints").exists()
    assert main(["sample", str(RUN), "--max_new_tokens=5"]) == 0


def test_wandb_offline_with_a_resume(monkeypatch):
    wandb = pytest.importorskip("wandb")
    logged, log = [], wandb.Run.log
    monkeypatch.setattr(
        wandb.Run, "log", lambda run, data, **kw: logged.append(dict(data)) or log(run, data, **kw)
    )
    assert fit(4, "wandb.yaml", "--samples.max_new_tokens=8") == 0
    check_run(4)
    wandb.finish()  # the page explains two runs in one process
    assert fit(8, "wandb.yaml", "--resume=auto") == 0
    check_run(8)
    wandb.finish()
    losses = [(r["trainer/global_step"], r["train/loss"]) for r in logged if "train/loss" in r]
    assert losses == [(row["step"], row["train/loss"]) for row in rows() if "train/loss" in row]
    folders = sorted(Path("lightning_logs/wandb").glob("offline-run-*"), key=os.path.getmtime)
    assert len(folders) == 2  # a resume is a run of its own
    for folder in folders:
        stored = next(folder.glob("*.wandb")).read_bytes()
        assert b"train/loss" in stored
        assert b"model/n_layer" in stored
    assert list(folders[0].glob("files/media/table/samples/*.table.json"))  # the text


def test_wandb_without_an_account_is_one_line(monkeypatch):
    pytest.importorskip("wandb")
    argv = ["fit", *TINY, "--config=wandb.yaml", "--trainer.logger.init_args.offline=false"]
    code = SCRIPT.format(path=[str(ROOT), str(ROOT / "tests")], argv=argv)
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody answers
    monkeypatch.setenv("HOME", str(Path.cwd()))  # without a file of keys
    done = subprocess.run(  # a process keeps the settings of its first run
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("error: trainer.logger: No API key configured.")
    assert error.endswith("set WANDB_MODE=offline")
    assert not RUN.exists()


def test_mlflow_in_a_file():
    mlflow = pytest.importorskip("mlflow")
    assert fit(4, "mlflow.yaml") == 0
    assert fit(8, "mlflow.yaml", "--resume=auto") == 0
    check_run(8)
    uri = yaml.safe_load(Path("mlflow.yaml").read_text())["trainer"]["logger"]["init_args"]
    client = mlflow.MlflowClient(uri["tracking_uri"])
    (experiment,) = client.search_experiments(filter_string="name = 'gpt-lightning'")
    runs = client.search_runs([experiment.experiment_id], order_by=["start_time"])
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    losses = [
        (point.step, point.value)
        for run in runs
        for point in client.get_metric_history(run.info.run_id, "train/loss")
    ]
    assert losses == [(row["step"], row["train/loss"]) for row in rows() if "train/loss" in row]
    assert runs[0].data.params["model/n_layer"] == "1"


def test_tensorboard_and_csv_at_once():
    assert fit(4, "both.yaml") == 0
    check_run(4)
    assert list(Path("lightning_logs/tensorboard").rglob("events.out.*"))
    (path,) = Path("lightning_logs/csv").rglob("metrics.csv")
    assert "train/loss" in path.read_text().splitlines()[0]


def test_a_sweep_prunes_and_continues(monkeypatch, capsys):
    optuna = pytest.importorskip("optuna")
    tiny: dict = {}
    for arg in ("--trainer.max_steps=12", *TINY):
        key, _, value = arg.removeprefix("--").partition("=")
        *sections, name = key.split(".")
        functools.reduce(lambda at, word: at.setdefault(word, {}), sections, tiny)[name] = value
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import sweep

    worse = iter([*[3.0] * 12, *[9.0] * 100])  # four trials of three validations, then worse ones
    real = optuna.Trial.report
    monkeypatch.setattr(
        optuna.Trial, "report", lambda self, value, step: real(self, next(worse), step)
    )
    for trials in (5, 1):
        monkeypatch.setattr(
            sys, "argv", ["sweep.py", "text.txt", f"--trials={trials}", "--config", "tiny.yaml"]
        )
        sweep.main()
    study = optuna.load_study(study_name="sweep", storage="sqlite:///sweep.db")
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE"] * 4 + ["PRUNED"] * 2
    folders = [Path(trial.user_attrs["run"]) for trial in study.trials]
    assert folders == [Path(f"lightning_logs/sweep/version_{n}") for n in range(6)]
    last = [max((folder / "checkpoints").glob("*.ckpt")).name[:12] for folder in folders]
    assert last == ["step-0000012"] * 4 + ["step-0000004"] * 2  # a pruned run is saved
    best = study.best_trial
    assert best.value == pytest.approx(min(t.value for t in study.trials if t.value))
    assert f"best: {best.value:.4f}" in capsys.readouterr().out
    config = f"{best.user_attrs['run']}/config.yaml"
    again = gpt_lightning.fit(config, run_name="again")
    assert again.best_loss == best.value
