"""A compiled `fit` leaves other libraries, the process and other models as PyTorch's own does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# A word of arguments: ours, or plain for a module of another author under L.Trainer.
SCRIPT = '''
import gc, inspect, json, os, signal, sys, threading
from unittest import mock
import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

LIBRARIES = ("lightning", "torch.optim", "torch._inductor", "torch._dynamo")


def where(value):
    """Description of a callable, equal in two processes; None for other values."""
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    code = getattr(value, "__code__", None)
    if inspect.iscode(code):
        return f"{code.co_filename}:{code.co_firstlineno} {value.__qualname__}"
    for inner in ("__func__", "fget", "func", "__wrapped__"):
        if inspect.getattr_static(value, inner, None) is not None:
            return f"{type(value).__name__} of {where(getattr(value, inner))}"
    return f"{where(type(value))} {getattr(value, '__qualname__', '')}" if callable(value) else None


def functions():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if module is None or not f"{name}.".startswith(tuple(f"{lib}." for lib in LIBRARIES)):
            continue
        for key, value in sorted(vars(module).items()):
            found[f"{name}.{key}"] = where(value)
            if inspect.isclass(value) and value.__module__ == name:
                for attribute, method in vars(value).items():
                    found[f"{name}.{key}.{attribute}"] = where(method)
    return {name: place for name, place in found.items() if place}


def configs():
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    return {
        f"{c.__name__}.{key}": repr(sorted(value) if isinstance(value, (set, frozenset)) else value)
        for c in (dynamo, functorch, inductor)
        for key, value in c.get_config_copy().items()
    }


def process():
    """State of the process by name, one entry for each variable, signal and kind of hook."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    hooks = [key for key in vars(nn.modules.module) if key.startswith("_global_") and "hook" in key]
    return {
        **{f"environment {k}": v for k, v in os.environ.items() if k != "_"},
        **{s.name: str(signal.getsignal(s)) for s in signals},
        **{key: len(getattr(nn.modules.module, key) or ()) for key in hooks},
        "wakeup": signal.set_wakeup_fd(-1),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)],
        "streams": [str(sys.stdout), str(sys.stderr)],
        "excepthooks": [str(sys.excepthook), str(threading.excepthook)],
        "autocast": torch.is_autocast_enabled("cpu"),
        "products": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


class Attention(nn.Module):
    """Model of a user, with each layer for which the package has a kernel."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(64, 64), nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.rest = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64))

    def forward(self, idx):
        qkv = self.qkv(self.norm(self.embedding(idx))).view(2, 32, 3, 2, 32).transpose(1, 3)
        out = nn.functional.scaled_dot_product_attention(*qkv.unbind(2), is_causal=True)
        return self.rest(out.transpose(1, 2).reshape(2, 32, 64))


before = process()
import torch._dynamo
if sys.argv[1] == "plain":
    model = BoringModel()
    model.layer = torch.compile(model.layer)
    model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), fused=True)
    trainer = L.Trainer(accelerator="cpu", precision="bf16-mixed", max_steps=2, limit_val_batches=0)
    trainer.fit(model)
else:
    from gpt_lightning import fit

    fit(
        {"data.text_file": "text.txt", "data.tokenizer": "char", "data.batch_size": 2},
        {"model.config.n_layer": 1, "model.config.n_head": 2, "model.config.n_embd": 64},
        {"model.config.block_size": 32, "model.config.vocab_size": None, "model.compile": True},
        {"model.config.dropout": 0.1, "trainer.accelerator": "cpu", "trainer.max_steps": 2},
        {"trainer.precision": "bf16-mixed", "samples.max_new_tokens": 4},
    )
after = process()
settings = configs()
from torch._inductor import config
from torch._inductor.graph import GraphLowering
code = []
with (
    mock.patch.object(GraphLowering, "save_output_code", code.append),
    config.patch(fx_graph_cache=False),
    torch.autocast("cpu", torch.bfloat16),
):
    torch.compile(Attention())(torch.randint(64, (2, 32))).sum().backward()
facts = {"functions": functions(), "configs": settings, "code": code}
json.dump(facts | {"before": before, "after": after}, open(f"{sys.argv[1]}.json", "w"))
'''


def different(plain: dict, ours: dict) -> dict:
    """Entries of `plain` that `ours` lacks or has with another value."""
    return {key: [value, ours.get(key)] for key, value in plain.items() if ours.get(key) != value}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_compiled_fit_replaces_nothing(tmp_path):
    (tmp_path / "text.txt").write_text("a text of letters that are learned, " * 100)
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    found = {}
    for who in ("plain", "ours"):
        command = [sys.executable, "script.py", who]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found[who] = json.loads((tmp_path / f"{who}.json").read_text())
    plain, ours = found["plain"], found["ours"]
    assert any("torch.optim.adamw" in name for name in ours["functions"])
    assert len(plain["code"]) == 2  # forward and backward of the user's model
    generated = ("compile_tasks.", "__compiled_fn")  # modules and functions named after their code
    functions = {
        name: place
        for name, place in plain["functions"].items()
        if not any(word in name for word in generated)
    }
    assert different(functions, ours["functions"]) == {}
    own = str(Path(__file__).parents[2] / "gpt_lightning"), "gpt_lightning."
    assert {n: at for n, at in ours["functions"].items() if any(word in at for word in own)} == {}
    assert different(plain["configs"], ours["configs"]) == {}
    # the first line has the number of the graph in its process
    plains, own_code = ([c.partition("\n")[2] for c in who["code"]] for who in (plain, ours))
    assert plains == own_code
    # variables are put back, also those that PyTorch's compiler sets
    changed = different(plain["after"], plain["before"]).items()
    pytorchs = {key: after for key, (after, _) in changed if not key.startswith("environment ")}
    assert ours["after"] == ours["before"] | pytorchs
