"""The command `gpt-lightning eval`: tasks of the lm-evaluation-harness."""

import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from jsonargparse.typing import PositiveInt

from gpt_lightning.errors import UserError, is_out_of_memory, optional, reason_of
from gpt_lightning.files import Fields
from gpt_lightning.parsing import nearest
from gpt_lightning.tables.rows import Column, Console, Row, TenThousandths

SPLITS = ("training_split", "fewshot_split", "validation_split", "test_split")
Name = Annotated[str, Column(width=16)]


@dataclass
class ScoreRow(Row):
    """Number of a task, and its standard error."""

    task: Name
    metric: Name
    value: TenThousandths
    stderr: TenThousandths


def evaluate(
    path: str,
    tasks: str = "hellaswag,lambada_openai,wikitext",
    data: str | None = None,
    limit: PositiveInt | None = None,
    batch_size: PositiveInt = 16,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dtype: Literal["fp32", "bf16"] = "fp32",
    json: bool = False,
) -> None:
    """Score a model on tasks of EleutherAI's lm-evaluation-harness.

    Args:
        path: Checkpoint, run folder, folder of Hugging Face, ckpt.pt of nanoGPT, or gpt2 and its
            other sizes, which are downloaded; docs/models.md has all of them.
        tasks: Names of the harness, separated by commas.
        data: Folder with the items of each task as TASK.jsonl; null: the harness downloads them.
        limit: Number of items of each task; null: all.
        batch_size: Texts per batch.
        device: Device of the model. auto: cuda, else mps, else cpu.
        dtype: dtype of matrix products. bf16 is faster and changes the last digits.
        json: Print all numbers as JSON instead of a table.
    """
    for package in ("accelerate", "lm_eval"):
        optional(package, "eval")
    from lm_eval.evaluator import simple_evaluate  # --help must not wait for it
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from gpt_lightning.commands.export import write_model
    from gpt_lightning.data.tokenizers import start_tokens
    from gpt_lightning.hardware.device import device_kind
    from gpt_lightning.hardware.precision import check_accelerator
    from gpt_lightning.runs.sources import read_source, tokenizer_of

    check_accelerator(device, "--device")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    found = read_source(path, gpt_for="eval")
    tokenizer = tokenizer_of(found)
    # stdout has the results alone
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        model_folder = Path(folder) / "model"
        write_model(found, tokenizer, model_folder)
        manager = TaskManager()
        names = [name.strip() for name in tasks.split(",")]
        chosen = [task for name in names for task in load(name, manager, data, folder)]
        try:
            model = HFLM(
                pretrained=str(model_folder),
                device=device_kind(device),
                dtype="float32",
                mixed_precision_dtype="bfloat16" if dtype == "bf16" else None,
                batch_size=batch_size,
                prefix_token_id=start_tokens(tokenizer, "")[0],
            )
            results = simple_evaluate(
                model, tasks=chosen, limit=limit, log_samples=False, task_manager=manager
            )
        except Exception as error:  # a task's own code may raise anything
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"{tasks} of {path}: {reason_of(error)}: an item may be longer than the "
                f"model's context of {found.shape()['block_size']} tokens, or have a character "
                f"that the tokenizer {tokenizer.name} lacks"
            ) from error
    if results is None:  # torchrun's first rank has them
        return
    if json:
        print(dumps(results["results"]))
        return
    console = Console(ScoreRow)
    print(f"# {found.source}, {dtype} on {device_kind(device)}")
    print(console.header)
    for row in score_rows(results["results"]):
        print(console.line(row))


def score_rows(results: Fields) -> Iterator[ScoreRow]:
    """Yield a row for each number of each task; its standard error is None if it has none."""
    for task, numbers in results.items():
        for key, value in numbers.items():
            metric, _, name_of_filter = key.partition(",")
            if name_of_filter and not metric.endswith("_stderr"):
                stderr = numbers.get(f"{metric}_stderr,{name_of_filter}")
                known = isinstance(stderr, float)
                yield ScoreRow(task, key.removesuffix(",none"), value, stderr if known else None)


def load(name: str, manager: Any, data: str | None, folder: str) -> list[Any]:
    """Return a task of the harness, or the tasks of a group, with the items.

    Args:
        name: Name of the task.
        manager: TaskManager of the harness.
        data: Folder with the items as TASK.jsonl; None: the harness downloads them.
        folder: Folder for temporary files.

    Raises:
        UserError: There is no such task, or its items cannot be read.
    """
    entry = manager.task_index.get(name)
    if not entry:
        hint = nearest(name, manager.all_tasks)
        raise UserError(f"no task {name!r}{hint}; `lm_eval ls tasks` lists them")
    task = name
    if data is not None:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(yaml.safe_dump(local_task(name, entry, Path(data))))
        task = str(path)
    try:
        return [*manager.load(task)["tasks"].values()]
    except Exception as error:  # of the network, the hub's package, or the reader of the file
        fix = f"check {data}/{name}.jsonl"
        if data is None:
            fix = f"connect to the network, or give --data a folder with {name}.jsonl"
        raise UserError(f"cannot read the items of {name} ({reason_of(error)}): {fix}") from error


def local_task(name: str, entry: Any, data: Path) -> Fields:
    """Return the settings of a task of the harness whose items are in a folder.

    Raises:
        UserError: The folder has no such file, or the name is that of several tasks.
    """
    settings = entry.cfg or {}
    if "task" not in settings or not isinstance(settings["task"], str):
        raise UserError(f"{name} is a group of tasks: name those whose items are in {data}")
    items = data / f"{name}.jsonl"
    if not items.is_file():
        raise UserError(f"{items}: no such file; put the items of {name} there")
    split = "test" if settings.get("test_split") else "validation"
    return {
        "include": str(entry.yaml_path),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(items.absolute())}},
        **dict.fromkeys(SPLITS),
        f"{split}_split": split,
    }
