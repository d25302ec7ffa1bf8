"""`bench profile --budget`: parts of planted traces, floors, and the step of `fit` on a CPU."""

import inspect
import json

import pytest
import torch

from gpt_lightning.bench.core import budget, fit_run, traces, training_step
from gpt_lightning.bench.core.traces import Work, read_trace
from gpt_lightning.cli import main
from gpt_lightning.hardware.peaks import Peak
from gpt_lightning.model import flops
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import SkippedError, call
from gpt_lightning.training.steps import StepShape

TINY = [
    "--data.batch_size=2",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.val_check_interval=2",
    "--model.config.n_layer=1",
    "--model.config.n_head=1",
    "--model.config.n_embd=16",
    "--model.config.block_size=32",
    "--model.config.vocab_size=100",
    "--model.compile=false",
]
SETTING = {"device": "cpu", "size": "124m", "steps": 2, "warmup": 1, "top": 5}


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """A known peak, and a copy of little."""
    monkeypatch.setattr(training_step, "measured_peak", lambda *args: Peak(1e12, "a test's", ""))
    monkeypatch.setattr(budget, "COPIED", 2**16)
    before = torch.get_float32_matmul_precision(), torch._inductor.config.cpp.enable_kernel_profile
    yield
    torch.set_float32_matmul_precision(before[0])
    torch._inductor.config.cpp.enable_kernel_profile = before[1]


@pytest.mark.parametrize(
    ("op", "kernel", "part"),
    [
        ("aten::addmm", "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("", "triton_tem_fused_mm_3", "products"),
        ("aten::_scaled_dot_product_cudnn_attention", "cudnn_generated_fort_native", "attention"),
        ("", "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("", "fmha_cutlassB_bf16_aligned_64x64_k64_sm80", "attention"),
        ("aten::bmm", "nvjet_tst_128x256", "attention"),
        ("aten::_softmax", "cunn_SoftMaxForward", "attention"),
        ("aten::native_layer_norm", "vectorized_layer_norm_kernel", "norms"),
        ("", "triton_per_fused_add_native_layer_norm_native_layer_norm_backward_7", "norms"),
        ("aten::_log_softmax", "cunn_SoftMaxForward", "loss"),
        ("", "triton_red_fused__log_softmax__to_copy_nll_loss_forward_9", "loss"),
        ("aten::_fused_adamw_", "multi_tensor_apply_kernel", "optimizer"),
        ("", "void multi_tensor_apply_kernel<LpNormFunctor>", "optimizer"),
        ("aten::_foreach_mul_", "multi_tensor_apply_kernel", "optimizer"),
        ("aten::_to_copy", "elementwise_kernel", "casts"),
        ("aten::add_", "vectorized_elementwise_kernel<CUDAFunctor_add<float>>", "casts"),
        ("", "triton_poi_fused__to_copy_t_12", "casts"),
        ("aten::gelu", "vectorized_elementwise_kernel", "elementwise"),
        ("aten::add", "vectorized_elementwise_kernel", "elementwise"),
        ("", "triton_poi_fused__to_copy_add_mul_tanh_4", "elementwise"),
        ("aten::sum", "reduce_kernel", "elementwise"),
        ("aten::embedding_dense_backward", "embedding_backward_feature_kernel", "other"),
        ("", "Memcpy HtoD (Pinned -> Device)", "other"),
        # a launch that only the compiled graph is known for: its kernel decides
        ("## Call CompiledFxGraph f00 ##", "triton_red_fused_native_layer_norm_3", "norms"),
        ("autograd::engine::evaluate_function: X", "nvjet_tst_64", "products"),
    ],
)
def test_parts_go_by_names(op, kernel, part):
    assert Work(op, kernel, (), 0.0, 1.0).part == part


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": ts, "dur": dur, "args": args}


def launched(number, name, ts, start, dur):
    """A kernel that a launch without an op began, in microseconds."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", ts, 2, correlation=number),
        event("kernel", name, start, dur, correlation=number),
    ]


def test_the_budget_of_a_planted_gpu_trace():
    planted = [
        event("user_annotation", "step", 0, 400),
        *launched(1, "nvjet_tst_128", 10, 1000, 600),
        *launched(2, "triton_per_fused_add_native_layer_norm_2", 20, 1600, 100),
        *launched(3, "multi_tensor_apply_kernel", 30, 1750, 50),  # 50 of nothing before it
        event("user_annotation", "step", 500, 400),
        *launched(4, "nvjet_tst_128", 510, 2000, 700),
        *launched(5, "a_kernel_of_nobody", 520, 2700, 100),
    ]
    works = read_trace({"traceEvents": planted}, ("step",), on_gpu=True)
    times = budget.trace_tables.summary(works, 2, 1.0, on_gpu=True)
    least = {"products": 0.5, "norms": 0.1, "optimizer": 0.05}
    table = budget.parts_table(works, 2, times["span_ms"], least)
    assert {row["part"]: (row["calls"], round(row["ms"], 6)) for row in table} == {
        "products": (1.0, 0.65),
        "norms": (0.5, 0.05),
        "optimizer": (0.5, 0.025),
        "other": (0.5, 0.05),
        "idle": (None, 0.025),
        "step": (None, 0.8),
    }
    assert sum(row["share"] for row in table[:-1]) == pytest.approx(1.0)
    assert [row["over_floor"] for row in table] == [
        *(pytest.approx(x) for x in (1.3, 0.5, 0.5)),
        *(None, None, pytest.approx(0.8 / 0.65)),
    ]
    kernels = budget.trace_tables.kernels_table(works, 2, 2, "part")
    assert (kernels[0]["kind"], kernels[0]["kernel"]) == ("products", "nvjet_tst_128")


def test_floors_of_124m_at_the_h200s_micro_batch():
    with torch.device("meta"):
        model = GPT(GPTConfig(12, 12, 768, 1024, 50304))
    step = StepShape(64, 1024, 8, 1)
    least = budget.floors(model, step, "bf16", 989e12, 4.2e12)
    # the FLOPs of MFU: all parameters, and attention on the full square with 12 for our 7
    counted = flops.flops_per_token(model.num_params(embeddings=False), 12, 768, 1024)
    products = (least["products"] + least["attention"] * 12 / 7) * 989e12 / 1e3
    assert products == pytest.approx(counted * step.tokens, rel=2e-3)  # biases and norms
    million = {part: ms * 4.2e12 / 1e3 / 1e6 for part, ms in least.items()}  # bytes
    assert million["loss"] == pytest.approx(3 * 524_288 * 50304 * 2 / 1e6)
    assert million["norms"] == pytest.approx(5 * 25 * 524_288 * 768 * 2 / 1e6)
    assert million["elementwise"] == pytest.approx(5 * 12 * 524_288 * 3072 * 2 / 1e6)
    assert million["optimizer"] == pytest.approx(32 * model.num_params() / 1e6)
    matrices = 12 * 12 * 768**2 + 50304 * 768
    # 8 casts of the weights (4 + 2), a gradient cast (2 + 4), 7 added (2 + 4 + 4)
    assert million["casts"] == pytest.approx((8 * 6 + 6 + 7 * 10) * matrices / 1e6)
    full = budget.floors(model, step, "tf32", 495e12, 4.2e12)
    assert full["products"] == pytest.approx(least["products"] * 989 / 495)
    assert full["loss"] == pytest.approx(2 * least["loss"])
    assert full["casts"] * 4.2e12 / 1e3 == pytest.approx(7 * 12 * matrices)  # sums alone
    assert full["optimizer"] == least["optimizer"]


def in_this_process(address, configuration, timeout_s):
    return {"status": "ok", "note": "", **call(budget.measure_budget, configuration)}


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_the_step_of_fit_is_profiled(tmp_path, monkeypatch, optimizer, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "isolated", in_this_process)
    options = ["--budget", "--device=cpu", "--steps=2", "--warmup=1", "--top=5"]
    assert main(["bench", "profile", *options, *TINY, f"--model.optimizer={optimizer}"]) == 0
    (path,) = sweep.ROOT.glob("profile/*/results.json")
    found = json.loads(path.read_text())
    (row,), parts = found["rows"], {row["part"]: row for row in found["parts"]}
    assert row["step"] == "128 tokens = 2 sequences x 32 tokens x 2 accumulated x 1 ranks"
    assert row["dtype"] == "bf16"
    assert row["graphs"] == 0
    assert row["ceilings"].startswith("1.0 TFLOP/s, ")
    step = parts.pop("step")
    assert step["ms"] == row["span_ms"]
    assert sum(part["ms"] for part in parts.values()) == pytest.approx(row["span_ms"])
    assert row["span_ms"] - parts["idle"]["ms"] == pytest.approx(row["kernels_ms"])
    for part in ("products", "attention", "norms", "loss", "optimizer", "casts", "elementwise"):
        assert parts[part]["ms"] > 0, part
    mm = 2 * 3 * (4 + 1)  # micro-batches; forward and two gradients; linear layers and the head
    assert parts["products"]["calls"] >= mm
    assert (parts["products"]["calls"] > 2 * mm) == (optimizer == "muon")
    assert list(path.parent.glob("trace-cpu-124m.json.gz"))
    assert "bench profile --budget" in found["machine"]["command"]


def test_steps_with_and_without_the_profiler_are_told_apart(tmp_path, monkeypatch):
    class Module:
        model = GPT(GPTConfig(1, 1, 16, 32, 100))

    def train(batches, device, precision, model, clip, accumulate):
        assert len(batches) % accumulate == 0
        taken = 0
        for x, _ in batches:
            taken += 1
            torch.mm(x.float(), x.float().T)
        assert taken == len(batches)
        return Module

    monkeypatch.setattr(fit_run, "train", train)
    row = call(budget.measure_budget, SETTING | {"fit_options": TINY, "folder": str(tmp_path)})
    parts = {part["part"]: part for part in row["parts"]}
    assert parts["products"]["calls"] == 2  # a micro-batch has one
    assert 0 < row["timer_ms"] < 1000
    assert row["mfu"] > 0
    works = traces.read_file(tmp_path / "trace-cpu-124m.json.gz", ("step",), on_gpu=False)
    assert len(traces.by_range(works)["step",]) == SETTING["steps"]


def test_what_no_profiler_sees_is_skipped(tmp_path):
    with pytest.raises(SkippedError, match="MPS"):
        call(
            budget.measure_budget,
            SETTING | {"device": "mps", "fit_options": TINY, "folder": str(tmp_path)},
        )


def test_the_help_and_the_options_are_the_budgets(capsys):
    assert main(["bench", "profile", "--budget", "--help"]) == 0
    assert "Options of `fit` follow" in capsys.readouterr().out
    assert main(["bench", "profile", "--budget", "--modes=inference"]) == 2
    assert "unknown key 'modes'" in capsys.readouterr().err
    _, (row,) = sweep.read_options(budget.BENCH, ["--budget", "--device=cpu", *TINY])
    assert row["fit_options"] == TINY
    names = inspect.signature(budget.measure_budget).parameters.keys() - {"row", "folder"}
    assert names == row.keys() - {"device", "size"}
