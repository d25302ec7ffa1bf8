"""The command `gpt-lightning eval`: published tasks and perplexity, beside GPT-2's figures."""

import os
from pathlib import Path
from typing import Literal

from jsonargparse.typing import PositiveInt

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, new_path

RENDEZVOUS = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them


def evaluate(
    path: str,
    tasks: str = "hellaswag,lambada,wikitext",
    data: str | None = None,
    text: str | None = None,
    split: Literal["train", "val", "test"] = "val",
    stride: PositiveInt | None = None,
    limit: PositiveInt | None = None,
    batch_size: PositiveInt = 16,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dtype: Literal["fp32", "bf16"] = "fp32",
    out: str | None = None,
    network: str | Fields | None = None,
) -> None:
    """Score a model on published tasks and texts, beside the published figures of GPT-2.

    `torchrun --nproc_per_node N -m gpt_lightning eval ...` divides the work among N processes.

    Args:
        path: Checkpoint, run folder, folder of Hugging Face, ckpt.pt of nanoGPT, or gpt2 and its
            other sizes, which are downloaded; docs/models.md has all of them.
        tasks: Names, separated by commas, such as hellaswag,lambada; perplexity, with --text.
        data: Folder with the files of the tasks (docs/evaluation.md has their names); null: they
            are downloaded once.
        text: Text file, or a prepared dataset, for perplexity.
        split: Split of a prepared dataset.
        stride: Tokens by which the window of perplexity moves; null: its whole length.
        limit: Number of items of each task, of windows for perplexity; null: all.
        batch_size: Texts per batch and process.
        device: Device of the model. auto: cuda, else mps, else cpu.
        dtype: dtype of matrix products. bf16 is faster and changes the last digits.
        out: JSON file for all numbers and the results of each item; it replaces
            one that eval wrote.
        network: Network of one's own with these weights (also --model.network), such as
            my_package.MyGPT; null: that of the run's config.yaml.
    """
    import torch  # --help must not wait for it

    from gpt_lightning.evaluate.scoring import Scorer
    from gpt_lightning.evaluate.tasks import Task, report, task_names
    from gpt_lightning.hardware.precision import DTYPES
    from gpt_lightning.runs.sources import open_model

    names = task_names(tasks)
    if (text is None) == ("perplexity" in names):
        raise UserError("--tasks perplexity and --text FILE belong together: give both, or neither")
    if out is not None and not is_report(Path(out)):
        new_path("--out", out)  # checked before the model is read
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world > 1 and (missing := [name for name in RENDEZVOUS if not os.environ.get(name)]):
        raise UserError(
            f"WORLD_SIZE is {world}, and {missing[0]} is not set: unset WORLD_SIZE, or start it "
            f"with `torchrun --nproc_per_node {world} -m gpt_lightning eval ...`"
        )
    source, model, tokenizer, kind = open_model(path, device, network)
    rank = int(os.environ.get("LOCAL_RANK") or 0)
    model.to(torch.device(kind, rank) if kind == "cuda" else kind)
    scorer = Scorer(model, tokenizer, batch_size, DTYPES[dtype].cast)
    todo = [Task(name, scorer, data, limit, text or "", split, stride) for name in names]
    if world > 1:
        torch.distributed.init_process_group("gloo")
    report(todo, f"{source}, {dtype} on {kind}", model.config, Path(out) if out else None)


def is_report(path: Path) -> bool:
    """Return whether a path is a file with results of `eval`, which later ones may replace."""
    head = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    return head.startswith(b'{"model": ') and b', "tasks": {' in head
