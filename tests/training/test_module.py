import dataclasses
import itertools
import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from tiny_fit import quiet_trainer

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training import schedule
from gpt_lightning.training.behaviours import process, step_seeds
from gpt_lightning.training.behaviours.step_seeds import StepSeeds
from gpt_lightning.training.continuation import hyperparameters
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.schedule import share_of_peak
from gpt_lightning.training.trainer import Trainer

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=None)


class Metrics(L.Callback):
    """Keeps what was logged at each optimizer step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step > len(self.rows):
            self.rows.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def fit(text_file, module=None, batch_size=4, trainer=None, ckpt_path=None, **data):
    L.seed_everything(1337)
    module = module or GPTModule(TINY)
    data = {"block_size": 16, "order": "sequential", "tokenizer": "char", **data}
    metrics = Metrics()
    settings = {"max_steps": 4, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    settings |= {"use_distributed_sampler": False, "callbacks": [metrics]} | (trainer or {})
    loop = quiet_trainer(**settings)
    datamodule = TokenDataModule(
        text_file=str(text_file), data_dir=str(text_file.parent), batch_size=batch_size, **data
    )
    loop.fit(module, datamodule, ckpt_path=ckpt_path, weights_only=True)
    return module, loop, metrics.rows


def eager():
    """Not compiled in bfloat16 either, which would take seconds."""
    return GPTModule(TINY, compile=False)


def same(a: GPTModule, b: GPTModule) -> bool:
    return all(
        torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True)
    )


def test_learning_rate_follows_the_formula_and_is_the_optimizers(text_file):
    module = GPTModule(
        TINY, learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=2, decay_steps=6
    )
    _, trainer, rows = fit(text_file, module, trainer={"max_steps": 8})
    expected = [1e-2 * share_of_peak(step, module.settings, 6) for step in range(9)]
    assert [row["optim/lr"] for row in rows] == pytest.approx(
        expected[:8], rel=1e-6
    )  # logged as f32
    # the coming step's
    assert {group["lr"] for group in trainer.optimizers[0].param_groups} == {expected[8]}


def test_muon_follows_the_same_schedule_scaled(text_file):
    module = GPTModule(
        TINY, optimizer="muon", learning_rate=1e-2, muon_learning_rate=4e-2, decay_steps=8
    )
    _, trainer, rows = fit(text_file, module)
    muon, *adamw = (group["lr"] for group in trainer.optimizers[0].param_groups)
    coming = 1e-2 * share_of_peak(len(rows), module.settings, 8)
    assert all(lr == pytest.approx(coming, rel=1e-12) for lr in adamw)
    assert muon == pytest.approx(4 * adamw[0], rel=1e-12)
    assert [row["optim/lr_muon"] for row in rows] == pytest.approx(
        [4 * row["optim/lr"] for row in rows], rel=1e-6
    )
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_clipping_works_in_every_precision_with_fused_adamw(text_file, precision):
    free, _, free_rows = fit(text_file, eager(), trainer={"precision": precision})
    module, trainer, rows = fit(
        text_file, eager(), trainer={"precision": precision, "gradient_clip_val": 1e-3}
    )
    assert trainer.optimizers[0].param_groups[0]["fused"]
    assert rows[0]["optim/grad_norm"] == free_rows[0]["optim/grad_norm"]  # before clipping
    after = torch.nn.utils.get_total_norm(
        [p.grad for p in module.parameters() if p.grad is not None]
    )
    assert float(after) == pytest.approx(1e-3, rel=0.02)  # bfloat16 gradients have two digits
    assert not same(free, module)


@pytest.mark.parametrize(
    ("eval_batch_size", "precision", "rel"),
    [
        (1, "32-true", 1e-5),
        (5, "32-true", 1e-5),
        (64, "32-true", 1e-5),
        # the logits of a bfloat16 model have two digits, the mean over them must have more
        (1, "bf16-true", 1e-3),
        (8, "bf16-true", 1e-3),
    ],
)
def test_validation_is_the_mean_over_every_token_of_the_split(
    text_file, eval_batch_size, precision, rel
):
    module, trainer, _ = fit(
        text_file, eager(), eval_batch_size=eval_batch_size, trainer={"precision": precision}
    )
    stream = trainer.datamodule.reader.stream("val")
    module.eval()
    losses = []
    for start in range(0, len(stream) - 1, 16):
        window = torch.from_numpy(
            stream.windows(torch.tensor([start]).numpy(), min(17, len(stream) - start))
        )
        with torch.no_grad():
            logits = module(window[:, :-1])
        losses += torch.nn.functional.cross_entropy(
            logits[0].float(), window[0, 1:], reduction="none"
        ).tolist()
    assert len(losses) == len(stream) - 1
    (result,) = trainer.validate(module, trainer.datamodule, verbose=False)
    mean = math.fsum(losses) / len(losses)
    assert result["val/loss"] == pytest.approx(mean, rel=rel)
    assert result["val/perplexity"] == pytest.approx(math.exp(mean), rel=5 * rel)


def test_validation_does_not_change_training(text_file):
    def dropping():
        return GPTModule(dataclasses.replace(TINY, dropout=0.2), compile=False)

    once, _, _ = fit(text_file, dropping(), trainer={"max_steps": 12, "val_check_interval": 12})
    often, _, _ = fit(text_file, dropping(), trainer={"max_steps": 12, "val_check_interval": 3})
    assert same(once, often)


def test_a_checkpoint_is_the_whole_module(text_file, tmp_path):
    module, trainer, _ = fit(text_file, GPTModule(TINY, learning_rate=1e-2, warmup_steps=1))
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    again = GPTModule.load_from_checkpoint(path, weights_only=True)
    assert hyperparameters(again) == hyperparameters(module)
    names = {field.name for field in dataclasses.fields(Settings)}
    assert hyperparameters(module).keys() == {"config"} | names
    assert hyperparameters(module)["betas"] == [0.9, 0.95]  # as in checkpoints before Settings
    assert again.config == dataclasses.replace(TINY, vocab_size=trainer.datamodule.vocab_size)
    assert same(again, module)


class Logged(Logger):
    """Keeps what is logged, and the step."""

    name = version = ""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs) -> None: ...


def test_an_evaluation_is_logged_at_the_step_of_its_checkpoint(text_file, tmp_path):
    _, trainer, _ = fit(text_file, eager(), trainer={"max_steps": 3})
    trainer.save_checkpoint(tmp_path / "3.ckpt")
    logger = Logged()
    again = quiet_trainer(logger=logger, use_distributed_sampler=False)
    again.validate(eager(), trainer.datamodule, ckpt_path=tmp_path / "3.ckpt", weights_only=True)
    assert [step for step, row in logger.rows if "val/loss" in row] == [3]


def test_resuming_goes_on_where_it_was(text_file, tmp_path):
    module = GPTModule(TINY, schedule="constant", optimizer="muon")
    straight, _, _ = fit(text_file, module, trainer={"max_steps": 30}, order="shuffled")
    module = GPTModule(TINY, schedule="constant", optimizer="muon")
    _, trainer, _ = fit(text_file, module, trainer={"max_steps": 13}, order="shuffled")
    trainer.save_checkpoint(tmp_path / "13.ckpt")
    module = GPTModule(TINY, schedule="constant", optimizer="muon")
    resumed, trainer, _ = fit(
        text_file,
        module,
        trainer={"max_steps": 30},
        order="shuffled",
        ckpt_path=tmp_path / "13.ckpt",
    )
    assert trainer.global_step == 30
    assert same(straight, resumed)


def test_the_command_lines_learning_rate_wins_over_the_checkpoints(text_file, tmp_path):
    _, trainer, _ = fit(text_file, GPTModule(TINY, learning_rate=1e-3, schedule="constant"))
    trainer.save_checkpoint(tmp_path / "4.ckpt")
    module = GPTModule(TINY, learning_rate=5e-1, schedule="constant")
    _, trainer, _ = fit(text_file, module, trainer={"max_steps": 6}, ckpt_path=tmp_path / "4.ckpt")
    assert {group["lr"] for group in trainer.optimizers[0].param_groups} == {5e-1}


def test_weights_are_drawn_on_the_cpu_whatever_the_device():
    config = dataclasses.replace(TINY, vocab_size=50)
    torch.manual_seed(0)
    with torch.device("meta"):  # stands for the GPU in whose context Lightning calls the hook
        module = GPTModule(config)
        module.configure_model()
    torch.manual_seed(0)
    other = GPTModule(config)
    other.configure_model()
    assert same(module, other)


def test_compiling_is_in_place_once_and_leaves_the_names(text_file, monkeypatch):
    calls = []

    def compile_quickly(self, backend):
        calls.append(self)
        torch.nn.Module.compile(self, backend="eager")

    monkeypatch.setattr("gpt_lightning.model.gpt.GPT.compile", compile_quickly)
    module, _, _ = fit(text_file, GPTModule(TINY, compile=True))
    assert calls == [module.model]
    assert not any("_orig_mod" in name for name in module.state_dict())
    fit(text_file, GPTModule(TINY, compile="auto"))
    assert len(calls) == 1  # auto is off on a CPU


def test_a_vocabulary_may_be_padded_but_not_too_small(text_file):
    module, trainer, _ = fit(text_file, GPTModule(dataclasses.replace(TINY, vocab_size=128)))
    assert module.config.vocab_size == 128 > trainer.datamodule.vocab_size
    with pytest.raises(UserError, match=r"vocab_size is 5, but .* has \d+ tokens"):
        fit(text_file, GPTModule(dataclasses.replace(TINY, vocab_size=5)))


def test_clipping_by_value_comes_after_the_norm_and_its_check(text_file):
    _, _, free = fit(text_file)
    by_value = {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}
    _, _, rows = fit(text_file, trainer=by_value)
    assert rows[0]["optim/grad_norm"] == free[0]["optim/grad_norm"]

    class Infinite(GPTModule):
        def on_after_backward(self) -> None:
            self.model.transformer.ln_f.weight.grad[0] = math.inf

    with pytest.raises(UserError, match="gradient norm is inf at step 1"):
        fit(text_file, Infinite(TINY), trainer=by_value)


def test_64_true_is_float64_throughout(text_file):
    module, trainer, _ = fit(text_file, trainer={"precision": "64-true", "max_steps": 1})
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    x, y = next(iter(trainer.datamodule.reader.split_loader("val")))
    for chunk in (None, 7):
        module.model.config = dataclasses.replace(module.config, loss_chunk=chunk)
        module.zero_grad()
        loss = module.model(x, y)
        loss.backward()
        logits = module.model(x)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        (gradient,) = torch.autograd.grad(expected, module.model.lm_head.weight)
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
        found = module.model.lm_head.weight.grad
        assert float((found - gradient).norm() / gradient.norm()) < 1e-12
    losses = torch.cat(trainer.predict(module, trainer.datamodule))
    assert losses.dtype == torch.float64
    (result,) = trainer.validate(module, trainer.datamodule, verbose=False)
    stream = trainer.datamodule.reader.stream("val")
    assert result["val/loss"] == pytest.approx(float(losses.sum() / (len(stream) - 1)), rel=1e-13)


def test_a_fit_leaves_the_callers_random_numbers_and_an_evaluation_its_allocator(
    text_file, monkeypatch
):
    kept = []
    monkeypatch.setattr(process, "keep_freed_memory", lambda: kept.append("fit"))
    states = []
    started = GPTModule.on_train_start
    monkeypatch.setattr(
        GPTModule,
        "on_train_start",
        lambda self: (states.append(torch.get_rng_state()), started(self)),
    )
    module = GPTModule(dataclasses.replace(TINY, dropout=0.5), compile=False)
    module, trainer, _ = fit(text_file, module)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert kept == ["fit"]
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    assert kept == ["fit"]


def test_plain_loaders_get_the_schedule_too():
    tokens = torch.randint(9, (8, 17), generator=torch.Generator().manual_seed(0))
    pairs = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    config = dataclasses.replace(TINY, vocab_size=9)
    module = GPTModule(config, learning_rate=0.1, warmup_steps=2, compile=False)
    rates = []

    class Rates(L.Callback):
        def on_train_batch_start(self, trainer, *args):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = quiet_trainer(max_steps=4, callbacks=[Rates()])
    trainer.fit(module, torch.utils.data.DataLoader(pairs, batch_size=2))
    assert rates == [0.1 * share_of_peak(step, module.settings, 4) for step in range(4)]
    assert rates[0] < rates[1]


# ---- what only a GPU, a scaler or several ranks would see ----------------------------------------


def test_a_validation_logs_no_tensor_of_another_device(text_file):
    """NCCL reduces tensors of its GPU alone, and Lightning makes one of a number."""
    reduced = []

    class Recording(GPTModule):
        def log_dict(self, values, sync_dist=False, rank_zero_only=False, **kwargs):
            if sync_dist and not rank_zero_only:
                reduced.append(values)
            super().log_dict(values, sync_dist=sync_dist, rank_zero_only=rank_zero_only, **kwargs)

    fit(text_file, Recording(TINY, schedule="constant"), trainer={"val_check_interval": 2})
    (values,) = reduced[:1]
    assert {k for k, v in values.items() if isinstance(v, torch.Tensor)} == {
        "val/loss",
        "val/perplexity",
    }


def test_a_fused_step_would_clip_scaled_gradients(text_file):
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(UserError, match="fused true would clip scaled gradients in 16-mixed"):
        fit(text_file, GPTModule(TINY, fused=True, compile=False), trainer={"plugins": [scaled]})
    module, _, _ = fit(text_file, eager(), trainer={"plugins": [scaled], "max_steps": 1})
    assert module.trainer.optimizers[0].param_groups[0]["fused"] is None


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resume_with_another_fused_is_the_same_run(fused, text_file, tmp_path, monkeypatch):
    trainer = {"max_steps": 2, "plugins": [DurableCheckpointIO()]}
    first = GPTModule(TINY, schedule="constant", fused=not fused)
    _, loop, _ = fit(text_file, first, trainer=trainer)
    path = tmp_path / "step.ckpt"
    loop.save_checkpoint(path)
    other, placed = GPTModule(TINY, schedule="constant", fused=fused), []
    place_steps = schedule.place_steps

    def placing(optimizer, group):
        placed.append((len(optimizer.state) > 0, group["fused"]))
        place_steps(optimizer, group)

    monkeypatch.setattr(schedule, "place_steps", placing)
    _, loop, rows = fit(text_file, other, trainer=trainer | {"max_steps": 4}, ckpt_path=path)
    # with the checkpoint's state and this run's kernel; test_optim.py has the devices
    assert placed == [(True, fused or None)] * 2
    (state, *_) = loop.optimizers[0].state.values()
    assert (state["step"].device.type, int(state["step"])) == ("cpu", 4)
    assert loop.optimizers[0].param_groups[0]["fused"] is (fused or None)
    _, _, straight = fit(text_file, GPTModule(TINY, schedule="constant", fused=not fused))
    assert rows[-1]["train/loss"] == pytest.approx(straight[-1]["train/loss"], rel=1e-6)


def test_the_memory_of_the_process_is_read_every_tenth_of_a_second(text_file, monkeypatch):
    now, read = [8.0], []
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(process, "limit_kept_memory", lambda: read.append(now[0]))
    times = iter([9.0, 9.05, 9.125, 9.15])

    class Clocked(GPTModule):
        def on_train_batch_start(self, batch, batch_idx):
            super().on_train_batch_start(batch, batch_idx)
            now[0] = next(times)

    fit(text_file, Clocked(TINY), trainer={"limit_val_batches": 0})
    assert read == [9.0, 9.125]


@pytest.mark.parametrize(
    ("config", "compiled", "precision", "kernel"),
    [
        ({}, False, "32-true", "flash"),
        ({"dropout": 0.1}, False, "32-true", "math"),
        ({"attention": "naive"}, False, "32-true", "naive"),
        ({}, True, "bf16-mixed", "naive"),  # short, and compiled for a CPU
        ({"attention": "flash"}, True, "bf16-mixed", "flash"),
    ],
)
def test_the_attention_kernel_of_a_run_is_known(config, compiled, precision, kernel, text_file):
    module = GPTModule(dataclasses.replace(TINY, **config), compile=compiled, schedule="constant")
    module.trainer = L.Trainer(accelerator="cpu", precision=precision, logger=False, max_steps=1)
    module.trainer.state.fn = "fit"
    module.config = dataclasses.replace(module.config, vocab_size=64)
    module.configure_model()
    assert module.attention_kernel == kernel


def test_gradients_are_views_of_the_buckets_of_ddp():
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    assert trainer.strategy._ddp_kwargs == {"gradient_as_bucket_view": True}
    plain = DDPStrategy(gradient_as_bucket_view=False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=plain, logger=False)
    assert trainer.strategy._ddp_kwargs == {"gradient_as_bucket_view": False}


def test_each_micro_batch_of_each_rank_drops_other_activations(monkeypatch):
    seeds = []
    monkeypatch.setattr(step_seeds, "seed_device", lambda device, seed: seeds.append(seed))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    for place in itertools.product((0, 1), repeat=4):
        seed, step, micro_batch, rank = place
        trainer = SimpleNamespace(global_step=step, global_rank=rank)
        module = SimpleNamespace(device=torch.device("cpu"), seed=seed, micro_batches=micro_batch)
        StepSeeds().on_train_batch_start(trainer, module)
    assert len(set(seeds)) == 16
