"""How `bench peers` measures two models, in the row's own process."""

from typing import Any

import torch
import torch.nn.functional as F

from gpt_lightning.bench.core.paired import compare, interleave
from gpt_lightning.bench.core.timing import StepTimer, stats
from gpt_lightning.bench.core.training_step import (
    autocast,
    checked_graphs,
    compiled_graphs,
    make_model,
    use_dtype,
)
from gpt_lightning.bench.core.worker import SkippedError
from gpt_lightning.data.loader import Batch
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.model.compilation import compile_in_place
from gpt_lightning.model.gpt import GPT
from gpt_lightning.model.huggingface import state_dict_to_hf


def measure_peers(
    device: str,
    dtype: str,
    compile: bool,  # noqa: A002 - the field's word
    size: str,
    shape: list[int],
    batch: int,
    context: int,
    steps: int,
    warmup: int,
    rounds: int,
) -> dict[str, Any]:
    """Trains both models in turns."""
    where = torch.device(device)
    use_dtype(dtype, where)
    torch.manual_seed(0)
    model = make_model(shape, context)
    peer = make_peer(model)  # before compilation renames anything
    x, y = (torch.randint(10_000, (batch, context), device=where) for _ in range(2))
    ours = Contestant(model.to(where), compile, (x, y), dtype)
    theirs = Contestant(peer.to(where), compile, (x, y), dtype)
    found = compare(
        interleave(lambda: ours.block(warmup, steps), lambda: theirs.block(warmup, steps), rounds)
    )
    both = (("ours", ours), ("theirs", theirs))
    measured = {f"{name}_{key}": value for name, c in both for key, value in c.facts().items()}
    return {
        **found.named("ours", "theirs"),
        **measured,
        "ours_tokens_per_sec": batch * context / found.a_ms * 1e3,
        "theirs_tokens_per_sec": batch * context / found.b_ms * 1e3,
        "attention": peer.attention,
        "transformers": peer.version,
    }


class Contestant:
    """A model in training, with its first step made.

    Args:
        model: Takes tokens and targets and gives the loss.
        compiled: Through torch.compile.
        batch: Tokens and targets, int64 (B, T) each, where the model is.
        dtype: Of the forward pass.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compiled: bool,
        batch: Batch,
        dtype: str,
    ) -> None:
        self.model, self.batch, self.dtype = model, batch, dtype
        if compiled:
            compile_in_place(model, batch[0].device.type)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.phases: dict[str, list[float]] = {}
        self.scaler = torch.amp.GradScaler(batch[0].device.type, enabled=dtype == "fp16")
        graphs, timer = compiled_graphs(), StepTimer(batch[0].device)
        synchronize(timer.device)
        self.loss = float(self.step(timer))
        self.first_step_s = timer.milliseconds()["total"][0] / 1e3
        self.graphs = checked_graphs(compiled, graphs)

    def step(self, timer: StepTimer) -> torch.Tensor:
        """One training step; returns its loss."""
        timer.begin()
        with autocast(self.dtype, timer.device):
            loss: torch.Tensor = self.model(*self.batch)
        timer.end("forward")
        self.scaler.scale(loss).backward()
        timer.end("backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        timer.end("optimizer")
        return loss.detach()

    def block(self, warmup: int, steps: int) -> list[float]:
        """Milliseconds of each of `steps` steps, after `warmup` others."""
        timer = StepTimer(self.batch[0].device)
        for _ in range(warmup + steps):
            self.step(timer)
        times = {phase: values[warmup:] for phase, values in timer.milliseconds().items()}
        for phase, values in times.items():
            self.phases.setdefault(phase, []).extend(values)
        return times["total"]

    def facts(self) -> dict[str, Any]:
        """What a row tells of it, but for its share of the comparison."""
        return {
            "forward_ms": stats(self.phases["forward"]).median,
            "backward_ms": stats(self.phases["backward"]).median,
            "first_step_s": self.first_step_s,
            "graphs": self.graphs,
            "loss": self.loss,
        }


def make_peer(model: GPT) -> Any:
    """transformers' GPT-2 with the weights of ours, as tokens and targets to a loss.

    Raises:
        SkippedError: transformers is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise SkippedError(f"{error.name} is not installed: pip install transformers") from error

    class Peer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(peer_config(model, transformers))
            missing = self.model.load_state_dict(state_dict_to_hf(model), strict=False)
            # the tied head is left out of the file format; everything else must be there
            assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
            assert not missing.unexpected_keys, missing
            self.attention = str(self.model.config._attn_implementation)
            self.version = str(transformers.__version__)

        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = self.model(idx, use_cache=False).logits  # (B, T, V)
            return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1))

    return Peer().train()


def peer_config(model: GPT, transformers: Any) -> Any:
    """The GPT2Config of one of our models."""
    ours = model.config
    return transformers.GPT2Config(
        n_layer=ours.n_layer,
        n_head=ours.n_head,
        n_embd=ours.n_embd,
        n_positions=ours.block_size,
        vocab_size=ours.vocab_size,
        activation_function="gelu_new",  # their name of the tanh approximation
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,  # the default, 50,256, is beyond a small vocabulary
        eos_token_id=0,
    )
