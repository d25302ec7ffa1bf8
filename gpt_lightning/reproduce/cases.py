"""Published tables as data, read from cases.yaml: their rungs, reports and curves.

A rung is a base configuration with overlays, options of `fit`, the published rows and a tolerance.
To add one, add it to cases.yaml and its overlay to configs/; no other code has the names of rungs.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from gpt_lightning.reproduce.rungs import Case, Rung

TABLES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))


def make_case(entry: dict[str, Any]) -> Case:
    """Make a case of its entry in cases.yaml."""
    fields = dict(entry)
    folder, settings = fields.pop("stacked", None), fields.pop("settings", ())
    rungs: list[Rung] = []
    overlays: tuple[str, ...] = ()
    for values in fields.pop("rungs"):
        rung = Rung(**{name: with_tuples(value) for name, value in values.items()})
        if folder and not rung.configs:
            overlays = (*overlays, f"{folder}/{rung.name}")
        configs = rung.configs or overlays
        rungs.append(replace(rung, configs=configs, settings=(*settings, *rung.settings)))
    return Case(rungs=tuple(rungs), **fields)


def with_tuples(value: Any) -> Any:
    """Return a value of YAML with tuples in place of lists."""
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


CASES = {entry["name"]: make_case(entry) for entry in TABLES["cases"]}
REPORTS: dict[str, list[str]] = TABLES["reports"]  # name -> title and origin
