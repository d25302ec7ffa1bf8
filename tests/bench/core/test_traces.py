"""Reading a profiler's trace: planted ones, as a GPU's and a CPU's look."""

import pytest

from gpt_lightning.bench.core import traces
from gpt_lightning.bench.core.traces import Work, read_trace

NAMES = ("step", "forward", "backward")
MAIN, AUTOGRAD, STREAM = 1, 2, 7


def event(cat, name, tid, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": ts, "dur": dur, "args": args}


# Microseconds. The GPU runs behind the program; the backward pass is launched by its own thread.
GPU = [
    event("user_annotation", "ProfilerStep#1", MAIN, 0, 1000),
    event("user_annotation", "step", MAIN, 0, 1000),
    event("user_annotation", "forward", MAIN, 10, 100),
    event("user_annotation", "backward", MAIN, 120, 300),
    event("gpu_user_annotation", "forward", STREAM, 500, 150),
    event("cpu_op", "aten::linear", MAIN, 20, 30, **{"External id": 1}),
    event("cpu_op", "aten::addmm", MAIN, 21, 28, **{"External id": 2}),
    event("cuda_runtime", "cudaLaunchKernel", MAIN, 25, 5, correlation=100),
    event("kernel", "volta_sgemm", STREAM, 500, 100, correlation=100, **{"External id": 2}),
    event("cpu_op", "aten::gelu", MAIN, 60, 10, **{"External id": 3}),
    event("cuda_runtime", "cudaLaunchKernel", MAIN, 62, 5, correlation=101),
    event("kernel", "vectorized", STREAM, 630, 20, correlation=101, **{"External id": 3}),
    event("cpu_op", "aten::mm", AUTOGRAD, 200, 20, **{"External id": 4}),
    event("cuda_driver", "cuLaunchKernelEx", AUTOGRAD, 205, 5, correlation=102),
    event("kernel", "nvjet_tst_128", STREAM, 700, 300, correlation=102, **{"External id": 4}),
    event("cuda_runtime", "cudaLaunchKernel", AUTOGRAD, 300, 5, correlation=103),
    event("kernel", "reduce_kernel", STREAM, 1000, 40, correlation=103),  # no op is known
    event("cuda_runtime", "cudaMemcpyAsync", MAIN, 500, 5, correlation=104),
    event("gpu_memcpy", "Memcpy HtoD", STREAM, 1050, 10, correlation=104),
    event("cuda_runtime", "cudaLaunchKernel", MAIN, 2000, 5, correlation=105),
    event("kernel", "outside of the step", STREAM, 2010, 1, correlation=105),
    {"ph": "f", "cat": "ac2g", "name": "ac2g", "tid": 1, "ts": 5},
]  # fmt: skip


@pytest.fixture(scope="module")
def works() -> list[Work]:
    return read_trace({"traceEvents": GPU}, NAMES, on_gpu=True)


def test_a_kernel_belongs_to_the_range_that_launched_it_whatever_the_thread(works):
    assert [(work.kernel, work.op, work.inside[-1].path[-1], work.kind) for work in works] == [
        ("volta_sgemm", "aten::addmm", "forward", "products"),
        ("vectorized", "aten::gelu", "forward", "elementwise"),
        ("nvjet_tst_128", "aten::mm", "backward", "products"),
        ("reduce_kernel", "", "backward", "reductions"),
        ("Memcpy HtoD", "", "step", "other"),
    ]


def test_operators_of_this_package_have_a_kind_and_a_part():
    work = Work("gpt_lightning::attention", "", (), 0.0, 1.0)
    assert (work.kind, work.part) == ("products", "attention")


def test_the_span_is_the_devices_and_the_gaps_are_in_it(works):
    spans = {
        path[-1]: [traces.span_ms(place, inner, on_gpu=True) for place, inner in places.items()]
        for path, places in traces.by_range(works).items()
    }
    assert spans["forward"] == pytest.approx([0.150])  # 500 to 650; 120 of them busy
    assert spans["step"] == pytest.approx([0.560])  # 500 to 1060
    assert traces.total_ms(works) == pytest.approx(0.470)


def test_shares_add_up_to_1(works):
    shares = traces.shares(works)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["products"] == pytest.approx(400 / 470)
    assert set(shares) == set(traces.KINDS)


def test_on_a_cpu_an_op_has_the_time_of_its_own():
    events = [
        event("user_annotation", "step", MAIN, 0, 100),
        event("cpu_op", "aten::matmul", MAIN, 10, 50),
        event("cpu_op", "aten::mm", MAIN, 15, 40),
        event("cpu_op", "aten::empty", MAIN, 16, 5),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", MAIN, 70, 20),
        event("cpu_op", "MmBackward0", MAIN, 71, 18),
        event("cpu_op", "aten::sum", MAIN, 72, 15),
        event("cpu_op", "aten::add_", AUTOGRAD, 12, 30),  # another thread's: not inside matmul
        event("cpu_op", "aten::add_", MAIN, 150, 30),  # after the step
    ]
    works = read_trace({"traceEvents": events}, NAMES, on_gpu=False)
    own = {work.kernel: round(work.ms * 1e3, 6) for work in works}
    assert own == {
        "aten::matmul": 10,
        "aten::mm": 35,
        "aten::empty": 5,
        "aten::sum": 15,
        "aten::add_": 30,
    }
    later = [{**e, "ts": e["ts"] + 1000} for e in events]  # a range need not begin at 0
    moved = read_trace({"traceEvents": later}, NAMES, on_gpu=False)
    assert [work.ms for work in moved] == [work.ms for work in works]
    for (place, inner), (other, found) in zip(
        traces.by_range(works)["step",].items(),
        traces.by_range(moved)["step",].items(),
        strict=True,
    ):
        ours, theirs = traces.span_ms(place, inner, False), traces.span_ms(other, found, False)
        assert ours == pytest.approx(theirs)
    (places,) = traces.by_range(works).values()
    assert [traces.span_ms(place, inner, on_gpu=False) for place, inner in places.items()] == [0.1]


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten::baddbmm", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "products"),
        ("aten::_softmax_backward_data", "softmax"),
        ("aten::_log_softmax", "softmax"),
        ("aten::softmax", "other"),  # the dispatch to _softmax
        ("aten::native_layer_norm_backward", "reductions"),
        ("aten::nll_loss_forward", "reductions"),
        ("aten::masked_fill_", "elementwise"),
        ("aten::_foreach_addcdiv_", "elementwise"),
        ("aten::_fused_adamw_", "elementwise"),
        ("aten::gelu_backward", "elementwise"),
        ("aten::gelu", "elementwise"),
        ("aten::embedding_dense_backward", "other"),
        ("aten::view", "other"),
    ],
)
def test_kinds_of_ops(op, kind):
    assert Work(op, op, (), 0.0, 1.0).kind == kind
