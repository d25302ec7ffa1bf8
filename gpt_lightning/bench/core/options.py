"""Options that benchmarks share: lists with commas, numbers with bounds, devices and sizes.

What is wrong with a value is told in one line that names its option.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser

Shape = tuple[int, int, int]  # layers, heads, width

# the systems course's table; the MLP is 4 times as wide
SIZES: dict[str, Shape] = {
    "small": (12, 12, 768),
    "medium": (24, 16, 1024),
    "large": (36, 20, 1280),
    "xl": (48, 25, 1600),
    "2.7B": (32, 32, 2560),
}
DTYPES = ("fp32", "tf32", "bf16", "fp16")
HEAD_WIDTH = 64  # GPT-2's


def option_of(name: str) -> str:
    """A name as it stands on the command line."""
    return "--" + name.replace("_", "-")


# ---- values --------------------------------------------------------------------------------------


def listed(args: Any, name: str, kind: Callable[[str], Any]) -> list[Any]:
    """The values of an option with commas, each one once.

    Args:
        args: What the parser found.
        name: Of the option, with underscores.
        kind: Makes a value of a text, or raises ValueError.

    Raises:
        UserError: one of them is no such value.
    """
    text = getattr(args, name)
    try:
        return list(dict.fromkeys(kind(part.strip()) for part in text.split(",")))
    except ValueError as error:
        raise UserError(f"{option_of(name)} is {text!r}: {error}") from error


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """A kind for `listed`: one of a few words."""

    def choice(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return choice


def switch(text: str) -> bool:
    """A kind for `listed`: true or false."""
    return {"true": True, "false": False}[one_of(("true", "false"))(text)]


def at_least(least: int) -> Callable[[str], int]:
    """A kind for `listed`: a whole number with a bound."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is no whole number") from None
        if value < least:
            raise ValueError(f"{text} is below {least}")
        return value

    return number


def check_bounds(args: Any, **bounds: int) -> None:
    """Refuses numbers that are too small.

    Args:
        args: What the parser found.
        bounds: The least value of each option, by its name with underscores; None passes.

    Raises:
        UserError: names the option, its value and the bound.
    """
    for name, least in bounds.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"{option_of(name)} is {value}; it must be at least {least}")


def check_positive(args: Any, name: str) -> None:
    """Refuses a number that is not above 0; None is none.

    Raises:
        UserError: names the option and its value.
    """
    value = getattr(args, name)
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise UserError(f"{option_of(name)} is {value}; it must be above 0")


def devices(args: Any) -> list[str]:
    """The devices of --device, auto resolved.

    Raises:
        UserError: one that is not there.
    """
    from gpt_lightning.hardware.device import default_device
    from gpt_lightning.hardware.precision import check_accelerator

    names = listed(args, "device", one_of(("auto", "cpu", "mps", "cuda")))
    for name in names:
        check_accelerator(name, "32-true", "--device")
    return list(dict.fromkeys(default_device() if name == "auto" else name for name in names))


# ---- sizes of GPT-2s -----------------------------------------------------------------------------


def add_size_arguments(parser: OneLineParser) -> None:
    """--sizes, and the three numbers of a size of one's own."""
    parser.add_argument("--sizes", default="small", help=f"With commas, of {', '.join(SIZES)}.")
    parser.add_argument(
        "--n_layer", type=int | None, default=None, help="A size of your own instead: its layers."
    )
    parser.add_argument(
        "--n_head",
        type=int | None,
        default=None,
        help=f"Its heads; null: as many as {HEAD_WIDTH} wide ones make the width.",
    )
    parser.add_argument("--d_model", type=int | None, default=None, help="Its width.")


def chosen_sizes(args: Any) -> dict[str, Shape]:
    """Name -> shape: those of --sizes, or the one of --n-layer, --n-head and --d-model.

    What is not given of the three is as in the size small, heads are GPT-2's.

    Raises:
        UserError: a number is too small, or the width is no multiple of the heads.
    """
    given = [name for name in ("n_layer", "n_head", "d_model") if getattr(args, name) is not None]
    if not given:
        return {name: SIZES[name] for name in listed(args, "sizes", one_of(list(SIZES)))}
    check_bounds(args, **dict.fromkeys(given, 1))
    n_layer, _, small_width = SIZES["small"]
    n_layer = args.n_layer or n_layer
    d_model = args.d_model or small_width
    n_head = args.n_head or max(1, d_model // HEAD_WIDTH)
    if d_model % n_head:
        raise UserError(
            f"--d-model {d_model} is not divisible by {n_head} heads: "
            "give another --n-head or --d-model"
        )
    return {f"{n_layer}/{n_head}/{d_model}": (n_layer, n_head, d_model)}
