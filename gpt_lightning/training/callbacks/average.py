"""EMA: Lightning's EMAWeightAveraging, whose update does not wait for the device.

PyTorch's AveragedModel asks its counter, a tensor of the device, whether this is the first update:
two waits a step. Lightning gives it a function of single tensors: three launches for each of them.
"""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class EMA(EMAWeightAveraging):
    """EMAWeightAveraging in one launch a step and without a wait, but for each session's first.

    Args:
        decay: Factor of the average in decay x average + (1 - decay) x weights.
        kwargs: Further arguments of EMAWeightAveraging.
    """

    def __init__(self, decay: float = 0.999, **kwargs: Any):
        super().__init__(decay=decay, **kwargs)
        self._update = get_ema_multi_avg_fn(decay)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._updated = 0  # last step of this session
        made = (value for value in vars(self).values() if isinstance(value, AveragedModel))
        self._copy: Any = next(made, None)  # Lightning has no public name for it

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step <= self._updated or not self.should_update(step_idx=step - 1):
            return
        if not self._updated or [*pl_module.buffers()]:  # the first one copies
            super().on_train_batch_end(trainer, pl_module, *args)
        else:
            averages = [*self._copy.module.parameters()]
            self._update(averages, [w.to(averages[0].device) for w in pl_module.parameters()], 0)
        self._updated = step
