"""Help of the training commands: a line for each key of ours, or the whole text of a section."""

import shutil
import textwrap
from typing import Any

from gpt_lightning.errors import UserError
from gpt_lightning.parsing import nearest

GENERAL = ("config", "run_name", "resume", "ckpt_path", "seed_everything", "print_config")
MODEL = "a checkpoint, or the best one of a run folder; a path or a URL"
BEGIN = f"Begin a new run with the weights, optimizer and step of {MODEL}."


def help_text(parser: Any, command: str, section: str) -> str:
    """Return the help of a command.

    Args:
        parser: Parser of the four training commands.
        command: fit, validate, test or predict.
        section: First word of keys, whose whole help is returned. Empty: a line for each key, and
            the names alone for Lightning's Trainer.

    Raises:
        UserError: There is no such section.
    """
    (parser,) = (a.choices[command] for a in parser._actions if isinstance(a.choices, dict))
    actions = {a.dest: a for a in parser._actions if not a.dest.endswith(".help")}
    groups = {name: group for name, group in parser.groups.items() if name != command}
    trainer, *others = [name for name in groups if "." not in name]
    names = [*others, trainer]
    if section and section not in names:
        raise UserError(f"--help={section}: expected {', '.join(names)}{nearest(section, names)}")
    width = shutil.get_terminal_size().columns
    usage = f"gpt-lightning {command} [--config NAME]... [--KEY VALUE]..."
    lines = [f"usage: {usage}", f"       gpt-lightning {command} --help=SECTION", ""]
    if not section:
        option = "data.batch_size 32" if command == "fit" else "ckpt_path lightning_logs/quickstart"
        lines += [f"example: gpt-lightning {command} --config quickstart --{option}", ""]
        actions["ckpt_path"].help = BEGIN if command == "fit" else f"Evaluate {MODEL}."
        for key in GENERAL:
            text = f"  --{key:<16} {' '.join(actions[key].help.split())}"
            lines.append(textwrap.fill(text, width, subsequent_indent=" " * 21))
    for name in [section] if section else names:
        lines += ["", f"--{name}.KEY: {groups[name].title} (--help={name})"]
        keys = [key for key in actions if key.startswith(f"{name}.") and key not in groups]
        if name == trainer and not section:
            short = ", ".join(key.removeprefix(f"{name}.") for key in keys)
            lines += [f"  {line}" for line in textwrap.wrap(short, 76)]
            continue
        for key in keys:
            default = "null" if actions[key].default is None else actions[key].default
            text = " ".join((actions[key].help or "").split())
            if section:
                indent = " " * 6
                lines += [
                    f"  --{key} (default: {default})",
                    textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent),
                ]
                continue
            line = f"  {key.removeprefix(f'{name}.'):<22} {default!s:<9} {text}"
            cut = line[: width - 4].rsplit(" ", 1)[0] + " ..."
            lines.append(line if len(line) <= width else cut)
    return "\n".join(lines)
