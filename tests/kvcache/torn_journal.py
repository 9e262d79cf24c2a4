"""A journal whose engine can be killed in the middle of its last writes."""

from __future__ import annotations

from random import Random

from segue.kvcache.journal import JournalChange, PageJournal


class TornJournal(PageJournal):
    """Remembers its writes since :meth:`mark`, so that the last of their bytes can be taken back."""

    def __init__(self, memory: memoryview, *, num_pages: int, page_size: int) -> None:
        self.writes: list[tuple[int, bytes]] = []  # (offset, what was there before)
        super().__init__(memory, num_pages=num_pages, page_size=page_size)

    def mark(self) -> None:
        """What was written so far stays."""
        self.writes.clear()

    @property
    def num_bytes(self) -> int:
        """The bytes that were written since :meth:`mark`."""
        return sum(len(old) for _, old in self.writes)

    def tear(self, num_bytes: int, random: Random) -> None:
        """Take the last bytes back; of the write that this cuts, any bytes may be missing."""
        for offset, old in reversed(self.writes):
            count = min(num_bytes, len(old))
            for place in random.sample(range(len(old)), count):
                self._memory[offset + place] = old[place]
            num_bytes -= count

    def _write(self, offset: int, data: bytes) -> None:
        self.writes.append((offset, bytes(self._memory[offset : offset + len(data)])))
        super()._write(offset, data)


def write_all(journal: PageJournal, *changes: JournalChange) -> None:
    """Write changes one after the other."""
    for change in changes:
        journal.write(change)
