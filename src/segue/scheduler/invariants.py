"""The scheduler's invariants, checked without its counters.

Every page and every slot has exactly one owner: it is free, cached (pages only), pending free, or a running
request's. Every lock in the prefix cache has a holder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler


def find_problems(scheduler: Scheduler) -> list[str]:
    """Returns one sentence per broken invariant; an empty list if all hold."""
    return [
        *_page_problems(scheduler),
        *_slot_problems(scheduler),
        *_lock_problems(scheduler),
        *_request_problems(scheduler),
    ]


def _page_problems(s: Scheduler) -> list[str]:
    holders = {
        "free": s.resources.allocator.free_pages(),
        "cached": [node.page for node in s.resources.prefix.nodes()],
        "pending_free": [page for released in s.resources.pending_free for page in released.pages],
    }
    holders |= {f"request {r.rid}": r.own_pages for r in s.running.values()}
    return _not_a_partition("page", holders, s.limits.num_pages)


def _slot_problems(s: Scheduler) -> list[str]:
    slots = {
        "free": list(s.resources.free_slots),
        "pending_free": [r.slot for r in s.resources.pending_free if r.slot is not None],
    }
    slots |= {f"request {r.rid}": [r.slot] for r in s.running.values()}
    return _not_a_partition("slot", slots, s.limits.max_running_requests)


def _lock_problems(s: Scheduler) -> list[str]:
    prefix, locks = s.resources.prefix, dict[int, int]()
    for holder in [r.node for r in s.running.values()] + [
        released.node for released in s.resources.pending_free
    ]:
        for node in holder.path() if holder is not None else ():
            locks[id(node)] = locks.get(id(node), 0) + 1
    problems = [
        f"cached page {node.page} has {node.locks} locks, but {locks.get(id(node), 0)} holders"
        for node in prefix.nodes()
        if node.locks != locks.get(id(node), 0)
    ]
    nodes = list(prefix.nodes())
    if len(nodes) != prefix.num_pages:
        problems.append(f"the prefix cache counts {prefix.num_pages} pages, but has {len(nodes)}")
    if prefix.num_evictable != sum(node.locks == 0 for node in nodes):
        problems.append(
            f"the prefix cache counts {prefix.num_evictable} evictable pages, but has another number of them"
        )
    return problems


def _request_problems(s: Scheduler) -> list[str]:
    problems: list[str] = []
    for r in s.running.values():
        if r.launched > r.capacity or r.capacity != len(r.pages) * s.limits.page_size:
            problems.append(f"request {r.rid} has {r.launched} computed positions in {len(r.pages)} pages")
        if r.node is None or s.resources.prefix.pages(r.node) != r.pages[: r.num_inserted]:
            problems.append(f"request {r.rid} reads shared pages that its lock does not cover")
    problems += [
        f"waiting request {r.rid} owns a slot, pages or a lock"
        for r in s.waiting
        if r.pages or r.node is not None or r.slot != -1
    ]
    if set(s.requests) != {r.rid for r in s.waiting} | set(s.running):
        problems.append("a live request neither waits nor runs, or an ended request waits or runs")
    return problems


def _not_a_partition(noun: str, holders: dict[str, list[int]], total: int) -> list[str]:
    owner: dict[int, str] = {}
    problems: list[str] = []
    for name, items in holders.items():
        for item in items:
            if item in owner:
                problems.append(f"{noun} {item} belongs to {owner[item]} and to {name}")
            owner[item] = name
    lost = [item for item in range(total) if item not in owner]
    return problems + ([f"{noun}s {lost} have no owner"] if lost else [])
