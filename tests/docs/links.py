"""Links of the documentation, and the anchors that its pages have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.blocks import ROOT, prose

LINK = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = ("http://", "https://", "mailto:")


def anchors(page: Path) -> set[str]:
    """The anchors of a page by its headings, as the web shows them; equal headings are counted."""
    found: set[str] = set()
    for _, line in prose(page):
        if (heading := re.match(r"#+ (.+)$", line)) is None:
            continue
        text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", heading[1])
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (unique := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(unique)
    return found


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Yields each link of a page to a file or an anchor of this repository, with its line."""
    for number, line in prose(page):
        for link in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if not link.startswith(ELSEWHERE):
                yield number, link


def broken_links(page: Path, root: Path = ROOT) -> list[str]:
    """The links of a page that lead nowhere, or out of the folder ``root``."""
    broken = []
    for number, link in links(page):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.is_relative_to(root) or not target.exists():
            broken.append(f"{page.relative_to(root)}:{number}: {link}: there is no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            broken.append(f"{page.relative_to(root)}:{number}: {link}: there is no such heading")
    return broken
