"""StopSignals: saves and ends a run on a signal, at the same step on all ranks.

The vote covers trainer.should_stop too, because a callback may set it on one rank only.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

from gpt_lightning.errors import exit_on_signal
from gpt_lightning.hardware.distributed import DelayedMax
from gpt_lightning.parsing import shell_command
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.training import optim, steps
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.progress import StepProgress

TWICE_S = 1.0  # terminals and wrappers may deliver one Ctrl-C twice


class StopSignals(steps.StepCallback):
    """Save and end the run on SIGTERM, SIGINT, SIGHUP and SIGUSR1, between two steps.

    The current step and its validation finish, RunCheckpoint saves unless it is disabled, and the
    program ends with 128 + the signal's number. SIGUSR1 also requeues the job under SLURM. SIGHUP
    stays ignored under nohup. A second Ctrl-C, a second or more after the first, ends the run
    without saving.

    Args:
        requeue: True requeues a SLURM job on SIGUSR1; False only ends it.
    """

    def __init__(self, requeue: bool = True) -> None:
        self.requeue = requeue
        self._requeue_signal: int = signal.SIGUSR1
        self._signal = 0
        self._interrupted = 0.0  # time of the first Ctrl-C
        self._agreement: DelayedMax | None = None
        self._agreed = 0  # signal that any rank has received
        self._asked = False  # trainer.should_stop was set on this rank

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._agreement, self._asked = None, False  # forget an earlier run's
        self._listen(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and not steps.is_fitting(trainer):  # nothing to save
            signal.signal(signal.SIGTERM, exit_on_signal)

    on_test_start = on_predict_start = on_validation_start

    def _listen(self, trainer: L.Trainer) -> None:
        """Handle the signals in place of Lightning, which ends a run with exit code 0.

        Lightning has stored the program's own handlers, and restores them at the end. Under ddp it
        would ask rank 0 for a SIGTERM before each micro-batch and wait twice for the device
        (PL#21487); with these handlers there is never one.
        """
        if hasattr(loop := trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
            loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        # a SLURMEnvironment among trainer.plugins may choose the signal that requeues
        environment = getattr(trainer.strategy, "cluster_environment", None)
        self._requeue_signal = getattr(environment, "requeue_signal", None) or signal.SIGUSR1
        self.requeue &= getattr(environment, "auto_requeue", True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, self._requeue_signal):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signal == signal.SIGINT == number:
            self._signal, self._interrupted = number, now
        elif now - self._interrupted >= TWICE_S:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait

    def before_batches(self, trainer: L.Trainer) -> None:
        """Give all ranks the signals and the requests to stop of any rank.

        BetweenSteps calls this before RunCheckpoint saves or ends the run.
        """
        if trainer.world_size > 1 and steps.at_step_boundary(trainer):
            module: Any = trainer.lightning_module
            self._asked |= getattr(module, "stop_requested", False)
            agreed = self._maximum(trainer, 2 * self._signal + self._asked)
            self._agreed, module.stop_requested = agreed // 2, bool(agreed % 2)

    def between_batches(self, trainer: L.Trainer) -> None:
        """End the run if a rank has received a signal."""
        stop = self._agreed if trainer.world_size > 1 else self._signal
        if not stop or not steps.at_step_boundary(trainer):
            return
        checkpoint = steps.find_callback(trainer, RunCheckpoint)
        if checkpoint is not None:
            checkpoint.finish(trainer)
        trainer.strategy.barrier()  # waits while rank 0 reads the file back
        if not trainer.is_global_zero:
            raise SystemExit(0)  # another code would make the launcher kill rank 0
        text = f"{signal.Signals(stop).name}: stopped after step {trainer.global_step}"
        requeues = stop == self._requeue_signal and self.requeue and "SLURM_JOB_ID" in os.environ
        if checkpoint is not None and checkpoint.enabled:
            command = "" if requeues else command_to_continue(trainer, checkpoint)
            text += f"; to continue:\n{command}" if command else "; --resume auto continues"
        if requeues:
            text += f"; {requeue_job()}"
        bar = steps.find_callback(trainer, StepProgress)
        if bar is not None:
            bar.on_train_end()  # the message gets a line of its own
        print(text, file=sys.stderr)
        raise SystemExit(128 + stop)

    def _maximum(self, trainer: L.Trainer, vote: int) -> int:
        """Return the maximum over ranks; on some devices that of the step before."""
        device = trainer.strategy.root_device
        if device.type in optim.DEFERRED_ON:  # one step late, so that the host never waits
            if self._agreement is None:
                self._agreement = DelayedMax(device)
            return self._agreement(vote)
        number = torch.tensor(vote, device=device)
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
        return int(number)


def command_to_continue(trainer: L.Trainer, checkpoint: RunCheckpoint) -> str:
    """Return the command that continues this run in this shell; empty if it is unknown.

    It is unknown under a launcher such as torchrun, and for a Trainer of the user's own. With
    checkpoint.folder another machine may continue the run, which finds the copy by the run's name.
    """
    folder = steps.run_folder(trainer)
    environment = getattr(trainer.strategy, "cluster_environment", None)
    launched = not isinstance(environment, LightningEnvironment | None)
    if folder is None or launched or checkpoint.folder or not RunPaths(folder).config.is_file():
        return ""
    return shell_command(["resume", str(folder)])


def requeue_job() -> str:
    """Make SLURM start this job again; return the outcome as text.

    An element of a job array is named ARRAY_ELEMENT: one element has the job ID of the array.
    """
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    except OSError as error:
        return f"job {job} was not requeued: scontrol: {error.strerror}"
    if done.returncode:
        return f"job {job} was not requeued: scontrol: {' '.join(done.stderr.split())}"
    return f"job {job} is requeued"
