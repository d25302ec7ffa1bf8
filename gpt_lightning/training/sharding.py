"""`--trainer.strategy fsdp2`: weights, gradients and optimizer state in shards, one for each rank.

PyTorch's fully_shard through Lightning's ModelParallelStrategy. A block's weights are gathered
before its forward and its backward, and its gradients are averaged into the shards.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from gpt_lightning.files import Fields
from gpt_lightning.model.gpt import GPT
from gpt_lightning.prepare.pool import cores


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks, with the checkpoints of the other strategies.

    Lightning's own would write tied weights twice and number an optimizer's parameters by the
    model, and would load weights before the run is compared with the checkpoint.
    """

    restore_checkpoint_after_setup = False  # the shards exist before the setup
    lightning_restore_optimizer = True
    load_checkpoint = Strategy.load_checkpoint  # through the CheckpointIO

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        if "OMP_NUM_THREADS" not in os.environ:  # Lightning sets it in the ranks of ddp alone
            torch.set_num_threads(max(1, cores() // self.num_processes))
        super().setup_environment()

    def on_train_start(self) -> None:
        """Reshard the embeddings, which the sanity check leaves gathered."""
        cast(FSDPModule, cast(Any, self.lightning_module).model).reshard()

    def lightning_module_state_dict(self) -> Fields:
        """Return the whole weights on rank 0, an empty dict on other ranks."""
        assert self.lightning_module is not None
        return self._gathered(self.lightning_module.state_dict(keep_vars=True))

    def optimizer_state(self, optimizer: Optimizer) -> Fields:
        """Return as `lightning_module_state_dict` the state of an optimizer."""
        return self._gathered(Strategy.optimizer_state(self, optimizer))

    def _gathered(self, state: Fields) -> Fields:
        whole = {}  # tied weights once

        def gather(shard: DTensor) -> Tensor:
            if id(shard) not in whole:
                full = shard.full_tensor().detach()  # a collective of all ranks
                whole[id(shard)] = full.cpu() if self.is_global_zero else full.new_empty(0)
            return whole[id(shard)]

        state = apply_to_collection(state, DTensor, gather)
        return state if self.is_global_zero else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        weights = {
            name: sharded_like(own.get(name), weight)
            for name, weight in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = dict(enumerate(p for g in optimizer.param_groups for p in g["params"]))
            shards = {
                i: {key: sharded_like(parameters.get(i), value) for key, value in values.items()}
                for i, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": shards})


def sharded_like(own: Any, value: Any) -> Any:
    """Return this rank's shard of a tensor of the shape of a sharded one; others as they are."""
    if not isinstance(own, DTensor) or getattr(value, "shape", None) != own.shape:
        return value
    value = value.to(own.device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """Shard a model in place, with the same weights on all ranks; reshard one that is in shards."""
    if isinstance(model, FSDPModule):  # an evaluation leaves the embeddings gathered
        model.reshard()
        return
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Give each rank all weights of a model in shards, for batches that differ between ranks.

    All ranks must enter and leave. A whole model stays as it is.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.unshard()
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)
