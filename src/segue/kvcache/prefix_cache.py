"""The prefix cache: KV pages shared between requests whose tokens begin alike.

A tree with one node a full page, keyed by the page's token ids. Each epoch of the weights has a root of its
own, so KV made by old weights is never matched under new ones. A holder locks a path from the root to its
deepest node; nodes that nobody locks are evicted leaf by leaf, the least recently used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

Key = tuple[int, ...]


class Node:
    """One cached page, or (``page == -1``) the root of an epoch of the weights."""

    __slots__ = ("children", "epoch", "key", "last_used", "locks", "page", "parent")

    def __init__(self, parent: Node | None, key: Key, page: int, epoch: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.epoch = epoch
        self.children: dict[Key, Node] = {}
        self.locks = 0  # holders whose path runs through this node
        self.last_used = 0

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixCache:
    """Owns the pages inserted into it until they are evicted."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self._num_locked = 0
        self._num_hidden = 0  # paths, ever
        self._roots: dict[int, Node] = {}
        self._hidden = Node(None, (), -1, -1)  # root of what is matched no more
        self._clock = 0
        self._leaves: list[
            tuple[int, int, Node]
        ] = []  # heap of (last_used, page, node); stale entries are skipped

    @property
    def num_evictable(self) -> int:
        """Pages that :meth:`evict` could free now."""
        return self.num_pages - self._num_locked

    def root(self, epoch: int) -> Node:
        """The root of an epoch of the weights."""
        node = self._roots.get(epoch)
        if node is None:
            self._roots = {e: root for e, root in self._roots.items() if root.children}
            node = self._roots[epoch] = Node(None, (), -1, epoch)
        return node

    def match(self, epoch: int, tokens: Sequence[int], max_tokens: int) -> Node:
        """The deepest node whose pages hold a prefix of ``tokens[:max_tokens]``; the root if none does."""
        node, size = self.root(epoch), self.page_size
        for start in range(0, max_tokens - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
        return node

    def pages(self, node: Node) -> list[int]:
        """Page ids from the root to ``node``, in token order."""
        return [n.page for n in node.path()][::-1]

    def lock(self, node: Node) -> None:
        """Protect the path to ``node`` from eviction."""
        self._clock += 1
        for n in node.path():
            if n.locks == 0:
                self._num_locked += 1
            n.locks += 1
            n.last_used = self._clock

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`."""
        self._clock += 1
        for n in node.path():
            assert n.locks > 0, f"page {n.page} was unlocked twice"
            n.locks -= 1
            n.last_used = self._clock
            if n.locks == 0:
                self._num_locked -= 1
                if not n.children:
                    self._push_leaf(n)

    def extend(self, node: Node, key: Key, page: int) -> tuple[Node, bool]:
        """Move a holder's lock from ``node`` one page deeper.

        Returns the child and whether ``page`` now belongs to the cache; it does not if the same tokens were
        cached by another request first, whose page stays.
        """
        child = node.children.get(key)
        inserted = child is None
        if child is None:
            child = node.children[key] = Node(node, key, page, node.epoch)
            self.num_pages += 1
        if child.locks == 0:
            self._num_locked += 1
        child.locks += 1
        return child, inserted

    def evict(self, count: int) -> list[int]:
        """Free ``count`` pages, least recently used first; the caller has checked ``num_evictable``."""
        assert count <= self.num_evictable, f"asked to evict {count} pages of {self.num_evictable}"
        pages: list[int] = []
        while len(pages) < count:
            last_used, _, node = heapq.heappop(self._leaves)
            if node.locks or node.children or node.last_used != last_used or node.parent is None:
                continue
            pages.append(node.page)
            self._remove(node)
        return pages

    def discard(self, node: Node) -> list[int]:
        """Free the pages from ``node`` towards the root that are not locked and that no other chain needs."""
        pages: list[int] = []
        while node.parent is not None and not node.locks and not node.children:
            parent = node.parent
            pages.append(node.page)
            del parent.children[node.key]
            node.parent = None
            node = parent
        self.num_pages -= len(pages)  # where it stopped there is no new leaf
        return pages

    def hide(self, node: Node) -> None:
        """Let no request match the path to ``node`` any more, nor what lies behind its first page.

        Holders keep what they have locked; the rest is evicted in its turn.
        """
        for top in node.path():
            if top.parent is not None and top.parent.parent is None and top.parent is not self._hidden:
                del top.parent.children[top.key]
                self._num_hidden += 1
                top.parent, top.key = self._hidden, (self._num_hidden,)
                self._hidden.children[top.key] = top

    def nodes(self) -> Iterator[Node]:
        """Every node that holds a page, for proofs."""
        stack = [*self._roots.values(), self._hidden]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self.num_pages -= 1
        if parent.parent is not None and not parent.children and parent.locks == 0:
            self._push_leaf(parent)

    def _push_leaf(self, node: Node) -> None:
        heapq.heappush(self._leaves, (node.last_used, node.page, node))
        if len(self._leaves) > 2 * self.num_pages + 64:
            live = {id(n): (n.last_used, n.page, n) for n in self.nodes() if not n.locks and not n.children}
            self._leaves = list(live.values())
            heapq.heapify(self._leaves)
