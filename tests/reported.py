"""Runs for the tests of `report`, and the content of its pages."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

# no folder has a slash in its name
HOSTILE = "a<!--<img src=x onerror=alert(1)>&quot;\\u003c<script>alert(1)<\\script>'\"REPORT_DATA"
SAMPLE = "To be\n</script><script>alert(1)</script><!-- <b>&amp;</b>\u2028\ud83d\ude00"
SAMPLE = SAMPLE.encode("utf-16", "surrogatepass").decode("utf-16")
FACTS = {"command": "gpt-lightning fit --config a.yaml", "software": "gpt_lightning 1.0 (abc1234)"}


def write_run(
    folder: Path,
    losses: list[Any],
    settings: Any = None,
    sample: str | None = SAMPLE,
    events: list[Any] | None = None,
) -> None:
    """Write a run whose training loss is 0.1 below its validation loss, NaN for None."""
    folder.mkdir(parents=True)
    rows: list[Any] = []
    for step, loss in enumerate(losses, 1):
        speed = {"perf/tokens": step * 100.0, "perf/tokens_per_sec": 90.0 + step, "perf/mfu": 0.25}
        train = loss and loss - 0.1
        rows.append({"step": step, "time": float(step), "train/loss": train, **speed})
        rows.append({"step": step, "time": step + 0.1, "val/loss": loss})
    steps = len(losses)
    if events is None:
        samples = [] if sample is None else sorted({min(1, steps), steps})
        events = [
            {"event": "begin", "step": 0, "steps": steps},
            {"event": "settings", "step": 0, "settings": settings or {}, "facts": FACTS},
            *({"event": "sample", "step": step, "text": sample} for step in samples),
            {"event": "end", "step": steps, "state": "finished", "reason": ""}
            | {"seconds": {"train": 6.0, "validation": 2.0}},
        ]
    for name, lines in {
        "metrics": rows,
        "timeline": [{"time": 0.0} | each for each in events],
    }.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings or {}))


def data_of(page: str) -> Any:
    """Return the data of a page."""
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
