"""Every row of lightning.yaml: the effect of what works, the message of what is refused.

`PYTHONPATH=tests python tests/training/test_lightning_table.py` writes docs/lightning.md from them.
"""

import contextlib
import inspect
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch import callbacks as cb
from lightning.pytorch import loggers
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchSyncBatchNorm
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from ranks import run_commands, run_ranks
from tiny_fit import TINY_RUN
from tiny_fit import rows as logged_rows

from gpt_lightning.commands.check_resume import compare
from gpt_lightning.errors import UserError
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.fit import default_callbacks, run_cli
from gpt_lightning.training.trainer import Trainer

FOLDER = Path(__file__).resolve().parent
DOCS = FOLDER.parents[1] / "docs" / "lightning.md"
TABLES: dict[str, list[dict[str, Any]]] = yaml.safe_load((FOLDER / "lightning.yaml").read_text())
BASE = ["--data.batch_size=2", "--model.compile=false", "--trainer.log_every_n_steps=1"]


class Watch(L.Callback):
    """Notes of a run that Lightning's own attributes do not keep."""

    def __init__(self) -> None:
        self.steps: list[int] = []  # optimizer steps done at the end of each micro-batch
        self.validated: list[int] = []  # optimizer steps done at each validation
        self.sanity_batches = 0
        self.validation_batches = 0
        self.norms: list[float] = []  # sum of the gradients that an update has used
        self.largest: list[float] = []  # sum of their absolute values
        self.seen: list[torch.Tensor] = []  # inputs of each micro-batch
        self.flags: dict[str, bool] = {}

    def setup(self, trainer, module, stage):
        self.trainer = trainer

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append(batch[0].clone())
        self.flags |= {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "anomaly": torch.is_anomaly_enabled(),
        }

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(trainer.global_step)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
        self.largest.append(max(float(grad.abs().max()) for grad in grads))

    def on_validation_batch_start(self, trainer, *args, **kwargs):
        self.flags["inference_mode"] = torch.is_inference_mode_enabled()
        if trainer.sanity_checking:
            self.sanity_batches += 1
        else:
            self.validation_batches += 1

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


@dataclass
class Run:
    """Outcome of a `fit`.

    Attributes:
        trainer: Trainer after the run.
        module: GPTModule after the run.
        data: TokenDataModule after the run.
        watch: Notes of the run.
        output: Text on standard output and standard error.
        rows: Rows of metrics.jsonl.
        files: Files in the working folder, as relative paths.
    """

    trainer: Any
    module: Any
    data: Any
    watch: Watch
    output: str
    rows: list[dict[str, Any]]
    files: list[str]

    def logged(self, key: str) -> list[int]:
        """Return the steps whose rows have a metric."""
        return [row["step"] for row in self.rows if key in row]

    def callback(self, kind: type) -> Any:
        """Return the run's callback of a class."""
        return next(c for c in self.trainer.callbacks if isinstance(c, kind))


class Stop(L.Callback):
    """Ask for a stop after the first step."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = True


class Halt(L.Callback):
    """Ask for a stop after the second step, as a preemption would."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop |= trainer.global_step == 2


class Sleep(L.Callback):
    """Make each micro-batch take a tenth of a second."""

    def on_train_batch_start(self, *args):
        time.sleep(0.1)


class Freeze(cb.BaseFinetuning):
    """Freeze the embedding, and train it from the second epoch on."""

    def freeze_before_training(self, pl_module):
        pl_module.configure_model()  # Lightning calls it later
        self.freeze(pl_module.model.transformer.wte)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.transformer.wte, optimizer, lr=1e-3)


class Writer(cb.BasePredictionWriter):
    """Print a prediction's shape."""

    def write_on_batch_end(self, trainer, pl_module, prediction, *args):
        print("written", *prediction.shape)


class Raise(L.Callback):
    """Fail in the third step."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("made to fail")


def evaluates(run: Run, stage: str) -> int:
    """Evaluate after a run, and return the number of batches."""

    class Count(L.Callback):
        n = 0

        def on_test_batch_end(self, *args, **kwargs):
            self.n += 1

        on_predict_batch_end = on_test_batch_end

    count = Count()
    run.trainer.callbacks.append(count)
    loader = run.data.val_dataloader()
    run.trainer.datamodule = None  # the text has no test split
    getattr(run.trainer, stage)(run.module, loader)
    return count.n


NAMES = {
    known.__name__: known
    for known in (
        *(AsyncCheckpointIO, CSVLogger, DDPStrategy, FSDPStrategy, LightningEnvironment),
        *(ModelParallelStrategy, TensorBoardLogger, TorchSyncBatchNorm, evaluates),
        *(Freeze, Raise, Sleep, Stop, Writer),
    )
} | {"cb": cb, "torch": torch, "pytest": pytest}


def arguments(row: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the Trainer, with new objects."""
    objects = {key: eval(text, NAMES) for key, text in row.get("objects", {}).items()}
    return row.get("given", {}) | objects


def cases(verdict: str) -> list:
    """Return the rows of a verdict as parameters with readable names."""
    return [
        pytest.param(row, id=f"{row['name']}-{i}", marks=[pytest.mark.slow] * row.get("slow", 0))
        for rows in TABLES.values()
        for i, row in enumerate(rows)
        if verdict in row
    ]


def option(key: str, value) -> str:
    """Return an argument of the Trainer as an option of the command line."""
    if isinstance(value, list):
        value = [{"class_path": f"{type(v).__module__}.{type(v).__name__}"} for v in value]
    return f"--trainer.{key}={value if isinstance(value, str) else json.dumps(value)}"


def fit(row: dict, capsys, caplog, more: Sequence[L.Callback] = (), *options: str) -> Run:
    """Train as the row says, in the working folder, with the notes of a Watch."""
    given = {"max_steps": 4} | arguments(row)
    watch, theirs = Watch(), given.pop("callbacks", [])
    options = [*(option(key, value) for key, value in given.items()), *options]
    failing = any(type(callback).__name__ == "Raise" for callback in theirs)
    found = [*theirs, *more, watch, *default_callbacks("fit")]
    try:
        run_cli(["fit", *TINY_RUN, *BASE, *options, *row.get("also", [])], callbacks=found)
    except RuntimeError:
        assert failing
    trainer = watch.trainer
    text = capsys.readouterr()
    written = [str(path) for path in Path().rglob("*") if path.is_file()]
    files = [name for name in written if name != "text.txt" and not name.startswith("data/")]
    metrics = [Path(name) for name in files if name.endswith("metrics.jsonl")]
    rows = [json.loads(line) for path in metrics for line in path.read_text().splitlines()]
    output = text.out + text.err + caplog.text
    return Run(trainer, trainer.lightning_module, trainer.datamodule, watch, output, rows, files)


@pytest.fixture
def folder(tmp_path, text_file, monkeypatch):
    """A working folder, and PyTorch's global switches restored."""
    monkeypatch.chdir(tmp_path)
    before = torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = before[0]
    torch.autograd.set_detect_anomaly(before[1])


def fit_by_ranks(row: dict) -> Run:
    """Train in two processes."""
    options = [option(key, value) for key, value in ({"max_steps": 4} | row["given"]).items()]
    out, _ = run_ranks(2, run_commands, ["fit", *TINY_RUN, *BASE, *options])
    return Run(None, None, None, Watch(), out, logged_rows(), [])


@pytest.mark.slow
@pytest.mark.parametrize("row", cases("works"))
def test_works_also_across_a_resume(row, folder, capsys, caplog):
    # tests/faults/test_two_ranks.py resumes two ranks
    ranks = row.get("given", {}).get("devices") == 2
    run = fit_by_ranks(row) if ranks else fit(row, capsys, caplog)
    if "no_resume" not in row and not ranks:
        check_resume(row, run, capsys, caplog)
    assert eval(row["works"], NAMES | {"run": run}), (
        run.watch.__dict__,
        run.files,
        run.output[-3000:],
        run.rows[-3:],
    )


def check_resume(row: dict, whole: Run, capsys, caplog) -> None:
    """Train again in two sessions, in a folder of their own, and compare with the whole run."""
    parts = Path("parts")
    parts.mkdir()
    for name in ("text.txt", "data"):
        (parts / name).symlink_to(Path(name).resolve())
    with contextlib.chdir(parts):
        assert fit(row, capsys, caplog, [Halt()]).trainer.global_step == 2
        resumed = fit(row, capsys, caplog, (), "--resume=auto")
    assert "step 2, " in resumed.output
    assert resumed.trainer.global_step == whole.trainer.global_step
    root = Path(row.get("given", {}).get("default_root_dir", "."))
    one, two = (where / root / "lightning_logs" / "run" / "version_0" for where in (Path(), parts))
    equal = dict.fromkeys(("weights", "optimizer", "data", "metrics"), True)
    assert compare(one, two) == equal


@pytest.mark.parametrize("row", cases("error"))
def test_is_refused(row, folder):
    package = re.search(r"pip install '?(\w+)", row["error"])
    if package and find_spec(package[1].replace("-", "_")):
        pytest.skip(f"{package[1]} is installed")
    given = arguments(row)
    if "also" in row:  # not for Trainer alone
        with pytest.raises(UserError) as error:
            run_cli(["fit", *TINY_RUN, *BASE, *row["also"]], callbacks=given.get("callbacks", []))
        assert not Path("lightning_logs").exists()
    else:
        given["callbacks"] = [*given.get("callbacks", []), RunCheckpoint()]
        with pytest.raises(UserError) as error:
            Trainer(**{"accelerator": "cpu", "logger": False, **given})
    message = str(error.value)
    assert row["error"] in message, message
    assert "\n" not in message
    assert len(message) < 300
    assert "http" not in message


@pytest.mark.parametrize(
    ("title", "known"),
    [
        ("Arguments", inspect.signature(L.Trainer).parameters),
        ("Callbacks", cb.__all__),
        ("Loggers", loggers.__all__),
    ],
)
def test_everything_of_lightning_has_a_row(title, known):
    assert {row["name"] for row in TABLES[title]} == set(known)


HEAD = """# Lightning's Trainer in `gpt-lightning fit`

Every argument of Lightning's Trainer, every callback and every logger that comes with Lightning,
and what `gpt-lightning fit` does with it. *works*: it does what Lightning documents. *error*: one
line on standard error, exit code 2, and nothing is written. The last column has the effect or
the reason. `tests/training/lightning.yaml` holds these rows, and a test runs each of them. A key is
written `--trainer.NAME VALUE`, or below `trainer:` in YAML; [configuration.md](configuration.md)
has the other keys.

## Gradient clipping, gradient accumulation, early stopping

| wanted | options of `gpt-lightning fit` |
| --- | --- |
| gradient clipping by norm | `--trainer.gradient_clip_val 1.0` |
| gradient clipping by value | the same, and `--trainer.gradient_clip_algorithm value` |
| gradient accumulation | `--trainer.accumulate_grad_batches 4`, or `--data.tokens_per_step N` |
| early stopping | `--trainer.callbacks EarlyStopping --trainer.callbacks.monitor val/loss` |
"""


def document() -> str:
    """Return the text of docs/lightning.md."""
    parts = [HEAD]
    for title, rows in TABLES.items():
        parts.append(f"## {title}\n\n| name | given | verdict | effect or reason |")
        parts.append("| --- | --- | --- | --- |")
        for row in rows:
            given = (
                row.get("given", {}).items() if "callbacks" not in row.get("objects", {}) else ()
            )
            text = row.get("label", ", ".join(f"{key} {shown(value)}" for key, value in given))
            verdict = "works" if "works" in row else "error"
            cell = f"`{text}`" if text else ""
            parts.append(f"| `{row['name']}` | {cell} | {verdict} | {row.get('text', '')} |")
        parts.append("")
    return "\n".join(parts)


def shown(value: Any) -> str:
    """Return a value as YAML has it."""
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def test_the_document_is_made_from_the_rows():
    assert DOCS.read_text(encoding="utf-8") == document(), f"run PYTHONPATH=tests python {__file__}"


if __name__ == "__main__":
    DOCS.write_text(document(), encoding="utf-8")
