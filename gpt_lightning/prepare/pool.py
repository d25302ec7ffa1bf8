"""Execution of units: in this process, in processes of this machine, or on a Ray cluster."""

import functools
import inspect
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from gpt_lightning.errors import UserError, one_line, optional
from gpt_lightning.prepare.settings import Settings

AGAIN = "run the same command again: it continues from the completed parts"
T = TypeVar("T")
R = TypeVar("R")


def run_all(
    function: Callable[[T], R], units: Sequence[T], settings: Settings
) -> Iterator[tuple[T, R]]:
    """Run a pure, picklable function on all units; yield units and results as they complete.

    Raises:
        UserError: The function raised it, a worker was killed, or there is no Ray.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    workers = min(settings.workers or cores, len(units))
    if settings.executor == "ray":
        yield from _on_ray(function, units)
    elif workers <= 1:  # this process suffices
        for unit in units:
            yield unit, function(unit)
    else:
        yield from _in_processes(function, units, workers)


def _in_processes(
    function: Callable[[T], R], units: Sequence[T], workers: int
) -> Iterator[tuple[T, R]]:
    # spawn: a fork would copy the locks of threads in any state.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
    try:
        futures = {pool.submit(function, unit): unit for unit in units}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        reason = f"one of {workers} worker processes was killed, perhaps for lack of memory"
        raise UserError(f"{reason}: try fewer --workers; {AGAIN}") from error
    except BaseException:
        # Do not wait: a unit may take minutes, and an incomplete part is not used.
        for child in set(multiprocessing.active_children()).difference(others):
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def check_main_guard() -> None:
    """Raise a UserError in a worker that imports a script, which calls prepare a second time."""
    for call in inspect.stack(0):
        if call.function == "<module>" and call.frame.f_globals.get("__name__") == "__mp_main__":
            fix = 'put the call below `if __name__ == "__main__":`'
            raise UserError(f"a worker process imports the script that calls prepare: {fix}")


def _begin_worker() -> None:
    """Make this worker end with its parent, also if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: end without a traceback
    parent = multiprocessing.parent_process()
    assert parent

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _on_ray(function: Callable[[T], R], units: Sequence[T]) -> Iterator[tuple[T, R]]:
    """Run units in a pool of a Ray cluster; all machines must see the same files."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    ray = optional("ray", "ray")
    ray_pool = optional("ray.util.multiprocessing", "ray")
    try:
        with ray_pool.Pool(ray_address=address) as pool:
            done = pool.imap_unordered(functools.partial(_caught, function), units)
            for unit, result, mistake in done:
                if mistake:  # Ray would add a remote traceback to the error
                    raise UserError(mistake)
                yield unit, result
    except UserError:
        raise
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = f"{type(error).__name__} {one_line(error)}"
        fix = f"start one with `ray start --head`, or set RAY_ADDRESS to one; {AGAIN}"
        raise UserError(f"the Ray cluster at {address!r} failed ({reason}): {fix}") from error


def _caught(function: Callable[[T], R], unit: T) -> tuple[T, R | None, str]:
    """Return a unit, its result, and the text of a UserError."""
    try:
        return unit, function(unit), ""
    except UserError as error:
        return unit, None, str(error)
