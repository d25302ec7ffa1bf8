"""`gpt-lightning` with accidents built in: FAULTS='{"kill_in_save": ["renamed", 2]}'.

The product knows nothing of this file: each accident replaces a function of Python, of the system,
or one method of GPTModule, in this process alone.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP: list[Callable[..., Any]] = []  # called with module, batch, loss and micro-batch


def in_step(function: Callable[..., Any]) -> Callable[..., None]:
    """Accident in a training step: its function returns the loss, or None to leave it."""

    def add(*arguments: Any) -> None:
        STEP.append(lambda *call: function(*call, *arguments))

    return add


def die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def is_data(path: Any, is_sidecar: bool = False) -> bool:
    """Return whether a file is the temporary file of a checkpoint, or of its digest."""
    name = Path(str(path)).name
    return ".ckpt" in name and ".tmp" in name and (".sha256" in name) == is_sidecar


# ---- inside the save -----------------------------------------------------------------------------


def kill_in_save(moment: str, number: int) -> None:
    """SIGKILL in the save of that number (1 is the first), at a moment.

    first byte; before fsync; after fsync; before the sidecar; before the rename: the sidecar is
    there; renamed: before the folder is synced; deleting: an older one has just been removed.
    """
    import torch

    saves = [0]
    real_save, real_fsync, real_replace, real_unlink = torch.save, os.fsync, os.replace, os.unlink

    def now(at: str) -> bool:
        return at == moment and saves[0] == number

    def save(obj: Any, file: Any) -> None:
        if is_data(getattr(file, "name", "")):
            saves[0] += 1
            if now("first byte"):
                file.write(b"P")
                die()
        real_save(obj, file)

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if is_data(name) and now("before fsync"):
            die()
        real_fsync(descriptor)
        if is_data(name) and now("after fsync"):
            die()

    def replace(source: Any, target: Any, **kwargs: Any) -> None:
        before = (is_data(source, is_sidecar=True) and now("before the sidecar")) or (
            is_data(source) and now("before the rename")
        )
        if before:
            die()
        real_replace(source, target, **kwargs)
        if is_data(source) and now("renamed"):
            die()

    def unlink(path: Any, **kwargs: Any) -> None:
        real_unlink(path, **kwargs)
        if str(path).endswith(".ckpt") and saves[0] >= number and moment == "deleting":
            die()

    torch.save = save
    os.fsync, os.replace, os.unlink = fsync, replace, unlink  # type: ignore[assignment]
    os.remove = unlink  # type: ignore[assignment]


def slow_sync(seconds: float) -> None:
    """Make each fsync take some seconds."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        time.sleep(seconds)
        real(descriptor)

    os.fsync = fsync


# ---- in a training step --------------------------------------------------------------------------


@in_step
def trace(module: Any, batch: Any, loss: Any, micro: int, path: str):
    """A line for each micro-batch: rank, session, step, number, digests of its rows, loss."""
    digests = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in batch[0].cpu()]
    at = [module.global_rank, os.getpid(), module.trainer.global_step, micro]
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps([*at, digests, float(loss.detach()).hex()]).encode() + b"\n")
    os.close(descriptor)


@in_step
def bad_gradient(module: Any, batch: Any, loss: Any, micro: int, value: str, step: int, rank: int):
    """Make the gradient of an optimizer step (1 is the first) nan or inf on one rank."""
    if module.trainer.global_step == step - 1 and module.global_rank == rank:
        return loss * float(value)


@in_step
def user_error(module: Any, batch: Any, loss: Any, micro: int, step: int, rank: int):
    """Raise a UserError in an optimizer step (1 is the first) on one rank."""
    if module.trainer.global_step == step - 1 and module.global_rank == rank:
        from gpt_lightning.errors import UserError

        raise UserError(f"an error of rank {rank}")


@in_step
def signal_at(module: Any, batch: Any, loss: Any, micro: int, number: int, step: int, at: int):
    """A signal to this process within a micro-batch (0 is the first) of an optimizer step."""
    if (module.trainer.global_step, micro) == (step - 1, at):
        os.kill(os.getpid(), number)


@in_step
def stop_at(module: Any, batch: Any, loss: Any, micro: int, step: int, at: int):
    """trainer.should_stop within a micro-batch (0 is the first) of an optimizer step."""
    module.trainer.should_stop |= (module.trainer.global_step, micro) == (step - 1, at)


@in_step
def slow(module: Any, batch: Any, loss: Any, micro: int, seconds: float):
    """Make each micro-batch take some seconds more."""
    time.sleep(seconds)


@in_step
def bad_moment(module: Any, batch: Any, loss: Any, micro: int, step: int):
    """A NaN in the optimizer's state alone, before the update of a step."""
    if module.trainer.global_step == step - 1:
        for state in module.trainer.optimizers[0].state.values():
            state["exp_avg"].view(-1)[0] = float("nan")


def gradients(path: str) -> None:
    """Save the gradients of the last step by parameter."""
    import torch

    from gpt_lightning.training.module import GPTModule

    clip = GPTModule.configure_gradient_clipping

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        found = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}
        torch.save(found, path)
        clip(self, *args, **kwargs)

    GPTModule.configure_gradient_clipping = save  # type: ignore[method-assign]


def patch_training_step() -> None:
    from gpt_lightning.training.module import GPTModule

    real, last = GPTModule.training_step, [-1, 0]

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss, step = real(self, batch, batch_idx), self.trainer.global_step
        last[:] = [step, last[1] + 1 if last[0] == step else 0]
        for change in STEP:
            changed = change(self, batch, loss, last[1])
            loss = loss if changed is None else changed
        return loss

    GPTModule.training_step = training_step  # type: ignore[method-assign]


def nan_validation(step: int) -> None:
    """Make the model's result NaN for the second batch of the validation at a step."""
    from gpt_lightning.training.module import GPTModule

    real = GPTModule.validation_step

    def validation_step(self: Any, batch: Any, batch_idx: int, *args: Any) -> Any:
        if self.global_step != step or batch_idx != 1:
            return real(self, batch, batch_idx, *args)
        spoil = self.model.lm_head.register_forward_hook(lambda *call: call[2] * float("nan"))
        try:
            return real(self, batch, batch_idx, *args)
        finally:
            spoil.remove()

    GPTModule.validation_step = validation_step  # type: ignore[method-assign]


def lying_folder(times: int) -> None:
    """Make uploads to checkpoint.folder report success and store half of the file, some times."""
    from fsspec.implementations.local import LocalFileSystem

    real, calls = LocalFileSystem.put_file, [0]

    def put_file(self: Any, source: str, target: str, *args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] > times:
            return real(self, source, target, *args, **kwargs)
        content = Path(source).read_bytes()
        Path(target).write_bytes(content[: len(content) // 2])

    LocalFileSystem.put_file = put_file


# ---- the clock -----------------------------------------------------------------------------------


def clock(offset_s: float, after_calls: int) -> None:
    """Set the wall clock after it was read a number of times."""
    real, calls = time.time, [0]

    def jumped() -> float:
        calls[0] += 1
        return real() + (offset_s if calls[0] > after_calls else 0.0)

    time.time = jumped


def no_locks() -> None:
    """Take flock from the file system, as Lustre without its option."""
    import errno
    import fcntl

    def flock(descriptor: Any, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    fcntl.flock = flock


def main() -> int:
    faults = json.loads(os.environ.get("FAULTS", "{}"))
    many = faults.pop("many", None)
    for name, arguments in faults.items():
        globals()[name](*(arguments if isinstance(arguments, list) else [arguments]))
    if STEP:
        patch_training_step()
    from gpt_lightning.cli import main as command

    if many is None:
        return command(sys.argv[1:])
    for argv in many:  # one start for many commands that must all be refused
        code = command(argv)
        sys.stdout.flush()
        print(f"exit {code}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
