"""Models that benches measure: sizes.yaml, the options that choose them, and how they are made."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from gpt_lightning.bench.course_model import CourseModel
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.tables.options import (
    Option,
    at_least,
    listed,
    one_of,
    optional,
    words,
)
from gpt_lightning.tables.rows import Values

TABLE = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text(encoding="utf-8"))
SHAPES: dict[str, list[int]] = TABLE["shapes"]  # layers, heads, width
COURSE_SIZES: list[str] = TABLE["course"]
GPU_SIZES: list[str] = TABLE["gpu"]
MODELS = ("gpt2", "course")  # the course's model is course_model.py
HEAD_WIDTH = 64  # GPT-2's
VOCABULARY = 10_000  # the systems course's

MODEL = words("model", "model", MODELS, "gpt2")


def make_config(shape: list[int], context: int, vocab_size: int = VOCABULARY) -> GPTConfig:
    """Return the configuration of a model of (layers, heads, width)."""
    n_layer, n_head, n_embd = shape
    return GPTConfig(n_layer, n_head, n_embd, block_size=context, vocab_size=vocab_size)


def make_model(model: str, shape: list[int], context: int) -> GPT | CourseModel:
    """Make one of MODELS, of (layers, heads, width)."""
    config = make_config(shape, context)
    return GPT(config) if model == "gpt2" else CourseModel(config)


def checkpoint_groups(model: GPT | CourseModel, blocks: int) -> None:
    """Keep only the input of each group of so many blocks, and recompute the group."""
    transformer = model.transformer
    h = list(transformer.h)
    groups = [nn.Sequential(*h[i : i + blocks]) for i in range(0, len(h), blocks)]
    transformer.h = nn.ModuleList(groups)
    transformer.checkpointing = True


# ---- options -------------------------------------------------------------------------------------


def read_sizes(args: Any, names: Iterable[str] = COURSE_SIZES) -> list[Values]:
    """Return the sizes of --sizes with their shapes."""
    return [{"size": name, "shape": SHAPES[name]} for name in listed(args, "sizes", one_of(names))]


def named_sizes(names: Iterable[str], default: str) -> Option:
    """Declare --sizes, which fills `size` and `shape`."""
    known = list(names)
    about = f"Any of {', '.join(known)}."
    return Option("sizes", default, about, lambda args: read_sizes(args, known))


def layers_and_width(text: str) -> tuple[int, int]:
    """Convert LAYERSxWIDTH."""
    layers, x, width = text.partition("x")
    if not x:
        raise ValueError(f"{text!r} is not LAYERSxWIDTH, such as 4x512")
    return at_least(1)(layers), at_least(1)(width)


def course_or_own_sizes(args: Any) -> list[Values]:
    """Return the sizes of --shapes, the one of --n-layer, --n-head and --d-model, or --sizes.

    Missing values of the three default to those of `small`; heads are HEAD_WIDTH wide.

    Raises:
        UserError: The width is not a multiple of the heads, or the course's heads have an odd
            number of channels, which RoPE cannot rotate in pairs.
    """
    single = args.n_layer is not None or args.d_model is not None
    if args.shapes is not None and single:
        raise UserError("give --shapes, or --n-layer and --d-model, not both")
    if not (args.shapes or single or args.n_head):
        return read_sizes(args)
    small_layers, _, small_width = SHAPES["small"]
    one = (args.n_layer or small_layers, args.d_model or small_width)
    found = []
    for n_layer, d_model in listed(args, "shapes", layers_and_width) if args.shapes else [one]:
        n_head = args.n_head or max(1, d_model // HEAD_WIDTH)
        if d_model % n_head:
            raise UserError(
                f"a width of {d_model} is not divisible by {n_head} heads: "
                "give another --n-head or width"
            )
        if "course" in args.model.split(",") and d_model // n_head % 2:
            raise UserError(
                f"{n_head} heads of a width of {d_model} have an odd number of channels, and RoPE "
                "rotates pairs: give another --n-head or width"
            )
        found.append({"size": f"{n_layer}/{n_head}/{d_model}", "shape": [n_layer, n_head, d_model]})
    return found


SIZES = (
    MODEL,
    Option("sizes", "small", f"Any of {', '.join(COURSE_SIZES)}.", course_or_own_sizes),
    optional("shapes", "Custom sizes, LAYERSxWIDTH: 4x512,16x1024.", str),
    optional("n_layer", "Number of layers of a custom size, instead of --sizes."),
    optional("n_head", f"Number of heads of the custom size; null: d_model / {HEAD_WIDTH}."),
    optional("d_model", "Width of the custom size."),
)
