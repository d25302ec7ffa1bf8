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
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from jsonargparse.typing import NonNegativeInt, PositiveInt

from gpt_lightning.errors import UserError
from gpt_lightning.parsing import checked

RAY_ADDRESS = "RAY_ADDRESS"
T = TypeVar("T")
R = TypeVar("R")


@checked("")
@dataclass(frozen=True)
class Execution:
    """Distribution of the work; it decides no byte of the result.

    Attributes:
        workers: Processes of this machine; None: one per core.
        executor: process or ray.
        shard_index: Number of this job in an array of jobs; None: no array.
        shard_count: Number of jobs in the array.
        merge: True to assemble the parts of an array's jobs.

    Raises:
        UserError: A number is out of bounds, or two arguments contradict each other.
    """

    workers: PositiveInt | None = None
    executor: Literal["process", "ray"] = "process"
    shard_index: NonNegativeInt | None = None
    shard_count: PositiveInt | None = None
    merge: bool = False

    def __post_init__(self) -> None:
        if self.shard_index is None:
            return
        if self.merge:
            raise UserError("shard_index and merge were both given: merge after all jobs, alone")
        if self.shard_count is None or self.shard_index >= self.shard_count:
            raise UserError(
                f"shard_index is {self.shard_index} and shard_count "
                f"{self.shard_count or 'missing'}: give --shard_count, the number of jobs, above "
                "every --shard_index"
            )


def run_all(
    function: Callable[[T], R], units: Sequence[T], execution: Execution
) -> Iterator[tuple[T, R]]:
    """Run a pure, picklable function on all units; yield units and results as they complete.

    Raises:
        UserError: The function raised it, a worker was killed, or there is no Ray.
    """
    if execution.executor == "ray":
        yield from _ray(function, units)
        return
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    workers = min(execution.workers or cores, len(units))
    if workers <= 1:  # this process suffices
        for unit in units:
            yield unit, function(unit)
    else:
        yield from _processes(function, units, workers)


def check_main_guard() -> None:
    """Raise a UserError in a worker that imports a script, which calls prepare a second time."""
    for call in inspect.stack(0):
        if call.function == "<module>" and call.frame.f_globals.get("__name__") == "__mp_main__":
            raise UserError(
                "a worker process imports the script that called prepare, and calls it again: put "
                'the call below `if __name__ == "__main__":`'
            )


def _completed(futures: Mapping[Future[R], T]) -> Iterator[tuple[T, R]]:
    """Yield units and their results as they complete."""
    for future in as_completed(futures):
        yield futures[future], future.result()


# ---- processes -----------------------------------------------------------------------------------


def _processes(
    function: Callable[[T], R], units: Sequence[T], workers: int
) -> Iterator[tuple[T, R]]:
    # spawn: a fork would copy the locks of threads in any state.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
    try:
        yield from _completed({pool.submit(function, unit): unit for unit in units})
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {workers} worker processes was killed, perhaps for lack of memory: run the "
            "same command again with fewer --workers, it continues from the completed parts"
        ) from error
    except BaseException:
        # Do not wait: a unit may take minutes, and an incomplete part is not used.
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    """Make this worker end with its parent, also if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: end without a traceback
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- Ray -----------------------------------------------------------------------------------------


def _ray(function: Callable[[T], R], units: Sequence[T]) -> Iterator[tuple[T, R]]:
    """Run units as tasks of one CPU each; all machines must see the same files."""
    ray = _cluster()
    task = ray.remote(num_cpus=1, max_retries=3)(_caught).options(name="gpt_lightning.prepare")
    try:
        futures = {task.remote(function, unit).future(): unit for unit in units}
        for unit, (result, mistake) in _completed(futures):
            if mistake is not None:
                raise UserError(mistake)
            yield unit, result
    except ray.exceptions.RayError as error:
        reason = (str(error).strip().splitlines() or ["no reason"])[-1]
        raise UserError(
            f"Ray lost a unit of work: {type(error).__name__}: {reason}; run the same command "
            "again, it continues from the completed parts"
        ) from error


def _caught(function: Callable[[T], R], unit: T) -> tuple[R | None, str | None]:
    """Return the result or a UserError's text: Ray would add a remote traceback to the error."""
    try:
        return function(unit), None
    except UserError as error:
        return None, str(error)


def _cluster() -> Any:
    try:
        import ray  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise UserError(
            "--executor ray needs the package ray: pip install 'gpt-lightning[ray]'"
        ) from error
    address = os.environ.get(RAY_ADDRESS, "auto")
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster answers at {address!r} ({(str(error).splitlines() or [''])[0]}): "
            f"start one with `ray start --head`, or set {RAY_ADDRESS} to one"
        ) from error
    return ray
