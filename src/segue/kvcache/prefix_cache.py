"""The prefix cache: KV pages shared between requests that have a common prefix of tokens.

The cache is a tree with one node per full page, keyed by the token ids of the page. Each epoch of the weights
has its own root, so KV of old weights never matches under new ones. So has each salt of an epoch: clients
that do not know a salt can neither use nor measure what was cached under it. A holder locks the path from the
root to its deepest node; nodes without a lock are evicted leaf by leaf, the least recently used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from segue.kvcache.journal import ROOT, PageRecord

Key = tuple[int, ...]


class Node:
    """One cached page, or (``page == ROOT``) the root of a salt in an epoch of the weights."""

    __slots__ = ("children", "key", "last_used", "locks", "page", "parent")

    def __init__(self, parent: Node | None, key: Key, page: int) -> None:
        self.parent = parent  # None: a root, or a node that has been removed
        self.key = key
        self.page = page
        self.children: dict[Key, Node] = {}
        self.locks = 0  # the number of holders whose path contains this node
        self.last_used = 0

    def path(self) -> Iterator[Node]:
        """Yield this node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def root(self) -> Node:
        """The root that its path begins at; of a root, itself."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node


class PrefixCache:
    """Owns the pages inserted into it until they are evicted."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self._num_locked = 0
        self._num_hidden = 0  # paths hidden so far
        self._roots: dict[tuple[int, str], Node] = {}  # by epoch and salt
        self._most_roots = 64  # when there are as many, those that nobody needs are dropped
        # The root of nodes that requests can no longer match.
        self._hidden = Node(parent=None, key=(), page=ROOT)
        self._clock = 0
        # A heap of (last_used, page, node). An entry is stale, and skipped, once its node has been used
        # again, locked, extended or removed.
        self._leaves: list[tuple[int, int, Node]] = []

    @property
    def num_evictable(self) -> int:
        """The number of pages that :meth:`evict` could free now."""
        return self.num_pages - self._num_locked

    def root(self, epoch: int, salt: str = "") -> Node:
        """Return the root of an epoch of the weights and a salt; "": the root of those without a salt."""
        node = self._roots.get((epoch, salt))
        if node is None:
            if len(self._roots) >= self._most_roots:
                self._roots = {key: root for key, root in self._roots.items() if root.children or root.locks}
                self._most_roots = 2 * len(self._roots) + 64
            node = self._roots[epoch, salt] = Node(parent=None, key=(), page=ROOT)
        return node

    def is_shared(self, node: Node) -> bool:
        """Whether requests can match a node without a parent, or one whose parent they can match."""
        return node.parent is not None and node.parent is not self._hidden

    def adopt(self, epoch: int, records: Iterable[PageRecord]) -> None:
        """Insert pages whose KV another engine has computed; each comes behind its parent.

        They are evicted in the order of ``records``, as if they had been used in it.
        """
        nodes = {ROOT: self.root(epoch)}
        for record in records:
            parent = nodes[record.parent_page]
            node = nodes[record.page] = parent.children[record.tokens] = Node(
                parent, record.tokens, record.page
            )
            self._clock += 1
            node.last_used = self._clock
            self.num_pages += 1
        for node in nodes.values():
            if node.parent is not None and not node.children:
                self._push_leaf(node)

    def match(self, epoch: int, tokens: Sequence[int], max_tokens: int, salt: str = "") -> Node:
        """Return the deepest node whose path holds a prefix of ``tokens[:max_tokens]``, or the root."""
        node, size = self.root(epoch, salt), self.page_size
        for start in range(0, max_tokens - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
        return node

    def pages(self, node: Node) -> list[int]:
        """Return the page ids from the root to ``node``, in token order."""
        return [n.page for n in node.path()][::-1]

    def lock(self, node: Node) -> None:
        """Protect the path to ``node`` from eviction, and keep its root."""
        self._clock += 1
        node.root.locks += 1
        for n in node.path():
            if n.locks == 0:
                self._num_locked += 1
            n.locks += 1
            n.last_used = self._clock

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`."""
        self._clock += 1
        assert node.root.locks > 0, "a path was unlocked twice"
        node.root.locks -= 1
        for n in node.path():
            assert n.locks > 0, f"page {n.page} was unlocked twice"
            n.locks -= 1
            n.last_used = self._clock
            if n.locks == 0:
                self._num_locked -= 1
                if not n.children:
                    self._push_leaf(n)

    def extend(self, node: Node, key: Key, page: int) -> Node:
        """Extend a holder's lock from ``node`` to the child for the page with the tokens ``key``.

        Returns the child. ``page`` now belongs to the cache, unless the child has another page: then another
        request has cached the same tokens before, and the page of that request stays.
        """
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key, page)
            self.num_pages += 1
        if child.locks == 0:
            self._num_locked += 1
        child.locks += 1
        return child

    def evict(self, count: int) -> list[int]:
        """Evict ``count`` pages, the least recently used first; the caller has checked ``num_evictable``.

        Returns the page ids, which the caller may reuse.
        """
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
        """Remove ``node`` and its ancestors, up to the first one that has a lock or another child.

        Unlike :meth:`evict`, this frees the pages of one sequence, however recently they were used.
        Returns the page ids, which the caller may reuse.
        """
        pages: list[int] = []
        while node.parent is not None and not node.locks and not node.children:
            parent = node.parent
            pages.append(node.page)
            # Unlike `_remove`, this puts no parent on the heap of leaves: the next turn removes that one.
            del parent.children[node.key]
            node.parent = None
            node = parent
        self.num_pages -= len(pages)  # the loop stops at a node that does not become an evictable leaf
        return pages

    def hide(self, node: Node) -> list[int]:
        """Hide the first page on the path to ``node``, and all its descendants, from :meth:`match`.

        The first page moves to the hidden root under a key that no page has, so no request finds it again.
        Holders keep the nodes that they have locked; nodes without a lock are evicted as usual.
        Returns the pages that are hidden now, and were not before.
        """
        for top in node.path():
            if top.parent is not None and top.parent.parent is None and top.parent is not self._hidden:
                del top.parent.children[top.key]
                top.parent.locks -= top.locks  # its holders unlock the hidden root
                self._hidden.locks += top.locks
                self._num_hidden += 1
                top.parent, top.key = self._hidden, (self._num_hidden,)
                self._hidden.children[top.key] = top
                return [each.page for each in self._below(top)]
        return []

    def nodes(self) -> Iterator[Node]:
        """Yield every node that holds a page, for checks of invariants."""
        return self._below(*self.roots())

    def roots(self) -> Iterator[Node]:
        """Yield every root, for checks of invariants."""
        yield from self._roots.values()
        yield self._hidden

    @staticmethod
    def _below(*tops: Node) -> Iterator[Node]:
        """Yield some nodes and all their descendants that hold a page."""
        stack = [*tops]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _remove(self, node: Node) -> None:
        """Take a leaf without a lock out of the tree; its parent may now be such a leaf itself."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self.num_pages -= 1
        if parent.parent is not None and not parent.children and parent.locks == 0:
            self._push_leaf(parent)

    def _push_leaf(self, node: Node) -> None:
        """Note a leaf without a lock for eviction. The heap is built anew once most entries are stale."""
        heapq.heappush(self._leaves, (node.last_used, node.page, node))
        if len(self._leaves) > 2 * self.num_pages + 64:
            leaves = {id(n): (n.last_used, n.page, n) for n in self.nodes() if not n.locks and not n.children}
            self._leaves = list(leaves.values())
            heapq.heapify(self._leaves)
