"""Process-wide settings of a run, which its end puts back."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# loggers whose messages the banner replaces, or that give advice that does not apply -> their level
LEVELS = {
    "lightning.pytorch.utilities.rank_zero": logging.WARNING,
    "lightning.fabric.utilities.seed": logging.WARNING,
    "lightning.fabric.utilities.distributed": logging.WARNING,
    # each rank would print that gloo has no all-to-all, which Muon in shards asks for
    "torch.distributed.tensor._collective_utils": logging.ERROR,
}
IGNORED = (
    "LightningCLI's args parameter",  # main() takes arguments so that tests can call it
    ".*does not have many workers",  # reading a memory map is not what a step waits for
    "The dirpath has changed",  # a resumed run has a folder of its own
    ".*LeafSpec.* is deprecated",  # Lightning's own use of PyTorch
    "Couldn't infer the batch indices",  # predict reads the split in order
    "You're using the WeightAveraging callback with a model",  # each rank has the whole model
    "Total length of `list` across ranks is zero",  # a dataset without a validation split
    r".*self\.log\('perf/tokens', \.\.\., sync_dist=True\)",  # the number is of all ranks
)


def quiet_lightning() -> None:
    """Silence messages that the banner replaces, and advice that does not apply."""
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    for message in IGNORED:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def quiet_process() -> Iterator[None]:
    """Silence what the banner replaces, and put back what a run has changed in this process.

    These are environment variables, signal handlers, the hook for errors in threads, levels of
    loggers, warning filters, and PyTorch's precision, determinism and benchmark flags.
    docs/architecture.md lists what has no way back.
    """
    variables, hook = dict(os.environ), threading.excepthook
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    levels = {name: logging.getLogger(name).level for name in LEVELS}
    products, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        quiet_lightning()
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            torch.set_float32_matmul_precision(products)
            torch.backends.cudnn.benchmark = benchmark
            torch.use_deterministic_algorithms(deterministic)
            threading.excepthook = hook
            for number, handler in handlers.items():
                if signal.getsignal(number) != handler is not None:  # None: not set by Python
                    signal.signal(number, handler)
            if os.environ != variables:
                os.environ.clear()
                os.environ.update(variables)
