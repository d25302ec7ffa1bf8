"""Command line: the commands of cli.yaml, and error messages of one line."""

import contextlib
import importlib
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpt_lightning import __version__, errors
from gpt_lightning.errors import MemoryExhaustedError, PeerError, UserError
from gpt_lightning.files import yaml_beside
from gpt_lightning.output import Output, open_closed_streams, use_output

DEBUG = "GPT_LIGHTNING_DEBUG"
# environment variables that PyTorch and Lightning read as numbers
NUMBERS = (
    *("OMP_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"),
    *("SLURM_LOCALID", "SLURM_PROCID", "SLURM_NTASKS"),
)

# PyTorch reads one of these variables; the user's wins
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class Command(NamedTuple):
    """Command of cli.yaml, which describes the fields."""

    text: str
    address: str = ""
    prints: bool = False


TRAINING = "training.fit:run"
TABLES = yaml_beside(__file__)
COMMANDS = {name: Command(**row) for name, row in TABLES["commands"].items()}


def usage(program: str = "gpt-lightning") -> str:
    """Return the text of `gpt-lightning --help`, or of a script with GPTCLI."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, (text, *_) in COMMANDS.items())
    return f"""usage: {program} COMMAND [options]

commands:
{commands}

{program} COMMAND --help explains a command."""


def main(argv: Sequence[str] | None = None, run: Callable[[list[str]], int] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments; None: those of the process.
        run: Another program, such as an experiment's: function from its arguments to its exit code.

    Returns:
        Exit code: 0; 1 for a defect; 2 for a user error or out-of-memory; 75 if another rank has
        failed or rows of a bench are left; 128 + the number of a signal. A failure prints one line
        on standard error. GPT_LIGHTNING_DEBUG=1 adds the traceback.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # Threads of GNU OpenMP, PyTorch's on Linux, spin while they wait for each other, which slows a
    # step down on a busy machine (benchmarks/shakespeare_char_cpu.md). The limit must be set before
    # torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
    # Segments that grow waste less of a GPU's memory between tensors of different sizes, so that a
    # larger batch fits (docs/memory.md). CUDA's allocator reads this when it starts.
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    before, threading.excepthook = threading.excepthook, print_thread_error
    try:
        open_closed_streams()
        code = exit_code(argv, run or dispatch)
        if Output.lost and not code and not Output.of_run:
            return exit_without_output(argv, Output.lost)
        return code
    finally:
        threading.excepthook = before


def prints_only(argv: list[str]) -> bool:
    """Return whether a command does nothing but print."""
    first = argv[0] if argv else "help"
    prints = first in ("--version", "help") or (first in COMMANDS and COMMANDS[first].prints)
    writes = argv[1:2] == ["verify"] or any(arg.startswith("--out") for arg in argv)
    return (prints and not writes) or any(
        arg in ("-h", "--help", "--list") or arg.startswith(("--help=", "--print_config"))
        for arg in argv
    )


def exit_without_output(argv: list[str], error: OSError) -> int:
    """Return the exit code of a command whose standard output is lost."""
    if isinstance(error, BrokenPipeError):  # the reader has seen enough
        return 0 if prints_only(argv) else 128 + signal.SIGPIPE
    return print_error(UserError(f"cannot write standard output: {error.strerror}"))


def exit_code(argv: list[str], run: Callable[[list[str]], int]) -> int:
    """Call a program, print its error as one line, and return the exit code."""
    training = argv[:1] and argv[0] in COMMANDS and COMMANDS[argv[0]].address == TRAINING
    use_output(of_run=bool(training) and not prints_only(argv))
    try:
        check_environment(argv)
        # training has StopSignals, and before it nothing to clean up
        with contextlib.nullcontext() if training else errors.termination_as_exit():
            code = run(argv)
        sys.stdout.flush()
        return code
    except (SystemExit, KeyboardInterrupt) as end:
        if type(end).__name__ == "SIGTERMException":  # Lightning's, without a code
            return 128 + signal.SIGTERM
        # Lightning cleans up after Ctrl-C and calls exit(1)
        if isinstance(end, SystemExit) and not isinstance(end.__context__, KeyboardInterrupt):
            if isinstance(end.code, str):  # sys.exit("reason") of a callback
                print(f"error: {end.code}", file=sys.stderr)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        if not local_rank():  # a terminal interrupts all ranks
            print("error: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if Output.lost and not Output.of_run:
            return exit_without_output(argv, Output.lost)
        if os.environ.get(DEBUG) == "1":
            raise
        return print_error(error)


def check_environment(argv: list[str]) -> None:
    """Check the system, the encoding of names, and environment variables that are numbers.

    Raises:
        UserError: Windows, letters that the locale does not have, or a variable that is no number.
    """
    if os.name == "nt":
        raise UserError("Windows itself is not supported: use WSL")
    if sys.getfilesystemencoding() == "ascii" and not "".join(argv).isascii():
        raise UserError("the locale is ASCII, and an argument is not: set PYTHONUTF8=1")
    for name in NUMBERS:
        digits = r"\s*\d[\d,]*\s*|\s*" if name == "OMP_NUM_THREADS" else r"\s*\d+\s*|"
        if not re.fullmatch(digits, os.environ.get(name, "")):
            raise UserError(f"{name} is {os.environ.pop(name)!r}; expected a number: unset it")


def local_rank() -> int:
    """Return this process's number among those of a run on this machine."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def print_error(error: Exception) -> int:
    """Print an exception as one line and return its exit code."""
    if local_rank():  # rank 0 ends this process meanwhile if it has the same error, printed once
        time.sleep(3 + min(local_rank() / 2, 1))  # all ranks of a machine end within 10 s
    # the message of a data loader's worker is a traceback, with the UserError at its end
    text = errors.one_line(re.split(r"(?:User|Outage)Error: ", str(error))[-1])
    code = 2
    if isinstance(error, UserError | MemoryExhaustedError | PeerError):
        code = error.exit_code
    elif isinstance(error, OSError) and error.filename is not None:
        fix = "check the name, its permissions and the disk's space"
        text = f"{error.filename}: {error.strerror}; {fix}"
    elif errors.is_out_of_memory(error):
        text = f"not enough memory, lower the sizes: {text}"
    else:
        kind = f"{type(error).__name__}: "
        code, where = place_of(error)
        text = f"{where}{kind}{text.rpartition(kind)[2]} ({DEBUG}=1 shows the traceback)"
    print(f"error: {text}", file=sys.stderr)
    return code


def place_of(error: Exception) -> tuple[int, str]:
    """Return the exit code of an exception, and the line of the user's code that has raised it.

    Libraries that the line has called do not count. Without such a line the code is 1, or 2 for
    what Lightning raises about the user's classes.
    """
    # the message of a worker's error is its traceback
    text = "".join(traceback.format_tb(error.__traceback__)) + str(error)
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)\n +(raise )?', text)
    for file, line, function, _ in reversed(frames):
        if file.startswith(os.path.dirname(__file__)):
            break
        if not ("-packages" in file or file.startswith((sysconfig.get_path("stdlib"), "<"))):
            return 2, f"{min(os.path.relpath(file), file, key=len)}:{line}, in {function}: "
    *_, (file, *_, raises) = frames
    return 2 if raises and "/lightning/pytorch/" in file else 1, ""


def print_thread_error(args: threading.ExceptHookArgs) -> None:
    """Print a thread's exception, such as TensorBoard's on a full disk, as one line.

    The run continues.
    """
    if os.environ.get(DEBUG) == "1":
        threading.__excepthook__(args)
    elif args.exc_value:
        text = errors.one_line(args.exc_value)
        errors.warn(f"{args.exc_type.__name__} in a thread: {text}")


def dispatch(
    argv: list[str],
    program: str = "gpt-lightning",
    train: Callable[[list[str]], None] | None = None,
) -> int:
    """Find the command, call it, and return the exit code.

    Args:
        argv: Arguments, the command first.
        program: Words that start this program.
        train: Function that runs a command of training; None: ours.
    """
    if not argv:
        print(usage(program), file=sys.stderr)
        return 2
    name, rest = argv[0], argv[1:]
    help_asked = name in ("-h", "--help", "help")
    if help_asked and rest:
        return dispatch([rest[0], "--help", *rest[1:]], program, train)
    if help_asked or name in ("--version", "-V", "version"):
        print(usage(program) if help_asked else f"gpt-lightning {__version__}")
        return 0
    if name not in COMMANDS:
        from gpt_lightning.hints import hint_at

        hint = hint_at(name.lower(), list(COMMANDS))
        raise UserError(f"no command {name!r}{hint}; gpt-lightning --help lists them")
    for before, arg in zip(argv, rest, strict=False):  # no value of the option before
        if re.fullmatch(r"-[A-Za-z_]{2,}[\w.-]*", arg) and not re.match("--[^=]+$", before):
            raise UserError(f"unknown argument {arg!r}: write -{arg}, or ./{arg} for a file")
    trains = COMMANDS[name].address == TRAINING and not prints_only(argv)
    if trains and "lightning" not in sys.modules and not local_rank():  # 3 s and more
        print(f"gpt-lightning {__version__}: loading PyTorch and Lightning", flush=True)
    if train and COMMANDS[name].address == TRAINING:
        train(argv)
        return 0
    address, function = (COMMANDS[name].address or f"commands.{name}:{name}").split(":")
    module = importlib.import_module(f"gpt_lightning.{address}")
    if function == "run":  # it parses its own arguments
        return module.run(argv) or 0
    return run_function(name, getattr(module, function), rest)


def run_function(name: str, function: Callable[..., int | None], args: list[str]) -> int:
    """Call a function with arguments from the command line. Its docstring is the help."""
    from jsonargparse import auto_cli

    from gpt_lightning.parsing import (
        OneLineParser,
        files_first,
        resolve_configs,
        typed_arguments,
    )

    # the option's names in `fit`
    args = [re.sub(r"^--model\.network(\.class_path)?\b", "--network", arg) for arg in args]
    args = resolve_configs(files_first(typed_arguments(function, args)))
    prog = f"gpt-lightning {name}"
    return auto_cli(function, args=args, parser_class=OneLineParser, prog=prog) or 0
