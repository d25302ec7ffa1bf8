"""Output that is lost: a reader that goes away, a full disk, a closed descriptor."""

import errno
import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tqdm import tqdm

from gpt_lightning import cli, output
from gpt_lightning.errors import UserError
from gpt_lightning.output import lasting_output


class Lost(io.StringIO):
    """A stream of a reader that goes away after a number of writes."""

    def __init__(self, number: int, writes: int = 1) -> None:
        super().__init__()
        self.error, self.left = OSError(number, os.strerror(number)), writes

    def write(self, text: str) -> int:
        if text.strip():
            self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_command_goes_on_without_its_output(monkeypatch, number):
    out, errors = Lost(number), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)
    with lasting_output():
        for step in range(3):
            print("step", step)
    assert out.getvalue().strip() == "step"
    reason = os.strerror(number)
    line = f"warning: standard output is lost ({reason}); the command continues without it\n"
    assert errors.getvalue() == line
    assert sys.stdout is out


def test_text_that_an_ascii_terminal_lacks_is_escaped(monkeypatch):
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="ascii"))
    with lasting_output():
        print("caf\u00e9 \U0001f600")
        sys.stdout.flush()
    assert file.getvalue() == rb"caf\xe9 \U0001f600" + b"\n"


def test_a_command_that_only_prints_ends_with_its_reader(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Lost(errno.EPIPE))
    assert cli.main(["--help"]) == 0
    monkeypatch.setattr(sys, "stdout", Lost(errno.ENOSPC, writes=0))
    with (
        pytest.raises(UserError, match="cannot write standard output: No space"),
        lasting_output(prints_only=True),
    ):
        print("usage")


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Return what a person sees: text after a carriage return is over the text before."""
        seen = [""]
        for text in re.split("([\r\n])", self.getvalue()):
            if text == "\n":
                seen.append("")
            elif text != "\r":
                seen[-1] = text + seen[-1][len(text) :]
        return [line.rstrip() for line in seen]


def test_other_text_is_in_no_line_of_a_progress_bar(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with lasting_output():
        bar = tqdm(total=2, file=sys.stdout, bar_format="step {n}/2", mininterval=0)
        print("warning:", "a long line of text", file=sys.stderr)
        bar.update()
        print("short")
        print()
        bar.update()
        bar.close()
        print("the end")
    assert screen.lines() == [
        "warning: a long line of text",
        "short",
        "",
        "step 2/2",
        "the end",
        "",
    ]


@pytest.mark.parametrize(("rank", "line"), [("0", "error: interrupted\n"), ("1", "")])
def test_ctrl_c_of_all_ranks_prints_one_line(monkeypatch, capsys, rank, line):
    def dispatch(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "dispatch", dispatch)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert cli.main(["fit"]) == 130
    assert capsys.readouterr().err == line


def test_sigterm_lets_a_command_clean_up(monkeypatch, capsys):
    cleaned = []

    def dispatch(argv):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            cleaned.append(argv)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "dispatch", dispatch)
    assert cli.main(["prepare"]) == 143
    assert cleaned == [["prepare"]]
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], True),
        (["fit", "--help"], True),
        (["fit", "--print_config"], True),
        (["reproduce", "--list"], True),
        (["data", "inspect", "set"], True),
        (["fit", "--data.text_file", "help.txt"], False),
        (["data", "verify", "set"], False),
    ],
)
def test_which_commands_only_print(argv, expected):
    assert cli.prints_only(argv) is expected


CODE = """
import os, sys
from gpt_lightning.output import lasting_output
with lasting_output():
    file = open("checkpoint", "w")
    os.write(1, b"a print of C++")
    print("step 1", flush=True)
    assert file.fileno() > 2 and not sys.stdin.closed
"""


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_descriptor_takes_no_file(tmp_path, closed):
    command = f"{sys.executable} -c '{CODE}' {closed}"
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "checkpoint").read_bytes() == b""


def test_a_reader_that_goes_away_in_a_process():
    code = (
        "import os, sys; from gpt_lightning.output import lasting_output\n"
        "with lasting_output():\n"
        "    for step in range(100_000): print('step', step)\n"
        "    os.system('echo of a child')\n"
        "sys.exit(3)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read().splitlines() == [
        "warning: standard output is lost (Broken pipe); the command continues without it"
    ]
    assert process.wait() == 3


@pytest.mark.parametrize("wait_s", [0.0, 10.0])
def test_a_log_gets_a_bar_of_long_work_alone(wait_s, monkeypatch, capsys):
    monkeypatch.setattr(output, "LOG_S", wait_s)
    with output.progress_bar(200, 100) as bar:
        bar.update(100)
    assert ("100%" in capsys.readouterr().err) == (wait_s == 0)
