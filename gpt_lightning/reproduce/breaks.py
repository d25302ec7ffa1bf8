"""`reproduce --selftest`: break the program at run time, train a few steps, and see what notices.

Each break replaces one function of ours while a rung is trained, so that flags, groups and
configuration still have the published values; or it is an option of `fit`. A break that leaves the
rung's verdict green is unseen.
"""

import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpt_lightning.data.readers import NanoGPTLoader
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import MLP, CausalSelfAttention
from gpt_lightning.reproduce.cases import Case, Rung
from gpt_lightning.reproduce.runner import CaseRun
from gpt_lightning.tables.rows import Console, Row, Verdict, row_type
from gpt_lightning.training import optim
from gpt_lightning.training.module import GPTModule

STEPS = {"small": 12, "gpt2-init": 4}  # of 2,000 and 50
WHOLE = "nothing"
# a rung, what is broken in it, the verdict, and what differs from the published run
BreakRow = row_type("rung:/17 broken:/31 verdict seen_as")
Make = Callable[[Any], Any]  # of the right function, the wrong one


@dataclass(frozen=True)
class Break:
    """A wrong program.

    Attributes:
        name: What is wrong.
        rung: Rung that is trained.
        owner: Class or module whose function is replaced.
        attribute: Name of the function.
        make: Function that returns the wrong function, of the right one.
        options: Options of `fit`.
    """

    name: str
    rung: str
    owner: Any = MLP
    attribute: str = "forward"
    make: Make = lambda right: right
    options: tuple[str, ...] = ()


def around(change: Callable[..., Any]) -> Make:
    """Return a maker of functions that call `change` with the right function and its arguments."""
    return lambda right: lambda *args, **options: change(right, *args, **options)


def hidden(key: str, wrong: Any) -> Make:
    """Return a maker of optimizers with another value of a key during an update alone."""

    def build(right: Any, *args: Any) -> Any:
        optimizer: Any = right(*args)
        step, groups = optimizer.step, optimizer.param_groups

        def wrong_step(closure: Callable[[], Any]) -> None:
            loss, before = closure(), [group[key] for group in groups]
            for group, value in zip(groups, before, strict=True):
                group[key] = wrong(value) if callable(wrong) else wrong
            step(lambda: loss)
            for group, value in zip(groups, before, strict=True):
                group[key] = value

        optimizer.step = wrong_step
        return optimizer

    return around(build)


def attend(power: float, future: int = 1) -> Make:
    """Return a maker of attention with scores times hs ** power, and keys seen below `future`."""

    def build(right: Any, self: Any, config: Any) -> None:
        def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
            unseen = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).triu(future)
            return (q @ k.mT * q.size(-1) ** power).masked_fill(unseen, -torch.inf).softmax(-1) @ v

        right(self, config)
        attention.__name__ = self.attention.__name__
        self.attention = attention

    return around(build)


def other_gelu(right: Any, self: Any, x: Tensor) -> Tensor:
    """Return the MLP's output with the GELU that the configuration does not name."""
    other = "none" if self.gelu.approximate == "tanh" else "tanh"
    y: Tensor = self.c_proj(torch.nn.functional.gelu(self.c_fc(x), approximate=other))
    return y


def swapped_draws(right: Any, self: Any) -> Any:
    """Return nanoGPT's next batch, the third and the fourth swapped."""
    self.count = getattr(self, "count", 0) + 1
    if self.count == 3:
        self.kept = right(self)
    return self.kept if self.count == 4 else right(self)


def clip_at(limit: float | None) -> Make:
    """Return a maker of a function that clips gradients at a limit."""
    return around(lambda right, parameters, old, *rest: right(parameters, limit, *rest))


BREAKS = [
    Break(
        "batches 3 and 4 swapped", "small", NanoGPTLoader, "training_batch", around(swapped_draws)
    ),
    Break("clipped at 2", "small", optim, "clip_gradients", clip_at(2.0)),
    Break("no weight decay", "small", GPTModule, "_build_optimizer", hidden("weight_decay", 0.0)),
    Break("eps 1e-6", "small", GPTModule, "_build_optimizer", hidden("eps", 1e-6)),
    Break("--model.warmup_steps=99", "small", options=("--model.warmup_steps=99",)),
]
for name in ("small", "gpt2-init"):
    heads = CausalSelfAttention, "__init__"
    BREAKS += [
        Break("the other GELU", name, MLP, "forward", around(other_gelu)),
        Break("attention without scale", name, *heads, attend(0)),
        Break("attention scaled by 1/hs", name, *heads, attend(-1)),
    ]


def run_broken(case: Case, rung: Rung, wrong: Break) -> Row:
    """Train the first steps of a rung with a break, and return its verdict."""
    options = [f"--trainer.max_steps={STEPS.get(rung.name, 4)}", *wrong.options]
    right = getattr(wrong.owner, wrong.attribute)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()) as quiet:
        run = CaseRun(case, options, Path(folder), [])
        new = patch.object(wrong.owner, wrong.attribute, wrong.make(right))
        with redirect_stderr(quiet), new:
            run.run(rung)
    (row,) = run.rungs
    seen = [each.setting for each in run.settings if each.verdict == Verdict.FAILED]
    missed = sum(each.verdict == Verdict.FAILED for each in run.losses)
    verdict = {Verdict.FAILED: "red", Verdict.OK: "unseen"}.get(row.verdict, row.verdict)
    found = ", ".join([*seen, *([f"{missed} losses"] if missed else [])])
    return BreakRow(rung.name, wrong.name, verdict, found or row.note)


def run_selftest(rungs: list[tuple[Case, Rung]]) -> int:
    """Break rungs, train them, and print a row for each break.

    Returns:
        0: Every break was seen, and nothing else was. 1: One was not.

    Raises:
        UserError: There is no break of these rungs.
    """
    console, unseen = Console(BreakRow), 0
    chosen = [(*pair, each) for pair in rungs for each in BREAKS if each.rung == pair[1].name]
    if not chosen:
        raise UserError("--selftest breaks gpt2-init and small: leave the table or --rungs out")
    whole = {rung.name: (case, rung, Break(WHOLE, rung.name)) for case, rung, _ in chosen}
    print(console.header())
    for case, rung, each in (*whole.values(), *chosen):
        row = run_broken(case, rung, each)
        unseen += row.verdict != ("unseen" if each.name == WHOLE else "red")
        print(console.line(row), flush=True)
    print(f"\n{len(chosen)} breaks, {unseen or 'none'} unseen")
    return int(unseen > 0)
