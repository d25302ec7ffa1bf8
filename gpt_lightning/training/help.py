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
    parser = parser._subcommands_action._name_parser_map[command]
    actions = {a.dest: a for a in parser._actions if not a.dest.endswith(".help")}
    actions["ckpt_path"].help = BEGIN if command == "fit" else f"Evaluate {MODEL}."
    groups = {name: group for name, group in parser.groups.items() if name != command}
    trainer, *others = [name for name in groups if "." not in name]
    names = [*others, trainer]
    if section and section not in names:
        raise UserError(f"--help={section}: expected {', '.join(names)}{nearest(section, names)}")
    parser.usage = f"gpt-lightning {command} [--config NAME]... [--KEY VALUE]..."
    if section:
        parser._action_groups = [g for n, g in groups.items() if n.partition(".")[0] == section]
        return str(parser.format_help())
    width = shutil.get_terminal_size().columns
    lines = [f"usage: {parser.usage}", f"       gpt-lightning {command} --help=SECTION", ""]
    option = "data.batch_size 32" if command == "fit" else "ckpt_path lightning_logs/quickstart"
    lines += [f"example: gpt-lightning {command} --config quickstart --{option}", ""]
    for key in GENERAL:
        text = f"  --{key:<16} {' '.join(actions[key].help.split())}"
        lines.append(textwrap.fill(text, width, subsequent_indent=" " * 21))
    for name in names:
        lines += ["", f"--{name}.KEY: {groups[name].title} (--help={name})"]
        keys = [key for key in actions if key.startswith(f"{name}.") and key not in groups]
        short = [key.removeprefix(f"{name}.") for key in keys]
        if name == trainer:
            lines += [f"  {line}" for line in textwrap.wrap(", ".join(short), 76)]
        else:
            for k, a in zip(short, map(actions.__getitem__, keys), strict=True):
                default = "null" if a.default is None else a.default
                line = f"  {k:<22} {default!s:<9} {' '.join(a.help.split())}"
                cut = line[: width - 4].rsplit(" ", 1)[0] + " ..."
                lines.append(line if len(line) <= width else cut)
    return "\n".join(lines)
