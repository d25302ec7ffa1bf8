"""Devices and precisions for which compilation is on by default."""

import pytest

from gpt_lightning.model import compilation
from gpt_lightning.model.compilation import should_compile


@pytest.mark.parametrize(
    ("device", "precision", "compiler", "expected"),
    [
        ("cuda", "32-true", None, True),
        ("cpu", "32-true", "g++", False),
        ("cpu", "bf16-mixed", "g++", True),
        ("cpu", "bf16-true", "g++", True),
        ("cpu", "bf16-mixed", None, False),
        ("mps", "bf16-mixed", "g++", False),
    ],
)
def test_auto(device, precision, compiler, expected, monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(compilation.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: str(tmp_path))
    compiled, why = should_compile(device, precision)
    assert compiled is expected
    assert why.startswith(f"auto: {'on' if expected else 'off'}")
    if device == "cpu" and precision != "32-true" and not expected:
        assert "no C++ compiler" in why


def test_auto_needs_pythons_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(compilation.shutil, "which", lambda name: "g++")
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: str(tmp_path))
    compiled, why = should_compile("cpu", "bf16-mixed")
    assert not compiled
    assert "Python.h" in why


def test_the_reason_names_float32_only_where_bfloat16_would_be_compiled():
    assert should_compile("cpu", "32-true") == (False, "auto: off for cpu in float32")
    assert should_compile("mps", "32-true") == (False, "auto: off for mps")
