"""The precision that is fastest and safe, by what a device can do."""

from types import SimpleNamespace

import pytest
import torch

from gpt_lightning.errors import UserError
from gpt_lightning.hardware import precision as precisions
from gpt_lightning.hardware.precision import fastest_precision, product_dtype, resolve_precision


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"amx_bf16": True}, "bf16-mixed"),
        ({"avx512_bf16": True}, "bf16-mixed"),
        ({"avx512_bf16": True, "avx512_fp16": True}, "32-true"),  # an Intel CPU with hidden AMX
        ({"amx_bf16": True, "avx512_bf16": True, "avx512_fp16": True}, "bf16-mixed"),
        ({"avx512_f": True, "amx_bf16": False}, "32-true"),
    ],
)
def test_a_cpu_takes_bfloat16_where_it_multiplies_it(capabilities, expected, monkeypatch):
    monkeypatch.setattr(
        precisions.torch.cpu, "get_capabilities", lambda: capabilities, raising=False
    )
    precision, why = fastest_precision("cpu")
    assert precision == expected
    named = {name for name in capabilities if name in why}
    assert named == (
        {next(n for n in capabilities if "bf16" in n)} if "bf16" in expected else set()
    )


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_a_gpu_takes_the_half_precision_that_it_has(has_bf16, expected, monkeypatch):
    monkeypatch.setattr(precisions, "device_kind", lambda accelerator: "cuda")
    monkeypatch.setattr(precisions, "cuda_has_bf16", lambda: has_bf16)
    assert fastest_precision("gpu")[0] == fastest_precision("auto")[0] == expected


def test_a_gpu_that_emulates_bfloat16_has_none(monkeypatch):
    for native in (False, True):
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation, native=native: including_emulation or native,
        )
        assert precisions.cuda_has_bf16() is native


@pytest.mark.parametrize(
    ("given", "rank", "resolved", "printed"),
    [
        ("auto", None, "bf16-mixed", "precision   auto: bf16-mixed, why\n"),
        ("auto", "1", "bf16-mixed", ""),  # printed once, by the process that starts the others
        ("32-true", None, "32-true", ""),
        (None, None, None, ""),  # Lightning's 32-true
    ],
)
def test_auto_is_resolved_and_printed(given, rank, resolved, printed, monkeypatch, capsys):
    monkeypatch.setattr(precisions, "fastest_precision", lambda accelerator: ("bf16-mixed", "why"))
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    trainer = SimpleNamespace(precision=given, accelerator="cpu")
    resolve_precision(trainer)
    assert trainer.precision == resolved
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("precision", "matmul", "device", "dtype"),
    [
        ("bf16-mixed", "highest", "cuda", "bf16"),
        ("bf16-true", "high", "cpu", "bf16"),
        ("16-mixed", "highest", "cuda", "fp16"),
        ("64-true", "high", "cuda", "fp64"),
        ("32-true", "highest", "cuda", "fp32"),
        ("32-true", "high", "cuda", "tf32"),
        ("32-true", "medium", "cuda", "tf32"),
        ("32-true", "high", "cpu", "fp32"),
        ("32-true", "medium", "cpu", "bf16"),
        ("32-true", "medium", "mps", "fp32"),
    ],
)
def test_the_dtype_of_products_is_what_the_device_multiplies(precision, matmul, device, dtype):
    assert product_dtype(precision, matmul, torch.device(device)) == dtype


@pytest.mark.parametrize(
    ("kind", "precision", "reason"),
    [
        ("cpu", "16-mixed", "float16 training needs a GPU"),
        ("cpu", "16-true", "float16 training needs a GPU"),
        ("mps", "64-true", "MPS has no float64"),
        ("cuda", "bf16-mixed", "old chip has no bfloat16; use 16-mixed or 32-true"),
    ],
)
def test_a_precision_that_the_device_lacks_is_refused(kind, precision, reason, monkeypatch):
    monkeypatch.setattr(precisions, "device_kind", lambda accelerator: kind)
    monkeypatch.setattr(precisions, "check_accelerator", lambda *args: None)
    monkeypatch.setattr(precisions.torch.cuda, "get_device_name", lambda: "old chip")
    has_bf16 = []
    monkeypatch.setattr(precisions, "cuda_has_bf16", lambda: bool(has_bf16))
    trainer = SimpleNamespace(precision=precision, accelerator=kind)
    with pytest.raises(UserError, match=rf"--trainer\.precision {precision} on {kind}: {reason}"):
        resolve_precision(trainer)
    has_bf16.append(True)
    for good in ("32-true", "bf16-mixed"):
        resolve_precision(SimpleNamespace(precision=good, accelerator=kind))
