"""Laws that all benches share: help, rows, columns, pages, resume, failed rows."""

import csv
import json
import shlex

import pytest

from gpt_lightning.bench import matmul, memory_meter, step
from gpt_lightning.bench.command import find_benches, import_bench
from gpt_lightning.cli import main
from gpt_lightning.hardware.peaks import Peak
from gpt_lightning.tables import sweep
from gpt_lightning.tables.rows import Console, implausible
from gpt_lightning.tables.worker import measured

BENCHES = find_benches()
SHAPE = "--device cpu --shapes 1x16 --contexts 8 --batches 1 --dtypes fp32"
# options with which a bench takes a second or two; its first option with two values has two rows
TINY = {
    "accumulation": "--device cpu",
    "attention": "--device cpu --d 8,16 --contexts 8 --kernels naive --steps 1 --batch 1",
    "dtypes": "--device cpu,cuda-rules --models toy --autocast bf16",
    "matmul": "--device cpu --squares 8,16 --sizes none --dtypes fp32 --steps 1 --warmup 1",
    "memory": f"{SHAPE} --modes inference,training --checkpointing false",
    "profile": f"{SHAPE} --modes training,full-step --steps 1 --warmup 0",
    "sizes": f"{SHAPE} --warmup 0,1 --steps 1",
}
# others, whose rows are not measured here
COMMANDS = TINY | {
    "gpu": "--device cpu --sizes 124m --models ours,hf",
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Nothing is left in the checkout, no peak is measured, no memory is limited."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory_meter, "limit_memory", lambda *args: None)
    for module in (matmul, step):
        monkeypatch.setattr(module, "measured_peak", lambda *args: Peak(1e15, "of a test", ""))
    monkeypatch.setattr(sweep, "isolated", in_this_process)


def in_this_process(address, configuration, timeout_s):
    return measured(address, configuration)


def command(name: str, *more: str) -> list[str]:
    return ["bench", name, *shlex.split(COMMANDS[name]), *more]


def report(name: str) -> tuple:
    (path,) = sweep.ROOT.glob(f"{name}/*/results.json")
    return path.parent, json.loads(path.read_text())


@pytest.mark.parametrize("name", BENCHES)
def test_help_explains_each_option(name, capsys):
    assert main(["bench", name, "--help"]) == 0
    text = capsys.readouterr().out
    bench = import_bench(name).BENCH
    assert bench.about[0] in " ".join(text.split())
    assert all(f"--{option.name}" in text for option in bench.options)
    assert "--resume" in text
    assert bench.about[1:]  # conventions and units


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_rows_have_plausible_columns_and_a_page_and_are_measured_once(name, monkeypatch, capsys):
    kept = {}

    def isolated(address, configuration, timeout_s):
        found = in_this_process(address, configuration, timeout_s)
        kept[len(kept)] = configuration | found
        return found

    monkeypatch.setattr(sweep, "isolated", isolated)
    assert main(command(name)) == 0
    bench = import_bench(name).BENCH
    folder, found = report(name)
    assert len(found["rows"]) == len(kept) >= 2
    columns = bench.tables["rows"].columns()
    for row, values in zip(found["rows"], kept.values(), strict=True):
        assert (row["status"], row["note"]) == ("ok", "")
        assert not implausible(row)
        unknown = values.keys() - columns - bench.tables.keys()
        assert unknown <= {option.name for option in bench.options} | {"folder"} | OWN
        for key in values.keys() & columns.keys() - {"status", "note"}:
            assert row[key] == values[key], key
    for table, row_type in bench.tables.items():
        parts = [part for values in kept.values() for part in values.get(table, [])]
        if table not in bench.beside([]):
            assert len(found[table]) == (len(parts) or len(kept) * (table == "rows"))
        assert all(part.keys() <= row_type.columns().keys() for part in parts)
    out, page = capsys.readouterr().out, (folder / "results.md").read_text()
    assert all(f"| {column.title} " in page for column in columns.values())
    assert all(title in out for title in Console(bench.tables["rows"]).titles)
    with (folder / "rows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(kept)
    monkeypatch.setattr(sweep, "isolated", lambda *args: pytest.fail("measured again"))
    assert main(command(name, "--resume")) == 0
    assert report(name)[1]["rows"] == found["rows"]


# values without a column
OWN = {"vocab_size", "fit_options", "memory_gib", "upcast", "every", "context"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_failed_row_is_a_row_and_the_next_one_is_measured(name, monkeypatch):
    results = iter([{"status": "crashed", "note": "planted"}])

    def isolated(*args):
        return next(results, {"status": "out of memory", "note": "planted, too"})

    monkeypatch.setattr(sweep, "isolated", isolated)
    assert main(command(name)) == 1
    _, found = report(name)
    first, *others = found["rows"]
    assert (first["status"], first["note"]) == ("crashed", "planted")
    assert others
    assert {row["status"] for row in others} == {"out of memory"}
    asked = []
    monkeypatch.setattr(
        sweep, "isolated", lambda address, row, limit: asked.append(row) or {"status": "skipped"}
    )
    assert main(command(name, "--resume")) == 0
    assert len(asked) == 1  # only the crash is measured again
    assert report(name)[1]["rows"][1:] == others
