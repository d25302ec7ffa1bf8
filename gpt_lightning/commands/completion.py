"""The command `gpt-lightning completion`."""

from typing import Literal


def completion(shell: Literal["bash", "zsh"]) -> None:
    """Print a completion script for all commands.

    In bash, `eval "$(gpt-lightning completion bash)"` turns it on.

    Args:
        shell: Your shell.
    """
    import importlib

    from gpt_lightning.cli import COMMANDS
    from gpt_lightning.parsing import OneLineParser
    from gpt_lightning.training.fit import training_parser

    parser = training_parser()
    subcommands = parser._subcommands_action
    assert subcommands is not None
    for name, (address, text) in COMMANDS.items():
        module_name, function = address.split(":")
        if module_name == "gpt_lightning.training.fit":
            continue
        module = importlib.import_module(module_name)
        if function == "run":
            subparser = module.make_parser()
        else:
            subparser = OneLineParser(description=text)
            subparser.add_function_arguments(
                getattr(module, function), as_group=False, as_positional=True
            )
        subcommands.add_subcommand(name, subparser, help=text)
    print(parser.get_completion_script(f"shtab-{shell}"))
