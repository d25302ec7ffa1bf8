"""Trains on a device that computes nothing, and prints what the host had to wait for in each step.

    python tests/emulated_device.py

A backend in Python has the place of a GPU, and FakeTensorMode the place of its kernels: tensors
have shapes, dtypes and a device, and no values. Lightning's Trainer runs GPTModule on it. The
output is a line of JSON: for each case and step the operations that read a number of the device or
move a tensor between devices, and the dtypes of the matrix products. The case `read` has a callback
that reads the loss.
"""

import contextlib
import itertools
import json
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.training import optim
from gpt_lightning.training.module import GPTModule

NAME = "emulated"
PACKAGE = Path(optim.__file__).parent.parent
CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=0.1)
STEPS, ACCUMULATE = 3, 2
AUTOCAST = "AutocastPrivateUse1"
# what CUDA's autocast does with the operations of a GPT
CASTS = {
    "linear": torch.bfloat16,
    "matmul": torch.bfloat16,
    "scaled_dot_product_attention": torch.bfloat16,
    "layer_norm": torch.float32,
    "cross_entropy_loss": torch.float32,
}


class Backend:
    """Functions of torch.cuda that training calls."""

    def is_initialized(self):
        return True

    is_available = is_initialized

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def _is_in_bad_fork(self):
        return False

    def manual_seed(self, seed):
        pass

    manual_seed_all = manual_seed

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


def register() -> list[torch.library.Library]:
    """Make torch know the device; autocast lasts as long as what is returned."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    without = torch.library.Library("_", "IMPL")
    casts = torch.library.Library("aten", "IMPL")
    without.fallback(torch.library.fallthrough_kernel, AUTOCAST)
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, AUTOCAST))

    def cast(name, dtype):
        operation = getattr(torch.ops.aten, name).default

        def call(*args):
            with torch._C._ExcludeDispatchKeyGuard(key):
                return operation(*(to(argument, dtype) for argument in args))

        casts.impl(name, call, AUTOCAST)

    for name, dtype in CASTS.items():
        cast(name, dtype)
    return [without, casts]


def to(argument, dtype):
    floating = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.to(dtype) if floating else argument


class EmulatedAccelerator(CPUAccelerator):
    def setup_device(self, device):
        pass

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device(NAME)]

    @staticmethod
    def name():
        return NAME


class EmulatedStrategy(SingleDeviceStrategy):
    """Strategy that makes new parameters on the device: fake ones cannot be moved in place."""

    def model_to_device(self):
        moved = {}  # a tied matrix stays one
        for module in self.model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    on_device = torch.nn.Parameter(torch.empty(p.shape, device=NAME))
                    module._parameters[name] = moved.setdefault(id(p), on_device)
        self.model._device = torch.device(NAME)

    def teardown(self):
        pass


class Operations(TorchDispatchMode):
    """Notes reads of the device, copies between devices, and products, step by step."""

    def __init__(self):
        super().__init__()
        self.steps, self.products = [[]], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reads = func is torch.ops.aten._local_scalar_dense.default
        out = 1 if reads else func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if (reads and NAME in devices) or len(devices) > 1:
            self.steps[-1].append(f"{func} at {line_of_ours()}")
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.products.add(str(out.dtype))
        return out


def line_of_ours() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "no line of ours"


class EnoughSteps(BaseException):
    """Ends a run without the hooks of its end, which read the device."""


class Steps(L.Callback):
    """Begins a list at each step, after the transfer of its first batch; ends the run."""

    def __init__(self, operations, read):
        self.operations, self.read = operations, read

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % ACCUMULATE == 0:
            self.operations.steps.append([])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.read:
            outputs["loss"].item()
        if trainer.global_step == STEPS:
            raise EnoughSteps


class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        size = (4, CONFIG.block_size)
        return itertools.repeat((torch.zeros(size, dtype=torch.long),) * 2)


def train(optimizer: str, precision: str, read: bool) -> dict[str, object]:
    """Train three steps of two micro-batches; return the operations of each step."""
    optim.FUSED_ADAMW_DEVICES = optim.DEFERRED_ON = {NAME}  # as on CUDA
    mixed = precision == "bf16-mixed"
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = GPTModule(CONFIG, optimizer=optimizer, schedule="constant", compile=False)
        module.log = lambda *args, **kwargs: None  # log steps may read
        operations = Operations()
        trainer = L.Trainer(
            strategy=EmulatedStrategy(NAME, accelerator=EmulatedAccelerator()),
            plugins=[MixedPrecision(precision, NAME) if mixed else Precision()],
            max_steps=STEPS,
            accumulate_grad_batches=ACCUMULATE,
            gradient_clip_val=1.0,
            log_every_n_steps=STEPS + 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Steps(operations, read)],
        )
        loader = torch.utils.data.DataLoader(Batches(), batch_size=None)
        with operations, contextlib.suppress(EnoughSteps):
            trainer.fit(module, loader)
    assert trainer.global_step == STEPS
    return {"steps": operations.steps[1:], "products": sorted(operations.products)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    libraries = register()
    cases = ("adamw", "bf16-mixed"), ("muon", "32-true")
    found = {" ".join(case): train(*case, read=False) for case in cases}
    print(json.dumps({**found, "read": train("adamw", "32-true", read=True)}))
