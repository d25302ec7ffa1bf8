"""The blocks of commands on the pages, and what each needs."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "lightning_logs/README.md",
]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"^(\w+ .*)?gpt[-_]lightning (?!-m )", re.MULTILINE)
TITLE = re.compile(r'sh title="needs: ([^"]+)"')
NEED = re.compile(
    r"(a|one|two|eight) (GPU|Mac|browser|network|cluster|bucket|machine)s?( with [\w ]+)?"
    r"|minutes|hours|minutes to hours|\d+ GB of disk|pip install \w+"
)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return (what follows the fence, text) of each block with a command of ours."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(info, text) for info, text in found if info[:2] in ("", "sh") and OURS.search(text)]


def words(line: str) -> list[str]:
    """Return the words of a line as bash makes them, with its quotes and patterns."""
    script = f"printf '%s\\0' {line}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]
