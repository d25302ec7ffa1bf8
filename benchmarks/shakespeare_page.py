"""Write a run of `gpt-lightning reproduce shakespeare-char` into benchmarks/shakespeare_char.md.

    python benchmarks/shakespeare_page.py lightning_logs/reproduce/shakespeare-char/version_0

The run may still go on: the section says how far it went. The script replaces its own section,
copies the picture, and writes a text that the best checkpoint has generated.
"""

import argparse
import contextlib
import io
import json
import shutil
import textwrap
from pathlib import Path

from gpt_lightning.cli import main as gpt_lightning

HEADING = "## The baby GPT, trained on this CPU"
BEST = {"the published run on a Mac (MPS, eager)": 1.4673, "nanoGPT's README": 1.4697}
SAMPLE = "shakespeare_char_sample.txt"
LAST_STEP, BEST_STEP = 5000, 1750  # steps of the published run


def section(results: dict) -> str:
    """Return the section for the content of a results.json."""
    rows = [row for row in results["losses"] if row["split"] in ("train", "val")]
    at = {(row["step"], row["split"]): row for row in rows}
    steps = sorted({row["step"] for row in rows})
    machine, last = results["machine"], steps[-1]
    best = min((row for row in rows if row["split"] == "val"), key=lambda row: row["ours"])
    reached = f"The run went to step {last:,} of {LAST_STEP:,}."
    if last < BEST_STEP:
        reached += f" The published run is best at step {BEST_STEP:,}, which it has not reached."
    others = "; ".join(f"{name}: {loss:.4f}" for name, loss in BEST.items())
    facts = (
        f"`{machine['command']}`, {machine['date']}, {machine['device']}, {machine['software']}. "
        f"{reached} Best validation loss: **{best['ours']:.4f}** at step {best['step']:,}; "
        f"{others}."
    )
    lines = [
        "| step | training loss, theirs | ours | batches | validation loss, theirs | ours "
        "| batches | difference |",
        "| ---: " * 8 + "|",
    ]
    for step in steps:
        cells = [f"{step}"]
        for split in ("train", "val"):
            row = at.get((step, split))
            theirs, batches = (row and row["theirs"]), (row and row.get("batches"))
            cells += [
                "" if theirs is None else f"{theirs:.4f}",
                "" if row is None else f"{row['ours']:.4f}",
                "" if batches is None else f"{batches}",
            ]
        difference = at.get((step, "val"), {}).get("difference")
        cells.append("" if difference is None else f"{difference:+.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    parts = [
        HEADING,
        textwrap.fill(facts, 100, break_long_words=False, break_on_hyphens=False),
        "\n".join(lines),
        "![curves and differences](shakespeare_char.png)",
        f"A text of the best checkpoint: [{SAMPLE}]({SAMPLE}).",
    ]
    return "\n\n".join(parts) + "\n"


def insert(page: str, new: str) -> str:
    """Return the page with the section replaced, or appended if it has none."""
    before, found, after = page.partition(HEADING)
    rest = after.partition("\n## ")
    tail = f"\n## {rest[2]}" if found and rest[1] else ""
    return f"{before.rstrip()}\n\n{new}{tail}"


def main() -> None:
    """Update the page, the picture and the sample."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="folder of the results")
    folder = parser.parse_args().results
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    pages = Path(__file__).parent
    page = pages / "shakespeare_char.md"
    page.write_text(insert(page.read_text(encoding="utf-8"), section(results)), encoding="utf-8")
    shutil.copyfile(folder / "losses.png", pages / "shakespeare_char.png")
    text, run = io.StringIO(), folder / results["losses"][0]["rung"]
    with contextlib.redirect_stdout(text):
        code = gpt_lightning(["sample", str(run), "--max_new_tokens", "1000"])
    if code:
        raise SystemExit(f"no sample: {run} has no checkpoint yet")
    (pages / SAMPLE).write_text(text.getvalue(), encoding="utf-8")


if __name__ == "__main__":
    main()
