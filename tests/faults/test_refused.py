"""Commands that are refused in one line, before anything is written: the rows of refused.yaml."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from folders import contents
from harness import fit


def rows() -> Iterator[Any]:
    for row in yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text()):
        marks = [pytest.mark.case(row["case"])]
        marks += [pytest.mark.slow if row.get("ci") else pytest.mark.faults]  # CI runs slow ones
        yield pytest.param(row, marks=marks, id=f"{row['case']} {row['args']}")


@pytest.mark.parametrize("row", rows())
def test_a_command_that_cannot_work(row, case, request):
    folder = request.getfixturevalue(row.get("from", "folder"))
    with (folder / "run.yaml").open("a") as file:
        file.write(row.get("add", ""))
    before = contents(folder)
    ended = fit(folder, *row["args"].split())
    case.saw(ended.refused(*row["words"]).removeprefix("error: "))
    assert "step  1/" not in ended.out
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before
    assert not any(name.startswith("lightning_logs") for name in after.keys() - before.keys())
    assert row["case"] == "R20" or after == before  # R20 may prepare the text
