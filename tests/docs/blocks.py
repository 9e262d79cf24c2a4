"""The fenced blocks of the README and of the pages of documentation, and what is said of each.

A comment of HTML directly before a block says what a test cannot see:

- ``<!-- not run: REASON -->``: the block cannot run here. The reason is one of `REASONS`.
- ``<!-- run with: NAME -->``: it needs what `tests/docs/surroundings.py` has by this name.
- ``<!-- is: WHAT -->``: a block of data is checked as what `tests/docs/data.py` has by this name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Why a block cannot run here: it needs a GPU, a cluster, a download, or another project's program, or a part
# of it stands for the reader's own file, host or key.
REASONS = ("gpu", "kubernetes", "network", "other-project", "placeholder")
COMMANDS = ("bash", "console")  # `console` has what is printed, too; its commands stand behind "$ "
DATA = ("json", "toml", "yaml")
PICTURES = ("text",)  # drawings, formulas, and what a program prints: nothing to run
LANGUAGES = (*COMMANDS, *DATA, *PICTURES, "python")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)\s*$")
MARK = re.compile(r"^ *<!-- (?P<key>not run|run with|is): (?P<value>[^>]+?) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: ``line`` is that of its first fence, ``text`` what is between the fences."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def not_run(self) -> str | None:
        """The reason why it cannot run here."""
        return self.marks.get("not run")

    @property
    def script(self) -> str:
        """The commands of a block of commands, without what they print."""
        return self.text if self.language == "bash" else _typed(self.text)


def pages() -> list[Path]:
    """All pages for readers, the README first."""
    roots = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
    return [*roots, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Yields the fenced blocks of a page.

    Raises:
        ValueError: a block does not end, or has two marks of one kind.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        end = number + 1
        while lines[end].strip() != "```":
            end += 1
            if end == len(lines):
                raise ValueError(f"{page}:{number + 1}: the block does not end; close it by ```")
        text = "".join(f"{line[len(fence['indent']) :]}\n" for line in lines[number + 1 : end])
        yield Block(page, number + 1, fence["language"], text, _marks(lines, number))
        number = end + 1


def all_blocks() -> list[Block]:
    """Every block of every page."""
    return [block for page in pages() for block in blocks(page)]


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a page outside of its blocks, each with its number."""
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def _marks(lines: list[str], fence: int) -> dict[str, str]:
    found: dict[str, str] = {}
    number = fence - 1
    while number >= 0 and (mark := MARK.match(lines[number])) is not None:
        if mark["key"] in found:
            raise ValueError(f"line {number + 1}: a block has two marks {mark['key']!r}; leave one of them")
        found[mark["key"]] = mark["value"]
        number -= 1
    return found


def _typed(text: str) -> str:
    """The commands in what a terminal shows: behind "$ ", to the end of their quotes and of their lines."""
    commands: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            continue
        command = line[2:]
        while command.endswith("\\") or _is_open(command):
            command += "\n" + next(lines)
        commands.append(command)
    return "".join(f"{command}\n" for command in commands)


def _is_open(command: str) -> bool:
    """Whether a quotation has not ended yet."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False
