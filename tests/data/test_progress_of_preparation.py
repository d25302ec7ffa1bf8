"""The log of a preparation without a terminal."""

import pytest

from gpt_lightning.data import progress
from gpt_lightning.data.progress import LINE_S, Progress


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_a_line_every_ten_seconds_with_the_rate_of_this_session(clock, capsys):
    with Progress(200_000_000, done_bytes=100_000_000) as shown:
        shown._bar.disable = True
        clock[0] += LINE_S - 1
        shown.add(10_000_000, 1_000)
        assert capsys.readouterr().out == ""
        clock[0] += 1
        shown.reach(150_000_000, 500)
        assert capsys.readouterr().out == "150 of 200 MB (75%), 5.0 MB/s, 1,500 tokens\n"
        clock[0] += 1
        shown.add(1, 1)
        assert capsys.readouterr().out == ""
