"""Lean training batch: Lightning's loop over batches in straight line, in the usual case.

For each batch Lightning runs some 200 functions of its own around the hooks: a closure in a closure
in a closure, properties of properties, progress counters, dictionaries of metrics. A step of
milliseconds finds none of them in the processor's caches. `LeanLoop` calls the same hooks with the
same arguments in the same order, and leaves the same state in Lightning's objects.

It does so for one process and one optimizer whose steps nobody overrides. Whatever differs is left
to Lightning's functions: another strategy or precision, a restart, a validation, the last batch.
"""

import hashlib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.core.hooks import ModelHooks
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from gpt_lightning.training.optimizers import adamw

Function = Callable[..., Any]
EMPTY_HOOKS = dict(vars(L.Callback))  # by name
EMPTY_MODULE_HOOKS = dict(vars(ModelHooks))

# SHA-256 of the files with the functions that LeanLoop stands for; and their names by owner, an
# attribute of LeanLoop. A subclass, an object or another program may have another function.
DIGEST = "1d1886f8"
TRANSFERS = "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer "
FUNCTIONS = {
    "trainer": "current_epoch enable_validation num_training_batches received_sigterm _results",
    "fit_loop": "_results _should_accumulate _can_stop_early",
    "loop": """advance on_advance_end on_iteration_done done batch_idx total_batch_idx global_step
        _is_training_done _is_validation_done _num_ready_batches_reached _should_accumulate
        _accumulated_batches_reached _should_check_val_fx _should_check_val_epoch _build_kwargs
        update_lr_schedulers _update_learning_rates _save_loggers_on_train_batch_end""",
    "batches": "increment_ready increment_by",
    "automatic": """run _make_closure _make_step_fn _make_backward_fn _make_zero_grad_fn
        _training_step _optimizer_step _optimizer_zero_grad _on_before_zero_grad""",
    "closure": "__init__ __call__ consume_result",
    "module": TRANSFERS
    + """_on_before_batch_transfer _apply_batch_transfer_handler _call_batch_hook
        optimizer_step backward optimizer_zero_grad automatic_optimization""",
    "selector": "get_instance",
    "transfers": TRANSFERS,
    "strategy": """optimizer_step backward training_step batch_to_device on_train_batch_start
        pre_backward post_backward post_training_step handles_gradient_accumulation root_device""",
    "precision": """optimizer_step backward pre_backward post_backward convert_input _wrap_closure
        _after_closure _clip_gradients""",
    "mixed": "autocast_context_manager",
    "optimizer": "step",
    "fetcher": "__next__",
    "loader": "__next__",
    "connector": "metrics on_batch_start on_batch_end should_update_logs update_train_step_metrics",
    "results": "metrics valid_items _forked_name",
}


def function_file(owner: Any, name: str) -> str:
    """Return the path of the file with the code of a method or a property; empty if unknown."""
    found = inspect.getattr_static(owner, name)
    code = getattr(getattr(found, "fget", found), "__code__", None)
    return str(getattr(code, "co_filename", ""))


@cache
def files_digest(files: frozenset[str]) -> str:
    """Return the SHA-256 of some files; empty if one of them cannot be read."""
    try:
        content = b"".join(Path(file).read_bytes() for file in sorted(files))
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()


def call(function: Any, module: L.LightningModule, hook: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the module, the strategy or a callback; `module.log` reads its name."""
    if not callable(function):
        return None
    fields = vars(module)  # Module.__setattr__ would search its parameters
    outer, fields["_current_fx_name"] = fields["_current_fx_name"], hook
    output = function(*args, **kwargs)
    fields["_current_fx_name"] = outer
    return output


def call_callbacks(
    trainer: Any, module: L.LightningModule, hook: str, *args: Any, **kwargs: Any
) -> None:
    """Call a hook of the callbacks that override it."""
    empty = EMPTY_HOOKS.get(hook)
    for callback in trainer.callbacks:  # may grow meanwhile
        function = getattr(callback, hook)
        if getattr(function, "__func__", None) is not empty:
            call(function, module, hook, trainer, module, *args, **kwargs)


class Fetched:
    """Fetcher of one batch that has been fetched already."""

    def __init__(self, item: Any, done: bool) -> None:
        self.item, self.done = item, done

    def __next__(self) -> Any:
        return self.item


class LeanLoop:
    """One run of Lightning's loop over the batches of an epoch.

    Args:
        loop: Lightning's loop.
        fetcher: Its source of batches.
    """

    def __init__(self, loop: Any, fetcher: Any) -> None:
        self.loop, self.fetcher, self.loader = loop, fetcher, fetcher._combined_loader
        self.automatic, self.batches = loop.automatic_optimization, loop.batch_progress
        self.trainer = trainer = loop.trainer
        self.fit_loop, self.connector = trainer.fit_loop, trainer._logger_connector
        self.results, self.closure = loop._results, Closure
        self.strategy: Any = trainer.strategy
        self.precision: Any = self.strategy.precision_plugin
        self.mixed = MixedPrecision
        self.autocast = getattr(self.precision, "autocast_context_manager", nullcontext)
        self.module: Any = trainer.lightning_module
        self.selector = trainer._data_connector._datahook_selector
        self.transfers = self.selector.datamodule or self.module
        self.optimizers: list[Any] = self.strategy._lightning_optimizers
        self.optimizer: Any = next(iter(self.optimizers), None)
        validates = is_overridden("validation_step", self.module)
        self.validates = validates and loop.val_loop._data_source.is_defined()
        self.fields = vars(self.module)
        self.output: Any = None  # of the training step, for on_train_batch_end
        on_cpu = self.strategy.root_device.type == "cpu"
        known = on_cpu and files_digest(adamw.FILES).startswith(adamw.DIGEST)
        self.update = adamw.LeanAdamW(getattr(self.optimizer, "_optimizer", None), known)
        self.check()

    def check(self) -> None:
        """Find out whether nobody has replaced what the methods below stand for."""
        self.checked = len(self.fields)
        step, precision, loader = self.module.training_step, self.precision, self.loader
        self.takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        self.usual = (
            type(self.loop) is _TrainingEpochLoop
            and type(self.fetcher) is _PrefetchDataFetcher
            and type(self.strategy) is SingleDeviceStrategy
            and type(loader) is CombinedLoader
            and type(precision) in (Precision, MixedPrecision)
            and getattr(precision, "scaler", None) is None
            and self.automatic.output_result_cls is ClosureResult
            and self.module.automatic_optimization
            and self.module is self.strategy.model
            and self.fields["_fabric"] is None
            and len(self.optimizers) == len(self.strategy.optimizers) == 1
            and (loader._mode, loader._flattened) == ("max_size_cycle", [loader._iterables])
        )
        if self.usual:
            files = {
                function_file(getattr(self, owner), name)
                for owner, names in FUNCTIONS.items()
                for name in names.split()
            }
            self.usual = files_digest(frozenset(files)).startswith(DIGEST)

    def applies(self) -> bool:
        """Return whether the next batch is a usual one."""
        trainer, strategy, optimizer = self.trainer, self.strategy, self.optimizer
        if len(self.fields) != self.checked:  # an attribute of the module may replace a method
            self.check()
        return (
            self.usual
            and not self.loop._restarting
            and not self.automatic._skip_backward
            and trainer.state.stage is RunningStage.TRAINING
            and type(trainer.profiler) is PassThroughProfiler
            and trainer._accelerator_connector.strategy is strategy
            and strategy._lightning_optimizers is self.optimizers
            and not strategy.lr_scheduler_configs
            and optimizer._on_before_step is optimizer._on_after_step is do_nothing_closure
        )

    def goes_on(self) -> bool:
        """Return whether a batch follows for certain; else Lightning decides."""
        steps = self.automatic.optim_progress.optimizer.step.total.completed
        return not (
            self.trainer.should_stop
            or self.is_last()
            or self.loop._restarting
            or -1 != self.loop.max_steps <= steps
        )

    def is_last(self) -> bool:
        """Return whether this batch is the last of the epoch."""
        batches = self.batches
        return batches.is_last_batch or batches.current.ready == self.fit_loop.max_batches

    def accumulates(self) -> bool:
        """Return whether the optimizer waits for more batches."""
        every = self.trainer.accumulate_grad_batches
        return self.batches.current.ready % every != 0 and not self.is_last()

    # ---- a batch ---------------------------------------------------------------------------------

    def advance(self) -> None:
        """Train on a batch, and validate if it is time to.

        Raises:
            StopIteration: There is no batch, or on_train_batch_start has ended the epoch.
        """
        loop, batches, fetcher = self.loop, self.batches, self.fetcher
        if loop.val_loop._restarting:
            loop.val_loop.restarting = False
        item = self.fetch()
        if item[0] is None:
            loop.advance(Fetched(item, fetcher.done))
            loop.on_advance_end(fetcher)
            return
        index, batches.is_last_batch = batches.current.ready, fetcher.done
        batch = self.on_device(item[0])
        batches.increment_ready()
        connector, results = self.connector, self.results
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        if self.hook("on_train_batch_start", batch, index) == -1:
            batches.increment_by(0, is_last_batch=True)
            batches.increment_processed()
            raise StopIteration
        batches.increment_started()
        output = self.optimize((batch, index) if self.takes_index else (batch,), index)
        batches.increment_processed()
        self.hook("on_train_batch_end", output, batch, index)
        self.update_metrics()
        batches.increment_completed()
        self.log_and_validate()

    def fetch(self) -> Any:
        """Return the next item of the fetcher."""
        fetcher, cycle = self.fetcher, self.loader._iterator
        if fetcher.batches or fetcher.done or fetcher.length is None:
            return next(fetcher)
        try:
            batch = next(cycle.iterators[0])
        except StopIteration:
            cycle._consumed[0] = fetcher.done = True
            raise
        cycle._idx += 1
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= fetcher.length
        return batch, cycle._idx - 1, 0

    def on_device(self, batch: Any) -> Any:
        """Return the batch on the device of the strategy."""
        device = self.strategy._root_device
        if type(batch) is tuple:
            for part in batch:
                if type(part) is not torch.Tensor or part.device != device:
                    break
            else:
                return batch
        return move_data_to_device(batch, device)

    def hook(self, name: str, *args: Any) -> Any:
        """Call a hook of the callbacks and of the module; return what the module's returns."""
        module = self.module
        call_callbacks(self.trainer, module, name, *args)
        function = getattr(module, name)
        if getattr(function, "__func__", None) is not EMPTY_MODULE_HOOKS[name]:
            return call(function, module, name, *args)

    # ---- an update -------------------------------------------------------------------------------

    def optimize(self, args: tuple[Any, ...], index: int) -> Any:
        """Run the training step, and update the weights at the last batch of a step."""
        zeroes = index % self.trainer.accumulate_grad_batches == 0
        run = partial(self.run_closure, args, index, zeroes)
        if self.accumulates():
            run()
        else:
            progress, optimizer = self.automatic.optim_progress.optimizer.step, self.optimizer
            progress.increment_ready()
            closure = partial(self.run_closure_of_step, run, optimizer._optimizer)
            call(self.update.step, self.module, "optimizer_step", closure=closure)
            progress.increment_completed()
        output, self.output = self.output, None
        return Closure(run).consume_result() if output is None else output  # raises

    def run_closure_of_step(self, run: Function, optimizer: Any) -> Any:
        loss, trainer, module = run(), self.trainer, self.module
        self.hook("on_before_optimizer_step", optimizer)
        call(
            module.configure_gradient_clipping,
            module,
            "configure_gradient_clipping",
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )
        return loss

    def run_closure(self, args: tuple[Any, ...], index: int, zeroes: bool) -> Any:
        """Run forward and backward pass; return the loss without a graph."""
        module, every = self.module, self.trainer.accumulate_grad_batches
        zero_grad = partial(self.zero_grad, index) if zeroes else None
        with torch.enable_grad():
            with self.autocast():
                output = call(module.training_step, module, "training_step", *args)
            if type(output) is not torch.Tensor or not output.is_floating_point():
                result = partial(ClosureResult.from_training_step_output, output, every)
                closure = Closure(result, self.backward, zero_grad)
                loss, done = closure(), closure.consume_result()
                self.output = {} if loss is None else done.asdict()
                return loss
            part = output if every == 1 else output / every
            loss = part.detach().clone()
            if zero_grad is not None:
                zero_grad()
            self.backward(part)
            self.output = {"loss": loss}
            return loss

    def zero_grad(self, index: int) -> None:
        progress = self.automatic.optim_progress.optimizer.zero_grad
        optimizer = self.strategy._optimizers[0]
        progress.increment_ready()
        self.hook("on_before_zero_grad", optimizer)
        progress.increment_started()
        call(self.update.zero_grad, self.module, "optimizer_zero_grad")
        progress.increment_completed()

    def backward(self, loss: torch.Tensor) -> None:
        call(self.call_backward, self.module, "backward", loss)

    def call_backward(self, loss: torch.Tensor) -> None:
        self.hook("on_before_backward", loss)
        loss.backward()
        self.hook("on_after_backward")

    # ---- metrics and validation ------------------------------------------------------------------

    def update_metrics(self) -> None:
        """Show callbacks and progress bars the values of this batch."""
        connector, results = self.connector, self.results
        shown, logged = connector._callback_metrics, connector._logged_metrics
        for metric in results.values():
            meta, value = metric.meta, metric._forward_cache
            if metric.has_reset or not meta.on_step or value is None:
                continue
            if not isinstance(value, torch.Tensor) or meta.prog_bar:
                connector.on_batch_end()  # raises, or makes it a number
                return
            if value.requires_grad and not meta.enable_graph:
                value = value.detach()
            name = f"{meta.name}_step" if meta.on_epoch else meta.name
            shown[meta.name] = shown[name] = value
            if meta.logger:
                logged[name] = value
        results.batch = results.batch_size = None

    def log_and_validate(self) -> None:
        """Write metrics and validate if it is time to; count the batches that stepped."""
        loop, trainer, batches = self.loop, self.trainer, self.batches
        steps, every = loop._batches_that_stepped + 1, trainer.log_every_n_steps
        stepped = not self.accumulates()
        logs = every and (steps % every == 0 or trainer.should_stop)
        if stepped and (logs or trainer.fast_dev_run):
            self.connector.update_train_step_metrics()
        due = trainer.should_stop or batches.is_last_batch or loop._skip_next_val
        if self.validates and trainer.limit_val_batches and not due:
            progress = batches.current if trainer.check_val_every_n_epoch else batches.total
            interval, time = trainer.val_check_batch, trainer._val_check_time_interval
            due = time or type(interval) is not int or progress.ready % interval == 0
        if due or trainer._signal_connector.received_sigterm:
            loop.on_advance_end(self.fetcher)
        elif stepped:
            loop._batches_that_stepped += 1


def lean_run(plain: Function) -> Function:
    """Return a function that runs the batches of an epoch, the usual ones by a LeanLoop."""

    def lean(loop: Any, fetcher: Any) -> None:
        lean_loop = LeanLoop(loop, fetcher)
        if not lean_loop.usual:
            plain(loop, fetcher)
            return
        loop.reset()
        loop.on_run_start(fetcher)
        while lean_loop.goes_on() or not loop.done:
            try:
                if lean_loop.applies():
                    lean_loop.advance()
                else:
                    loop.advance(fetcher)
                    loop.on_advance_end(fetcher)
            except StopIteration:
                break
            finally:
                if loop._restarting or loop._resuming_from_checkpoint:  # only the first
                    loop.on_iteration_done()

    return lean


def step_counter(plain: Any) -> Any:
    """Return a property that counts optimizer steps in one call; Lightning's takes nine."""

    def lean(trainer: Any) -> Any:
        strategy = trainer._accelerator_connector.strategy
        module = strategy._lightning_module
        if module is None or module.automatic_optimization:
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            return loop.optim_progress.optimizer.step.total.completed
        return plain.fget(trainer)

    return property(lean)
