"""The command `gpt-lightning import`: write a trained model as a checkpoint of this program."""

from importlib.metadata import version
from pathlib import Path

from jsonargparse.typing import PositiveInt

from gpt_lightning.errors import UserError
from gpt_lightning.parsing import plain_number


def import_model(
    source: str,
    out: str | None = None,
    block_size: PositiveInt | None = None,
    vocab_size: PositiveInt | None = None,
    dropout: float | None = None,
) -> None:
    """Write a trained GPT-2 as a checkpoint: to sample from, to evaluate, or for model.init_from.

    Args:
        source: gpt2, gpt2-medium, gpt2-large or gpt2-xl; a folder of Hugging Face, or a file
            .safetensors or .bin; ckpt.pt of nanoGPT; a checkpoint or run folder of `fit`.
        out: File to write, FILE.ckpt; it must be named.
        block_size: Context; null: the source's. A smaller one takes its first positions.
        vocab_size: Rows of the vocabulary; null: the source's. More rows, such as 50304, are the
            mean of the others.
        dropout: Dropout for a training; null: the source's.
    """
    if out is None:
        raise UserError("give --out FILE.ckpt: the file to write")
    path = Path(out)
    if path.suffix != ".ckpt" or path.exists():
        raise UserError(f"--out {out}: give the name of a new file that ends in .ckpt")

    from gpt_lightning.runs.checkpoint import RunRecord
    from gpt_lightning.runs.checkpoint_io import write_durable_checkpoint
    from gpt_lightning.runs.settings import Settings
    from gpt_lightning.runs.sources import read_source

    found = read_source(source, gpt_for="import")
    theirs = found.shape()
    if block_size is not None and block_size > theirs["block_size"]:
        raise UserError(
            f"--block_size {block_size} is above the {theirs['block_size']} positions of {source}: "
            "lower it, or leave it out"
        )
    if vocab_size is not None and vocab_size < theirs["vocab_size"]:
        raise UserError(
            f"--vocab_size {vocab_size} is below the {theirs['vocab_size']} rows of {source}: "
            "raise it, or leave it out"
        )
    changes = {"block_size": block_size, "vocab_size": vocab_size, "dropout": dropout}
    given = {key: plain_number(value) for key, value in changes.items() if value is not None}
    model = found.model(**given)
    record = RunRecord(
        config=model.config, settings=Settings(), tokenizer=found.tokenizer, figures=found.figures
    )
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoint = {"state_dict": weights, "global_step": found.figures.get("step", 0)}
    checkpoint["pytorch-lightning_version"] = version("lightning")
    record.write(checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durable_checkpoint(checkpoint, path)
    print(f"wrote       {path}: {model.num_params():,} parameters from {found.source}")
