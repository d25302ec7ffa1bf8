"""Causes of stalls: waiting for the device, compilation in evaluations and for new shapes."""

import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from tiny_fit import tiny_data
from torch.utils._python_dispatch import TorchDispatchMode

import gpt_lightning
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.training import build
from gpt_lightning.training.behaviours.non_finite import NonFiniteGuard
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.report import StepProgress
from gpt_lightning.training.callbacks.samples import SampleText
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.module import GPTModule

PACKAGE = Path(gpt_lightning.__file__).parent
TINY = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=16, vocab_size=None)


def fit(text_file, callbacks, module=None, **trainer):
    L.seed_everything(1337)
    module = module or GPTModule(TINY, schedule="constant")
    settings = {"accelerator": "cpu", "logger": False, "log_every_n_steps": 10, "max_steps": 30}
    loop = L.Trainer(
        **{**settings, **trainer},
        default_root_dir=text_file.parent,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(c, StepProgress) for c in callbacks),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        plugins=[DurableCheckpointIO()],
    )
    loop.fit(module, tiny_data(text_file, batch_size=3))
    return module, loop


# ---- waiting for the device ----------------------------------------------------------------------


class Reads(TorchDispatchMode, L.Callback):
    """Counts reads of tensors, by the optimizer step that they happen in and the line of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.found = 0, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.step = trainer.global_step + 1

    def note(self):
        frame = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE / "data"):
                return  # batches are made on the CPU, before they are handed over
            if path.is_relative_to(PACKAGE):
                break
            frame = frame.f_back
        where = "elsewhere" if frame is None else f"{path.name}:{frame.f_lineno}"
        self.found.append((self.step, where))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # item(), float(), int() and bool() of a tensor all come here
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))

    def steps(self):
        return {step for step, _ in self.found}


@pytest.fixture
def reads(monkeypatch):
    """Counts what a GPU would have to be waited for; a CPU stands for it."""
    reads = Reads()

    def noting(original):
        def method(tensor, *args, **kwargs):
            reads.note()
            return original(tensor, *args, **kwargs)

        return method

    for name in ("cpu", "numpy", "tolist"):  # read without passing the dispatcher
        monkeypatch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
    monkeypatch.setattr(
        "gpt_lightning.training.callbacks.speed.synchronize", lambda device: reads.note()
    )
    monkeypatch.setattr("gpt_lightning.training.optim.DEFERRED_ON", {"cpu"})
    return reads


def run_callbacks():
    return [SpeedMonitor(warmup_steps=10), StepProgress(), SampleText(5), RunCheckpoint()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("trainer", [{}, {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}])
def test_the_device_is_waited_for_at_log_steps_alone(trainer, optimizer, text_file, reads):
    module = GPTModule(TINY, schedule="constant", optimizer=optimizer)
    with reads:
        fit(text_file, [*run_callbacks(), reads], module, limit_val_batches=0, **trainer)
    during = {(step, where) for step, where in reads.found if step > 0}
    assert {step for step, _ in during} == {10, 20, 30}, sorted(during)


def test_reads_are_seen(text_file, reads):
    """The counter counts: without it the test above says nothing."""

    class Curious(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step in (3, 4, 6):
                {3: outputs["loss"].item, 4: outputs["loss"].cpu, 6: outputs["loss"].__bool__}[
                    trainer.global_step
                ]()

    with reads:
        fit(text_file, [*run_callbacks(), reads, Curious()], limit_val_batches=0, max_steps=9)
    assert {3, 4, 6} <= reads.steps()
    assert not {2, 5, 7, 8} & reads.steps()


# ---- gradients that are not finite ---------------------------------------------------------------


class Poison(L.Callback):
    """Makes a step's gradients NaN, and keeps the weights from before it."""

    def __init__(self, step: int) -> None:
        self.step, self.before, self.steps = step, None, 0

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step + 1 == self.step:
            self.before = [p.detach().clone() for p in pl_module.parameters()]
            next(pl_module.parameters()).grad.fill_(float("nan"))
        self.steps = trainer.global_step + 1


@pytest.mark.parametrize(
    ("deferred_on", "raised_at"), [({"cpu"}, 20), (set(), 13)], ids=["deferred", "at once"]
)
def test_nothing_is_learnt_from_bad_gradients(deferred_on, raised_at, text_file, monkeypatch):
    monkeypatch.setattr("gpt_lightning.training.optim.DEFERRED_ON", deferred_on)
    poison = Poison(13)
    module = GPTModule(TINY, learning_rate=1e-2, schedule="constant")
    with pytest.raises(UserError, match="gradient norm is nan at step 13: weights were not chan"):
        fit(text_file, [poison], module, limit_val_batches=0)
    assert poison.steps == raised_at
    for before, after in zip(poison.before, module.parameters(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("checkpoint", "last"), [({"every_n_steps": 4}, 12), ({}, None)], ids=["every", "at the end"]
)
def test_no_checkpoint_is_written_after_an_unread_bad_step(
    checkpoint, last, text_file, monkeypatch
):
    monkeypatch.setattr("gpt_lightning.training.optim.DEFERRED_ON", {"cpu"})
    callbacks = [Poison(13), RunCheckpoint(**checkpoint, keep_last=9)]
    with pytest.raises(UserError, match="at step 13"):
        fit(text_file, callbacks, limit_val_batches=0, max_steps=18, log_every_n_steps=100)
    saved = sorted(path.stem for path in (text_file.parent / "checkpoints").glob("*.ckpt"))
    assert saved == ([f"step-{step:07d}" for step in (4, 8, 12)] if last else [])


def test_an_optimizer_that_cannot_skip_is_asked_at_once(monkeypatch):
    monkeypatch.setattr("gpt_lightning.training.optim.DEFERRED_ON", {"cpu"})
    weight = torch.nn.Parameter(torch.zeros(2))
    for optimizer in (torch.optim.SGD([weight]), torch.optim.AdamW([weight], fused=False)):
        with pytest.raises(UserError, match="norm is inf at step 7"):
            NonFiniteGuard().watch(optimizer, torch.tensor(1.0), torch.tensor(torch.inf), 7)


def test_good_steps_are_the_same_steps(text_file, monkeypatch):
    at_once, _ = fit(text_file, [], limit_val_batches=0, max_steps=5)
    monkeypatch.setattr("gpt_lightning.training.optim.DEFERRED_ON", {"cpu"})
    deferred, trainer = fit(text_file, [], limit_val_batches=0, max_steps=5)
    assert float(trainer.optimizers[0].found_inf) == 0.0
    for a, b in zip(at_once.parameters(), deferred.parameters(), strict=True):
        assert torch.equal(a, b)


# ---- evaluation and samples ----------------------------------------------------------------------


@pytest.mark.parametrize("evaluates_compiled", [True, False])
def test_validation_and_samples_add_one_graph_at_most(text_file, evaluates_compiled, monkeypatch):
    """One graph to train with, one to evaluate with, whatever the last batch's size.

    On a CPU evaluations stay eager, at the speed of compiled ones and without their compile time.
    """
    if evaluates_compiled:  # as on a GPU
        monkeypatch.setattr(build, "evaluates_compiled", lambda module: True)
    frames = torch._dynamo.utils.counters
    torch._dynamo.reset()
    frames.clear()

    def compile_quickly(self, **kwargs):
        torch.nn.Module.compile(self, backend="eager")

    monkeypatch.setattr("gpt_lightning.model.gpt.GPT.compile", compile_quickly)
    module = GPTModule(TINY, schedule="constant", compile=True)
    _, trainer = fit(text_file, [SampleText(20)], module, max_steps=12, val_check_interval=4)
    windows = len(trainer.datamodule.reader.stream("val")) - 1
    assert windows % (16 * 3), "the last batch must be a smaller one for this to say anything"
    assert frames["stats"]["unique_graphs"] == 1 + evaluates_compiled
    assert sum(frames["graph_break"].values()) == 0


def test_validation_runs_in_the_precision_of_training(text_file):
    dtypes = {True: set(), False: set()}

    class RunRecorder(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            layer = pl_module.model.transformer.h[0].mlp.c_fc
            layer.register_forward_hook(
                lambda module, args, output: dtypes[module.training].add(output.dtype)
            )

    module = GPTModule(TINY, schedule="constant", compile=False)  # which would take seconds
    fit(
        text_file,
        [RunRecorder()],
        module,
        max_steps=4,
        val_check_interval=2,
        precision="bf16-mixed",
    )
    assert dtypes == {True: {torch.bfloat16}, False: {torch.bfloat16}}
