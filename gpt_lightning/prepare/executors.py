"""Who runs the units: this process, processes of this machine, or an existing Ray cluster."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gpt_lightning.errors import UserError

RAY_ADDRESS = "RAY_ADDRESS"
RAY_AHEAD = 2  # units waiting for each CPU of the cluster
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Execution:
    """Where and by whom the work is done; it decides no byte of the result.

    Attributes:
        workers: processes of this machine; None: one a core.
        executor: process or ray.
        shard_index: number of this job in an array of jobs; None: no array.
        shard_count: number of jobs in the array.
        merge: whether parts of an array's jobs are only put together.

    Raises:
        UserError: numbers that make no sense.
    """

    workers: int | None = None
    executor: Literal["process", "ray"] = "process"
    shard_index: int | None = None
    shard_count: int | None = None
    merge: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers is {self.workers}: it must be at least 1, or null")
        if self.shard_count is not None and self.shard_count < 1:
            raise UserError(f"shard_count is {self.shard_count}: it must be at least 1")
        if self.shard_index is None:
            return
        if self.merge:
            raise UserError("shard_index and merge were given: merge comes after all jobs, alone")
        if self.shard_count is None or not 0 <= self.shard_index < self.shard_count:
            raise UserError(
                f"shard_index is {self.shard_index} and shard_count {self.shard_count}: expected "
                "0 <= shard_index < shard_count"
            )

    def own(self, index: int) -> bool:
        """Whether a unit is for this job."""
        return self.shard_index is None or index % (self.shard_count or 1) == self.shard_index


def run_all(
    function: Callable[[T], R], units: Sequence[T], execution: Execution
) -> Iterator[tuple[T, R]]:
    """Runs a pure, picklable function on all units; yields unit and result as they come.

    Raises:
        UserError: what the function raised, a killed worker, or no Ray.
    """
    if execution.executor == "ray":
        yield from _ray(function, units)
        return
    workers = min(execution.workers or n_cores(), len(units))
    if workers <= 1:  # no other process: nothing to start, nothing to be left behind
        for unit in units:
            yield unit, function(unit)
    else:
        yield from _processes(function, units, workers)


def n_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- processes -----------------------------------------------------------------------------------


def _processes(
    function: Callable[[T], R], units: Sequence[T], workers: int
) -> Iterator[tuple[T, R]]:
    # spawn: a fork would copy threads' locks in whatever state they are.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
    try:
        futures = {pool.submit(function, unit): unit for unit in units}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {workers} worker processes was killed, perhaps for lack of memory: run the "
            "same command again with fewer --workers, it goes on where it was"
        ) from error
    except BaseException:
        # A unit may take minutes, and a part that is not complete does not exist.
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    """Ends this worker with its parent: one that is killed can no longer end it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C goes to all: end without a traceback
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- Ray -----------------------------------------------------------------------------------------


def _ray(function: Callable[[T], R], units: Sequence[T]) -> Iterator[tuple[T, R]]:
    """Runs units as tasks of one CPU each; all machines must see the same files."""
    ray = _cluster()
    task = ray.remote(num_cpus=1, max_retries=3)(_caught).options(name="gpt_lightning.prepare")
    ahead = RAY_AHEAD * max(int(ray.cluster_resources().get("CPU", 1)), 1)
    waiting = list(reversed(units))
    running: dict[Any, T] = {}
    while waiting or running:
        while waiting and len(running) < ahead:
            unit = waiting.pop()
            running[task.remote(function, unit)] = unit
        ready, _ = ray.wait(list(running), num_returns=1)
        for reference in ready:
            result, mistake = _got(ray, reference)
            if mistake is not None:
                for other in running:
                    ray.cancel(other)
                raise UserError(mistake)
            yield running.pop(reference), result


def _caught(function: Callable[[T], R], unit: T) -> tuple[R | None, str | None]:
    """Ray would wrap a UserError into an error of its own, with a remote traceback in its text."""
    try:
        return function(unit), None
    except UserError as error:
        return None, str(error)


def _got(ray: Any, reference: Any) -> tuple[Any, str | None]:
    try:
        found: tuple[Any, str | None] = ray.get(reference)
    except ray.exceptions.RayError as error:
        reason = (str(error).strip().splitlines() or ["no reason"])[-1]
        raise UserError(
            f"Ray lost a unit of work: {type(error).__name__}: {reason}; run the same command "
            "again, it goes on where it was"
        ) from error
    return found


@functools.cache
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
            f"start one with `ray start --head`, or let {RAY_ADDRESS} name one"
        ) from error
    return ray
