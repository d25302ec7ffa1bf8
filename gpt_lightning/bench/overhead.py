"""`gpt-lightning bench overhead`: what Lightning's Trainer and our callbacks cost a step."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt_lightning.bench.sizes import SIZES, autocast, check_dtype, compiled_graphs, devices
from gpt_lightning.bench.sweep import Bench, add_sweep_arguments, listed, one_of, run_sweep, switch
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.tables import column

if TYPE_CHECKING:
    import lightning as L
    import torch

    from gpt_lightning.device import Mark
    from gpt_lightning.module import GPTModule

SHAPES = {"tiny": (2, 2, 64)} | SIZES  # layers, heads, width
DTYPES = ("fp32", "tf32", "bf16")  # fp16 needs a GradScaler, which is another loop
PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed"}
LOOPS = {
    "raw": "forward, backward, AdamW, nothing else",
    "norm": "raw, and the gradient's norm, checked to be finite, as GPTModule does each step",
    "trainer": "Trainer and GPTModule, no callback, no logger",
    "callbacks": "the same with the callbacks of `fit`",
}
PAIRS = ("raw:raw", "raw:trainer", "norm:trainer", "trainer:callbacks")
LEARNING_RATE = 6e-4


@dataclass(frozen=True)
class OverheadRow:
    """Two loops over the same steps, B against A."""

    device: str = column("device")
    dtype: str = column("dtype")
    compile: bool = column("compile")
    size: str = column("size", width=8)
    batch: int = column("batch", "d")
    context: int = column("context", "d")
    a: str = column("A", width=9)
    b: str = column("B", width=9)
    a_ms: float | None = column("A ms", ",.3f", 9)
    b_ms: float | None = column("B ms", ",.3f", 9)
    difference_ms: float | None = column("B - A ms", ",.3f")
    ratio: float | None = column("B/A", ".3f", 6)
    ratio_std: float | None = column("std", ".3f", 6)
    ratio_min: float | None = column("min", ".3f", 6)
    ratio_max: float | None = column("max", ".3f", 6)
    graphs: int | None = column("graphs", "d")
    a_loss: float | None = column("A loss", ".5f", 8)
    b_loss: float | None = column("B loss", ".5f", 8)
    status: str = column("status", default="")
    note: str = column("note", default="")


BENCH = Bench(
    name="overhead",
    title="Lightning's Trainer against a raw PyTorch loop",
    row=OverheadRow,
    measure="gpt_lightning.bench.overhead:measure_overhead",
    notes=(
        "The same model, batch and optimizer in one process, in blocks A B A B. A step lasts from "
        "the moment its batch is asked for to the next such moment, in every loop. B - A and B/A: "
        "medians over the rounds, with the spread of the ratio; raw against raw is the noise.",
        "; ".join(f"{name}: {what}" for name, what in LOOPS.items()) + ". Callbacks: SpeedMonitor, "
        "StepProgress, SampleText and RunCheckpoint between two validations: nothing is sampled "
        "or saved.",
        "loss: after a block, every block from the same weights: equal losses mean equal work.",
    ),
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench overhead", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto; with commas.")
    parser.add_argument("--pairs", default=",".join(PAIRS), help=f"A:B, of {', '.join(LOOPS)}.")
    parser.add_argument("--sizes", default="tiny", help=f"With commas, of {', '.join(SHAPES)}.")
    parser.add_argument("--contexts", default="64", help="Tokens a sequence, with commas.")
    parser.add_argument("--batches", default="4", help="Sequences, with commas.")
    parser.add_argument("--dtypes", default="fp32", help=f"Of {', '.join(DTYPES)}.")
    parser.add_argument("--compile", default="false", help="true, false, or both with a comma.")
    parser.add_argument("--steps", type=int, default=20, help="Steps measured a block.")
    parser.add_argument("--warmup", type=int, default=3, help="Steps before, in each block.")
    parser.add_argument("--rounds", type=int, default=10, help="Blocks of each loop.")
    add_sweep_arguments(parser)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench overhead ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    if min(args.steps, args.warmup, args.rounds) < 1:
        raise UserError("--steps, --warmup and --rounds must be at least 1")
    configurations = [
        {
            "device": device,
            "dtype": dtype,
            "compile": compiled,
            "size": size,
            "shape": list(SHAPES[size]),
            "batch": batch,
            "context": context,
            "a": a,
            "b": b,
            "steps": args.steps,
            "warmup": args.warmup,
            "rounds": args.rounds,
        }
        for device, size, context, batch, dtype, compiled, (a, b) in itertools.product(
            devices(args.device),
            listed(args.sizes, one_of(list(SHAPES)), "--sizes"),
            listed(args.contexts, int, "--contexts"),
            listed(args.batches, int, "--batches"),
            listed(args.dtypes, one_of(DTYPES), "--dtypes"),
            listed(args.compile, switch, "--compile"),
            listed(args.pairs, pair, "--pairs"),
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


def pair(text: str) -> tuple[str, str]:
    """A kind for `listed`: two loops."""
    a, colon, b = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is no pair such as raw:trainer")
    loop = one_of(list(LOOPS))
    return loop(a), loop(b)


# ---- in the row's own process --------------------------------------------------------------------


def measure_overhead(
    device: str,
    dtype: str,
    compile: bool,  # noqa: A002 - the field's word
    size: str,
    shape: list[int],
    batch: int,
    context: int,
    a: str,
    b: str,
    steps: int,
    warmup: int,
    rounds: int,
) -> dict[str, Any]:
    """Runs two loops in turns."""
    import torch

    from gpt_lightning.bench.interleaved import compare, interleave
    from gpt_lightning.training import quiet_lightning

    quiet_lightning()
    where = torch.device(device)
    check_dtype(dtype, where)
    torch.manual_seed(0)
    module = make_module(shape, context, dtype, compile, where)
    x, y = (torch.randint(10_000, (batch, context), device=where) for _ in range(2))
    first, second = (Loop(name, module, (x, y), dtype) for name in (a, b))
    for loop in (first, second):
        loop.block(warmup=1, steps=1)  # compiles, and imports what Trainer imports late
    found = compare(
        interleave(lambda: first.block(warmup, steps), lambda: second.block(warmup, steps), rounds)
    )
    losses = {"a_loss": first.loss, "b_loss": second.loss}
    return {**found.named("a", "b"), "graphs": compiled_graphs(), **losses}


def make_module(
    shape: list[int],
    context: int,
    dtype: str,
    compile: bool,  # noqa: A002 - the field's word
    device: "torch.device",
) -> "GPTModule":
    """A module with its model made, which every loop trains."""
    from gpt_lightning.bench.sizes import make_model
    from gpt_lightning.module import GPTModule
    from gpt_lightning.optim import FUSED_ADAMW_DEVICES

    module = GPTModule(
        make_model(shape, context).config,
        learning_rate=LEARNING_RATE,
        schedule="constant",  # a raw loop would have to do the cosine too
        fused=device.type in FUSED_ADAMW_DEVICES,
        compile=compile,
        matmul_precision="high" if dtype == "tf32" else "highest",
    )
    module.configure_model()
    return module


class AskedBatches:
    """The same batch, over and over, and the moments at which it was asked for.

    Args:
        batch: Tokens and targets, int64 (B, T) each, on the device.
        n: How often.
    """

    def __init__(self, batch: tuple["torch.Tensor", "torch.Tensor"], n: int) -> None:
        self.batch, self.n = batch, n
        self.marks: list[Mark] = []

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
        from gpt_lightning.device import mark

        for _ in range(self.n):
            self.marks.append(mark(self.batch[0].device))
            yield self.batch

    def milliseconds(self) -> list[float]:
        """Between a batch and the next, n - 1 values."""
        from gpt_lightning.device import seconds_between, synchronize

        synchronize(self.batch[0].device)
        return [seconds_between(*marks) * 1e3 for marks in itertools.pairwise(self.marks)]


class Loop:
    """Trains a module from the same weights in each block.

    Args:
        name: Of LOOPS.
        module: Of make_module, as it was initialized.
        batch: Tokens and targets, on the device.
        dtype: Of the forward pass.
    """

    def __init__(
        self,
        name: str,
        module: "GPTModule",
        batch: tuple["torch.Tensor", "torch.Tensor"],
        dtype: str,
    ) -> None:
        self.name, self.module, self.batch, self.dtype = name, module, batch, dtype
        self.device = batch[0].device
        self.loss: float | None = None  # after the last block
        self._initial = {key: value.clone() for key, value in module.state_dict().items()}

    def block(self, warmup: int, steps: int) -> list[float]:
        """Milliseconds of each of `steps` steps, after `warmup` others."""
        import torch

        self.module.load_state_dict(self._initial)
        # the last step, which no request for a batch ends, is not among those measured
        batches = AskedBatches(self.batch, warmup + steps + 1)
        if self.name in ("raw", "norm"):
            self._train_raw(batches)
        else:
            self._train_with_trainer(batches)
        self.module.to(self.device)  # Trainer has left it on the CPU
        with torch.no_grad(), autocast(self.dtype, self.device):
            self.loss = float(self.module(*self.batch))
        return batches.milliseconds()[warmup:]

    def _train_raw(self, batches: AskedBatches) -> None:
        from gpt_lightning import optim

        self.module.to(self.device)
        model, module = self.module.model, self.module
        assert model is not None
        groups = optim.decay_groups(model.named_parameters(), module.weight_decay, module.decay)
        fused = bool(module.fused_setting)
        optimizer = optim.make_adamw(groups, LEARNING_RATE, module.betas, fused)
        model.train()
        for x, y in batches:
            with autocast(self.dtype, self.device):
                loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            if self.name == "norm":
                assert optim.clip_gradients(model.parameters(), None).isfinite()
            optimizer.step()

    def _train_with_trainer(self, batches: AskedBatches) -> None:
        import tempfile

        import lightning as L

        with_callbacks = self.name == "callbacks"
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                accelerator=self.device.type,
                devices=1,
                precision=PRECISIONS[self.dtype],  # type: ignore[arg-type]  # one of Trainer's
                max_steps=len(batches),
                callbacks=fit_callbacks() if with_callbacks else [],
                enable_progress_bar=with_callbacks,
                enable_checkpointing=False,
                enable_model_summary=False,
                logger=False,
                log_every_n_steps=10,  # as `fit`
                num_sanity_val_steps=0,
                use_distributed_sampler=False,
                default_root_dir=folder,
            )
            trainer.fit(self.module, train_dataloaders=batches)


def fit_callbacks() -> list["L.Callback"]:
    """The callbacks of `fit` that act between two validations."""
    import lightning as L

    from gpt_lightning.callbacks.checkpoint import RunCheckpoint
    from gpt_lightning.callbacks.progress import StepProgress
    from gpt_lightning.callbacks.samples import SampleText
    from gpt_lightning.callbacks.speed import SpeedMonitor

    class Unsaved(RunCheckpoint):
        def save(self, trainer: L.Trainer) -> None:
            pass  # gigabytes a block, and none of them within a step

    return [SpeedMonitor(), StepProgress(), SampleText(max_new_tokens=0), Unsaved()]
