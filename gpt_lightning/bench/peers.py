"""`gpt-lightning bench peers`: our GPT-2 against transformers', the same weights and batch."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt_lightning.bench.sizes import (
    DTYPES,
    SIZES,
    autocast,
    check_dtype,
    compiled_graphs,
    devices,
    make_model,
)
from gpt_lightning.bench.sweep import Bench, add_sweep_arguments, listed, one_of, run_sweep, switch
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.tables import column

if TYPE_CHECKING:
    import torch

    from gpt_lightning.model import GPT

SHAPES = {"tiny": (2, 2, 64)} | SIZES  # layers, heads, width


@dataclass(frozen=True)
class PeerRow:
    """A configuration and the steps of both models."""

    device: str = column("device")
    dtype: str = column("dtype")
    compile: bool = column("compile")
    size: str = column("size", width=8)
    batch: int = column("batch", "d")
    context: int = column("context", "d")
    ours_ms: float | None = column("ours ms", ",.2f", 9)
    theirs_ms: float | None = column("theirs ms", ",.2f", 9)
    ours_forward_ms: float | None = column("ours forward ms", ",.2f")
    theirs_forward_ms: float | None = column("theirs forward ms", ",.2f")
    ours_backward_ms: float | None = column("ours backward ms", ",.2f")
    theirs_backward_ms: float | None = column("theirs backward ms", ",.2f")
    ours_tokens_per_sec: float | None = column("ours tokens/s", ",.0f")
    theirs_tokens_per_sec: float | None = column("theirs tokens/s", ",.0f")
    ratio: float | None = column("theirs/ours", ".3f")
    ratio_std: float | None = column("std", ".3f", 6)
    ratio_min: float | None = column("min", ".3f", 6)
    ratio_max: float | None = column("max", ".3f", 6)
    ours_first_step_s: float | None = column("ours first s", ",.1f")
    theirs_first_step_s: float | None = column("theirs first s", ",.1f")
    ours_graphs: int | None = column("our graphs", "d")
    theirs_graphs: int | None = column("their graphs", "d")
    ours_loss: float | None = column("our loss", ".5f")
    theirs_loss: float | None = column("their loss", ".5f")
    attention: str = column("their attention", default="")
    transformers: str = column("transformers", default="")
    status: str = column("status", default="")
    note: str = column("note", default="")


BENCH = Bench(
    name="peers",
    title="The same GPT-2 through transformers' GPT2LMHeadModel and ours",
    row=PeerRow,
    measure="gpt_lightning.bench.peers:measure_peers",
    notes=(
        "Both models have the same weights, batch, loss function and AdamW and no dropout; theirs "
        "keeps no cache of keys and values. Training steps in blocks of ours, theirs, ours, ... in "
        "one process; ms: the median step. theirs/ours: median over the rounds of their time over "
        "ours, with its spread; above 1 ours is faster.",
        "loss: of the first step, before any update: equal losses mean equal models. first: the "
        "first step, with compilation. graphs: compiled by torch.compile.",
    ),
    hidden=(
        "ours_forward_ms",
        "theirs_forward_ms",
        "ours_backward_ms",
        "theirs_backward_ms",
        "ratio_min",
        "ratio_max",
        "ours_first_step_s",
        "theirs_first_step_s",
        "attention",
        "transformers",
        "note",
    ),
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench peers", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto; with commas.")
    parser.add_argument("--sizes", default="small", help=f"With commas, of {', '.join(SHAPES)}.")
    parser.add_argument("--contexts", default="256", help="Tokens a sequence, with commas.")
    parser.add_argument("--batches", default="4", help="Sequences, with commas.")
    parser.add_argument("--dtypes", default="fp32,bf16", help=f"Of {', '.join(DTYPES)}.")
    parser.add_argument("--compile", default="false,true", help="true, false, or both.")
    parser.add_argument("--steps", type=int, default=3, help="Steps measured a block.")
    parser.add_argument("--warmup", type=int, default=1, help="Steps before, in each block.")
    parser.add_argument("--rounds", type=int, default=5, help="Blocks of each model.")
    add_sweep_arguments(parser, timeout_s=1200.0)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench peers ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    if min(args.steps, args.rounds) < 1 or args.warmup < 0:
        raise UserError("--steps and --rounds must be at least 1, --warmup at least 0")
    configurations = [
        {
            "device": device,
            "dtype": dtype,
            "compile": compiled,
            "size": size,
            "shape": list(SHAPES[size]),
            "batch": batch,
            "context": context,
            "steps": args.steps,
            "warmup": args.warmup,
            "rounds": args.rounds,
        }
        for device, size, context, batch, dtype, compiled in itertools.product(
            devices(args.device),
            listed(args.sizes, one_of(list(SHAPES)), "--sizes"),
            listed(args.contexts, int, "--contexts"),
            listed(args.batches, int, "--batches"),
            listed(args.dtypes, one_of(DTYPES), "--dtypes"),
            listed(args.compile, switch, "--compile"),
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


# ---- in the row's own process --------------------------------------------------------------------


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
    import torch

    from gpt_lightning.bench.interleaved import compare, interleave

    where = torch.device(device)
    check_dtype(dtype, where)
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
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
        model: "torch.nn.Module",
        compiled: bool,
        batch: tuple["torch.Tensor", "torch.Tensor"],
        dtype: str,
    ) -> None:
        import torch

        from gpt_lightning.bench.timing import StepTimer
        from gpt_lightning.device import synchronize

        self.model, self.batch, self.dtype = model, batch, dtype
        if compiled:
            model.compile()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.phases: dict[str, list[float]] = {}
        self.scaler = torch.amp.GradScaler(batch[0].device.type, enabled=dtype == "fp16")
        graphs, timer = compiled_graphs(), StepTimer(batch[0].device)
        synchronize(timer.device)
        self.loss = float(self.step(timer))
        self.first_step_s = timer.milliseconds()["total"][0] / 1e3
        self.graphs = compiled_graphs() - graphs

    def step(self, timer: Any) -> "torch.Tensor":
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
        from gpt_lightning.bench.timing import StepTimer

        timer = StepTimer(self.batch[0].device)
        for _ in range(warmup + steps):
            self.step(timer)
        times = {phase: values[warmup:] for phase, values in timer.milliseconds().items()}
        for phase, values in times.items():
            self.phases.setdefault(phase, []).extend(values)
        return times["total"]

    def facts(self) -> dict[str, Any]:
        """What a row tells of it, but for its share of the comparison."""
        from gpt_lightning.bench.timing import stats

        return {
            "forward_ms": stats(self.phases["forward"]).median,
            "backward_ms": stats(self.phases["backward"]).median,
            "first_step_s": self.first_step_s,
            "graphs": self.graphs,
            "loss": self.loss,
        }


def make_peer(model: "GPT") -> Any:
    """transformers' GPT-2 with the weights of ours, as tokens and targets to a loss.

    Raises:
        SkippedError: transformers is not installed.
    """
    import torch
    import torch.nn.functional as F

    from gpt_lightning.bench.worker import SkippedError
    from gpt_lightning.hub import state_dict_to_hf

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


def peer_config(model: "GPT", transformers: Any) -> Any:
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
