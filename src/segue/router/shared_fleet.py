"""Copies of the coordinator's fleet: what it tells the serving processes, and how they take it.

The coordinator learns of the workers and owns their groups. A serving process chooses among copies of its
views. Circuit breakers are a process's own: each one counts the failures of its own requests.
"""

from __future__ import annotations

from dataclasses import replace

from segue.router.entry import WorkerEntry
from segue.router.fleet import WorkerView
from segue.router.process_messages import FleetState, SharedWorker
from segue.router.registry import Registry


def shared(number: int, entry: WorkerEntry) -> SharedWorker:
    """Returns what the serving processes are told of a worker."""
    view = entry.view
    of_view = {} if view is None else {name: getattr(view, name) for name in _OF_VIEW}
    return SharedWorker(
        number=number,
        url=entry.url,
        problem=entry.problem,
        is_leaving=entry.is_leaving,
        last_cut=entry.last_cut,
        **{"record": None, **of_view},
    )


_OF_VIEW = (
    *("record", "newest_epoch", "connected", "is_foreign", "has_all_routes"),
    *("is_drained", "report", "reported_at", "group"),
)


class SharedFleet:
    """The coordinator's side: which states its processes have been told."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._numbers: dict[WorkerEntry, int] = {}
        self._told: dict[int, SharedWorker] = {}
        self._num_registered = 0
        self.version = 0  # of the last state

    def next_state(self) -> FleetState:
        """Returns the workers as they are now, for processes that have taken every state before."""
        self._numbers = {entry: self._number_of(entry) for entry in self._registry}
        now = {number: shared(number, entry) for entry, number in self._numbers.items()}
        changed = [worker for number, worker in now.items() if self._told.get(number) != worker]
        self._told = now
        self.version += 1
        return FleetState(
            version=self.version, present=list(now), changed=changed, served=dict(self._registry.served)
        )

    def last_state(self) -> FleetState:
        """Returns the last state as a whole, for a process that has taken none."""
        return FleetState(
            version=self.version,
            present=list(self._told),
            changed=list(self._told.values()),
            served=dict(self._registry.served),
        )

    def _number_of(self, entry: WorkerEntry) -> int:
        if entry not in self._numbers:
            self._num_registered += 1
            return self._num_registered
        return self._numbers[entry]


class FleetCopy:
    """A serving process's side: it keeps the registry as the coordinator's states say."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._entries: dict[int, WorkerEntry] = {}  # by number
        self.version = 0  # of the last state

    def take(self, state: FleetState) -> None:
        """Take a state."""
        for number in self._entries.keys() - set(state.present):
            self._registry.remove(self._entries.pop(number))
        for worker in state.changed:
            entry = self._entries.get(worker.number)
            if entry is None:
                entry = self._entries[worker.number] = self._registry.add(worker.url)
            self._update(entry, worker)
        self._registry.served = dict(state.served)
        self._registry.changed()
        self.version = state.version

    def _update(self, entry: WorkerEntry, worker: SharedWorker) -> None:
        entry.problem, entry.is_leaving = worker.problem, worker.is_leaving
        entry.view = self._view_of(entry, worker)
        if entry.last_cut != worker.last_cut:
            _, end, text = entry.last_cut = worker.last_cut
            entry.upstream.abort_all(end, text)

    def _view_of(self, entry: WorkerEntry, worker: SharedWorker) -> WorkerView | None:
        """Returns a worker's view. Another process at the same URL begins with a new circuit breaker."""
        if worker.record is None:
            return None
        view = WorkerView(**{name: getattr(worker, name) for name in _OF_VIEW})
        if entry.view is not None and entry.view.record.incarnation == worker.record.incarnation:
            view = replace(view, breaker=entry.view.breaker)
        if worker.report is None:
            return view
        view = view.reported(worker.report, worker.reported_at)
        self._registry.index.observe(entry.id, view.cache)
        if not worker.is_foreign:  # whose report is made up, and knows of no request
            self._registry.holds.reported(entry.id, worker.reported_at)
        return view
