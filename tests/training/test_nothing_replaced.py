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
import lightning as L
import torch
from torch import nn

LIBRARIES = ("lightning", "torch.optim", "torch._inductor", "torch._dynamo")


def where(value):
    """Description of a function, equal in two processes."""
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    if not inspect.iscode(code):
        return None
    return f"{code.co_filename}:{code.co_firstlineno} {value.__qualname__}"


def functions():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if module is None or not f"{name}.".startswith(tuple(f"{lib}." for lib in LIBRARIES)):
            continue
        for key, value in sorted(vars(module).items()):
            if place := where(value):
                found[f"{name}.{key}"] = place
            if inspect.isclass(value) and value.__module__ == name:
                for attribute, method in vars(value).items():
                    method = getattr(method, "fget", method)
                    if place := where(method):
                        found[f"{name}.{key}.{attribute}"] = place
    return found


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
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    hooks = [key for key in vars(nn.modules.module) if key.startswith("_global_") and "hook" in key]
    return {
        "environment": {k: v for k, v in os.environ.items() if k != "_"},
        "signals": {s.name: str(signal.getsignal(s)) for s in signals},
        "wakeup": signal.set_wakeup_fd(-1),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)],
        "streams": [str(sys.stdout), str(sys.stderr)],
        "excepthooks": [str(sys.excepthook), str(threading.excepthook)],
        "module hooks": {key: len(getattr(nn.modules.module, key) or ()) for key in hooks},
        "autocast": torch.is_autocast_enabled("cpu"),
    }


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.compile(user_model())

    def training_step(self, batch, index):
        return self.model(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randint(64, (6, 32)), batch_size=2)


def user_model():
    layers = nn.Embedding(64, 64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64)
    return nn.Sequential(*layers)


before = process()
import torch._dynamo
if sys.argv[1] == "plain":
    L.Trainer(max_steps=2, accelerator="cpu", precision="bf16-mixed", logger=False,
              enable_checkpointing=False, enable_progress_bar=False).fit(Plain())
else:
    from gpt_lightning import fit

    fit(
        {"data.text_file": "text.txt", "data.tokenizer": "char", "data.batch_size": 2},
        {"model.config.n_layer": 1, "model.config.n_head": 2, "model.config.n_embd": 64},
        {"model.config.block_size": 32, "model.config.vocab_size": None, "model.compile": True},
        {"model.config.dropout": 0.1, "trainer.accelerator": "cpu", "trainer.max_steps": 2},
        {"trainer.precision": "bf16-mixed", "samples.max_new_tokens": 4, "trainer.logger": False},
    )
after = process()
settings = configs()
model = torch.compile(user_model())
idx = torch.randint(64, (2, 32))
with torch.profiler.profile() as profile, torch.autocast("cpu", torch.bfloat16):
    model(idx).sum().backward()
operators = sorted({event.key for event in profile.key_averages()})
facts = {"functions": functions(), "configs": settings, "operators": operators}
json.dump(facts | {"before": before, "after": after}, open(f"{sys.argv[1]}.json", "w"))
'''


def changed(facts: dict) -> dict[str, list]:
    """Entries of a process's state that differ after the run, by name."""
    before, after = facts["before"], facts["after"]
    return {key: [before[key], after[key]] for key in before if before[key] != after[key]}


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
    replaced = {
        name: [plain["functions"][name], place]
        for name, place in ours["functions"].items()
        if plain["functions"].get(name, place) != place
    }
    assert replaced == {}
    own = str(Path(__file__).parents[2] / "gpt_lightning")
    assert [name for name, place in ours["functions"].items() if own in place] == []
    configs = {key: [plain["configs"].get(key), value] for key, value in ours["configs"].items()}
    assert {key: both for key, both in configs.items() if both[0] != both[1]} == {}
    assert [name for name in ours["operators"] if "gpt_lightning" in name] == []
    # PyTorch sets variables itself when its compiler is imported
    pytorchs = plain["after"]["environment"].keys() - plain["before"]["environment"].keys()
    for name in pytorchs - ours["before"]["environment"].keys():
        ours["after"]["environment"].pop(name, None)
    theirs = changed(plain).keys() - {"environment"}
    assert {key: both for key, both in changed(ours).items() if key not in theirs} == {}
