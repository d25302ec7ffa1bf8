"""`gpt-lightning bench dtypes`: which dtype each tensor has under autocast."""

import itertools
from dataclasses import dataclass
from typing import Any

from gpt_lightning.bench.core.options import devices, listed, one_of
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.reports.tables import column

AUTOCAST = {"fp16": "float16", "bf16": "bfloat16"}
MODELS = ("toy", "gpt")
# CUDA's autocast as the dispatcher has it, asked with tensors that have no data: no GPU is needed
CUDA_RULES = "cuda-rules"
# the systems course's toy model on CUDA under fp16 autocast
PUBLISHED = {
    "parameters": "float32",
    "linear": "float16",
    "activation": "float16",
    "layer_norm": "float32",
    "logits": "float16",
    "loss": "float32",
    "gradients": "float32",
}


@dataclass(frozen=True)
class DtypeRow:
    """A model under autocast: the dtype of each kind of tensor."""

    device: str = column("device", width=10)
    autocast: str = column("autocast")
    model: str = column("model")
    parameters: str = column("parameters", default="")
    embedding: str = column("embeddings", default="")
    linear: str = column("linear outputs", default="")
    activation: str = column("ReLU or GELU", default="")
    layer_norm: str = column("layer norm", default="")
    residual: str = column("residual stream", default="")
    logits: str = column("logits", width=8, default="")
    loss: str = column("loss", width=8, default="")
    gradients: str = column("gradients", default="")
    published: str = column("against the published", default="")
    status: str = column("status", default="")
    note: str = column("note", default="")


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a model under autocast."""

    device: str = column("device")
    autocast: str = column("autocast")
    model: str = column("model")
    kind: str = column("kind")
    tensor: str = column("tensor")
    dtype: str = column("dtype")
    published: str = column("published (CUDA)", default="")


BENCH = Bench(
    name="dtypes",
    title="dtypes under autocast",
    row=DtypeRow,
    measure="gpt_lightning.reproduce.autocast_dtypes:measure_dtypes",
    notes=(
        "toy: Linear(20, 10) - ReLU - LayerNorm - Linear, without biases; gpt: our GPT, two layers "
        "of width 32. Published is CUDA's fp16 table of the toy model, and only that row can "
        "differ from it.",
        f"{CUDA_RULES}: CUDA's autocast asked through the dispatcher with tensors that have a "
        "shape and no data, forward only; it needs no GPU. Autocast on a CPU has rules of its own: "
        "layer norm is not among the operations that it lifts to float32.",
    ),
    tables={"tensors": TensorRow},
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench dtypes", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument(
        "--device",
        type=str | None,
        default=None,
        help=f"cpu, mps, cuda, {CUDA_RULES}, auto, with commas; null: auto, and {CUDA_RULES}.",
    )
    parser.add_argument("--autocast", default="fp16,bf16", help=f"Of {', '.join(AUTOCAST)}.")
    parser.add_argument("--models", default="toy,gpt", help=f"Of {', '.join(MODELS)}.")
    add_sweep_arguments(parser, timeout_s=120.0)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench dtypes ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    names = (args.device or f"auto,{CUDA_RULES}").split(",")
    args.device = ",".join(name for name in names if name != CUDA_RULES)
    places = [*(devices(args) if args.device else []), *([CUDA_RULES] * (CUDA_RULES in names))]
    configurations = [
        {"device": device, "autocast": dtype, "model": model}
        for device, dtype, model in itertools.product(
            places,
            listed(args, "autocast", one_of(list(AUTOCAST))),
            listed(args, "models", one_of(MODELS)),
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


# ---- in the row's own process --------------------------------------------------------------------


def measure_dtypes(device: str, autocast: str, model: str) -> dict[str, Any]:
    """Runs a step and notes the dtype of every tensor that a person could ask about."""
    from gpt_lightning.reproduce.autocast_dtypes_run import Observer

    published = PUBLISHED if (autocast, model) == ("fp16", "toy") else {}
    seen = Observer(model, AUTOCAST[autocast], device).observe()
    kinds: dict[str, list[str]] = {}
    for kind, _, dtype in seen:
        kinds.setdefault(kind, []).append(dtype)
    row = {kind: " + ".join(dict.fromkeys(dtypes)) for kind, dtypes in kinds.items()}
    same = verdict(row, published)
    on_cuda = device in ("cuda", CUDA_RULES)  # which the published table is of
    return {
        **{kind: text for kind, text in row.items() if kind in DtypeRow.__dataclass_fields__},
        "published": same,
        "status": "mismatch" if on_cuda and " was " in same else "ok",
        "tensors": [
            {"kind": kind, "tensor": name, "dtype": dtype, "published": published.get(kind, "")}
            for kind, name, dtype in seen
        ],
    }


def verdict(row: dict[str, str], published: dict[str, str]) -> str:
    """Where a row differs from what was published for it; empty if nothing was."""
    if not published:
        return ""
    other = [kind for kind, theirs in published.items() if row.get(kind, theirs) != theirs]
    unasked = [f"{kind} not asked" for kind in published if kind not in row]
    differs = [f"{kind} was {published[kind]}" for kind in other]
    return "; ".join([*(differs or ["the same"]), *unasked])
