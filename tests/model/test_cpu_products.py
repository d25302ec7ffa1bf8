"""The bfloat16 products of compiled graphs agree with exact ones, and leave the rest to PyTorch."""

import json
import os
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gpt_lightning.model import cpu_products
from gpt_lightning.model.cpu_attention import cpu_has_kernel
from gpt_lightning.model.cpu_products import Products, kernel

needs_kernel = pytest.mark.skipif(
    not (cpu_has_kernel() and shutil.which("g++")),
    reason="needs a CPU with AVX-512 BF16 and without AMX, and g++",
)


class Other(torch.Tensor):
    """A tensor whose functions may mean something else."""


def matrix(rows: int, columns: int, transposed: bool = False, more: int = 0) -> Tensor:
    """A matrix of normal numbers; each line in memory is `more` numbers longer."""
    if transposed:
        return matrix(columns, rows, more=more).t()
    return torch.randn(rows, columns + more).bfloat16()[:, :columns]


def check(M: int, N: int, K: int, a_t: bool, b_t: bool, with_bias: bool, more: int = 0) -> None:
    a, b = matrix(M, K, a_t, more), matrix(K, N, b_t, more)
    bias = matrix(1, N)[0] if with_bias else None
    memory = torch.full((M + 1, N + 3), 7.0).bfloat16()
    out = memory[:M, :N]
    assert kernel()(a, b, bias, out, 2), (M, N, K)
    exact = a.double() @ b.double() + (bias.double() if with_bias else 0.0)
    # one rounding, of 2^-9 at most, and float32 sums; a wrong column is an error of 1
    assert (out.double() - exact).abs().max() < 2**-8 * exact.abs().max(), (M, N, K, a_t, b_t)
    assert (out.double() - exact).norm() < 0.002 * exact.norm()
    assert (memory[:M, N:] == 7).all(), "written beside its columns"
    assert (memory[M:] == 7).all(), "written below its rows"


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("a_t", [False, True], ids=["a", "a_t"])
@pytest.mark.parametrize("b_t", [False, True], ids=["b", "b_t"])
def test_products_are_exact_sums_rounded_once(a_t, b_t):
    torch.manual_seed(0)
    for M in (56, 69, 300):  # tiles of 14 rows, whole and not, an odd number of them
        for N in (16, 33, 64):  # of 32 columns
            for K in (1, 2, 30, 31, 64, 65, 130):
                check(M, N, K, a_t, b_t, with_bias=K % 4 == 2, more=N % 3)
    check(70, 1600, 66, a_t, b_t, with_bias=True)  # two blocks of columns
    check(70, 1570, 6201, a_t, b_t, with_bias=True)  # three blocks of K, too


@needs_kernel
@pytest.mark.slow
def test_any_number_of_threads_gives_the_same_bits():
    torch.manual_seed(0)
    for a_t in (False, True):
        a, b, found = matrix(200, 3400, a_t), matrix(3400, 100), []
        for threads in (1, 2, 3, 20):  # 15 tiles of rows
            found.append(torch.empty(200, 100, dtype=torch.bfloat16))
            assert kernel()(a, b, None, found[-1], threads)
        assert all(torch.equal(found[0], other) for other in found)


@needs_kernel
@pytest.mark.slow
def test_many_rows_are_computed_in_parts():
    torch.manual_seed(0)
    check(8300, 16, 3100, True, False, with_bias=True)  # more than 8,190 rows, two blocks of K


@needs_kernel
@pytest.mark.slow
def test_callers_in_two_threads_have_their_own_memory():
    torch.manual_seed(0)
    problems = [(matrix(256, 512, True), matrix(512, 256)) for _ in range(2)]
    expected = [torch.empty(256, 256, dtype=torch.bfloat16) for _ in problems]
    for (a, b), out in zip(problems, expected, strict=True):
        assert kernel()(a, b, None, out, 2)
    different = []

    def repeat(number: int) -> None:
        a, b = problems[number]
        for _ in range(100):
            out = torch.empty(256, 256, dtype=torch.bfloat16)
            kernel()(a, b, None, out, 2)
            if not torch.equal(out, expected[number]):
                different.append(number)

    callers = [threading.Thread(target=repeat, args=(number,)) for number in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not different


@needs_kernel
@pytest.mark.slow
def test_not_finite_numbers_stay_in_their_rows_and_columns():
    a, b = matrix(120, 64), matrix(64, 40)
    a[3, 5], b[7, 11] = torch.nan, torch.inf
    out = torch.empty(120, 40, dtype=torch.bfloat16)
    assert kernel()(a, b, None, out, 2)
    expected = a.float() @ b.float()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())


LEFT = {
    "float32": lambda: (matrix(128, 64).float(), matrix(64, 64).float(), None),
    "mixed": lambda: (matrix(128, 64), matrix(64, 64), torch.zeros(64)),
    "few rows": lambda: (matrix(8, 64), matrix(64, 64), None),
    "few columns": lambda: (matrix(128, 64), matrix(64, 8), None),
    "no inner 1": lambda: (matrix(128, 128)[:, ::2], matrix(64, 64), None),
    "no K": lambda: (matrix(128, 0), matrix(0, 64), None),
    "no bias": lambda: (matrix(128, 64), matrix(64, 64), matrix(1, 0)[0]),
    "bias of one": lambda: (matrix(128, 64), matrix(64, 64), matrix(1, 1)[0]),
    "bias of rows": lambda: (matrix(128, 64), matrix(64, 64), matrix(128, 64)),
}


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("case", LEFT)
def test_the_rest_is_left_to_pytorch(case):
    torch.manual_seed(0)
    a, b, bias = LEFT[case]()
    out = torch.full((a.shape[0], b.shape[1]), 7.0).to(a.dtype)
    assert not kernel()(a, b, bias, out, 2)
    assert (out == 7).all()
    if case in ("mixed", "no bias"):
        return  # PyTorch refuses them
    if bias is None:
        Products(torch).mm(a, b, out=out)
        assert torch.equal(out, a @ b)
    else:
        Products(torch).addmm(bias, a, b, out=out)
        assert torch.equal(out, torch.addmm(bias, a, b))


@needs_kernel
@pytest.mark.slow
def test_what_has_no_numbers_of_its_own_is_left_to_pytorch():
    x, out = matrix(64, 64), torch.empty(64, 64, dtype=torch.bfloat16)
    others = [x.to("meta"), x.to_sparse(), torch.Tensor._make_subclass(Other, x), object()]
    with FakeTensorMode():
        others.append(torch.empty(64, 64, dtype=torch.bfloat16))
    for other in others:
        assert not kernel()(other, x, None, out, 2)
        assert not kernel()(x, other, None, out, 2)
        assert not kernel()(x, x, None, other, 2)
    y = matrix(64, 64)
    assert not kernel()(x, y, None, x, 2)  # it would write what it reads
    assert not kernel()(y, x, None, x, 2)
    assert not kernel()(x, x, None, out[:1].expand(64, 64), 2)
    assert not kernel()(x[:, 0], x, None, out, 2)
    assert kernel()(x, torch.nn.Parameter(x), None, out, 2)


@needs_kernel
@pytest.mark.slow
def test_wrong_arguments_are_errors():
    x = matrix(128, 64)
    with pytest.raises(TypeError, match="2 arguments for 5"):
        kernel()(x, x)
    with pytest.raises(ValueError, match="0 threads"):
        kernel()(x, x, None, x, 0)
    out = torch.full((128, 64), 7.0).bfloat16()
    assert not kernel()(x, x, None, out, 2)  # 64 columns, 128 rows
    with pytest.raises(RuntimeError):
        Products(torch).mm(x, x, out=out)
    assert (out == 7).all()


def test_graphs_get_other_functions_as_they_are(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu_products, "multiply", lambda *given: calls.append(given) or True)
    theirs = SimpleNamespace(bmm=object(), addmm=lambda *given, **more: calls.append((given, more)))
    products = Products(theirs)
    assert products.bmm is theirs.bmm
    products.mm(1, 2, out=3)
    products.addmm(4, 1, 2, alpha=1, beta=1, out=3)
    products.addmm(4, 1, 2, alpha=2, beta=1, out=3)
    scaled = ((4, 1, 2), {"alpha": 2, "beta": 1, "out": 3})
    ours = [("gpt_lightning::mm", 1, 2, None, 3), ("gpt_lightning::addmm", 1, 2, 4, 3)]
    assert calls == [*ours, scaled]


def test_other_devices_need_no_kernel(monkeypatch):
    monkeypatch.setattr(cpu_products, "kernel", lambda: pytest.fail("it would be built"))
    out = torch.empty(64, 64, device="meta", dtype=torch.bfloat16)
    Products(torch).mm(out, out, out=out)


COMPILED = """
import contextlib
import sys
import torch
from gpt_lightning.model import cpu_products
from gpt_lightning.model.cpu_attention import cpu_has_kernel
from gpt_lightning.model.compilation import compile_in_place
from gpt_lightning.model.gpt import GPT, GPTConfig

torch.manual_seed(0)
model = GPT(GPTConfig(2, 2, 64, 32, 65, dropout=0.0))
idx, targets = torch.randint(65, (2, 16, 32))
compile_in_place(model, "cpu")
kernel, outcomes = cpu_products.kernel(), []
cpu_products.kernel = lambda: lambda *given: outcomes.append(kernel(*given)) or outcomes[-1]

def gradients():
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, targets)
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())])

ours = gradients()
print(len(outcomes), all(outcomes))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    gradients()
profile.export_chrome_trace(sys.argv[1])
multiply = cpu_products.multiply
cpu_products.multiply = lambda *given: False
plain = gradients()
print(float((ours - plain).norm() / plain.norm()))

cpu_products.multiply = multiply
for N in (48, 64):  # two graphs
    outcomes.clear()
    product = torch.compile(lambda a, b: (a @ b).sin(), dynamic=False)
    with cpu_products.left_to_pytorch() if N == 48 else contextlib.nullcontext():
        product(torch.ones(128, N).bfloat16(), torch.ones(N, N).bfloat16())
    print(len(outcomes))
"""


@needs_kernel
@pytest.mark.slow
def test_a_compiled_model_calls_them_forward_and_backward(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, str(tmp_path / "trace.json")],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    called, difference, *of_others = done.stdout.splitlines()
    n = 3 * (2 * 4 + 1)  # forward, and two backward, of four layers a block and the head
    assert called == f"{n} True"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    operators = [event["name"] for event in events if event.get("cat") == "cpu_op"]
    assert operators.count("gpt_lightning::mm") + operators.count("gpt_lightning::addmm") == n
    assert not {"aten::mm", "aten::addmm"} & set(operators)
    assert float(difference) < 0.001
    assert of_others == ["0", "1"]
