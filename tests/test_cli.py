"""The command as a person uses it: what it prints, leaves behind and exits with."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt_lightning import __version__, cli
from gpt_lightning.cli import ALLOCATOR, COMMANDS, main
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import read_config

TINY = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 20
  val_check_interval: 10
  check_val_every_n_epoch: null
  gradient_clip_val: 1.0
model:
  config: {n_layer: 2, n_head: 2, n_embd: 32, block_size: 16, vocab_size: null}
  learning_rate: 1.0e-2
data:
  text_file: text.txt
  tokenizer: char
  val_fraction: 0.1
  batch_size: 8
samples:
  max_new_tokens: 30
speed:
  peak_flops: 1.0e+9
"""


@pytest.fixture
def workdir(text_file, monkeypatch) -> Path:
    """A folder with a text and `tiny.yaml`, which is where the command runs."""
    folder = text_file.parent
    monkeypatch.chdir(folder)
    (folder / "tiny.yaml").write_text(TINY)
    return folder


@pytest.mark.parametrize("given", [None, *ALLOCATOR])
def test_the_allocator_of_cuda_has_growing_segments_unless_the_user_set_it(given, monkeypatch):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(given, "max_split_size_mb:512")
    assert main(["--version"]) == 0
    found = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    expected = (
        {given: "max_split_size_mb:512"} if given else {ALLOCATOR[0]: "expandable_segments:True"}
    )
    assert found == expected


@pytest.mark.slow
def test_torch_reads_the_allocators_setting(workdir):
    code = (
        "from gpt_lightning.cli import main; main(['--version']); "
        "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "expandable_segments:True" in done.stdout


def fails(capsys, *args: str) -> str:
    """Runs a command that must be refused: exit code 2 and one line, which is returned."""
    assert main(args) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


# ---- a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, words) -> Path:
    """A run of tiny.yaml and what it printed, made once: the folder that a test copies."""
    folder, printed = tmp_path_factory.mktemp("trained"), io.StringIO()
    (folder / "text.txt").write_text(words)
    (folder / "tiny.yaml").write_text(TINY)
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        assert main(["fit", "--config", "tiny.yaml"]) == 0
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


@pytest.fixture
def run_folder(trained, workdir) -> Path:
    shutil.copytree(trained, workdir, dirs_exist_ok=True)
    return workdir / "lightning_logs" / "tiny" / "version_0"


def test_fit_leaves_a_run_that_can_be_repeated_looked_at_and_sampled(run_folder, workdir, capsys):
    printed = (workdir / "printed.txt").read_text()
    for word in ("device", "32-true", "compile     off", "parameters", "128 tokens = 8 sequences"):
        assert word in printed
    assert "step 20/20 | validation loss" in printed
    assert "tensorboard --logdir" in printed

    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    logged = {key for row in rows for key in row}
    curves = {"train/loss", "val/loss", "val/perplexity", "optim/lr", "optim/grad_norm"}
    assert curves | {"perf/tokens_per_sec", "perf/step_ms", "perf/mfu", "perf/tokens"} <= logged
    assert all(0.05 < row["perf/memory_gib"] < 64 for row in rows if "train/loss" in row)
    assert "\nin browser  http://localhost:6006/?smoothing=0#custom_scalars" in printed
    val = [row["val/loss"] for row in rows if "val/loss" in row]
    assert len(val) == 2
    assert val[1] < val[0] < 3.0
    assert [row["step"] for row in rows] == [10, 10, 20, 20]

    events = EventAccumulator(str(run_folder)).Reload()
    assert curves <= set(events.Tags()["scalars"])
    assert not any("hp_metric" in tag for tag in events.Tags()["scalars"])
    assert {"samples/text/text_summary", "run/config/text_summary"} <= set(events.Tags()["tensors"])
    assert "_hparams_/session_start_info" in events.summary_metadata

    # run again from what was saved: the same losses, to the last bit
    assert main(["fit", "--config", str(run_folder / "config.yaml"), "--run_name", "again"]) == 0
    again = workdir / "lightning_logs" / "again" / "version_0" / "metrics.jsonl"
    repeated = [json.loads(line) for line in again.read_text().splitlines()]
    assert [row["val/loss"] for row in repeated if "val/loss" in row] == val


def test_a_checkpoint_can_be_sampled_validated_and_predicted(run_folder, workdir, capsys):
    (checkpoint,) = (run_folder / "checkpoints").glob("step-0000020-loss-*.ckpt")
    (run_folder.parent / "version_7").mkdir()  # without a checkpoint
    texts = []
    for path in (run_folder, run_folder.parent, checkpoint):
        assert main(["sample", str(path), "--max_new_tokens", "40", "--seed", "7"]) == 0
        texts.append(capsys.readouterr().out.split("\n", 1)[1])
    assert texts[0] == texts[1] == texts[2]  # the last step was the best
    assert len(texts[0]) >= 40

    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    best = min(row["val/loss"] for row in rows if "val/loss" in row)
    assert main(["validate", "--config", "tiny.yaml", "--ckpt_path", str(checkpoint)]) == 0
    said = capsys.readouterr().out
    assert f"validation loss {best:.4f}" in said
    assert "changed     precision" not in said
    assert main(["predict", "--config", "tiny.yaml", "--ckpt_path", str(checkpoint)]) == 0
    losses = np.load(workdir / "lightning_logs" / "tiny" / "predict_0" / "token_losses.npy")
    manifest = load_manifest(workdir / "data" / "text-char")
    assert len(losses) == manifest.tokens("val") - 1
    assert losses.mean() == pytest.approx(best, rel=1e-5)

    capsys.readouterr()
    rounded = ["--trainer.precision", "bf16-mixed", "--model.compile", "false"]
    assert (
        main(["validate", "--config", "tiny.yaml", "--ckpt_path", str(checkpoint), *rounded]) == 0
    )
    assert "changed     precision 32-true -> bf16-mixed" in capsys.readouterr().out


def test_auto_precision_is_resolved_before_the_run_and_in_its_config(workdir, capsys, monkeypatch):
    fastest = "gpt_lightning.hardware.precision.fastest_precision"
    monkeypatch.setattr(fastest, lambda accelerator: ("bf16-mixed", "it is fast"))
    short = ["--trainer.max_steps", "10", "--model.compile", "false"]
    auto = ["--trainer.precision", "auto"]
    assert main(["fit", "--config", "tiny.yaml", *short, *auto]) == 0
    printed = capsys.readouterr().out
    assert "precision   auto: bf16-mixed, it is fast\n" in printed
    assert "precision   bf16-mixed, float32 products" in printed
    run = workdir / "lightning_logs" / "tiny" / "version_0"
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["precision"] == "bf16-mixed"
    for command in ("validate", "predict"):
        assert main([command, "--config", "tiny.yaml", "--ckpt_path", str(run), *auto]) == 0
        printed = capsys.readouterr().out
        assert "precision   auto: bf16-mixed, it is fast\n" in printed
        assert "changed     precision" not in printed


def test_resuming_from_a_checkpoint_goes_on(run_folder, workdir, capsys):
    last = str(next((run_folder / "checkpoints").glob("step-0000020-*.ckpt")))
    extra = ["--trainer.max_steps", "30", "--model.decay_steps", "30", "--run_name", "more"]
    assert main(["fit", "--config", "tiny.yaml", "--ckpt_path", last, *extra]) == 0
    rows = (workdir / "lightning_logs" / "more" / "version_0" / "metrics.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in rows.splitlines()]
    assert steps == [30, 30]
    assert json.loads(rows.splitlines()[0])["perf/tokens"] == 30 * 128  # 20 of them before
    assert main(["fit", "--config", "tiny.yaml", "--ckpt_path", last]) == 0
    printed = capsys.readouterr().out
    assert "nothing to do: the run is at step 20, trainer.max_steps is 20" in printed


def test_a_checkpoint_that_does_not_fit_is_refused(run_folder, workdir, capsys):
    resume = ["fit", "--config", "tiny.yaml", "--ckpt_path", str(run_folder)]
    line = fails(capsys, *resume, "--model.config.n_layer", "3", "--model.optimizer", "muon")
    assert "model.config.n_layer is 3, the checkpoint's 2" in line
    assert "model.optimizer is muon, the checkpoint's adamw" in line
    (workdir / "other.txt").write_text((workdir / "text.txt").read_text().replace("a", "A"))
    line = fails(capsys, *resume, "--data.text_file", "other.txt", "--trainer.max_steps", "30")
    assert "the checkpoint was trained on other tokens than those of data/other-char" in line


def test_a_diverging_run_ends_before_the_update(workdir, capsys):
    line = fails(capsys, "fit", "--config", "tiny.yaml", "--model.learning_rate", "1e30")
    assert "gradient norm is nan at step 2: weights were not changed: lower" in line


def test_what_lightning_can_switch_off_can_be_switched_off(workdir, capsys):
    names = ("enable_progress_bar", "enable_checkpointing", "logger")
    args = [f"--trainer.{name}=false" for name in names]
    assert main(["fit", "--config", "tiny.yaml", *args]) == 0
    assert main(["fit", "--config", "tiny.yaml", "--trainer.fast_dev_run", "true"]) == 0
    assert not list(workdir.rglob("*.ckpt"))


def test_a_split_of_no_validation_trains_and_keeps_the_last_model(workdir, capsys):
    args = ["--data.val_fraction", "0", "--trainer.max_steps", "5"]
    assert main(["fit", "--config", "tiny.yaml", *args]) == 0
    checkpoints = workdir / "lightning_logs" / "tiny" / "version_0" / "checkpoints"
    assert [path.name for path in checkpoints.glob("*.ckpt")] == ["step-0000005.ckpt"]


def test_test_needs_a_test_split(run_folder, workdir, capsys):
    last = ["--ckpt_path", str(run_folder)]
    line = fails(capsys, "test", "--config", "tiny.yaml", *last)
    assert "no test split, only train, val: make a dataset with one" in line
    args = ["prepare", "text.txt", "--tokenizer=char", "--test_fraction=0.1", "--out=data/three"]
    assert main(args) == 0
    (workdir / "tiny.yaml").write_text(
        TINY.replace("text_file: text.txt", "dataset: three").replace("tokenizer: char", "")
    )
    assert main(["test", "--config", "tiny.yaml", *last]) == 0
    assert re.search(r"^test loss \d\.\d{4}, perplexity", capsys.readouterr().out, re.M)


# ---- mistakes -----------------------------------------------------------------------------------


def test_a_defect_is_one_line_and_a_traceback_on_request(workdir, capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("out of\nluck")

    text = "RuntimeError: out of luck (GPT_LIGHTNING_DEBUG=1 shows the traceback)\n"
    monkeypatch.setattr("gpt_lightning.commands.sample.read_prompts", broken)
    assert main(["sample", "x"]) == 2  # in a file that is not of the package
    found = re.fullmatch(r"error: (.+):(\d+), in broken: (.+\n)", capsys.readouterr().err)
    assert (Path(found[1]).name, found[3]) == ("test_cli.py", text)
    monkeypatch.setattr(cli, "__file__", __file__)
    assert main(["sample", "x"]) == 1
    assert capsys.readouterr().err == f"error: {text}"
    monkeypatch.setenv("GPT_LIGHTNING_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main(["sample", "x"])


def test_letters_that_the_locale_does_not_have_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    assert main(["prepare", "\udcc3\udcbc.txt"]) == 2
    assert capsys.readouterr().err == (
        "error: the locale is ASCII, and an argument is not: set PYTHONUTF8=1\n"
    )
    assert main(["configs"]) == 0


def test_a_configuration_of_many_brackets_is_one_line(tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text("run_name: " + "[" * 3000 + "]" * 3000)
    with pytest.raises(UserError, match=r"deep\.yaml cannot be read \(maximum recursion"):
        read_config(path)


# ---- help ----------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)
    assert main([]) == 2  # a script without its word has done nothing
    assert capsys.readouterr() == ("", printed)


def test_help_takes_a_command(capsys):
    for word in ("help", "--help", "-h"):
        assert main([word, "configs"]) == 0
        assert "usage: gpt-lightning configs" in capsys.readouterr().out


def test_help_of_plain_functions_imports_nothing_heavy():
    commands = ("prepare", "sample", "data")
    code = (
        "import sys; from gpt_lightning.cli import main; "
        "[main([name, '--help']) for name in sys.argv[1:]];"
        "assert not {'torch', 'lightning', 'tiktoken'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: gpt-lightning {name}" in done.stdout for name in commands)


@pytest.mark.parametrize(
    ("argv", "first"),
    [
        (["fit", "--config", "x"], f"gpt-lightning {__version__}: loading PyTorch and Lightning\n"),
        (["fit", "--print_config"], ""),
        (["fit", "--help=model"], ""),
        (["data", "verify", "x"], ""),
    ],
)
def test_training_prints_a_line_before_it_imports_what_takes_seconds(
    argv, first, capsys, monkeypatch
):
    printed = []

    def load(name):
        printed.append(capsys.readouterr().out)
        raise UserError("end of the test")

    monkeypatch.setattr(cli.importlib, "import_module", load)
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    assert main(argv) == 2
    assert printed == [first]


def test_print_config_is_a_configuration(workdir, capsys):
    assert main(["fit", "--config", "tiny.yaml", "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["config"]["n_embd"] == 32
    assert config["speed"]["warmup_steps"] == 5


@pytest.mark.parametrize(
    "typed",
    [
        "fit --trainer.max_steps 7 --config tiny.yaml",
        "fit --config tiny.yaml --trainer.max_steps=7 -c later.yaml",
        "validate --trainer.max_steps 7 --verbose false -c later.yaml",
        "fit --trainer.callbacks LearningRateMonitor --trainer.callbacks.log_momentum true"
        " --trainer.max_steps 7 -c tiny.yaml -c later.yaml",
    ],
)
def test_an_option_overrides_configurations_wherever_it_is_typed(typed, workdir, capsys):
    Path("later.yaml").write_text("trainer: {max_steps: 5, callbacks: [RichProgressBar]}\n")
    assert main([*typed.split(), "--print_config"]) == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert trainer["max_steps"] == 7
    if "Monitor" in typed:
        (monitor,) = trainer["callbacks"]
        assert monitor["init_args"]["log_momentum"] is True


def test_a_configuration_overrides_those_that_it_names(workdir, capsys):
    Path("sub").mkdir()
    Path("sub/base.yaml").write_text("config: quickstart\ntrainer: {max_steps: 3, devices: 1}\n")
    Path("sub/wide.yaml").write_text("trainer: {max_steps: 4}\nmodel: {config: {n_embd: 64}}\n")
    mine = "model: {muon_momentum: 0.5}\ntrainer: {num_nodes: 2}\n"
    Path("sub/mine.yaml").write_text(f"{mine}config: [base.yaml, wide.yaml]\n")
    Path("base.yaml").write_text("config: sub/base.yaml\n")  # a path is relative to its file
    for file, steps, width in (("sub/mine.yaml", 4, 64), ("base.yaml", 3, 128)):
        assert main(["fit", "--config", file, "--print_config"]) == 0
        config = yaml.safe_load(capsys.readouterr().out)
        assert config["data"]["corpus"] == "shakespeare-plays-all"  # quickstart's
        assert (config["trainer"]["max_steps"], config["trainer"]["devices"]) == (steps, 1)
        assert config["model"]["config"]["n_embd"] == width
    assert main(["fit", "--config=sub/mine.yaml", "--config=base.yaml", "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["trainer"]["max_steps"], config["trainer"]["num_nodes"]) == (3, 2)
    assert config["model"]["muon_momentum"] == 0.5


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("config: mine.yaml", "mine.yaml: config mine.yaml leads back to mine.yaml"),
        ("config: [tiny.yaml, other.yaml]", "other.yaml: config mine.yaml leads back to mine.yaml"),
        (
            "config: quikstart",
            "mine.yaml: config quikstart: no such file or configuration: did you",
        ),
        ("config: [none.yaml]", "mine.yaml: config none.yaml: no such file or configuration"),
        ("config: [[tiny.yaml]]", "mine.yaml: config has ['tiny.yaml']; give names or paths"),
        ("config: {tiny.yaml: 1}", "mine.yaml: config is not a name"),
        ("config: 3", "mine.yaml: config is not a name"),
        ("config: null", "mine.yaml: config is not a name"),
        ("config+: tiny.yaml", "mine.yaml: config is not a name"),
        ("config.file: tiny.yaml", "mine.yaml: config is not a name"),
        ("base: {}", "mine.yaml: unknown key 'base'"),
        ("base: {model: {}}", "mine.yaml: unknown key 'base'"),
        ("data: {base: {}}", "mine.yaml: unknown key 'data.base'"),
        ("model: {config: {n_layr: {}}}", "mine.yaml: unknown key 'model.config.n_layr': did you"),
        ("config: wrong.yaml", "unknown key 'trainer.max_step': did you mean 'trainer.max_steps'"),
    ],
)
def test_a_configuration_that_names_no_other_is_one_line(config, line, workdir, capsys):
    Path("mine.yaml").write_text(config)
    Path("other.yaml").write_text("config: mine.yaml")
    Path("wrong.yaml").write_text("trainer: {max_step: 1}")
    assert line in fails(capsys, "fit", "--config", "mine.yaml")


def test_a_run_has_the_name_of_the_configuration_that_was_typed(workdir, capsys):
    Path("mine.yaml").write_text("config: tiny.yaml\ntrainer: {max_steps: 1}\n")
    assert main(["fit", "--config", "mine.yaml"]) == 0
    config = read_config(Path("lightning_logs/mine/version_0/config.yaml"))
    assert config["trainer"]["val_check_interval"] == 10
    assert "config" not in config


def test_the_reason_of_an_exit_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(cli, "dispatch", lambda argv: sys.exit("no token for the dashboard"))
    assert main(["configs"]) == 1
    assert capsys.readouterr().err == "error: no token for the dashboard\n"


def test_a_rank_of_a_large_machine_waits_no_longer_than_a_few_seconds(monkeypatch):
    waits = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    for rank in ("1", "15", "63"):  # all ranks end within 10 s
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert cli.print_error(UserError("wrong")) == 2
    assert waits[0] < waits[1] == waits[2] <= 4
