"""Options of benchmarks: a bench declares them, and the driver parses and multiplies them.

An option fills fields of the configurations that a sweep measures. An option with several values
is an axis: each value is another configuration. Errors are one line that names the option.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import device_kind
from gpt_lightning.hardware.precision import check_accelerator
from gpt_lightning.parsing import nearest
from gpt_lightning.tables.rows import Values

T = TypeVar("T")
Convert = Callable[[str], T]  # text -> value; raises ValueError for a text that is none

PositiveFinite = restricted_number_type("PositiveFinite", float, [(">", 0), ("<", math.inf)])


@dataclass(frozen=True)
class Option:
    """An option of a bench.

    Attributes:
        name: Name on the command line, with underscores.
        default: Default value.
        help: Help text.
        read: Function from all parsed arguments to the fields that the option fills, one mapping
            for each value. It raises UserError for a value that cannot be. By default the option
            fills no field: another one reads its value.
        type: Type of the value; None: the text as it is; bool: a switch without a value.
        alias: Second name on the command line.
    """

    name: str
    default: object
    help: str
    read: Callable[[Namespace], list[Values]] = lambda args: [{}]
    type: object = None
    alias: str = ""


# ---- values --------------------------------------------------------------------------------------


def listed(args: Namespace, name: str, kind: Convert[T]) -> list[T]:
    """Return the comma-separated values of an option, each value once.

    Args:
        args: Parsed arguments.
        name: Name of the option, with underscores.
        kind: Converter of a text to a value.

    Raises:
        UserError: The converter raised ValueError.
    """
    text = args[name]
    try:
        return list(dict.fromkeys(kind(part.strip()) for part in text.split(",")))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--{name.replace('_', '-')} is {text!r}: {error}") from error


def one_of(choices: Iterable[str]) -> Convert[str]:
    """Return a converter that accepts a few words."""
    known = list(choices)

    def choice(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text!r} is none of {', '.join(known)}{nearest(text, known)}")
        return text

    return choice


def switch(text: str) -> bool:
    """Convert true or false."""
    return one_of(("true", "false"))(text) == "true"


def at_least(least: int) -> Convert[int]:
    """Return a converter to whole numbers that are not below a bound."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return number


def device(text: str) -> str:
    """Convert the name of a device, with auto resolved.

    Raises:
        UserError: This machine has no such device.
    """
    check_accelerator(one_of(("auto", "cpu", "mps", "cuda"))(text), "--device")
    return device_kind(text)


# ---- options that benchmarks share ---------------------------------------------------------------


def axis(
    name: str, field: str, default: str, kind: Convert[object], about: str, alias: str = ""
) -> Option:
    """Declare an option with comma-separated values.

    Args:
        name: Name of the option.
        field: Field of a configuration that a value fills.
        default: Default values.
        kind: Converter of a text to a value.
        about: Help text.
        alias: Second name of the option.
    """
    return Option(
        name,
        default,
        about,
        lambda args: [{field: value} for value in listed(args, name, kind)],
        alias=alias,
    )


def words(name: str, field: str, choices: Iterable[str], default: str | None = None) -> Option:
    """Declare an option with comma-separated words, by default all of them."""
    known = ",".join(choices)
    about = f"Any of {known.replace(',', ', ')}."
    return axis(name, field, default or known, one_of(choices), about)


def numbers(name: str, field: str, default: str, about: str, least: int = 1) -> Option:
    """Declare an option with comma-separated whole numbers."""
    return axis(name, field, default, at_least(least), f"{about}, separated by commas.")


def shared(name: str, default: object, about: str, kind: object = PositiveInt) -> Option:
    """Declare an option whose one value all configurations share, by default a whole number."""
    return Option(name, default, about, lambda args: [{name: args[name]}], kind)


def optional(name: str, about: str, kind: type = PositiveInt) -> Option:
    """Declare an option that is null by default and that fills no field."""
    return Option(name, None, about, type=kind | None)


def dtypes(default: str, choices: Sequence[str] = ("fp32", "tf32", "bf16", "fp16")) -> Option:
    """Declare --dtypes."""
    return words("dtypes", "dtype", choices, default)


def switches(name: str, default: str, about: str) -> Option:
    """Declare an option that is true, false, or both."""
    return axis(name, name, default, switch, f"{about}: true, false, or both with a comma.")


sizes = partial(words, "sizes", "size")
batches = partial(numbers, "batches", "batch", about="Sequences per batch")
contexts = partial(numbers, "contexts", "context", about="Tokens per sequence")
warmup = partial(shared, "warmup", about="Steps before the measured ones.", kind=NonNegativeInt)
steps = partial(shared, "steps", about="Measured steps per row.")
DEVICE = axis(
    "device", "device", "auto", device, "Any of cpu, mps, cuda and auto, separated by commas."
)
MEMORY_LIMIT = shared(
    "memory_gib",
    None,
    "Memory limit of a row on a CPU, in GiB; a row that needs more is out of memory. "
    "null: the machine's memory.",
    PositiveFinite | None,
)
