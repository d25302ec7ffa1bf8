"""`--trainer.strategy fsdp2`: weights, gradients and optimizer state in shards, one for each rank.

PyTorch's fully_shard through Lightning's ModelParallelStrategy. A block's weights are gathered
before its forward and its backward, and its gradients are averaged into the shards. Checkpoints are
those of every other strategy: rank 0 gathers them, one tensor at a time. With checkpoint.sharded
each rank writes its own shards; every strategy reads both kinds.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, empty
from torch.optim import Optimizer

from gpt_lightning.files import Fields
from gpt_lightning.model.gpt import GPT
from gpt_lightning.model.transforms import ResidualLayerNorm, transform
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.runs.shards import write_shards


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks, with the checkpoints of the other strategies.

    Attributes:
        writes_shards: True if each rank writes its own shards of a checkpoint.
    """

    writes_shards = False
    restore_checkpoint_after_setup = False  # the shards exist before the setup
    lightning_restore_optimizer = True

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def shard(self, model: GPT, mixed: bool) -> None:
        """Shard a model in place, on the device of this rank; reshard one that is in shards.

        Args:
            model: Model with the same weights on all ranks.
            mixed: True if blocks compute with weights in bfloat16. Gradients are reduced in
                float32, and the embeddings and the residual stream stay in float32, as in ddp.
        """
        if isinstance(model, FSDPModule):  # an evaluation leaves the embeddings gathered
            model.reshard()
            return
        policy = MixedPrecisionPolicy()
        if mixed:
            policy = MixedPrecisionPolicy(
                torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            # weights may have another dtype
            transform(model.transformer.h, {nn.LayerNorm: ResidualLayerNorm})
        mesh = self.device_mesh["data_parallel"]
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)

    @contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        """Give each rank all weights of a model, so that ranks may evaluate different batches.

        All ranks must enter and leave.
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

    # ---- checkpoints -----------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> Fields:
        """Return the whole weights on rank 0, an empty dict on other ranks; or the shards."""
        assert self.lightning_module is not None
        return self._gathered(self.lightning_module.state_dict(keep_vars=True))

    def optimizer_state(self, optimizer: Optimizer) -> Fields:
        """Return as `lightning_module_state_dict` the state of an optimizer."""
        return self._gathered(Strategy.optimizer_state(self, optimizer))

    def _gathered(self, state: Fields) -> Fields:
        if self.writes_shards:
            return state
        whole = {}  # tied weights once

        def gather(value: Tensor) -> Tensor:
            if not isinstance(value, DTensor):
                return value.detach()
            if id(value) not in whole:
                full = value.full_tensor().detach()  # a collective of all ranks
                whole[id(value)] = full.cpu() if self.is_global_zero else full.new_empty(0)
            return whole[id(value)]

        state = apply_to_collection(state, Tensor, gather)
        return state if self.is_global_zero else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own, theirs = self.lightning_module.state_dict(), checkpoint["state_dict"]
        weights = {name: sharded_like(own.get(name), weight) for name, weight in theirs.items()}
        self.lightning_module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = dict(enumerate(p for g in optimizer.param_groups for p in g["params"]))
            shards = {
                i: {key: sharded_like(parameters.get(i), value) for key, value in values.items()}
                for i, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": shards})

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Fields:
        def shard_of(placeholder: Tensor) -> Tensor:
            mesh = self.device_mesh["data_parallel"]
            shape, dtype = placeholder.shape, placeholder.dtype
            return empty(shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])

        if isinstance(self.checkpoint_io, DurableCheckpointIO):
            self.checkpoint_io.allocate = shard_of
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def save_checkpoint(
        self, checkpoint: Fields, filepath: Any, storage_options: Any | None = None
    ) -> None:
        if self.writes_shards:
            filepath = self.broadcast(filepath)
            checkpoint = write_shards(checkpoint, Path(filepath))
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)


def sharded_like(own: Any, value: Any) -> Any:
    """Return this rank's shard of a tensor of the shape of a sharded one; others as they are."""
    fits = isinstance(own, DTensor) and isinstance(value, Tensor) and value.shape == own.shape
    if isinstance(value, DTensor):  # a sharded checkpoint's
        return value if fits else value.full_tensor()
    if not fits:
        return value
    value = value.to(own.device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
