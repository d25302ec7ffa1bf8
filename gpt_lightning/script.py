"""GPTCLI: the command line with classes of the user, for a script."""

import os
import shlex
import sys
from functools import partial
from typing import Any

from gpt_lightning import cli, parsing
from gpt_lightning.training import fit
from gpt_lightning.training.command import TrainingCLI
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule


class GPTCLI(TrainingCLI):
    """LightningCLI that trains a subclass of GPTModule, on a subclass of TokenDataModule.

    A script with it has all commands of `gpt-lightning`, with the subclass in fit, resume,
    validate, test and predict. An error is one line, and ends the script with exit code 2.

    Example:
        ```python
        if __name__ == "__main__":
            GPTCLI(MyModule)
        ```

    Args:
        model_class: Subclass of GPTModule, whose arguments are the keys model.*.
        datamodule_class: Subclass of TokenDataModule, whose arguments are the keys data.*.
        args: Arguments in place of those of the process, `fit` first. An error is raised then.
        settings: Further arguments of TrainingCLI.
    """

    def __init__(
        self,
        model_class: type[GPTModule] = GPTModule,
        datamodule_class: type[TokenDataModule] = TokenDataModule,
        args: list[str] | None = None,
        **settings: Any,
    ):
        init = super().__init__

        def start(argv: list[str]) -> None:
            init(model_class, datamodule_class, args=argv, **settings)

        if args is not None:
            start(args)
            return
        parsing.script = script_of_process()
        train = partial(fit.run, start=start)
        code = cli.main(run=partial(cli.dispatch, program=parsing.script, train=train))
        if code or not hasattr(self, "trainer"):  # another command, or help
            sys.exit(code)


def script_of_process() -> str:
    """Return the words that start this process's script again, such as python my.py."""
    module = sys.modules["__main__"].__spec__
    words = [os.path.relpath(sys.argv[0])]
    if module:
        words = ["-m", module.name.removesuffix(".__main__")]
    return f"{parsing.program('python')} {shlex.join(words)}"
