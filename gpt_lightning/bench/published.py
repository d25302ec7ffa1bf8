"""Published table of a systems course next to ours, with the known defects of each row.

Published: https://github.com/elbiczel/cs336g-a2-systems at 769ef21, measured on other machines than
this one. The model is not a GPT-2: RMSNorm, RoPE, SwiGLU with three matrices of 4 C, no biases, a
head of its own. It has 128.6 M parameters where our small has 92.9 M, and 3,407 M where our 2.7B
has 2,544 M: 1.29 (small) to 1.32 (2.7B) times our FLOPs per token. --model course measures it.

Defects of the published rows: backward is the difference of two means, of the whole step and of the
forward, so that one row is negative; on the MacBook --compile was ignored; on the GPU 'float32' ran
as TF32; forward ran with autograd on; gradients were never set to zero; times are means over 10
steps, outliers included; there is no optimizer. total is forward and backward; tokens/s is batch x
context over total. Where the report has no number of warm-up steps, it was the program's default.
"""

from collections.abc import Sequence
from typing import Any

from gpt_lightning.files import reference_rows
from gpt_lightning.tables.rows import Row, column, row_type
from gpt_lightning.tables.sweep import paragraphs

FILE = "end_to_end.csv"
TABLE = "published"
NAMES = {"S": "small", "M": "medium", "L": "large", "XL": "xl", "2p7": "2.7B"}
DEFAULT_WARMUP = 5
WARMUPS = {"No Warm-up": 0, "1 step warm up": 1}  # sections with another number


# times are means over 10 steps
PublishedRow = row_type(
    "machine device dtype compile size batch context warmup forward_ms forward_std_ms backward_ms "
    "backward_std_ms total_ms total_std_ms tokens_per_sec note",
    machine=column("published for"),
    dtype=column("dtype as called"),
    compile=column("compile as called"),
    total_ms=column("forward + backward ms", ",.2f"),
    note=column("what is wrong with it"),
)


def published_tables(rows: Sequence[Row]) -> tuple[dict[str, Sequence[Row]], tuple[str, ...]]:
    """Return the published rows with the sizes, batches and contexts of ours, if any, and notes."""
    ours = {(row.size, row.batch, row.context) for row in rows}
    found = [row for row in read_published() if (row.size, row.batch, row.context) in ours]
    return ({TABLE: found}, paragraphs(__doc__)) if found else ({}, ())


def read_published() -> list[Row]:
    """Read all rows of the report, in its order."""
    return [published_row(line) for line in reference_rows(FILE)]


def published_row(line: dict[str, str]) -> Row:
    """Convert a line of the file to our units."""
    section = line["section"]
    times: dict[str, Any] = {
        f"{ours}_{statistic}ms": float(line[f"{theirs}_{name}_s"]) * 1e3
        for ours, theirs in (("forward", "fwd"), ("backward", "bwd"), ("total", "total"))
        for statistic, name in (("", "mean"), ("std_", "std"))
    }
    batch, context = int(line["batch_size"]), int(line["context_length"])
    return PublishedRow(
        machine="MacBook Air" if "(MBAir)" in section else "RTX PRO 6000 Workstation",
        device=line["device"],
        dtype=line["dtype"],
        compile=line["compile"].lower(),
        size=NAMES[line["model"]],
        batch=batch,
        context=context,
        warmup=WARMUPS.get(section, DEFAULT_WARMUP),
        tokens_per_sec=batch * context / times["total_ms"] * 1e3,
        note=defects(line),
        **times,
    )


def defects(line: dict[str, str]) -> str:
    """Describe the known defects of a line."""
    on_gpu = line["device"] == "cuda"
    found = {
        # The MacBook's rows are of a program that always compiled. 8894702 made it obey the flag,
        # eight minutes before the GPU's rows were committed.
        "--compile was ignored, the model was compiled": line["compile"] == "False" and not on_gpu,
        "d_ff is 4,098": line["model"] == "M",
        "'float32' ran as TF32": line["dtype"] == "float32" and on_gpu,
        "negative backward": float(line["bwd_mean_s"]) < 0,
        "an outlier in the mean": float(line["fwd_std_s"]) > 0.5 * float(line["fwd_mean_s"]),
    }
    return "; ".join(text for text, is_there in found.items() if is_there)
