"""`gpt-lightning bench gpu`, tried out on a CPU with a tiny model."""

import re
from pathlib import Path

import pytest
import torch

from gpt_lightning.bench import fits, gpu, step
from gpt_lightning.bench.models import GPU_SIZES
from gpt_lightning.cli import main
from gpt_lightning.hardware.peaks import Peak
from gpt_lightning.model.gpt import GPT, SIZES, GPTConfig
from gpt_lightning.parsing import config_file, config_names
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import SkippedError, call

TINY = [
    "--data.batch_size=2",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.val_check_interval=2",
    "--model.config.attention=auto",  # cuDNN is not there
    "--model.config.n_layer=1",
    "--model.config.n_head=1",
    "--model.config.n_embd=16",
    "--model.config.block_size=32",
    "--model.config.vocab_size=100",
]
TOKENS = gpu.TOKENS
PUBLISHED = {"124m": "gpt2", "350m": "gpt2-medium", "774m": "gpt2-large", "1558m": "gpt2-xl"}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """Nothing is left in the checkout, and no peak is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step, "measured_peak", lambda *args: Peak(1e12, "of a test", ""))
    monkeypatch.setattr(gpu, "TOKENS", 10_000)
    before = torch.get_float32_matmul_precision()
    torch._dynamo.reset()  # a row is a process of its own
    yield
    torch.set_float32_matmul_precision(before)


def measure(model, **settings):
    arguments = {"device": "cpu", "size": "124m", "steps": 2, "warmup": 1, "fit_options": TINY}
    return call(gpu.measure_size, arguments | {"model": model} | settings)


def test_a_row_of_ours_is_fit_with_the_sizes_file(monkeypatch):
    told = []
    run = fits.training.run_cli
    monkeypatch.setattr(
        fits.training, "run_cli", lambda argv, **kwargs: (told.append(argv), run(argv, **kwargs))
    )
    row = measure("ours", fit_options=[*TINY, "--model.compile=false"])  # which takes 20 s
    *_, argv = told  # before it, the parser of the configuration
    assert argv[:3] == ["fit", "--config=gpt2_124m", "--config=gpu/gpt2_124m"]
    assert "--trainer.max_steps=3" in argv
    assert (row["batch"], row["accumulate"], row["context"]) == (2, 2, 32)
    model = GPT(GPTConfig(1, 1, 16, 32, 100))
    assert row["parameters"] == model.num_params()
    assert row["tokens_per_sec"] == pytest.approx(2 * 2 * 32 / row["step_ms"] * 1e3)
    assert row["mfu"] > 0
    assert row["target"] is None  # a CPU has no target
    assert row["matmul_precision"] == "high"  # TF32 on CUDA, from the configuration
    assert row["options"] == " ".join([*TINY, "--model.compile=false"])


@pytest.mark.slow
def test_products_of_theirs_are_of_the_configurations_precision(monkeypatch):
    seen = []

    def train_theirs(row, config, dtype, step):
        seen.append(dtype)
        return {"step_ms": 5.0}

    monkeypatch.setattr(gpu, "train_theirs", train_theirs)
    for precision in ("bf16-mixed", "32-true"):
        torch.set_float32_matmul_precision("highest")
        row = measure("hf", fit_options=[*TINY, f"--trainer.precision={precision}"])
        assert row["matmul_precision"] == "high"  # as ours
    assert seen == ["bf16", "fp32"]
    with pytest.raises(SkippedError, match="bf16-true is a mode of `fit` alone"):
        measure("hf", fit_options=[*TINY, "--trainer.precision=bf16-true"])


@pytest.mark.slow
def test_theirs_gets_a_micro_batch_that_fits(monkeypatch):
    pytest.importorskip("transformers")
    asked = []

    train = step.Training.__call__

    def needs_memory(self, phase):
        B, T = self.batch[0].shape
        if not asked or asked[-1] != (B, self.micro_batches, T):
            asked.append((B, self.micro_batches, T))
        if B > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(self, phase)

    monkeypatch.setattr(step.Training, "__call__", needs_memory)
    row = measure("hf", fit_options=[*TINY, "--data.batch_size=4"])
    assert asked == [(4, 2, 32), (2, 4, 32), (1, 8, 32)]
    assert (row["batch"], row["accumulate"]) == (1, 8)


@pytest.fixture
def rows_of_nobody(monkeypatch):
    """Rows that nobody measured, on a GPU that nobody has; keeps their sizes and models."""
    asked = []

    def isolated(address, row, timeout_s):
        asked.append(f"{row['size']} {row['model']}")
        numbers = {"step_ms": 10.0, "mfu": 0.5, "target": 0.52, "matmul_precision": "high"}
        return {"status": "ok", "note": "", **numbers}

    monkeypatch.setattr(sweep, "isolated", isolated)
    monkeypatch.setattr(gpu, "device_name", lambda device: "NVIDIA H200")
    return asked


def bench(*args):
    return main(["bench", "gpu", "--device", "cpu", "--out", "pages", *args])


def on_the_page():
    page = Path("pages/gpu_h200.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| \d+m", line)]
    return page, [f"{size.removeprefix('| ')} {model}" for size, model, *_ in rows]


def test_the_page_lands_beside_the_others(rows_of_nobody, capsys):
    assert bench("--sizes", "350m,774m") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "pages/gpu_h200.md"
    page, rows = on_the_page()
    assert "gpt-lightning bench gpu --device cpu" in page
    assert rows == [f"{size} {model}" for size in ("350m", "774m") for model in gpu.MODELS]
    assert "50.0% | 52%" in page


def test_a_killed_sweep_leaves_its_page_and_a_later_call_adds_to_it(rows_of_nobody, monkeypatch):
    measured = sweep.isolated

    def killed(address, row, timeout_s):
        if row["model"] == "hf":
            raise KeyboardInterrupt
        return measured(address, row, timeout_s)

    monkeypatch.setattr(sweep, "isolated", killed)
    assert bench("--sizes", "124m") == 130
    assert on_the_page()[1] == ["124m ours"]
    monkeypatch.setattr(sweep, "isolated", measured)
    assert bench("--sizes", "1558m", "--models", "ours") == 0
    assert bench("--sizes", "124m", "--resume") == 0
    assert rows_of_nobody == ["124m ours", "1558m ours", "124m hf", "124m hf-compiled"]
    in_order = ["124m ours", "124m hf", "124m hf-compiled", "1558m ours"]
    assert on_the_page()[1] == in_order
    # a row that fails replaces no number
    failed = {"status": "crashed", "note": "planted"}
    monkeypatch.setattr(sweep, "isolated", lambda *args: failed)
    assert bench("--sizes", "1558m") == 1
    page, rows = on_the_page()
    assert rows == [*in_order, "1558m hf", "1558m hf-compiled"]
    assert page.count("planted") == 2
    monkeypatch.setattr(
        sweep, "isolated", lambda *args: {"status": "ok", "note": "", "step_ms": 77.0}
    )
    assert bench("--sizes", "1558m", "--models", "ours") == 0
    page, rows = on_the_page()
    assert len(rows) == 6
    assert "77.0" in next(line for line in page.splitlines() if line.startswith("| 1558m | ours"))


def test_the_sizes_files_are_the_published_models_at_the_same_tokens_a_step():
    options = {option.name: option.default for option in gpu.BENCH.options}
    assert 524_288 * (options["steps"] + options["warmup"]) < TOKENS  # one epoch
    overlays = {name for name in config_names() if name.startswith("gpu/gpt2")}
    assert {f"gpu/gpt2_{size}" for size in GPU_SIZES} == overlays
    for size in GPU_SIZES:
        overlay = f"gpu/gpt2_{size}"
        configs = ["--config=gpt2_124m", f"--config={overlay}"]
        parsed = fits.parse_fit([*configs, "--data.seed=1"])
        config, published = parsed.model.config, SIZES[PUBLISHED[size]]
        for key in ("n_layer", "n_head", "n_embd", "block_size", "bias", "activation"):
            assert config[key] == getattr(published, key), (size, key)
        assert config.vocab_size == 50304
        assert (config.attention, parsed.model.matmul_precision) == ("cudnn", "high")
        assert (parsed.model.compile, parsed.model.fused) == ("auto", "auto")
        assert parsed.trainer.precision == "bf16-mixed"
        accumulate = parsed.trainer.accumulate_grad_batches
        assert parsed.data.batch_size * 1024 * accumulate == 524_288
        assert parsed.trainer.val_check_interval == 250 * accumulate
        assert parsed.trainer.limit_val_batches * parsed.data.batch_size * 1024 == 5_242_880
        assert f"{parsed.data.batch_size} sequences x 1,024 tokens x {accumulate} accumulated" in (
            config_file(overlay).read_text()
        )
