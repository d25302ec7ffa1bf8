"""`gpt-lightning bench gpu`, tried out on a CPU with a tiny model."""

from pathlib import Path

import pytest
import torch

from gpt_lightning.bench import gpu
from gpt_lightning.bench.core import fit_run, sweep, training_step
from gpt_lightning.bench.core import results as folders
from gpt_lightning.bench.core.worker import call
from gpt_lightning.cli import main
from gpt_lightning.hardware.peaks import Peak
from gpt_lightning.model import flops
from gpt_lightning.model.gpt import GPT, SIZES, GPTConfig
from gpt_lightning.parsing import config_file, config_names

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--data.batch_size=2",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.val_check_interval=2",
    "--model.config.n_layer=1",
    "--model.config.n_head=1",
    "--model.config.n_embd=16",
    "--model.config.block_size=32",
    "--model.config.vocab_size=100",
]
PUBLISHED = {"124m": "gpt2", "350m": "gpt2-medium", "774m": "gpt2-large", "1558m": "gpt2-xl"}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """Nothing is left in the checkout, and no peak is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_step, "measured_peak", lambda *args: Peak(1e12, "of a test", ""))
    monkeypatch.setattr(fit_run, "random_dataset", small_dataset(fit_run.random_dataset))
    before = torch.get_float32_matmul_precision()
    torch._dynamo.reset()  # a row is a process of its own
    yield
    torch.set_float32_matmul_precision(before)


def small_dataset(random_dataset):
    return lambda folder, vocab_size: random_dataset(folder, vocab_size, n_tokens=10_000)


def measure(model, **settings):
    arguments = {"device": "cpu", "size": "124m", "steps": 2, "warmup": 1, "fit_options": TINY}
    return call(gpu.measure_size, arguments | {"model": model} | settings)


def test_a_row_of_ours_is_fit_with_the_sizes_file(monkeypatch):
    told = []
    run = fit_run.training.run_cli
    monkeypatch.setattr(
        fit_run.training, "run_cli", lambda argv, **kwargs: (told.append(argv), run(argv, **kwargs))
    )
    row = measure("ours", fit_options=[*TINY, "--model.compile=false"])  # which takes 20 s
    *_, argv = told  # before it, the parser of the configuration
    assert argv[:3] == ["fit", "--config=gpt2_124m", "--config=gpu/gpt2_124m"]
    assert "--trainer.max_steps=3" in argv
    assert (row["batch"], row["accumulate"], row["context"]) == (2, 2, 32)
    model = GPT(GPTConfig(1, 1, 16, 32, 100))
    assert row["parameters"] == model.num_params()
    assert row["tokens_per_sec"] == pytest.approx(2 * 2 * 32 / row["step_ms"] * 1e3)
    per_token = flops.flops_per_token(model.num_params(embeddings=False), 1, 16, 32)
    assert row["mfu"] == pytest.approx(row["tokens_per_sec"] * per_token / 1e12)
    assert row["target"] == 0.48


@pytest.mark.slow
def test_theirs_makes_the_same_step(monkeypatch):
    pytest.importorskip("transformers")
    steps = []
    update = training_step.TrainingStep.update
    monkeypatch.setattr(
        training_step.TrainingStep, "update", lambda self: (steps.append(1), update(self))
    )
    row = measure("hf", steps=3)
    assert len(steps) == 4  # with the warm-up
    assert (row["batch"], row["accumulate"], row["context"]) == (2, 2, 32)
    assert row["tokens_per_sec"] == pytest.approx(2 * 2 * 32 / row["step_ms"] * 1e3)
    assert row["target"] is None
    assert row["graphs"] == 0


@pytest.mark.slow
def test_theirs_gets_a_micro_batch_that_fits(monkeypatch):
    pytest.importorskip("transformers")
    asked = []

    def time_steps(model, device, step, steps, warmup):
        asked.append(step)
        if step[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 5.0

    monkeypatch.setattr(gpu, "time_steps", time_steps)
    row = measure("hf", fit_options=[*TINY, "--data.batch_size=4"])
    assert asked == [(4, 2, 32), (2, 4, 32), (1, 8, 32)]
    assert (row["batch"], row["accumulate"]) == (1, 8)


def test_the_page_lands_beside_the_others(monkeypatch, tmp_path, capsys):
    """The command, the page and its name, with rows that nobody measured."""
    monkeypatch.setattr(
        sweep,
        "isolated",
        lambda address, row, timeout_s: {
            "status": "ok",
            "note": "",
            "step_ms": 10.0,
            "mfu": 0.5,
            "target": 0.52,
        },
    )
    monkeypatch.setattr(gpu, "device_name", lambda device: "NVIDIA H200")
    arguments = ["--device", "cpu", "--sizes", "350m,774m", "--out", "pages"]
    assert main(["bench", "gpu", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "pages/gpu_h200.md"
    page = Path("pages/gpu_h200.md").read_text()
    assert "gpt-lightning bench gpu --device cpu" in page
    rows = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| 350m")]
    assert [model for _, model in rows] == ["ours", "hf", "hf-compiled"]
    assert "50.0% | 52%" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(capsys):
    assert main(["bench", "gpu"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: bench gpu: no NVIDIA GPU on this machine")
    assert len(err.splitlines()) == 1
    assert not out
    assert not folders.ROOT.exists()


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--device", "cpu", "--sizes", "125m"], "error: --sizes is '125m'"),
        (["--device", "cpu", "--models", "theirs"], "error: --models is 'theirs'"),
        (["--device", "cpu", "--steps", "0"], "error: steps is 0; it must be at least 1"),
    ],
)
def test_mistakes_take_one_line(args, line, capsys):
    assert main(["bench", "gpu", *args]) == 2
    assert capsys.readouterr().err.startswith(line)


def test_the_sizes_files_are_the_published_models_at_the_same_tokens_a_step():
    overlays = {name for name in config_names() if name.startswith("gpu/")}
    assert {f"gpu/gpt2_{size}" for size in gpu.TARGETS} == overlays
    for size in gpu.TARGETS:
        overlay = f"gpu/gpt2_{size}"
        configs = ["--config=gpt2_124m", f"--config={overlay}"]
        parsed = fit_run.parse_fit([*configs, "--data.seed=1"])
        config, published = parsed.model.config, SIZES[PUBLISHED[size]]
        for key in ("n_layer", "n_head", "n_embd", "block_size", "bias", "activation"):
            assert config[key] == getattr(published, key), (size, key)
        assert config.vocab_size == 50304
        assert (config.attention, parsed.model.matmul_precision) == ("sdpa", "high")
        assert (parsed.model.compile, parsed.model.fused) == ("auto", "auto")
        assert parsed.trainer.precision == "bf16-mixed"
        accumulate = parsed.trainer.accumulate_grad_batches
        assert parsed.data.batch_size * 1024 * accumulate == 524_288
        assert parsed.trainer.val_check_interval == 250 * accumulate
        assert parsed.trainer.limit_val_batches * parsed.data.batch_size * 1024 == 5_242_880
        assert f"{parsed.data.batch_size} sequences x 1,024 tokens x {accumulate} accumulated" in (
            config_file(overlay).read_text()
        )


def test_make_has_the_command():
    assert "\t$(BIN)/gpt-lightning bench gpu\n" in (ROOT / "Makefile").read_text()
