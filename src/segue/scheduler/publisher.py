"""Which pages of the prefix cache an engine that takes over may use, as changes of the journal.

A page enters the prefix cache when the step that computes it is launched. It is *published* once that step's
result was applied: only then its KV is there, on every rank, because no rank can end a step without the sums
of all ranks. It is forgotten before it becomes free, and when requests cannot match it any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from segue.kvcache.journal import ROOT, ForgottenCache, ForgottenPages, JournalChange, PageRecord
from segue.kvcache.prefix_cache import Node, PrefixCache


class PagePublisher:
    """Turns what happens to the prefix cache into changes of the journal; :meth:`take` returns them.

    What :meth:`take` has returned must be written before the next step is launched: that step may write to
    pages that were forgotten.
    """

    def __init__(self, prefix: PrefixCache) -> None:
        self._prefix = prefix
        self._computing: deque[tuple[int, Node]] = deque()  # (step, cached page), in the order of insertion
        self._published: dict[int, int] = {}  # page -> seq of its record
        self._changes: list[JournalChange] = []
        self._next_seq = 1

    def adopted(self, records: Iterable[PageRecord], next_seq: int) -> None:
        """Note pages that are in the journal already; further records are numbered from ``next_seq``."""
        self._published.update((record.page, record.seq) for record in records)
        self._next_seq = next_seq

    def inserted(self, node: Node, step: int) -> None:
        """Note a page that is new in the cache; the last step that was planned is ``step``."""
        self._computing.append((step, node))

    def applied(self, step: int) -> None:
        """Publish the pages whose KV is there now that the result of ``step`` was applied.

        What was dropped or hidden meanwhile is left out, and so is all that comes behind it.
        """
        while self._computing and self._computing[0][0] <= step:
            node = self._computing.popleft()[1]
            parent = node.parent
            if parent is None or not self._prefix.is_shared(node):
                continue
            parent_seq = 0 if parent.page == ROOT else self._published.get(parent.page)
            if parent_seq is not None:
                self._publish(node, parent.page, parent_seq)

    def forget(self, pages: Sequence[int]) -> None:
        """Note pages that are about to become free, or that requests cannot match any more."""
        gone = tuple(page for page in pages if self._published.pop(page, None) is not None)
        if gone:
            self._changes.append(ForgottenPages(gone))

    def forget_all(self) -> None:
        """Note that nothing that is in the cache now may be used by another engine."""
        self._computing.clear()
        self._published.clear()
        self._changes.append(ForgottenCache())

    def take(self) -> list[JournalChange]:
        """Return the changes since the last call, in their order."""
        changes, self._changes = self._changes, []
        return changes

    def _publish(self, node: Node, parent_page: int, parent_seq: int) -> None:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._published[node.page] = seq
        self._changes.append(PageRecord(node.page, seq, parent_page, parent_seq, node.key))
