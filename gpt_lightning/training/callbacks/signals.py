"""StopSignals: end all ranks on a signal or in an outage, between two steps.

All ranks stop at the same step. Their vote covers trainer.should_stop too, because a callback may
set it on one rank only.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import distributed as dist

from gpt_lightning.data.loader import TrainLoader
from gpt_lightning.errors import EXIT_AGAIN, OutageError, exit_on_signal
from gpt_lightning.model.network import network_option
from gpt_lightning.output import Output
from gpt_lightning.parsing import checked, shell_command
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.training import between_steps, run_state
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.report import StepProgress

TWICE_S = 1.0  # terminals and wrappers may deliver one Ctrl-C twice
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


@checked("signals")
class StopSignals(between_steps.StepCallback):
    """Save and end the run on SIGTERM, SIGINT, SIGHUP and SIGUSR1, between two steps; in outages.

    Lost output ends a run as SIGHUP does. The current step and its validation finish,
    RunCheckpoint saves unless it is disabled, and the program ends with 128 + the signal's
    number. SIGUSR1 also requeues the job under SLURM. SIGHUP stays ignored under nohup. A
    second Ctrl-C, a second or more after the first, ends the run without saving.

    Args:
        requeue: True requeues a SLURM job on SIGUSR1; False only ends it.
    """

    def __init__(self, requeue: bool = True):
        self.requeue = requeue
        self._requeue_signal: int = signal.SIGUSR1
        self._signal = 0
        self._interrupted = 0.0  # time of the first Ctrl-C
        self._fetches = False  # True while the data of a step are waited for
        self._outage: Any = None  # OutageError of this rank
        self._agreed = 0  # signal that any rank has received, or EXIT_AGAIN in an outage

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and not run_state.is_fitting(trainer):  # nothing to save
            signal.signal(signal.SIGTERM, exit_on_signal)

    on_test_start = on_predict_start = on_validation_start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle the signals in place of Lightning, which ends a run with exit code 0.

        Lightning has stored the program's own handlers, and restores them at the end.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        # a SLURMEnvironment among trainer.plugins may choose the signal that requeues
        environment = getattr(trainer.strategy, "cluster_environment", None)
        self._requeue_signal = getattr(environment, "requeue_signal", None) or signal.SIGUSR1
        self.requeue &= getattr(environment, "auto_requeue", True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, self._requeue_signal):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)

    on_sanity_check_start = on_train_start

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signal == signal.SIGINT == number:
            self._signal, self._interrupted = number, now
        elif now - self._interrupted >= TWICE_S:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait
        if self._fetches:
            self._fetches = False  # raised once
            raise OutageError(f"{signal.Signals(number).name} while a shard was waited for")

    def before_batches(self, trainer: Trainer) -> None:
        """Give all ranks the signals and the requests to stop of any rank.

        BetweenSteps calls this before RunCheckpoint saves or ends the run.
        """
        if run_state.at_step_boundary(trainer):
            if Output.lost and trainer.global_step:
                self._signal = self._signal or signal.SIGHUP
            self._fetch(trainer)
            self._agreed = self._signal or (EXIT_AGAIN if self._outage else 0)
            if trainer.world_size > 1:
                self._vote(trainer)

    def _fetch(self, trainer: Any) -> None:
        """Wait for the data of the coming step."""
        loader, self._outage = getattr(trainer.train_dataloader, "loader", None), None
        try:  # a signal may raise in each line
            if isinstance(loader, TrainLoader):
                self._fetches = True
                loader.fetch_step()
                self._fetches = False
        except OutageError as error:
            self._fetches, self._outage = False, error

    def _vote(self, trainer: Trainer) -> None:
        module: Any = trainer.lightning_module
        requested = getattr(module, "stop_requested", False)
        vote = torch.tensor([self._agreed, int(requested)], device=module.device)
        self._agreed, requested = trainer.strategy.all_gather(vote).amax(0).tolist()
        module.stop_requested = bool(requested)

    def between_batches(self, trainer: Trainer) -> None:
        """End the run if a rank has received a signal, or its data do not come."""
        if not (stop := self._agreed) or not run_state.at_step_boundary(trainer):
            return
        checkpoint = run_state.find_callback(trainer, RunCheckpoint)
        if checkpoint:
            checkpoint.save(trainer)
        trainer.strategy.barrier()  # waits while rank 0 reads the file back
        outages = [self._outage] * trainer.world_size
        if stop == EXIT_AGAIN and trainer.world_size > 1:
            dist.all_gather_object(outages, self._outage)
        if not trainer.is_global_zero:
            raise SystemExit(0)  # another code would make the launcher kill rank 0
        if stop == EXIT_AGAIN:
            raise next(filter(None, outages))
        text = f"{signal.Signals(stop).name}: stopped after step {trainer.global_step}"
        requeues = stop == self._requeue_signal and self.requeue and "SLURM_JOB_ID" in os.environ
        if checkpoint and checkpoint.enabled:
            command = "" if requeues else command_to_continue(trainer, checkpoint)
            text += f"; to continue:\n{command}" if command else "; --resume auto continues"
        if requeues:
            text += f"; {requeue_job()}"
        if bar := run_state.find_callback(trainer, StepProgress):
            bar.on_train_end()  # the message gets a line of its own
        print(text, file=sys.stderr)
        raise SystemExit(128 + stop)


def command_to_continue(trainer: Trainer, checkpoint: RunCheckpoint) -> str:
    """Return the command that continues this run in this shell; empty if it is unknown.

    It is unknown under a launcher such as torchrun, and for a Trainer of the user's own. With
    checkpoint.folder another machine may continue the run, which finds the copy by the run's name.
    """
    folder = run_state.run_folder(trainer)
    environment = getattr(trainer.strategy, "cluster_environment", None)
    launched = not isinstance(environment, LightningEnvironment | None)
    if folder is None or launched or checkpoint.folder or not RunPaths(folder).config.is_file():
        return ""
    network = getattr(trainer.lightning_module, "network", None)
    return shell_command(["resume", str(folder), *network_option(network)])


def requeue_job() -> str:
    """Make SLURM start this job again; return the outcome as text.

    An element of a job array is named ARRAY_ELEMENT: one element has the job ID of the array.
    """
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(error.stderr.split())
        return f"job {job} was not requeued: scontrol: {reason}"
    return f"job {job} is requeued"
