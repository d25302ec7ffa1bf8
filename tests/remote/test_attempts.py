"""Attempts at addresses: pauses, and the one classification of errors."""

from types import SimpleNamespace

import pytest

from gpt_lightning.errors import OutageError, UserError
from gpt_lightning.remote import attempts
from gpt_lightning.remote.attempts import on_file_system


class Answer(OSError):  # as those of aiohttp and of the hub
    def __init__(self, status: int) -> None:
        super().__init__(f"answer {status}")
        self.response = SimpleNamespace(status_code=status)


def behind(cause: Exception) -> Exception:
    error = FileNotFoundError("a.jsonl")  # as fsspec's http and s3 raise it
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "first", "tries", "reason"),
    [
        (ConnectionResetError("reset  by\npeer"), False, 6, "reset"),
        (TimeoutError(), False, 6, "TimeoutError"),
        (Answer(503), False, 6, "answer 503"),
        (Answer(503), True, 6, "answer 503"),
        (Answer(429), False, 6, "answer 429"),
        (behind(Answer(500)), False, 6, "answer 500"),
        (behind(TimeoutError()), False, 6, "TimeoutError"),
        (RuntimeError("boto"), False, 6, "boto"),
        (ConnectionResetError("reset"), True, 1, "reset"),
        (Answer(404), False, 1, "no such file"),
        (behind(Answer(404)), False, 1, "no such file"),
        (behind(RuntimeError("boto")), False, 1, "no such file"),
        (Answer(403), False, 1, "answer 403"),
        (PermissionError("denied"), False, 1, "denied"),
        (FileNotFoundError(), False, 1, "no such file"),
        (NotADirectoryError(), False, 1, "no such file"),
        (ValueError("no URL"), False, 1, "no URL"),
        (UserError("one line"), False, 1, "one line"),
    ],
)
@pytest.mark.parametrize("action", ["fetch", "write"])
def test_what_may_pass_is_tried_six_times(error, first, tries, reason, action, monkeypatch):
    calls, clock = [], [0.0]
    monkeypatch.setattr(attempts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(attempts.time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))

    def fail(system, path):
        calls.append(path)
        raise error

    with pytest.raises(UserError, match=reason) as raised:
        attempts.attempts("memory://x", fail, action, first)
    assert raised.value.exit_code == (75 if tries > 1 else 2)
    assert len(calls) == tries
    assert clock[0] == (15.5 if tries == 6 else 0.0)
    if not isinstance(error, UserError):
        assert str(raised.value).startswith(f"cannot {action} memory://x")
        assert raised.value.__cause__ is error
        assert ("again" in str(raised.value)) == (tries > 1)


def test_one_line_before_the_second_attempt(monkeypatch, capsys):
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.0)
    answers = iter([TimeoutError(), ConnectionError("lost"), "content"])

    def third(system, path):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    assert attempts.attempts("memory://x", third, "write") == "content"
    said = capsys.readouterr().out
    assert said == "cannot write memory://x (TimeoutError): trying for 16 s\n"


def test_an_outage_is_waited_for(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(attempts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(attempts.time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))
    busy = Answer(429)

    def until(end_s):
        def work(system, path):
            if clock[0] < end_s:
                raise busy
            return clock[0]

        return work

    assert attempts.attempts("memory://x", until(180.0), patience_s=600.0) == 181.5
    lines = capsys.readouterr().out.splitlines()
    # at 0, 61.5, 121.5 s
    assert lines == ["cannot fetch memory://x (answer 429): trying for 600 s"] * 3
    with pytest.raises(OutageError, match=r"cannot fetch memory://x \(answer 429\): check"):
        attempts.attempts("memory://x", until(1e9), patience_s=600.0)
    assert clock[0] == 181.5 + 571.5


@pytest.mark.parametrize(
    ("url", "fix"),
    [("nowhere://x", "use s3://, gs:// or a folder"), ("gs://bucket/x", "install gcsfs")],
)
def test_a_protocol_that_is_missing(url, fix):
    with pytest.raises(UserError, match=fix):
        on_file_system(url)
