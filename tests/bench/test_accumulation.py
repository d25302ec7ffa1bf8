"""`gpt-lightning bench accumulation`: the published sums, digit by digit."""

import pytest

from gpt_lightning.bench import accumulation
from gpt_lightning.cli import main
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import call, measured


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "isolated", lambda address, values, _: measured(address, values))


@pytest.mark.parametrize("row", accumulation.PUBLISHED)
def test_the_sums_have_the_published_digits(row):
    found = call(accumulation.measure_sum, {"device": "cpu"} | row)
    assert f"{found['sum']:.4f}" == f"{row['published']:.4f}"
    assert found["status"] == "ok"


def test_a_float16_accumulator_loses_what_its_steps_cannot_hold():
    setting = {"device": "cpu", "upcast": False, "published": 0.0}
    dtypes = {"accumulator": "float16", "addend": "float16"}
    half = call(accumulation.measure_sum, setting | dtypes)
    assert half["sum"] * 2**7 % 1 == 0  # above 8 its steps are 2^-7
    dtypes = {"accumulator": "float64", "addend": "float64"}
    whole = call(accumulation.measure_sum, setting | dtypes)
    assert abs(whole["error"]) < 1e-10 < abs(half["error"])


def test_another_digit_is_a_mismatch_and_exit_code_1(monkeypatch, capsys):
    first, second, *_ = accumulation.PUBLISHED
    monkeypatch.setattr(accumulation, "PUBLISHED", [first | {"published": 10.0002}, second])
    assert main(["bench", "accumulation", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert (out.count(" mismatch\n"), out.count(" ok\n")) == (1, 1)
