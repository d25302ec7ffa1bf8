"""The table of `make faults`: cases, and the results of their injections."""

from dataclasses import dataclass, field
from pathlib import Path

import yaml

CASES: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())


@dataclass
class Row:
    """Results of the injections of one case."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    silent: int = 0
    seconds: float = 0.0
    seen: list[str] = field(default_factory=list)
    stock: list[str] = field(default_factory=list)

    def note(self, outcome: str, seconds: float, seen: list[str], silent: bool) -> None:
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.silent += silent
        self.seconds += seconds
        self.seen += [text for text in seen if text not in self.seen]

    @property
    def verdict(self) -> str:
        if self.failed:
            return f"FAILED {self.failed} of {self.passed + self.failed}"
        return f"{self.passed} passed" if self.passed else "skipped"


def cell(text: str, limit: int = 160) -> str:
    """Return text as a cell of Markdown."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def markdown(rows: dict[str, Row], environment: str) -> str:
    """Return the headline figures and a line for each case that ran."""
    ran = {case: row for case, row in rows.items() if row.passed or row.failed}
    good = sum(not row.failed for row in ran.values())
    injections = sum(row.passed + row.failed for row in ran.values())
    silent = sum(row.silent for row in ran.values())
    lines = [
        f"**cases passed: {good} of {len(ran)}** ({injections} injections); "
        f"**silent wrong results: {silent}**",
        "",
        environment,
        "",
        "| case | fault | expected | seen | stock Lightning | seconds |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    for case, row in rows.items():
        fault, expected = CASES[case]
        seen = "; ".join([row.verdict, *row.seen[:4]])
        stock = "; ".join(row.stock) or "-"
        lines.append(
            f"| {case} | {fault} | {expected} | {cell(seen)} | {cell(stock)} | {row.seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"
