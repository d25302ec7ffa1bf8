"""`gpt-lightning` with accidents built in: FAULTS='{"kill_in_save": ["renamed", 2]}'.

The product knows nothing of this file: each accident replaces a function of Python, of the system,
or one method of GPTModule, in this process alone.
"""

import builtins
import hashlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP: list[Callable[[Any, Any, Any], Any]] = []  # called with module, batch and loss


def die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def is_data(path: Any) -> bool:
    """Return whether a file is the temporary file of a checkpoint."""
    name = Path(str(path)).name
    return ".ckpt" in name and ".tmp" in name and ".sha256" not in name


def is_sidecar(path: Any) -> bool:
    name = Path(str(path)).name
    return ".ckpt" in name and ".tmp" in name and ".sha256" in name


# ---- inside the save -----------------------------------------------------------------------------


def kill_in_save(moment: str, number: int) -> None:
    """SIGKILL in the save of that number (1 is the first), at a moment.

    first byte; before fsync; after fsync; before the sidecar; before the rename: the sidecar is
    there; renamed: before the folder is synced; deleting: an older one has just been removed.
    """
    saves = [0]
    real_open, real_fsync, real_replace, real_unlink = io.open, os.fsync, os.replace, os.unlink

    def now(at: str) -> bool:
        return at == moment and saves[0] == number

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = real_open(file, mode, *args, **kwargs)
        if "w" in mode and is_data(file):
            saves[0] += 1
            if now("first byte"):
                opened.write(b"P")
                opened.flush()
                die()
        return opened

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if is_data(name) and now("before fsync"):
            die()
        real_fsync(descriptor)
        if is_data(name) and now("after fsync"):
            die()

    def replace(source: Any, target: Any, **kwargs: Any) -> None:
        before = (is_sidecar(source) and now("before the sidecar")) or (
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

    io.open = builtins.open = open_  # type: ignore[assignment]
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


def trace(path: str) -> None:
    """A line for each micro-batch: rank, session, step, number, digests of its rows, loss."""
    last = [-1, 0]

    def note(module: Any, batch: Any, loss: Any) -> Any:
        step = module.trainer.global_step
        last[:] = [step, last[1] + 1 if last[0] == step else 0]
        digests = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in batch[0].cpu()]
        line = [module.global_rank, os.getpid(), *last, digests, float(loss.detach()).hex()]
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)
        return loss

    STEP.append(note)


def bad_gradient(value: str, step: int, rank: int) -> None:
    """Make the gradient of an optimizer step (1 is the first) nan or inf on one rank."""

    def spoil(module: Any, batch: Any, loss: Any) -> Any:
        here = module.trainer.global_step == step - 1 and module.global_rank == rank
        return loss * float(value) if here else loss

    STEP.append(spoil)


def user_error(step: int, rank: int) -> None:
    """Raise a UserError in an optimizer step (1 is the first) on one rank."""

    def fail(module: Any, batch: Any, loss: Any) -> Any:
        if module.trainer.global_step == step - 1 and module.global_rank == rank:
            from gpt_lightning.errors import UserError

            raise UserError(f"an error of rank {rank}")
        return loss

    STEP.append(fail)


def signal_at(number: int, step: int, micro: int) -> None:
    """A signal to this process within a micro-batch (0 is the first) of an optimizer step."""
    seen: list[int] = []

    def send(module: Any, batch: Any, loss: Any) -> Any:
        if module.trainer.global_step == step - 1:
            seen.append(1)
            if len(seen) == micro + 1:
                os.kill(os.getpid(), number)
        return loss

    STEP.append(send)


def stop_at(step: int, micro: int) -> None:
    """trainer.should_stop within a micro-batch (0 is the first) of an optimizer step."""
    seen: list[int] = []

    def stop(module: Any, batch: Any, loss: Any) -> Any:
        if module.trainer.global_step == step - 1:
            seen.append(1)
            module.trainer.should_stop |= len(seen) == micro + 1
        return loss

    STEP.append(stop)


def slow(seconds: float) -> None:
    """Make each micro-batch take some seconds more."""

    def wait(module: Any, batch: Any, loss: Any) -> Any:
        time.sleep(seconds)
        return loss

    STEP.append(wait)


def bad_moment(step: int) -> None:
    """A NaN in the optimizer's state alone, before the update of a step."""
    import torch

    def spoil(module: Any, batch: Any, loss: Any) -> Any:
        if module.trainer.global_step == step - 1:
            for state in module.trainer.optimizers[0].state.values():
                state["exp_avg"].view(-1)[0] = torch.nan
        return loss

    STEP.append(spoil)


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

    real = GPTModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = real(self, batch, batch_idx)
        for change in STEP:
            loss = change(self, batch, loss)
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


def spike(step: int, factor: float) -> None:
    """Multiply the loss of an optimizer step."""

    def grow(module: Any, batch: Any, loss: Any) -> Any:
        return loss * (factor if module.trainer.global_step == step - 1 else 1.0)

    STEP.append(grow)


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


ACCIDENTS: dict[str, Callable[..., None]] = {
    "kill_in_save": kill_in_save,
    "trace": trace,
    "bad_gradient": bad_gradient,
    "signal_at": signal_at,
    "stop_at": stop_at,
    "nan_validation": nan_validation,
    "spike": spike,
    "lying_folder": lying_folder,
    "slow": slow,
    "slow_sync": slow_sync,
    "bad_moment": bad_moment,
    "user_error": user_error,
    "gradients": gradients,
    "clock": clock,
    "no_locks": no_locks,
}


def main() -> int:
    faults = json.loads(os.environ.get("FAULTS", "{}"))
    many = faults.pop("many", None)
    for name, arguments in faults.items():
        ACCIDENTS[name](*(arguments if isinstance(arguments, list) else [arguments]))
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
