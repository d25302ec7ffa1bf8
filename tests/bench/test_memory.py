"""`gpt-lightning bench memory` and the meters behind it."""

import gc
from pathlib import Path

import pytest
import torch

from gpt_lightning.bench import memory, memory_meter, models
from gpt_lightning.bench.memory_meter import MIB, PhaseMemory
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import SkippedError, call

CPU = torch.device("cpu")
SIZE, BATCH, CONTEXT = "3/2/64", 2, 64
LIMIT_MEMORY = memory_meter.limit_memory


@pytest.fixture(autouse=True)
def no_limit_of_pytest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory_meter, "limit_memory", lambda *args: None)


def measured(mode: str = "training", checkpointing: bool = False, dtype: str = "fp32", **more):
    arguments = {"device": "cpu", "size": SIZE, "batch": BATCH}
    arguments |= {"context": CONTEXT, "warmup": 1, "memory_gib": None, "folder": "files"}
    arguments |= {"dtype": dtype, "mode": mode, "checkpointing": checkpointing, "model": "gpt2"}
    arguments |= {"blocks": int(checkpointing)} | more
    gc.collect()  # else what earlier tests have left may be freed within the measurement
    return call(memory.measure_row, arguments)


# ---- meters --------------------------------------------------------------------------------------


def test_the_profiler_sees_every_byte() -> None:
    def work(phase) -> None:
        with phase("first"):
            kept = torch.ones(MIB // 4)  # 1 MiB
            torch.ones(MIB)  # 4 MiB, freed at once
        with phase("second"):
            more = torch.ones(MIB // 2)  # 2 MiB
            del kept
        del more

    _, found = memory_meter.measure_memory(work, CPU)
    assert found["first"] == PhaseMemory(0, peak=5 * MIB, end=MIB, largest=4 * MIB)
    assert found["second"] == PhaseMemory(MIB, 3 * MIB, end=2 * MIB, largest=2 * MIB)


def test_the_limit_is_what_is_asked_for_or_a_share_of_what_is_available(monkeypatch) -> None:
    limits = []
    infinite = memory_meter.resource.RLIM_INFINITY
    monkeypatch.setattr(memory_meter, "limit_memory", LIMIT_MEMORY)
    monkeypatch.setattr(memory_meter.resource, "getrlimit", lambda what: (5, infinite))
    monkeypatch.setattr(
        memory_meter.resource, "setrlimit", lambda what, limit: limits.append((what, *limit))
    )
    monkeypatch.setattr(memory_meter, "available_gib", lambda: 7.0)
    data = memory_meter.resource.RLIMIT_DATA
    assert memory_meter.limit_memory(CPU, 1.5) == 1.5
    assert memory_meter.limit_memory(CPU, None, 0.5) == 3.5
    assert limits == [(data, 3 * 2**29, infinite), (data, 7 * 2**29, infinite)]
    monkeypatch.setattr(memory_meter.resource, "getrlimit", lambda what: (5, 2**30))
    memory_meter.limit_memory(CPU, 1.5)
    assert limits[2:] == [(data, 2**30, 2**30)]  # no more than the hard limit
    assert memory_meter.limit_memory(torch.device("cuda"), 1.5) is None
    assert len(limits) == 3


def test_cuda_leaves_a_snapshot_even_if_memory_ends(monkeypatch) -> None:
    level = {"now": 10, "peak": 10}  # levels of a made-up CUDA allocator

    def allocate(size: int) -> None:
        level["now"] += size
        level["peak"] = max(level["peak"], level["now"])

    cuda, recorded = torch.cuda, []
    monkeypatch.setattr(cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda, "memory_allocated", lambda: level["now"])
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda: level["peak"])
    monkeypatch.setattr(
        cuda, "reset_peak_memory_stats", lambda device: level.update(peak=level["now"])
    )
    monkeypatch.setattr(cuda.memory, "_record_memory_history", lambda **how: recorded.append(how))
    monkeypatch.setattr(cuda.memory, "_dump_snapshot", lambda name: Path(name).write_text("all"))

    def work(phase) -> None:
        with phase("forward"):
            allocate(7)
            allocate(-4)
        with phase("backward"):
            allocate(1)

    _, found = memory_meter.measure_memory(work, torch.device("cuda"))
    assert not recorded
    assert found["forward"] == PhaseMemory(begin=10, peak=17, end=13)
    assert found["backward"] == PhaseMemory(begin=13, peak=14, end=14)  # peaks start anew

    def fails(phase) -> None:
        with phase("forward"):
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        memory_meter.measure_memory(fails, torch.device("cuda"), Path("a.pickle"))
    assert Path("a.pickle").read_text() == "all"
    begin = {"max_entries": memory_meter.MAX_ENTRIES, "stacks": "python"}
    assert recorded == [begin, {"enabled": None}]  # and recording is over


# ---- rows ----------------------------------------------------------------------------------------


def test_memory_is_what_arithmetic_says() -> None:
    row = measured()
    n = models.make_model("gpt2", SIZE, CONTEXT).num_params()
    # weights and AdamW's two moments, float32; and buffers of a few KiB: inputs, step counters
    assert row["start_mib"] == pytest.approx(3 * n * 4 / MIB, rel=0.01)
    # while the optimizer works there are the gradients as well
    assert row["optimizer_peak_mib"] >= 4 * n * 4 / MIB
    assert row["residual_mib"] == BATCH * CONTEXT * 64 * 4 / MIB
    assert row["held_residuals"] == pytest.approx(row["held_mib"] / row["residual_mib"])
    peaks = [row[f"{phase}_peak_mib"] for phase in ("forward", "backward", "optimizer")]
    assert row["peak_mib"] == max(peaks)
    # the largest single tensors are those of the logits
    assert row["largest_mib"] == pytest.approx(BATCH * CONTEXT * 10_000 * 4 / MIB, rel=0.01)


@pytest.mark.slow
def test_a_larger_group_keeps_fewer_inputs_and_recomputes_more(monkeypatch) -> None:
    # else the logits are the peak
    make_batch, make_config = memory.random_batch, models.make_config
    monkeypatch.setattr(models, "make_config", lambda *size: make_config(*size, vocab_size=16))
    monkeypatch.setattr(memory, "random_batch", lambda *args: make_batch(*args, 16))
    rows = {n: measured(checkpointing=True, size="8/2/64", blocks=n) for n in (1, 4, 8)}
    # a group keeps its input and the state of the random numbers
    each = 1 + torch.get_rng_state().nbytes / (BATCH * CONTEXT * 64 * 4)
    for n, row in rows.items():
        kept = rows[8]["held_residuals"] + (8 / n - 1) * each
        assert row["held_residuals"] == pytest.approx(kept, abs=0.1)
    # the activations of a group exist at once
    one, four, eight = (rows[n]["backward_peak_mib"] for n in (1, 4, 8))
    assert one < four < eight
    with pytest.raises(SkippedError, match="the model has 3 blocks"):
        measured(checkpointing=True, blocks=4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["gpt2", "course"])
def test_saved_tensors_are_what_a_forward_holds(model, dtype) -> None:
    row = measured(model=model, dtype=dtype)
    sums = {part["where"]: part["mib"] for part in row["saved"] if part["module"] == "in all"}
    assert set(sums) == {"block 0", "outside of the blocks"}
    expected = sums["outside of the blocks"] + 3 * sums["block 0"]
    assert row["held_mib"] == pytest.approx(expected, rel=0.03)
    parts = [part for part in row["saved"] if part["module"] != "in all"]
    assert "attn.rope" not in {part["module"] for part in parts}  # its table is a buffer
    for where, whole in sums.items():
        assert sum(p["mib"] for p in parts if p["where"] == where) == pytest.approx(whole)
    for part in row["saved"]:
        assert part["residuals"] == pytest.approx(part["mib"] / row["residual_mib"])


def test_inference_keeps_nothing_but_the_logits() -> None:
    row = measured("inference")
    assert row["held_mib"] == pytest.approx(BATCH * CONTEXT * 10_000 * 4 / MIB, rel=0.01)
    assert "backward_peak_mib" not in row
    assert row["forward_peak_mib"] < measured()["forward_peak_mib"]


def test_modes_are_combined_with_checkpoints_where_they_differ() -> None:
    _, rows = sweep.read_options(memory.BENCH, ["--device=cpu", "--groups=1,2", "--dtypes=fp32"])
    modes = {(row["mode"], row["blocks"]) for row in rows}
    assert modes == {("inference", 0), ("training", 0), ("training", 1), ("training", 2)}
    assert len(rows) == 3 * len(modes)  # contexts


def test_the_peaks_are_drawn_over_the_context(tmp_path) -> None:
    def row(**fields):
        setting = {"device": "cpu", "dtype": "fp32", "model": "gpt2", "size": "small", "batch": 4}
        more = {"mode": "training", "checkpointing": True, "status": "ok", "peak_mib": 9.0}
        return memory.MemoryRow.of(setting | more | {"context": 8, "blocks": 1} | fields)

    assert memory.picture(tmp_path, [row(), row()]) == []
    assert memory.picture(tmp_path, [row(), row(context=16)]) == ["peak.png"]
    assert (tmp_path / "peak.png").stat().st_size > 5_000
