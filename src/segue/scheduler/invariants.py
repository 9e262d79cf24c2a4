"""The scheduler's invariants, checked on its lists and trees; its counters are compared with them.

Every page and every slot has exactly one owner: it is free, cached (pages only), pending free (released, but
a step in flight may still use it), or a running request's. Every lock in the prefix cache has a holder: a
running request, or resources that are pending free. Tests and ``GetState`` with ``check`` call this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from segue.kvcache.prefix_cache import Node

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler

Owned = tuple[str, Sequence[int]]  # an owner's name, and the numbers of its pages or slots


def find_problems(scheduler: Scheduler) -> list[str]:
    """Returns one sentence per broken invariant; an empty list if all hold."""
    return [
        *_not_a_partition("page", _page_owners(scheduler), scheduler.limits.num_pages),
        *_not_a_partition("slot", _slot_owners(scheduler), scheduler.limits.max_running_requests),
        *_lock_problems(scheduler),
        *_request_problems(scheduler),
    ]


def _page_owners(s: Scheduler) -> Iterator[Owned]:
    """Yields every owner of pages with its pages. A further kind of owner is one more line here."""
    yield "the free list", s.resources.free_pages
    yield "the prefix cache", [node.page for node in s.resources.prefix.nodes()]
    yield from (("a step in flight", released.pages) for released in s.resources.pending_free)
    yield from ((f"request {r.rid}", r.own_pages) for r in s.running.values())
    yield from ((name, hold.own_pages) for name, hold in s.handover.holds())


def _slot_owners(s: Scheduler) -> Iterator[Owned]:
    """Yields every owner of request slots with its slots."""
    yield "the free list", s.resources.free_slots
    yield from (("a step in flight", [r.slot]) for r in s.resources.pending_free if r.slot is not None)
    yield from ((f"request {r.rid}", [r.slot]) for r in s.running.values())


def _lock_holders(s: Scheduler) -> Iterator[Node]:
    """Yields the deepest node of every lock in the prefix cache."""
    nodes = [r.node for r in s.running.values()] + [released.node for released in s.resources.pending_free]
    yield from (node for node in nodes if node is not None)
    yield from (hold.node for _, hold in s.handover.holds())


def _lock_problems(s: Scheduler) -> list[str]:
    """Returns what is wrong with the prefix cache: the locks of its nodes, and its counts of pages.

    A holder locks its node and all ancestors, so a node's locks are the holders at it and below it.
    """
    prefix = s.resources.prefix
    locks = Counter(id(node) for holder in _lock_holders(s) for node in holder.path())
    nodes = list(prefix.nodes())
    problems = [
        f"cached page {node.page} has {node.locks} locks, but {locks[id(node)]} holders"
        for node in nodes
        if node.locks != locks[id(node)]
    ]
    roots = Counter(id(holder.root) for holder in _lock_holders(s))
    if roots != Counter({id(root): root.locks for root in prefix.roots() if root.locks}):
        problems.append("a root of the prefix cache has another number of holders, or is not in the cache")
    if len(nodes) != prefix.num_pages:
        problems.append(f"the prefix cache counts {prefix.num_pages} pages, but has {len(nodes)}")
    if prefix.num_evictable != sum(node.locks == 0 for node in nodes):
        problems.append(
            f"the prefix cache counts {prefix.num_evictable} evictable pages, but has another number of them"
        )
    return problems


def _request_problems(s: Scheduler) -> list[str]:
    """Returns what is wrong with requests: the pages of running ones, and who waits and who runs."""
    problems: list[str] = []
    for r in s.running.values():
        if r.launched > r.capacity or r.capacity != len(r.pages) * s.limits.page_size:
            problems.append(f"request {r.rid} has {r.launched} computed positions in {len(r.pages)} pages")
        if r.node is None or s.resources.prefix.pages(r.node) != r.pages[: r.num_inserted]:
            problems.append(f"request {r.rid} reads shared pages that its lock does not cover")
    problems += [
        f"waiting request {r.rid} owns a slot, pages or a lock"
        for r in (*s.waiting, *s.handover.awaiting.values())
        if r.pages or r.node is not None or r.slot != -1
    ]
    if {lease.rid for lease in s.handover.machine.leases.active.values()} != set(s.handover.awaiting):
        problems.append("a request awaits its KV without a lease, or a lease has no request that awaits it")
    if set(s.requests) != {r.rid for r in s.waiting} | set(s.running) | set(s.handover.awaiting):
        problems.append("a live request neither waits nor runs, or an ended request waits or runs")
    return problems


def _not_a_partition(noun: str, owners: Iterable[Owned], total: int) -> list[str]:
    """Returns the problems of pages or slots, whichever ``noun`` names, that have two owners or none.

    ``owners`` gives each owner's name and numbers; every number from 0 to ``total`` - 1 must occur once.
    """
    owner: dict[int, str] = {}
    problems: list[str] = []
    for name, items in owners:
        for item in items:
            if item in owner:
                problems.append(f"{noun} {item} belongs to {owner[item]} and to {name}")
            owner[item] = name
    lost = [item for item in range(total) if item not in owner]
    return problems + ([f"{noun}s {lost} have no owner"] if lost else [])
