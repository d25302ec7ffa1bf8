"""StopSignals, Watchdog, Replicas: end all ranks on a signal, when one hangs, when they differ.

All ranks stop at the same step. Their vote covers trainer.should_stop too, because a callback may
set it on one rank only.
"""

import faulthandler
import os
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch import distributed as dist

from gpt_lightning.data.loader import TrainLoader
from gpt_lightning.errors import CONTINUE, EXIT_AGAIN, OutageError, UserError, exit_on_signal
from gpt_lightning.hardware.device import Timestamp, record_event
from gpt_lightning.hardware.distributed import PARENT, RankLauncher, leave
from gpt_lightning.model.network import network_option
from gpt_lightning.output import Output
from gpt_lightning.parsing import checked, shell_command
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.training import steps
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.report import StepProgress
from gpt_lightning.training.callbacks.speed import Interval, total_s
from gpt_lightning.training.datamodule import token_data

TWICE_S = 1.0  # terminals and wrappers may deliver one Ctrl-C twice
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
ANSWER_S = 3.0  # time for the other ranks to print their stacks


@checked("signals")
class StopSignals(steps.StepCallback):
    """Save and end the run on SIGTERM, SIGINT, SIGHUP and SIGUSR1, between two steps; in outages.

    Lost output ends a run as SIGHUP does. The current step and its validation finish,
    RunCheckpoint saves unless it is disabled, and the program ends with 128 + the signal's
    number. SIGUSR1 also requeues the job under SLURM. SIGHUP stays ignored under nohup. A
    second Ctrl-C, a second or more after the first, ends the run without saving.

    The vote of several ranks carries their times. `perf/rank_step_ms`: minimum, median and maximum
    over the ranks of a step's time in which a rank waits for no other: what it does between steps,
    its wait for data, its forward passes; of each rank the median since the last log.
    `perf/slowest_rank`: number of the rank with the maximum.

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
        self._begin: Timestamp | None = None  # this rank works alone since then
        self._forwards: list[Interval] = []  # alone, in the micro-batches since the last vote
        self._passed: list[Interval] = []  # those of the step before, which the device has done
        self._rank_ms: list[list[float]] = []  # times of the steps since the last log, by rank

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and not steps.is_fitting(trainer):  # nothing to save
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
        device = trainer.strategy.root_device if trainer.world_size > 1 else None
        self._begin = record_event(device) if device else None
        if steps.at_step_boundary(trainer):
            if Output.lost and trainer.global_step:
                self._signal = self._signal or signal.SIGHUP
            self._fetch(trainer)
            self._agreed = self._signal or (EXIT_AGAIN if self._outage else 0)
            if device:
                self._end_alone(device)
                self._vote(trainer)
                self._begin = record_event(device)

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
        stop = 2 * self._agreed + getattr(module, "stop_requested", False)
        vote = torch.tensor([stop, total_s(self._passed) * 1e3], device=module.device)
        stops, times = trainer.strategy.all_gather(vote).T.tolist()
        self._agreed, module.stop_requested = int(max(stops)) // 2, bool(max(stops) % 2)
        if self._passed:
            self._rank_ms.append(times)
        self._passed, self._forwards = self._forwards, []

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        self._end_alone(pl_module.device)

    def _end_alone(self, device: torch.device) -> None:
        if self._begin is not None:
            self._forwards.append((self._begin, record_event(device)))
            self._begin = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        whole = self._rank_ms and steps.at_step_boundary(trainer)
        if whole and steps.at_log_step(trainer, trainer.global_step):
            ms = [statistics.median(times) for times in zip(*self._rank_ms, strict=True)]
            self._rank_ms.clear()
            for function in (min, statistics.median, max):
                pl_module.log(f"perf/rank_step_ms/{function.__name__}", function(ms))
            pl_module.log("perf/slowest_rank", ms.index(max(ms)))

    def between_batches(self, trainer: Trainer) -> None:
        """End the run if a rank has received a signal, or its data do not come."""
        if not (stop := self._agreed) or not steps.at_step_boundary(trainer):
            return
        checkpoint = steps.find_callback(trainer, RunCheckpoint)
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
        if bar := steps.find_callback(trainer, StepProgress):
            bar.on_train_end()  # the message gets a line of its own
        print(text, file=sys.stderr)
        raise SystemExit(128 + stop)


def command_to_continue(trainer: Trainer, checkpoint: RunCheckpoint) -> str:
    """Return the command that continues this run in this shell; empty if it is unknown.

    It is unknown under a launcher such as torchrun, and for a Trainer of the user's own. With
    checkpoint.folder another machine may continue the run, which finds the copy by the run's name.
    """
    folder = steps.run_folder(trainer)
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


@checked("watchdog")
class Watchdog(steps.StepCallback):
    """End all ranks if one of them hangs. Each rank prints the stacks of its threads first.

    A rank that waits for a hung rank is inside a collective of C++, where Python handles no signal.
    Therefore a thread watches the main thread. Runs of one rank are not watched.

    Args:
        limit_s: Longest time in seconds between two batches, validations or saves. After this time
            the run ends with exit code 75; null: no limit.
        grace_s: Longest time of a batch in seconds after a stop signal such as SIGTERM. After this
            time the run ends without saving. The least value is twice the longest batch so far.
    """

    def __init__(self, limit_s: PositiveFloat | None = 1800.0, grace_s: PositiveFloat = 20.0):
        self.limit_s, self.grace_s = limit_s, grace_s
        self._beat_s = 0.0  # time of the last sign of progress
        self._in_batch = False  # True if this was the start or end of a batch
        self._longest_s = 0.0  # longest time between two of those
        self._pipe: tuple[int, int] | None = None  # numbers of signals, from handler to thread

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        main = threading.current_thread() is threading.main_thread()
        if trainer.world_size == 1 or self._pipe or not main:
            return
        self.beat()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        # Python's handler in C writes to the pipe even while the main thread waits
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(trainer, self._pipe[0]), daemon=True).start()

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """End the thread."""
        if self._pipe:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])
            self._pipe = None

    on_exception = teardown

    # ---- the main thread -------------------------------------------------------------------------

    def beat(self, *args: Any, in_batch: bool = False, **kwargs: Any) -> None:
        """Record progress of this rank."""
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
    on_train_start = on_train_end = on_save_checkpoint = before_phase = beat

    # ---- the thread ------------------------------------------------------------------------------

    def _watch(self, trainer: Trainer, signals: int) -> None:
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
                    if launcher := trainer.strategy.launcher:
                        launcher.kill(stop)  # this rank may wait for another's data
            now, grace_s = time.monotonic(), max(self.grace_s, 2 * self._longest_s)
            if stop and self._in_batch and now - max(since, self._beat_s) > grace_s:
                reason = f"no batch has ended for {grace_s:.0f} s (watchdog.grace_s)"
                self._end(trainer, f"{signal.Signals(stop).name}, but {reason}", 128 + stop)
            if self.limit_s is not None and now - self._beat_s > self.limit_s:
                reason = f"no progress for {self.limit_s:g} s (watchdog.limit_s)"
                self._end(trainer, reason, EXIT_AGAIN)

    def _end(self, trainer: Trainer, reason: str, code: int) -> None:
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


@checked("replicas")
class Replicas(steps.StepCallback):
    """End the run if its ranks read other data, or no longer have the same weights.

    Under DDP each rank has all weights and updates them with the same gradients: they stay equal
    bit for bit unless a device computes wrongly.

    Args:
        every_n_steps: Steps between two comparisons of the weights.
    """

    def __init__(self, every_n_steps: PositiveInt = 1000):
        self.every_n_steps = every_n_steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = token_data(trainer)
        if trainer.world_size == 1 or data is None:
            return
        from gpt_lightning.hardware.agreement import first_difference, words  # not for one rank

        record = data.record()
        facts = {"tokenizer": record["tokenizer"], **record.get("data_identity", {})}
        facts = {f"data: {key}": words(value) for key, value in facts.items()}
        all_facts: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(all_facts, facts)
        for rank, theirs in enumerate(all_facts):
            if line := first_difference(theirs, all_facts[0], f"rank {rank}"):
                raise UserError(line) if trainer.is_global_zero else SystemExit(2)

    def before_batches(self, trainer: Trainer) -> None:
        """Compare the weights, before RunCheckpoint saves them."""
        step = trainer.global_step
        due = step % self.every_n_steps == 0 and steps.at_step_boundary(trainer)
        if trainer.world_size == 1 or steps.is_sharded(trainer) or not due:
            return
        weights = dict(trainer.lightning_module.named_parameters())
        sums = torch.stack([checksum(weight) for weight in weights.values()])
        all_sums = trainer.strategy.all_gather(sums)
        for rank, at in (all_sums != all_sums[0]).nonzero()[:1].tolist():
            name = [*weights][at].removeprefix("model.")
            line = (
                f"after step {step} {name} of rank {rank} is not that of rank 0: check the devices "
                f"and their memory, then resume from a checkpoint up to step "
                f"{step - self.every_n_steps}, when they were compared before"
            )
            raise UserError(line) if trainer.is_global_zero else SystemExit(2)


def checksum(weights: Tensor) -> Tensor:
    """Return the sum of the bytes of a tensor: a changed bit changes it."""
    return weights.detach().reshape(-1).view(torch.uint8).sum()
