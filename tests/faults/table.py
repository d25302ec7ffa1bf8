"""The cases, and the table of their results."""

from dataclasses import dataclass, field

# what is done, and what must come of it
CASES: dict[str, tuple[str, str]] = {
    "R01": ("SIGKILL at random moments", "bit-exact"),
    "R02": ("SIGKILL inside the save", "the newest valid file; temporaries swept; exact"),
    "R03": ("SIGTERM, SIGINT within a step", "the step ends, 143 / 130, exact resume"),
    "R04": ("SIGTERM to one rank of two", "both end, one checkpoint, no orphan"),
    "R05": ("resume around an epoch's end, thrice in one", "exact"),
    "R06": ("disk full", "path and reason; the file before loads"),
    "R07": ("read-only checkpoint folder", "refused before step 1, named"),
    "R08": ("checkpoint cut, empty, a text", "named; auto takes the older one"),
    "R09": ("one bit flipped", "refused, every time"),
    "R10": ("another model or other groups", "both values; files untouched"),
    "R11": ("damaged dataset", "names shard, expected, found, the cure"),
    "R12": ("shard cut while it is read", "a clean error, no SIGBUS"),
    "R13": ("shard replaced, same size, then resume", "refused"),
    "R14": ("tokens beyond the vocabulary", "refused at start"),
    "R15": ("NaN, inf, learning rate 1e20", "stops before the update, names the step"),
    "R16": ("malicious checkpoint", "refused; nothing runs, nothing imported"),
    "R17": ("malicious shard", "refused; nothing runs"),
    "R18": ("wrong keys and files", "exit 2, the key, the nearest one"),
    "R19": ("resume with another learning rate", "the command line wins, printed"),
    "R20": ("sizes that cannot work", "both numbers before step 1"),
    "R21": ("texts that make no dataset", "the file, the byte; bounded time"),
    "R22": ("two prepare at once; SIGKILL in prepare", "one identical manifest"),
    "R23": ("prepare on a full disk", "names the path; no manifest"),
    "R24": ("10 GB shard; 20 of 1 GB", "RssAnon within 64 MB, start within 2 s"),
    "R25": ("loader workers 0, 1, 2, 4, changed", "the same order and bytes"),
    "R26": ("two ranks, and one to two and back", "exact; same order, loss within 1e-5"),
    "R27": ("resume with another batch, context, seed", "refused with both values"),
    "R28": ("mtime, clock, a process that slept", "the right file; the stall reported"),
    "R29": ("metrics after kills, a torn line", "each step once, repaired"),
    "R30": ("nothing to resume, a finished run, no path", "one line; 0, 0, error"),
    "R31": ("optimizer and rate after resume", "the closed form"),
    "R32": ("supply chain", "exact pins, no bad release"),
    "R33": ("network", "no socket beyond loopback"),
    "R34": ("max_time, EarlyStopping, should_stop within a step", "the step ends; exact"),
    "R35": ("validate, test, predict between two sessions", "auto continues the training run"),
    "R36": ("the run's config.yaml after a resume", "runs, validates, passes doctor --resume"),
    "R37": (
        "reader or terminal gone, SIGHUP, SIGUSR1",
        "trains on, or saves and ends with 128 + n",
    ),
    "R38": ("digest missing, empty, unreadable", "every command warns or refuses"),
    "R39": ("weights or moments that are no numbers", "never a good checkpoint; exact after"),
    "R40": ("main process killed, its loader workers alive", "waits for them, exact"),
    "R41": ("a rank that hangs", "all end within the limit, with their stacks"),
    "R42": ("rank 0 dies before the ranks meet", "the others end within seconds"),
    "R43": ("power cut: rows of metrics.jsonl lost", "the gap is named"),
    "R44": ("checkpoint of another run in the folder", "refused by the run's identity"),
    "R45": ("file system without flock", "a warning; the run goes on"),
    "R46": ("a fifo or a device as checkpoint", "refused at once"),
    "R47": ("runs of any logger, started at once", "never one folder for two"),
    "R48": ("senseless arguments of the Trainer", "refused before anything is written"),
    "R49": ("a NaN batch in validation", "a NaN loss, printed"),
    "R50": ("saves, samples, validations of any frequency", "in no rate; phases add up"),
    "R51": ("asynchronous save under kills", "exact"),
    "R52": ("remote folder: slow, failing, torn", "retried, verified, no copy lost"),
    "R54": ("1,200 shards, 1,024 descriptors", "trains; EMFILE is no damage"),
    "R55": ("loss spike with the guard on", "the step is skipped, counted, printed"),
    "R56": ("resume with every logger", "exact; each point once"),
    "R57": ("killed while a run folder is claimed", "the next run has its own; nothing lost"),
    "R58": ("disk full during an asynchronous save", "path and reason; the file before loads"),
    "R59": ("remote folder that reports success falsely", "found by the digest"),
    "R60": ("time zone and clock changed between sessions", "exact"),
    "R61": ("two resumes of one run at once", "one trains, the other is refused"),
    "R62": ("a file of an old run over a new one, names swapped", "found by the digest"),
    "R63": ("the text edited between two sessions", "refused, both digests"),
}


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
    for case in CASES:
        if case not in rows:
            continue
        row, (fault, expected) = rows[case], CASES[case]
        seen = "; ".join([row.verdict, *row.seen[:4]])
        stock = "; ".join(row.stock) or "-"
        lines.append(
            f"| {case} | {fault} | {expected} | {cell(seen)} | {cell(stock)} | {row.seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"
