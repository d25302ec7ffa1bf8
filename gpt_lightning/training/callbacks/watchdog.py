"""Watchdog: ends all ranks of a run when one of them hangs."""

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from typing import Any

import lightning as L
from jsonargparse.typing import PositiveFloat

from gpt_lightning.errors import CONTINUE, EXIT_PEER
from gpt_lightning.hardware.distributed import PARENT, RankLauncher, leave
from gpt_lightning.parsing import checked

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
ANSWER_S = 3.0  # time for the other ranks to print their stacks


@checked("watchdog")
class Watchdog(L.Callback):
    """End all ranks if one of them hangs. Each rank prints the stacks of its threads first.

    A rank that waits for a hung rank is inside a collective of C++, where Python handles no signal.
    Therefore a thread watches the main thread. Runs of one rank are not watched.

    Args:
        limit_s: Longest time in seconds between two batches, validations or saves. After this time
            the run ends with exit code 75; null: no limit.
        grace_s: Longest time of a batch in seconds after a stop signal such as SIGTERM. After this
            time the run ends without saving. The least value is twice the longest batch so far.
    """

    def __init__(
        self, limit_s: PositiveFloat | None = 1800.0, grace_s: PositiveFloat = 20.0
    ) -> None:
        self.limit_s, self.grace_s = limit_s, grace_s
        self._beat_s = 0.0  # time of the last sign of progress
        self._in_batch = False  # True if this was the start or end of a batch
        self._longest_s = 0.0  # longest time between two of those
        self._pipe: tuple[int, int] | None = None  # numbers of signals, from handler to thread

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        main = threading.current_thread() is threading.main_thread()
        if trainer.world_size == 1 or self._pipe is not None or not main:
            return
        self.beat()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        # Python's handler in C writes to the pipe even while the main thread waits
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(trainer, self._pipe[0]), daemon=True).start()

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """End the thread."""
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])
            self._pipe = None

    on_exception = teardown

    # ---- the main thread -------------------------------------------------------------------------

    def beat(self, *args: Any, in_batch: bool = False, **kwargs: Any) -> None:
        """Record progress of this rank; `phase` calls this before samples and saves."""
        now = time.monotonic()
        if self._in_batch and in_batch:
            self._longest_s = max(self._longest_s, now - self._beat_s)
        self._beat_s, self._in_batch = now, in_batch

    def _beat_in_batch(self, *args: Any, **kwargs: Any) -> None:
        self.beat(in_batch=True)

    on_train_batch_start = on_train_batch_end = _beat_in_batch
    on_validation_batch_start = on_validation_batch_end = _beat_in_batch
    on_test_batch_start = on_predict_batch_start = _beat_in_batch
    # rank 0 may be busy with samples or files now, for longer than a batch
    on_validation_start = on_validation_epoch_end = on_validation_end = beat
    on_train_start = on_train_end = on_save_checkpoint = beat

    # ---- the thread ------------------------------------------------------------------------------

    def _watch(self, trainer: L.Trainer, signals: int) -> None:
        stop, since = 0, 0.0
        while True:
            if select.select([signals], [], [], 0.5)[0]:
                received = os.read(signals, 64)
                if not received:  # teardown
                    os.close(signals)
                    return
                stops = STOP_SIGNALS & {*received}  # loader workers cause other signals
                if stops and not stop:
                    stop, since = max(stops), time.monotonic()
            now, grace_s = time.monotonic(), max(self.grace_s, 2 * self._longest_s)
            if stop and self._in_batch and now - max(since, self._beat_s) > grace_s:
                reason = f"no batch has ended for {grace_s:.0f} s (watchdog.grace_s)"
                self._end(trainer, f"{signal.Signals(stop).name}, but {reason}", 128 + stop)
            if self.limit_s is not None and now - self._beat_s > self.limit_s:
                reason = f"no progress for {self.limit_s:g} s (watchdog.limit_s)"
                self._end(trainer, reason, EXIT_PEER)

    def _end(self, trainer: L.Trainer, reason: str, code: int) -> None:
        rank, launcher = trainer.global_rank, trainer.strategy.launcher
        print(f"rank {rank}: {reason}; its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(2)
        if isinstance(launcher, RankLauncher):
            launcher.end(ANSWER_S)
        elif PARENT in os.environ:
            time.sleep(2 * ANSWER_S)  # rank 0 kills this process meanwhile, unless it is stopped
            os.kill(int(os.environ[PARENT]), signal.SIGKILL)
        if rank == 0:
            leave(f"{reason} (above: the stacks of each rank that still runs); {CONTINUE}", code)
        os._exit(code)
