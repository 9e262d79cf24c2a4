"""What processes map of the slabs of the memory service."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


def slabs_of(ranks: Iterable[int]) -> tuple[int, int, set[str]]:
    """The bytes of slabs that the ranks of an engine map, their share of them (PSS), and the permissions."""
    size, share, permissions = 0, 0, set()
    for pid in ranks:
        is_slab = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                is_slab = "segue-slab" in line
                if is_slab:
                    permissions.add(line.split()[1])
            elif is_slab and line.startswith("Size:"):
                size += int(line.split()[1]) << 10
            elif is_slab and line.startswith("Pss:"):
                share += int(line.split()[1]) << 10
    return size, share, permissions
