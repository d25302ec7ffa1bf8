"""Write the types of the keyword arguments of GPTModule and TokenDataModule: `make stubs`.

An argument stands in one place, a field of a dataclass of settings. Type checkers read
training/keywords.pyi, and no program does.
"""

import dataclasses
import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gpt_lightning.data.settings import DataSettings
from gpt_lightning.runs.settings import Settings

STUB = Path(__file__).parent.parent / "gpt_lightning/training/keywords.pyi"
HEAD = '''"""Types of keyword arguments: `make stubs` writes them from dataclasses of settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict
'''


def name_of(kind: Any) -> str:
    """Return the type as a call may have it: a list in place of a tuple, any mapping."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " | ".join(map(name_of, args))
    if origin is Literal:
        words = ", ".join(f'"{word}"' for word in args)
        return f"Literal[{words}]"
    if origin is tuple:
        item = name_of(args[0])
        whole = ", ".join("..." if arg is Ellipsis else item for arg in args)
        return f"tuple[{whole}] | list[{item}]"
    if origin is dict:
        return f"Mapping[{', '.join(map(name_of, args))}]"
    # a number with bounds is derived from a plain one
    names = {type(None): "None", bool: "bool", int: "int", float: "float", str: "str"}
    return next(name for base, name in names.items() if issubclass(kind, base))


def stub() -> str:
    """Return the text of keywords.pyi."""
    text = HEAD
    for name, settings in {"ModelArguments": Settings, "DataArguments": DataSettings}.items():
        text += f"\nclass {name}(TypedDict, total=False):\n"
        hints = get_type_hints(settings)
        for field in dataclasses.fields(settings):
            found = name_of(hints[field.name])
            if settings is DataSettings:  # any of its words may be a path
                found = re.sub(r"^str", "str | Path", found)
            text += f"    {field.name}: {found}\n"
    return text


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
