"""The command line: a table of commands, and one line for every mistake."""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence

from gpt_lightning import __version__
from gpt_lightning.errors import MemoryExhaustedError, UserError

DEBUG = "GPT_LIGHTNING_DEBUG"

# name -> (where it is, what --help says). Nothing is imported before it is asked for.
COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("gpt_lightning.training.fit:run", "train a model: --config configs/quickstart.yaml"),
    "validate": ("gpt_lightning.training.fit:run", "loss of a checkpoint on the validation split"),
    "test": ("gpt_lightning.training.fit:run", "loss of a checkpoint on the test split"),
    "predict": (
        "gpt_lightning.training.fit:run",
        "loss of each token of the validation split, to a file",
    ),
    "prepare": ("gpt_lightning.prepare.command:prepare", "turn a text into shards of tokens"),
    "verify": ("gpt_lightning.data.verify:verify", "every byte of a dataset against its digests"),
    "data": ("gpt_lightning.commands.inspect_data:run", "look into a dataset: data inspect DIR"),
    "sample": ("gpt_lightning.commands.sample:sample", "write text with a trained model"),
    "reproduce": (
        "gpt_lightning.reproduce.command:run",
        "published tables beside ours, row by row: --list",
    ),
    "bench": ("gpt_lightning.bench.command:run", "measure this machine: bench --help"),
    "checkpoint": (
        "gpt_lightning.commands.checkpoint:run",
        "inspect or verify checkpoints: checkpoint --help",
    ),
    "doctor": (
        "gpt_lightning.commands.check_resume:run",
        "check this machine: doctor --resume --config FILE",
    ),
    "completion": (
        "gpt_lightning.commands.completion:completion",
        "a completion script for your shell",
    ),
}


def usage() -> str:
    """What `gpt-lightning --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: gpt-lightning COMMAND [options]",
            "",
            "commands:",
            *lines,
            "",
            "gpt-lightning COMMAND --help explains one.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        Exit code: 0, or 2 for a mistake that the user can mend or a want of memory, 1 for a defect,
        130 for Ctrl-C. Failures leave one line on standard error, and a traceback only if
        GPT_LIGHTNING_DEBUG=1.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # Threads of GNU OpenMP, PyTorch's on Linux, spin while they wait for each other. On two cores
    # with one busy that made a step 230 ms instead of 60; at this count 130, and 61 on an idle
    # machine. It must be there before torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    threading.excepthook = complain_of_thread
    try:
        return dispatch(argv)
    except SystemExit as exit_:  # --help and the like
        if isinstance(exit_.__context__, KeyboardInterrupt):  # Lightning tidied up and said exit(1)
            return interrupted()
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get(DEBUG) == "1":
            raise
        return complain(error)


def interrupted() -> int:
    """What Ctrl-C leaves behind."""
    print("error: interrupted", file=sys.stderr)
    return 130


def complain(error: Exception) -> int:
    """Prints the line and returns the exit code that an exception deserves."""
    # a loader's worker hands its whole traceback on; the line is at its end
    text = " ".join(str(error).rpartition("UserError: ")[2].split())
    if isinstance(error, UserError | MemoryExhaustedError):
        print(f"error: {text}", file=sys.stderr)
        return 2
    if isinstance(error, OSError) and error.filename is not None:
        advice = "check its permissions and the disk's space"
        print(f"error: {error.filename}: {error.strerror}; {advice}", file=sys.stderr)
        return 2
    print(f"error: {type(error).__name__}: {text} ({DEBUG}=1 shows the traceback)", file=sys.stderr)
    return 1


def complain_of_thread(args: threading.ExceptHookArgs) -> None:
    """One line for what ends a thread, such as TensorBoard's on a full disk; the run goes on."""
    if os.environ.get(DEBUG) == "1":
        threading.__excepthook__(args)
    elif args.exc_value is not None:
        text = " ".join(str(args.exc_value).split())
        print(f"warning: {args.exc_type.__name__} in a thread: {text}", file=sys.stderr)


def dispatch(argv: list[str]) -> int:
    """Finds the command and calls it; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(f"gpt-lightning {__version__}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        from gpt_lightning.parsing import nearest

        raise UserError(
            f"no command {name!r}{nearest(name, COMMANDS)}; gpt-lightning --help lists them"
        )
    module, function = COMMANDS[name][0].split(":")
    command = getattr(importlib.import_module(module), function)
    if function == "run":  # parses by itself
        return command(argv) or 0
    run_function(name, command, argv[1:])
    return 0


def run_function(name: str, function: Callable[..., None], args: list[str]) -> None:
    """Calls a plain function with arguments from the command line; its docstring is its help."""
    from jsonargparse import auto_cli

    from gpt_lightning.parsing import OneLineParser, check_config_files, underscored

    args = underscored(args)
    check_config_files(args)
    auto_cli(
        function,
        args=args,
        parser_class=OneLineParser,
        prog=f"gpt-lightning {name}",
        allow_abbrev=False,
    )
