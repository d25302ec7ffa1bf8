"""`gpt-lightning bench profile` on a tiny model: sums that agree with totals."""

import gzip
import inspect
import json
import shlex
from contextlib import nullcontext

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode

from gpt_lightning.bench.core.trace_tables import attention_flops
from gpt_lightning.bench.core.traces import KINDS
from gpt_lightning.bench.core.training_step import make_model
from gpt_lightning.bench.profile import (
    MODES,
    PARTS,
    ProfileRow,
    Step,
    attention_in_parts,
    measure_profile,
    nvtx_range,
    set_attention,
)
from gpt_lightning.cli import main
from gpt_lightning.model.attention import naive_attention
from gpt_lightning.tables import sweep
from gpt_lightning.tables.rows import make_row
from gpt_lightning.tables.worker import SkippedError, call

SHAPE, BATCH, CONTEXT = [2, 2, 32], 2, 16
SETTING = {
    "device": "cpu",
    "dtype": "fp32",
    "model": "gpt2",
    "size": "2/2/32",
    "shape": SHAPE,
    "batch": BATCH,
    "context": CONTEXT,
    "steps": 2,
    "warmup": 1,
    "top": 5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module", params=MODES)
def measured(request, folder):
    return request.param, call(
        measure_profile, SETTING | {"mode": request.param, "folder": str(folder)}
    )


def test_what_is_of_its_own_adds_up_to_all_kernels(measured):
    mode, row = measured
    ranges = {part["range"]: part for part in row["ranges"]}
    assert sum(part["own_ms"] for part in ranges.values()) == pytest.approx(row["kernels_ms"])
    assert ranges["step"]["kernels_ms"] == pytest.approx(row["kernels_ms"])
    phases = {name.split(" / ")[1] for name in ranges if name.count(" / ") == 1}
    assert (
        phases
        == {
            "inference": {"forward"},
            "training": {"forward", "backward"},
            "full-step": {"data", "forward", "backward", "optimizer"},
        }[mode]
    )
    for part in ranges.values():
        assert 0 <= part["products_ms"] <= part["kernels_ms"] <= part["span_ms"]


def test_kernels_fit_into_the_span(measured):
    _, row = measured
    assert 0 < row["busy"] <= 1
    assert row["kernels_ms"] == pytest.approx(row["busy"] * row["span_ms"])
    assert row["timer_ms"] > 0


def test_shares_add_up_to_1(measured):
    _, row = measured
    assert sum(row[kind] for kind in KINDS) == pytest.approx(1.0)
    assert sum(part["share"] for part in row["kernels"]) == pytest.approx(1.0)
    assert sum(part["ms"] for part in row["kernels"]) == pytest.approx(row["kernels_ms"])
    assert sum(part["calls"] for part in row["kernels"]) == pytest.approx(row["kernel_calls"])
    assert len(row["kernels"]) == SETTING["top"] + 1  # the rest is one row
    for share in ("time_share", "flop_share"):
        assert sum(part[share] for part in row["attention"]) == pytest.approx(1.0)


def test_matrix_products_are_counted(measured):
    mode, row = measured
    forward = SHAPE[0] * 6 + 1  # four linear layers, scores and values; the head
    # the backward pass has two for each of the forward's
    times = 1 if mode == "inference" else 3
    assert row["products_calls"] == times * forward
    # the backward of the attention is in no range of its own
    assert row["products_calls"] - row["products_outside_calls"] == 2 * SHAPE[0]


@pytest.mark.parametrize(("model", "calls"), [("gpt2", (25, 17)), ("course", (37, 29))])
def test_products_of_four_layers_beside_the_published_30(model, calls, folder):
    setting = SETTING | {"model": model, "shape": [4, 2, 32], "mode": "inference"}
    row = call(measure_profile, setting | {"folder": str(folder / model)})
    assert (row["products_calls"], row["products_outside_calls"]) == calls


def test_the_courses_attention_has_rope_as_a_part(folder):
    setting = SETTING | {"model": "course", "mode": "inference", "folder": str(folder / "rope")}
    row = call(measure_profile, setting)
    ranges = {part["range"]: part for part in row["ranges"]}
    assert ranges["step / forward / attention / RoPE"]["calls"] == 2 * SHAPE[0]  # queries and keys
    assert {"step / forward / MLP", "step / forward / RMS norm"} <= set(ranges)
    (rope,) = (part for part in row["attention"] if part["part"] == "RoPE")
    assert rope["gflop"] == SHAPE[0] * 6 * BATCH * CONTEXT * SHAPE[2] / 1e9


def test_attention_is_named_in_every_layer(measured):
    _, row = measured
    ranges = {part["range"]: part for part in row["ranges"]}
    for part in PARTS:
        assert ranges[f"step / forward / attention / {part}"]["calls"] == SHAPE[0]
    assert ranges["step / forward / attention / softmax"]["products_ms"] == 0
    times = {part["part"]: part["kernels_ms"] for part in row["attention"]}
    attention = ranges["step / forward / attention"]
    assert sum(times.values()) == pytest.approx(attention["kernels_ms"])
    assert times["projections"] == pytest.approx(attention["own_ms"])


def test_the_trace_opens_and_tensorboard_shows_the_tables(measured, folder):
    mode, row = measured
    with gzip.open(folder / row["trace"], "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"step", "forward", "attention", "MLP", *PARTS} <= names
    (run,) = (folder / "tensorboard").glob(f"*-{mode}")
    events = EventAccumulator(str(run)).Reload()
    assert {f"profile/{name}/text_summary" for name in ("step", "ranges", "kernels")} <= set(
        events.Tags()["tensors"]
    )
    (busy,) = events.Scalars("profile/busy")
    assert busy.value == pytest.approx(row["busy"])
    shares = [events.Scalars(f"share/{kind}")[0].value for kind in KINDS]
    assert sum(shares) == pytest.approx(1.0, abs=1e-6)  # float32


def test_attention_in_parts_is_naive_attention():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 8, 4)
    named = []
    in_parts = attention_in_parts(lambda name: named.append(name) or nullcontext(name))
    assert torch.equal(in_parts(q, k, v, 0.0), naive_attention(q, k, v, 0.0))
    assert named == list(PARTS)
    assert torch.equal(in_parts(q[:, :, -1:], k, v, 0.0), naive_attention(q[:, :, -1:], k, v, 0.0))


def test_flops_of_the_attention_are_those_that_torch_counts():
    model = make_model(SHAPE, CONTEXT)
    set_attention(model, naive_attention)  # torch does not count the fused one of CPUs
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(100, (BATCH, CONTEXT)))
    layers = [counter.get_flop_counts()[f"GPT.transformer.h.{i}.attn"] for i in range(SHAPE[0])]
    ours = attention_flops("gpt2", SHAPE, BATCH, CONTEXT)
    softmax = ours.pop("softmax")
    assert sum(ours.values()) == sum(sum(layer.values()) for layer in layers)
    assert softmax == SHAPE[0] * BATCH * SHAPE[1] * CONTEXT**2 * 5


def test_what_no_profiler_sees_is_skipped(folder):
    with pytest.raises(SkippedError, match="MPS"):
        call(
            measure_profile,
            SETTING | {"device": "mps", "mode": "inference", "folder": str(folder)},
        )


# ---- the command ---------------------------------------------------------------------------------

OPTIONS = ["--device=cpu", "--n-layer=2", "--n-head=2", "--d-model=32", "--contexts=16"]


@pytest.fixture
def own_process(tmp_path, monkeypatch):
    """Rows are measured here; the second one crashes."""
    monkeypatch.chdir(tmp_path)

    def measure(address, values, timeout_s):
        if values["mode"] == "training":
            return {"status": "crashed", "note": "planted"}
        return {"status": "ok", **call(measure_profile, values)}

    monkeypatch.setattr(sweep, "isolated", measure)


def test_a_planted_crash_is_a_row_and_the_others_have_their_tables(own_process, capsys):
    assert main(["bench", "profile", *OPTIONS, "--steps=1", "--warmup=0"]) == 1
    (path,) = sweep.ROOT.glob("profile/*/results.json")
    found = json.loads(path.read_text())
    assert [(row["mode"], row["status"]) for row in found["rows"]] == [
        ("inference", "ok"),
        ("training", "crashed"),
        ("full-step", "ok"),
    ]
    for name in ("ranges", "attention", "kernels"):
        assert {row["mode"] for row in found[name]} == {"inference", "full-step"}
        assert (path.parent / f"{name}.csv").read_text().count("\n") == 1 + len(found[name])
    assert len(list(path.parent.glob("trace-*.json.gz"))) == 2
    assert len(list(path.parent.glob("tensorboard/*/events*"))) == 2
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:2] == ["nsys", "profile"]
    values = json.loads(command[-1])
    row = make_row(ProfileRow, values)
    rest = {name: value for name, value in values.items() if not hasattr(row, name)}
    inspect.signature(measure_profile).bind(row, **rest)  # what nsys runs can be called
    assert (values["device"], values["for_nsys"]) == ("cuda", True)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--steps", "0"], "error: steps is 0; it must be at least 1"),
        (["--modes", "trainig"], "error: --modes is 'trainig': 'trainig' is none of inference"),
        (["--top", "0"], "error: top is 0; it must be at least 1"),
    ],
)
def test_mistakes_take_one_line(args, line, capsys):
    assert main(["bench", "profile", *args]) == 2
    assert capsys.readouterr().err.startswith(line)


# ---- what needs a GPU, with its calls replaced ---------------------------------------------------


def test_under_nsys_only_the_steps_are_recorded_and_no_profiler_is_in_the_way(
    monkeypatch, tmp_path
):
    calls = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    run_step = Step.__call__
    monkeypatch.setattr(Step, "__call__", lambda self: calls.append("step") or run_step(self))
    call(
        measure_profile,
        SETTING | {"mode": "full-step", "folder": str(tmp_path), "for_nsys": True},
    )
    steps = ["step"] * SETTING["steps"]
    # warm-up and those timed without ranges; one more with them; those recorded
    assert calls == ["step", *steps, "step", "start", *steps, "stop"]
    assert not list(tmp_path.iterdir())


def test_on_cuda_a_range_is_an_nvtx_range_too(monkeypatch):
    named = []
    monkeypatch.setattr(
        torch.cuda.nvtx, "range", lambda name: named.append(name) or nullcontext(name)
    )
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler, nvtx_range("softmax"):
        torch.ones(4).softmax(0)
    assert named == ["softmax"]
    assert "softmax" in {event.key for event in profiler.key_averages()}
