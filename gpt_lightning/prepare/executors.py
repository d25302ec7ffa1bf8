"""Execution of units: in this process, in processes of this machine, or on a Ray cluster."""

import inspect
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from gpt_lightning.errors import UserError, optional
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
        yield from _ray(function, units)
    elif workers <= 1:  # this process suffices
        yield from ((unit, function(unit)) for unit in units)
    else:
        # spawn: a fork would copy the locks of threads in any state.
        context = multiprocessing.get_context("spawn")
        others = multiprocessing.active_children()
        pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
        try:
            yield from _completed({pool.submit(function, unit): unit for unit in units})
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


def _completed(futures: Mapping[Future[R], T]) -> Iterator[tuple[T, R]]:
    """Yield units and their results as they complete."""
    for future in as_completed(futures):
        yield futures[future], future.result()


def _begin_worker() -> None:
    """Make this worker end with its parent, also if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: end without a traceback
    parent = multiprocessing.parent_process()
    assert parent

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- Ray -----------------------------------------------------------------------------------------


def _ray(function: Callable[[T], R], units: Sequence[T]) -> Iterator[tuple[T, R]]:
    """Run units as tasks of one CPU each; all machines must see the same files."""
    ray = optional("ray", "ray")
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
        task = ray.remote(num_cpus=1, max_retries=3)(_caught).options(name="gpt_lightning.prepare")
        futures = {task.remote(function, unit).future(): unit for unit in units}
        for unit, (result, mistake) in _completed(futures):
            if mistake:
                raise UserError(mistake)
            yield unit, result
    except UserError:
        raise
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        last = str(error).strip().splitlines()[-1:]
        reason = " ".join([type(error).__name__, *last])
        fix = f"start one with `ray start --head`, or set RAY_ADDRESS to one; {AGAIN}"
        raise UserError(f"the Ray cluster at {address!r} failed ({reason}): {fix}") from error


def _caught(function: Callable[[T], R], unit: T) -> tuple[R | None, str | None]:
    """Return the result or a UserError's text: Ray would add a remote traceback to the error."""
    try:
        return function(unit), None
    except UserError as error:
        return None, str(error)
