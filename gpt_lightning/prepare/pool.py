"""Execution of units: in this process, in processes of this machine, or on a Ray cluster."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from gpt_lightning.errors import UserError, one_line, optional
from gpt_lightning.prepare.settings import Settings

AGAIN = "run the same command again: it continues from the completed parts"
T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Return the number of cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def run_all(function: Callable[[T], R], units: Sequence[T], settings: Settings) -> Iterator[R]:
    """Run a pure, picklable function on all units; yield the results in order.

    Raises:
        UserError: The function raised it, a worker was killed, or there is no Ray.
    """
    workers = min(settings.workers or cores(), len(units))
    if settings.executor == "ray":
        yield from _on_ray(function, units)
    elif workers <= 1:
        yield from map(function, units)
    else:
        yield from _in_processes(function, units, workers)


def _in_processes(function: Callable[[T], R], units: Sequence[T], workers: int) -> Iterator[R]:
    # spawn: a fork would copy the locks of threads in any state.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
    try:
        yield from pool.map(function, units)
    except BrokenProcessPool as error:
        reason = f"one of {workers} worker processes was killed, perhaps for lack of memory"
        raise UserError(f"{reason}: try fewer --workers; {AGAIN}") from error
    except BaseException:
        # Do not wait: a unit may take minutes, and an incomplete unit is not used.
        for child in set(multiprocessing.active_children()).difference(others):
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def check_main_guard() -> None:
    """Raise a UserError in a worker that imports a script, which calls prepare a second time."""
    main = sys.modules["__main__"]
    if sys.modules.get("__mp_main__", main) is not main:  # spawn replaces it after the import
        fix = 'put the call below `if __name__ == "__main__":`'
        raise UserError(f"a worker process imports the script that calls prepare: {fix}")


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: end without a traceback
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent ends, also if that is killed."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
    os._exit(1)


def _on_ray(function: Callable[[T], R], units: Sequence[T]) -> Iterator[R]:
    """Run units in a pool of a Ray cluster; all machines must see the same files."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    ray = optional("ray.util.multiprocessing", "ray")
    try:
        with ray.Pool(ray_address=address) as pool:
            for result in pool.imap(function, units):
                if isinstance(result, Exception):  # Ray returns it in an exception of its own
                    raise getattr(result, "underlying", result)
                yield result
    except (ConnectionError, RuntimeError) as error:
        reason = f"{type(error).__name__} {one_line(error)}"
        fix = f"start one with `ray start --head`, or set RAY_ADDRESS to one; {AGAIN}"
        raise UserError(f"the Ray cluster at {address!r} failed ({reason}): {fix}") from error
