"""Add a run of `gpt-lightning reproduce shakespeare-char` to benchmarks/shakespeare_char.md.

    python benchmarks/shakespeare_page.py lightning_logs/reproduce/shakespeare-char/version_0

The run may still go on, or be of another seed (`--seed_everything 1338`). Its losses are kept by
seed in rows/shakespeare_char.json, and the section has all seeds that are there. The run of the
published seed gives the picture, and a text that its best checkpoint has generated.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

HEADING = "## The baby GPT, trained"
# best validation losses of the same program: on a Mac (MPS, eager and compiled), nanoGPT's README
PUBLISHED = [1.4673, 1.4745, 1.4697]
SEED, LAST_STEP = "1337", 5000  # of the published runs
PAGES = Path(__file__).parent
ROWS, SAMPLE = PAGES / "rows" / "shakespeare_char.json", "shakespeare_char_sample.txt"


def spread(losses: list[float]) -> str:
    """Return the mean of losses and their standard deviation, which is 0 for one."""
    deviation = statistics.stdev(losses) if losses[1:] else 0.0
    return f"{statistics.mean(losses):.4f} (standard deviation {deviation:.4f})"


def section(runs: dict) -> str:
    """Return the section for the contents of results.json by the seed of the run."""
    tables = [{(row["step"], row["split"]): row for row in run["losses"]} for run in runs.values()]
    best = [min(at[key]["ours"] for key in at if key[1] == "val") for at in tables]
    facts = [
        f"Best validation loss of {len(runs)} seeds: **{spread(best)}**; the published runs of the "
        f"same program have {', '.join(map(str, PUBLISHED))}: {spread(PUBLISHED)}."
    ]
    for seed, run in runs.items():
        machine, judged = run["machine"], [row for row in run["losses"] if row["verdict"]]
        missed = [f"{row['split']} {row['step']}" for row in judged if row["verdict"] != "ok"]
        last = max(row["step"] for row in run["losses"])
        facts.append(
            f"Seed {seed}: `{machine['command']}`, {machine['date']}, {machine['device']}, "
            f"{machine['software']}, to step {last:,} of {LAST_STEP:,}; "
            f"{len(judged) - len(missed)} of {len(judged)} losses within their tolerance"
            f"{', not ' * bool(missed)}{', '.join(missed)}."
        )
    heads = [f"{name} loss, theirs | {' | '.join(runs)}" for name in ("training", "validation")]
    lines = [f"| step | {' | '.join(heads)} |", "| ---: " * (3 + 2 * len(runs)) + "|"]
    for step in sorted({step for at in tables for step, split in at if split == "val"}):
        losses = []
        for split in ("train", "val"):
            rows = [at.get((step, split), {}) for at in tables]
            losses += [max(row.get("theirs") or 0 for row in rows), *(r.get("ours") for r in rows)]
        lines.append(f"| {step} | {' | '.join(f'{loss:.4f}' if loss else '' for loss in losses)} |")
    parts = [
        HEADING,
        *(textwrap.fill(f, 100, break_long_words=False, break_on_hyphens=False) for f in facts),
        "\n".join(lines),
        "![curves and differences](shakespeare_char.png)",
        f"A text: [{SAMPLE}]({SAMPLE}). Its first line names the run.",
    ]
    return "\n\n".join(parts) + "\n"


def insert(page: str, new: str) -> str:
    """Return the page with the section replaced, or appended if it has none."""
    before, found, after = page.partition(HEADING)
    rest = after.partition("\n## ")
    tail = f"\n## {rest[2]}" if found and rest[1] else ""
    return f"{before.rstrip()}\n\n{new}{tail}"


def main() -> None:
    """Keep the losses of a run, and update the page, the picture and the sample."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="folder of the results")
    folder = parser.parse_args().results
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    (seed,) = (row["ours"] for row in results["settings"] if row["setting"] == "seed")
    runs = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() else {}
    runs[seed] = {name: results[name] for name in ("machine", "losses")}
    runs = dict(sorted(runs.items()))
    ROWS.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    page = (PAGES / "shakespeare_char.md").read_text(encoding="utf-8")
    (PAGES / "shakespeare_char.md").write_text(insert(page, section(runs)), encoding="utf-8")
    if seed != SEED:
        return
    shutil.copyfile(folder / "losses.png", PAGES / "shakespeare_char.png")
    run = str(folder / results["losses"][0]["rung"])
    command = [sys.executable, "-m", "gpt_lightning", "sample", run, "--max_new_tokens", "1000"]
    (PAGES / SAMPLE).write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


if __name__ == "__main__":
    main()
