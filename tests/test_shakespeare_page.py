"""benchmarks/shakespeare_page.py: the section that it writes is of the run's own numbers."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "shakespeare_page.py"))
MACHINE = {"command": "gpt-lightning x", "date": "today", "device": "a CPU", "software": "0.1.0"}


def row(step, split, theirs, ours, batches):
    difference = None if theirs is None else ours - theirs
    return {
        "rung": "cpu-bf16", "step": step, "split": split, "theirs": theirs, "ours": ours,
        "difference": difference, "batches": batches,
    }  # fmt: skip


@pytest.fixture
def losses():
    return [
        row(0, "train", 4.2874, 4.28741, 20),
        row(0, "val", 4.2823, 4.28232, 200),
        row(250, "train", 1.9639, 1.97, 20),
        row(250, "val", 2.0676, 2.05, 200),
        row(250, "best", 2.0676, 1.0, 200),
    ]


def test_a_run_that_has_not_ended_says_how_far_it_went(losses):
    text = SCRIPT["section"]({"losses": losses, "machine": MACHINE})
    assert "The run went to step 250 of 5,000. The published run is best at step 1,750" in (
        " ".join(text.split())
    )
    assert "**2.0500** at step 250" in text
    assert "| 0 | 4.2874 | 4.2874 | 20 | 4.2823 | 4.2823 | 200 | +0.0000 |" in text
    assert "| 250 | 1.9639 | 1.9700 | 20 | 2.0676 | 2.0500 | 200 | -0.0176 |" in text
    assert "`gpt-lightning x`, today" in text
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("|"))


def test_a_run_past_the_best_step_and_one_without_training_batches(losses):
    rows = [*losses, row(2000, "val", None, 1.4712, 200)]
    text = " ".join(SCRIPT["section"]({"losses": rows, "machine": MACHINE}).split())
    assert (
        "The run went to step 2,000 of 5,000. Best validation loss: **1.4712** at step 2,000"
        in text
    )
    rows.append(row(2250, "train", 1.1, 1.2, 20))  # its validation goes on
    assert "| 2250 | 1.1000 | 1.2000 | 20 | | | | |" in (
        " ".join(SCRIPT["section"]({"losses": rows, "machine": MACHINE}).split())
    )
    assert "| 2000 | | | | | 1.4712 | 200 | |" in text
    assert "1.4673" in text
    assert "1.4697" in text


def test_the_section_is_replaced_and_the_rest_stays():
    insert, heading = SCRIPT["insert"], SCRIPT["HEADING"]
    first = insert("# Page\n\n## Other\n\ntext\n", f"{heading}\n\none\n")
    assert first == f"# Page\n\n## Other\n\ntext\n\n{heading}\n\none\n"
    page = first + "\n## Later\n\nend\n"
    assert insert(page, f"{heading}\n\ntwo\n") == page.replace("one", "two")
