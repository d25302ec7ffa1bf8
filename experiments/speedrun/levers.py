# mypy: ignore-errors
"""Measure the levers of the Shakespeare speedrun one at a time, and write their page.

    python -m experiments.speedrun.levers

Each lever changes one thing of the base, a short run of the speedrun's model, and trains as many
tokens with the same seeds. The gain is the base's loss over the whole validation split minus the
lever's, seed by seed. What no record uses is written here alone. Each run has one thread, and as
many run side by side as there are cores: losses are measured, not times.
"""

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from experiments.speedrun.model import ROWS, RotaryAttention, SpeedrunGPT, SpeedrunTransformer
from gpt_lightning.cli import main
from gpt_lightning.data.texts import corpus_file
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import machine_record
from gpt_lightning.model.fast.compilation import compile_in_place
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.transforms import transform
from gpt_lightning.parsing import OneLineParser
from gpt_lightning.tables.ledger import Ledger, identity
from gpt_lightning.tables.options import at_least, listed, one_of
from gpt_lightning.tables.worker import isolated
from gpt_lightning.training.optimizers.muon import orthogonalize

ABOUT = "Measure the levers of the Shakespeare speedrun one at a time, and write their page."
PAGE = Path(__file__).parent / "records" / "levers.md"
ROWS_FOLDER = Path("lightning_logs") / "speedrun" / "levers"
LIMIT_S = 3600.0  # time limit of a run
V = 65
LONG = "1.4697, best"  # records of several epochs
SHARES = dict[float, int]  # share of the training at which a value begins -> value


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        what: Lever in words.
        kept: True if it takes a thing of all records away.
        records: Records that use it.
        change: Function that changes the new model in place.
        variant: gpt2, speedrun, or speedrun-pairs for pairs of tokens in place of triples.
        n_layer: Blocks.
        n_embd: Width.
        dropout: Dropout at the begin and at the end, linear between.
        optimizer: Optimizer of the blocks' matrices: adamw, muon, normuon or soap.
        lr: Peak of AdamW's rate.
        matrix_lr: Peak of the matrices' rate.
        schedule: linear, late (constant, then a line over the last 70%), cosine or constant.
        batch: Sequences of 128 tokens per step.
        context: Tokens per sequence.
        depth: Blocks that run, of a model with_growth.
        average: Decay of the averaged weights that are evaluated; 0: the last weights.
        shuffled: True for each window once in an epoch, False for random windows.
    """

    what: str
    _: KW_ONLY
    kept: bool = False
    records: str = "no"
    change: Callable[[GPT], None] = lambda model: None
    variant: str = "speedrun"
    n_layer: int = 3
    n_embd: int = 128
    dropout: tuple[float, float] = (0.0, 0.0)
    optimizer: str = "muon"
    lr: float = 8e-3
    matrix_lr: float = 3e-2
    schedule: str = "linear"
    batch: SHARES = field(default_factory=lambda: {0.0: 16})
    context: SHARES = field(default_factory=lambda: {0.0: 128})
    depth: SHARES = field(default_factory=lambda: {0.0: 3})
    average: float = 0.0
    shuffled: bool = True


# ---- changes of the model ------------------------------------------------------------------------


def each(model: GPT, change: Callable[..., object]) -> None:
    """Call a function with each block."""
    for block in model.transformer.h:
        change(block)


def with_pairs(model: GPT) -> None:
    """Add a table of all pairs to the embedding of tokens."""
    model.transformer.wte = Pairs(model.transformer.wte)


class Pairs(nn.Module):
    """Embedding of tokens and of pairs of tokens."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings = tokens.num_embeddings
        self.tokens, self.pairs = tokens, nn.Embedding(V * V, tokens.embedding_dim)
        nn.init.normal_(self.pairs.weight, std=0.03)

    def forward(self, idx: Tensor) -> Tensor:
        return self.tokens(idx) + self.pairs(nn.functional.pad(idx, (1, 0))[:, :-1] * V + idx)


def with_more_triples(model: GPT) -> None:
    """Double the table of triples."""
    table = nn.Embedding(2 * ROWS, model.config.n_embd)
    nn.init.normal_(table.weight, std=0.01)
    model.transformer.last = table


def without_triples(model: GPT) -> None:
    """Leave triples out of the embedding."""
    nn.init.zeros_(model.transformer.last.weight).requires_grad_(False)


def with_mix(model: GPT) -> None:
    """Add the embedding to the input of each block, with a trained weight that begins at 0."""
    transform(model, {SpeedrunTransformer: Mixed})
    model.transformer.mix = nn.Parameter(torch.tensor([[1.0, 0.0]] * model.config.n_layer))


class Mixed(SpeedrunTransformer):
    """Model whose blocks read the embedding, too."""

    def blocks(self, x: Tensor) -> Tensor:
        x0 = x
        for block, mix in zip(self.h, self.mix, strict=True):
            x = block(mix[0] * x + mix[1] * x0)
        return x


def with_embedding_dropout(model: GPT) -> None:
    """Drop from the embedding as GPT-2 does."""
    transform(model, {SpeedrunTransformer: Dropped})


class Dropped(SpeedrunTransformer):
    """Model with dropout after the embedding."""

    def blocks(self, x: Tensor) -> Tensor:
        return super().blocks(nn.functional.dropout(x, 0.1, self.training))


def with_growth(model: GPT) -> None:
    """Let the first blocks run alone at first; the others begin as identities."""
    transform(model, {SpeedrunTransformer: Growing})


class Growing(SpeedrunTransformer):
    """Model of which the first `active` blocks run."""

    active = 1

    def blocks(self, x: Tensor) -> Tensor:
        for block in self.h[: self.active]:
            x = block(x)
        return x


def with_gelu(model: GPT) -> None:
    """Take GPT-2's activation."""
    each(model, lambda block: setattr(block.mlp, "gelu", nn.GELU(approximate="tanh")))


def without_rotation(model: GPT) -> None:
    """Add learned positions to the input, as GPT-2 does."""
    transform(model, {RotaryAttention: NormalizedAttention})
    model.transformer.wte = Positions(model.transformer.wte, model.config)


class NormalizedAttention(RotaryAttention):
    """Attention without rotations."""

    def rotate(self, x: Tensor) -> Tensor:
        return x


class Positions(nn.Module):
    """Embedding of tokens and of positions."""

    def __init__(self, wte: nn.Embedding, config: GPTConfig) -> None:
        super().__init__()
        self.num_embeddings = wte.num_embeddings
        self.wte, self.wpe = wte, nn.Embedding(config.block_size, config.n_embd)
        nn.init.normal_(self.wpe.weight, std=0.1)

    def forward(self, idx: Tensor) -> Tensor:
        return self.wte(idx) + self.wpe.weight[: idx.size(1)]


def without_normalization(model: GPT) -> None:
    """Leave queries and keys as they are."""
    each(model, lambda block: setattr(block.attn, "normalize", lambda x: x))


def with_normal_projections(model: GPT) -> None:
    """Draw GPT-2's initial projections and head."""
    std = 0.02 * (2 * model.config.n_layer) ** -0.5
    each(model, lambda block: nn.init.normal_(block.attn.c_proj.weight, std=std))
    each(model, lambda block: nn.init.normal_(block.mlp.c_proj.weight, std=std))
    nn.init.normal_(model.lm_head.weight, std=0.02)


BASE = Run("the base")
LEVERS: dict[str, Run] = {
    "base": BASE,
    "pairs": Run("a table of pairs beside the triples", change=with_pairs),
    "pairs-alone": Run(
        "a table of pairs instead of triples", records=LONG, variant="speedrun-pairs"
    ),
    "more-triples": Run("twice as many rows for triples", change=with_more_triples),
    "triples": Run("without the embedding of triples", kept=True, change=without_triples),
    "rotary": Run("learned positions instead of rotary ones", kept=True, change=without_rotation),
    "qk-norm": Run("queries and keys not normalized", kept=True, change=without_normalization),
    "relu2": Run("GELU instead of squared ReLU", kept=True, change=with_gelu),
    "zero-init": Run(
        "normal projections and head instead of zeros", kept=True, change=with_normal_projections
    ),
    "mix": Run("the embedding as an input of each block", change=with_mix),
    "gpt2": Run("GPT-2 itself, with Muon", kept=True, variant="gpt2", lr=4e-3),
    "adamw": Run("AdamW instead of Muon", kept=True, optimizer="adamw", matrix_lr=4e-3),
    "normuon": Run("NorMuon instead of Muon", optimizer="normuon"),
    "soap": Run("SOAP instead of Muon", optimizer="soap", matrix_lr=4e-3),
    "muon-lr": Run("Muon's rate 0.045", matrix_lr=4.5e-2),
    "adamw-lr": Run("AdamW's rate 0.012", lr=1.2e-2),
    "cosine": Run("a cosine instead of a line", kept=True, schedule="cosine"),
    "late": Run("a line to 0 over the last 70% only", records=LONG, schedule="late"),
    "average": Run(
        "a constant rate and averaged weights", records=LONG, schedule="constant", average=0.98
    ),
    "batch-growth": Run("8 sequences a step in the first quarter", batch={0.0: 8, 0.25: 16}),
    "small-batch": Run("8 sequences a step", batch={0.0: 8}),
    "context": Run("64 tokens of context in the first half", context={0.0: 64, 0.5: 128}),
    "random": Run("random windows instead of shuffled ones", kept=True, shuffled=False),
    "dropout": Run("dropout 0.1", records=LONG, dropout=(0.1, 0.1)),
    "embedding-dropout": Run(
        "dropout 0.1, of the embedding too", change=with_embedding_dropout, dropout=(0.1, 0.1)
    ),
    "dropout-schedule": Run("dropout from 0 to 0.1", dropout=(0.0, 0.1)),
    "small": Run("2 layers, as wide", n_layer=2),
    "small-first": Run(
        "1 block in the first quarter, 2 in the second, then 3",
        change=with_growth,
        depth={0.0: 1, 0.25: 2, 0.5: 3},
    ),
}


# ---- optimizers ----------------------------------------------------------------------------------


class Matrices(torch.optim.Optimizer):
    """NorMuon (Li et al. 2025) or SOAP (Vyas et al. 2024) for single matrices.

    NorMuon divides each row of Muon's direction by the root of its mean square, averaged over
    steps, and keeps the direction's norm. SOAP is Adam in the basis of the eigenvectors of averaged
    products of the gradient with itself, taken again every 10 steps.
    """

    def __init__(self, matrices: list[Tensor], lr: float, kind: str) -> None:
        super().__init__([{"params": matrices}], {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        for p in group["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            direction = getattr(self, self.kind)(p.grad, state)
            p.mul_(1 - group["lr"] * 0.1).add_(direction, alpha=-group["lr"])

    def normuon(self, g: Tensor, state: dict) -> Tensor:
        momentum = state.setdefault("momentum", torch.zeros_like(g)).lerp_(g, 0.05)
        coefficients = (3.4445, -4.775, 2.0315)
        d = orthogonalize(g.lerp(momentum, 0.95)[None], coefficients, 5)[0]
        square = d.square().mean(1, keepdim=True)
        mean = state.setdefault("square", torch.zeros_like(square)).lerp_(square, 0.05)
        scaled = d / (mean / (1 - 0.95 ** state["step"])).sqrt().clamp(min=1e-8)
        scaled *= d.norm() / scaled.norm().clamp(min=1e-12)  # a first gradient may be 0
        return scaled * max(1.0, g.size(0) / g.size(1)) ** 0.5

    def soap(self, g: Tensor, state: dict) -> Tensor:
        left = state.setdefault("left", torch.zeros(len(g), len(g))).lerp_(g @ g.mT, 0.05)
        right = state.setdefault("right", torch.zeros(g.size(1), g.size(1))).lerp_(g.mT @ g, 0.05)
        if state["step"] % 10 == 1:
            state["bases"] = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
        q_left, q_right = state["bases"]
        rotated = q_left.mT @ g @ q_right
        momentum = state.setdefault("momentum", torch.zeros_like(g)).lerp_(g, 0.05)
        square = state.setdefault("square", torch.zeros_like(g)).lerp_(rotated.square(), 0.05)
        n = state["step"]
        numerator = q_left.mT @ momentum @ q_right / (1 - 0.95**n)
        return q_left @ (numerator / (square / (1 - 0.95**n)).sqrt().add(1e-8)) @ q_right.mT


def optimizers(model: GPT, run: Run) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the blocks' matrices, and AdamW for the rest."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if n.startswith("transformer.h.") and p.dim() == 2]
    taken = set(map(id, matrices))
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(groups, lr=run.lr, betas=(0.9, 0.95), fused=True)
    if run.optimizer == "muon":
        own = torch.optim.Muon(matrices, lr=run.matrix_lr, weight_decay=0.1)
    elif run.optimizer == "adamw":
        own = torch.optim.AdamW(matrices, run.matrix_lr, (0.9, 0.95), weight_decay=0.1, fused=True)
    else:
        own = Matrices(matrices, run.matrix_lr, run.optimizer)
    return [own, adamw]


# ---- training ------------------------------------------------------------------------------------


def train(run: Run, seed: int, tokens: int) -> float:
    """Return the validation loss after a number of tokens."""
    torch.manual_seed(seed)
    train_ids, val_ids = read_tokens()
    gpt2 = run.variant == "gpt2"
    config = GPTConfig(run.n_layer, 4, run.n_embd, 128, V, False, max(run.dropout), gpt2)
    model = GPT(config) if gpt2 else SpeedrunGPT(config, run.variant == "speedrun-pairs")
    run.change(model)
    compile_in_place(model, "cpu")
    drops = [module for module in model.modules() if hasattr(module, "p")]
    averaged = [p.detach().clone() for p in model.parameters()] if run.average else []
    both = optimizers(model, run)
    peaks = [group["lr"] for optimizer in both for group in optimizer.param_groups]
    starts, seen = windows(len(train_ids), run.shuffled, seed), 0
    while seen < tokens:
        share = seen / tokens
        B, T = at(run.batch, share), at(run.context, share)
        if isinstance(model.transformer, Growing):
            model.transformer.active = at(run.depth, share)
        B = B * 128 // T
        first = np.array([next(starts) for _ in range(B * T // 128)])
        first = (first[:, None] + np.arange(0, 128, T)).reshape(-1)[:B]
        rows = train_ids[torch.from_numpy(first)[:, None] + torch.arange(T + 1)]  # (B, T + 1)
        factor = rate(run.schedule, share, B * T / tokens)
        groups = [group for optimizer in both for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * factor
        if run.dropout[0] != run.dropout[1]:
            for module in drops:
                module.p = run.dropout[0] + round(share * 4) / 4 * (run.dropout[1] - run.dropout[0])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        if averaged:
            with torch.no_grad():
                torch._foreach_lerp_(averaged, list(model.parameters()), 1 - run.average)
        seen += B * T
    if averaged:
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), averaged)
    return evaluate(model.eval(), val_ids)


def rate(schedule: str, share: float, step: float) -> float:
    """Return the factor of the peak rate: 20 steps of warm-up, then the schedule."""
    warm = min(1.0, (share / step + 1) / 21)
    if schedule in ("linear", "late"):
        return warm * min(1.0, (1 - share) / (1.0 if schedule == "linear" else 0.7))
    if schedule == "constant":
        return warm
    return warm * 0.5 * (1 + np.cos(np.pi * share))


def at(values: SHARES, share: float) -> int:
    """Return the value at a share of the training."""
    return values[max(begin for begin in values if begin <= share)]


def windows(n: int, shuffled: bool, seed: int) -> Iterator[int]:
    """Yield first tokens of windows of 128 tokens and their targets."""
    rng = np.random.default_rng(seed)
    while True:
        if shuffled:
            starts = np.arange(rng.integers(128), n - 128, 128)
            rng.shuffle(starts)
            yield from starts
        else:
            yield int(rng.integers(n - 128))


def read_tokens() -> tuple[Tensor, Tensor]:
    """Return the tokens of both splits, nanoGPT's."""
    text = corpus_file("tinyshakespeare", Path("data")).read_text(encoding="utf-8")
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([ids[character] for character in text])
    n = int(0.9 * len(text))
    return tokens[:n], tokens[n:]


@torch.no_grad()
def evaluate(model: GPT, tokens: Tensor) -> float:
    """Return the mean loss over all characters, in windows of 128 one after the other."""
    total, n = 0.0, len(tokens) - 1
    with torch.compiler.set_stance("force_eager"), torch.autocast("cpu", torch.bfloat16):
        whole = n // 128 * 128
        x, y = tokens[:whole].view(-1, 128), tokens[1 : whole + 1].view(-1, 128)
        for i in range(0, len(x), 64):
            total += model(x[i : i + 64], y[i : i + 64]).item() * y[i : i + 64].numel()
        total += model(tokens[None, whole:n], tokens[None, whole + 1 :]).item() * (n - whole)
    return total / n


# ---- page ----------------------------------------------------------------------------------------


def measure(row: SimpleNamespace) -> dict[str, float]:
    """Return the loss of a run."""
    return {"loss": train(LEVERS[row.lever], row.seed, row.tokens)}


def run(argv: list[str]) -> int:
    """Measure levers, each run in a process of its own, and write the page.

    Raises:
        UserError: An argument is wrong, or a run failed.
    """
    parser = OneLineParser(prog="python -m experiments.speedrun.levers", description=ABOUT)
    parser.add_argument("--only", default=",".join(LEVERS), help="Levers, separated by commas.")
    parser.add_argument("--seeds", default="1,2,3", help="Seeds, separated by commas.")
    parser.add_argument("--tokens", type=int, default=819_200, help="Tokens of a run.")
    parser.add_argument("--rows", default=str(ROWS_FOLDER), help="Folder of the losses so far.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="Runs side by side.")
    args = parser.parse_args(argv)
    names = dict.fromkeys(["base", *listed(args, "only", one_of(LEVERS))])
    seeds, ledger = listed(args, "seeds", at_least(0)), Ledger(Path(args.rows))
    ledger.folder.mkdir(parents=True, exist_ok=True)
    keys = [{"lever": n, "seed": seed, "tokens": args.tokens} for n in names for seed in seeds]
    todo = [key for key in keys if identity(key) not in ledger.by_key()]
    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = pool.map(lambda key: isolated(f"{__spec__.name}:measure", key, LIMIT_S), todo)
        for key, row in zip(todo, rows, strict=True):
            if row["status"] != "ok":
                raise UserError(f"{key['lever']} ended: {row['status']}, {row['note']}")
            ledger.append(key, row)
            print(f"{key['lever']} seed {key['seed']}: {row['loss']:.4f}", flush=True)
    found = ((key, row) for key, row in ledger.read() if key["tokens"] == args.tokens)
    known = {(key["lever"], key["seed"]): row["loss"] for key, row in found}
    write(known, seeds, args.tokens)
    return 0


def write(known: dict[tuple[str, int], float], seeds: list[int], tokens: int) -> None:
    """Write the page of all losses that are known."""
    lines = [
        "| lever | mean loss | gain | by seed | in a record |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for name, run in LEVERS.items():
        losses = [known.get((name, seed)) for seed in seeds]
        if None in losses:
            continue
        # a lever of a record is measured by its absence
        sign = -1 if run.kept else 1
        gains = [sign * (known["base", s] - known[name, s]) for s in seeds]
        each = ", ".join(f"{gain:+.4f}" for gain in gains) if name != "base" else ""
        mean = f"{statistics.mean(gains):+.4f}" if name != "base" else ""
        kept = "" if name == "base" else "yes" if run.kept else run.records
        loss = statistics.mean(loss for loss in losses if loss is not None)
        lines.append(f"| {run.what} | {loss:.4f} | {mean} | {each} | {kept} |")
    machine = machine_record([])
    facts = ". ".join(machine[key] for key in ("date", "CPU", "software"))
    text = f"""# Levers of the Shakespeare speedrun

`python -m experiments.speedrun.levers`. {facts}.

The base: the speedrun's model with {BASE.n_layer} layers, {BASE.n_embd} wide, 16 x 128 characters a
step, {tokens:,} characters in all; Muon {BASE.matrix_lr:g}, AdamW {BASE.lr:g}, a line to 0. Each
row changes one thing; tokens and seeds ({", ".join(map(str, seeds))}) are the same. The gain is in
nats, and positive if the lever lowers the loss. A lever that all records use is measured by its
absence. The base reads less than one epoch: dropout, averaged weights and pairs of characters are
for records of several epochs, and lose here.

"""
    PAGE.write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main(run=run))
