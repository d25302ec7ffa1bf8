"""The command `gpt-lightning completion`."""

from typing import Literal


def completion(shell: Literal["bash", "zsh"]) -> None:
    """Print a completion script for all commands.

    In bash, `eval "$(gpt-lightning completion bash)"` turns it on.

    Args:
        shell: Your shell.
    """
    from gpt_lightning.cli import COMMANDS, load_command
    from gpt_lightning.parsing import OneLineParser
    from gpt_lightning.training.fit import training_parser

    parser = training_parser()
    subcommands = parser._subcommands_action
    assert subcommands is not None
    for name, (address, text) in COMMANDS.items():
        if address == COMMANDS["fit"][0]:  # its subcommands are there
            continue
        module, function = load_command(name)
        if function == "run":
            subparser = module.make_parser()
        else:
            subparser = OneLineParser(description=text)
            subparser.add_function_arguments(
                getattr(module, function), as_group=False, as_positional=True
            )
        subcommands.add_subcommand(name, subparser, help=text)
    print(parser.get_completion_script(f"shtab-{shell}"))
