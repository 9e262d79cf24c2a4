"""What a router learns of its workers: who they are, their reports, epochs, drains and groups.

It writes the views that `segue.router.registry` chooses by. Where several processes share the clients, only
the coordinator has one, and the others get what it knows from there.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from segue.api.fleet import RoleChanged
from segue.errors import StaleEpochError
from segue.laps.groups import PrefillGroups, Pressure, RebalanceRules, follow, rebalance, split
from segue.logs import logger
from segue.messages.fleet import Registration, Role, WorkerRecord, WorkerReport
from segue.router.entry import NOT_REACHED, WorkerEntry
from segue.router.fleet import WorkerView
from segue.router.records import as_reached, wrong_role
from segue.router.registry import Registry


class Membership:
    """What is known of the workers in a registry."""

    def __init__(self, registry: Registry, rebalance_rules: RebalanceRules | None) -> None:
        """Start without workers; ``rebalance_rules``: of the groups for LAPS; None: there are none."""
        self.registry = registry
        self.router_id = secrets.token_hex(8)  # by which the router knows itself at a worker's URL
        self.rebalance_rules = rebalance_rules
        off = "--enable-laps-alloc is not given" if rebalance_rules is None else ""
        self.groups = PrefillGroups(off=off) if rebalance_rules is None else split([], rebalance_rules, 0.0)
        self.pressure = Pressure()
        self.on_joined: Callable[[WorkerEntry], None] = lambda entry: None  # an engine has said who it is
        self.on_lost: Callable[[WorkerEntry], None] = lambda entry: None  # a worker's reports ended
        self.on_change: Callable[[], None] = lambda: None  # more has changed than a worker's load
        self._told_off = self.groups.off  # why there are no groups, as it was logged last
        self._epochs: dict[str, int] = {}  # the highest one that each cohort has ever had

    # --- who is there ---

    def add(self, url: str, role: Role | None = None) -> WorkerEntry:
        """Register a worker, whose id must be new; ``role``: the only one that it may have; None: any."""
        entry = self.registry.add(url, role)
        entry.on_change = self._changed
        self._changed()
        return entry

    def _changed(self) -> None:
        self.registry.changed()
        self.on_change()

    def remove(self, entry: WorkerEntry) -> None:
        """Forget a worker at once."""
        self.registry.remove(entry)
        self.pressure.forget(entry.id)
        self._regroup()
        self._changed()

    def role_changed(self, entry: WorkerEntry, change: RoleChanged) -> None:
        """Take a worker's answer to a change of its role, which comes before its new record."""
        if entry.role is not None:
            entry.role = change.role  # the one that it had to have was the old one
        if entry.view is not None:
            record = structs.replace(entry.view.record, role=change.role, kv_address=change.kv_address or "")
            entry.view = replace(entry.view, record=as_reached(record, entry.id, entry.url))
        self._regroup()
        self._changed()

    def check_epoch(self, registration: Registration) -> None:
        """Note the epoch of a worker. The others of its cohort are replaced at once if theirs are lower.

        A worker says where it is once it serves. So its cohort has an active engine from then on, also while
        this router has not reached it yet, as after a start.

        Raises:
            StaleEpochError: the cohort has had a higher epoch.
        """
        cohort, epoch = registration.cohort, registration.epoch
        if cohort and epoch > self._epochs.get(cohort, -1):
            self.registry.served[cohort] = time.monotonic()
        newest = self._note_epoch(cohort, epoch)
        if epoch < newest:
            raise StaleEpochError(
                f"{registration.url}: epoch {epoch} of cohort {cohort!r} was replaced by epoch {newest}; end "
                "this engine, or start it anew with an epoch of its own"
            )

    def _note_epoch(self, cohort: str, epoch: int) -> int:
        """Returns the highest epoch of a cohort, once ``epoch`` is known as well.

        Nothing that a replaced worker still sends may reach a client, so its connections are closed.
        """
        newest = max(epoch, self._epochs.get(cohort, epoch))
        if not cohort or newest == self._epochs.get(cohort):
            return newest
        self._epochs[cohort] = newest
        for entry in self.registry:
            if entry.view is not None and entry.view.record.cohort == cohort:
                entry.view = replace(entry.view, newest_epoch=newest)
                if entry.is_replaced:
                    text = f"epoch {newest} has replaced the worker's epoch {entry.view.record.epoch}"
                    logger.warning("worker %s: %s", entry.id, text)
                    entry.cut("cut", text)
        self._regroup()
        self._changed()
        return newest

    # --- what the workers tell ---

    def introduce(self, entry: WorkerEntry, record: WorkerRecord, *, is_foreign: bool = False) -> None:
        """Take a worker's record. Another process at the same URL begins with a new circuit breaker.

        ``is_foreign``: it is no engine of Segue, and the record is made up.
        """
        may_change = entry.num_changes > 0
        if not may_change and (problem := wrong_role(record, entry.role)) is not None:
            entry.view = None
            self.lose(entry, problem)
            return
        record = as_reached(record, entry.id, entry.url)
        old = entry.view
        is_same = old is not None and old.record.incarnation == record.incarnation
        newest_epoch = self._note_epoch(record.cohort, record.epoch)
        view = WorkerView(
            record=record,
            newest_epoch=newest_epoch,
            is_foreign=is_foreign,
            has_all_routes=not is_foreign,
            is_drained=entry.gets_none,
            group=self.groups.of(entry.id),
        )
        entry.view = replace(view, breaker=old.breaker) if old is not None and is_same else view
        entry.problem = ""
        logger.info("worker %s: connected%s", entry.id, " again" if is_same else "")
        self._regroup()
        self._changed()
        if not is_same and not is_foreign:
            self.on_joined(entry)

    def same_engine(self, entry: WorkerEntry, record: WorkerRecord) -> WorkerEntry | None:
        """Returns another worker whose reports come from the process of ``record``; None: there is none."""
        for other in self.registry:
            if other is entry or other.view is None or other.problem or other.is_leaving:
                continue
            if other.view.record.incarnation == record.incarnation:
                return other
        return None

    def report(self, entry: WorkerEntry, report: WorkerReport, now: float) -> None:
        """Take a worker's report."""
        if entry.view is None:
            return
        before, entry.view = entry.view.report, entry.view.reported(report, now)
        if entry.view.is_active and entry.view.record.cohort:
            self.registry.served[entry.view.record.cohort] = now
        if before is None or _condition(before) != _condition(report):
            self._changed()
        self.registry.holds.reported(entry.id, now)
        self.registry.index.observe(entry.id, entry.view.cache)
        if self.rebalance_rules is not None:
            self.pressure.note(entry.id, entry.view.queued_s(now), now)
            self._set_groups(rebalance(self.groups, self.pressure, self.rebalance_rules, now))

    def note_routes(self, entry: WorkerEntry, *, has_all: bool) -> None:
        """Note whether a worker that is no engine of Segue says that it has all routes of one."""
        if entry.view is not None and entry.view.has_all_routes != has_all:
            entry.view = replace(entry.view, has_all_routes=has_all)
            self._changed()

    def lose(self, entry: WorkerEntry, problem: str) -> None:
        """Note that there is no connection for a worker's reports, and why."""
        if entry.problem != problem:
            logger.warning("worker %s: %s", entry.id, problem)
        entry.problem = problem
        if entry.view is not None:
            entry.view = replace(entry.view, connected=False)
        self._regroup()
        self._changed()
        self.on_lost(entry)

    def stop_grouping(self) -> None:
        """Leave the groups as they are, because the router ends."""
        self.rebalance_rules = None

    def _regroup(self) -> None:
        """Let the groups follow the workers that are connected and may compute prompts."""
        if self.rebalance_rules is None:
            return
        now = time.monotonic()
        present = [
            entry.id
            for entry in self.registry
            if entry.view is not None and entry.view.connected and entry.prefills and not entry.is_replaced
        ]
        self._set_groups(follow(self.groups, present, self.pressure, self.rebalance_rules, now))
        if any(entry.problem == NOT_REACHED for entry in self.registry):
            return  # it may be the second worker that the groups need
        if self.groups.off != self._told_off:
            self._told_off = self.groups.off
            if self.groups.off:
                logger.warning("--enable-laps-alloc is off: %s", self.groups.off)
            else:
                logger.info("--enable-laps-alloc is on: there are %d prefill workers", len(present))

    def _set_groups(self, groups: PrefillGroups) -> None:
        """Take new groups, and write each worker's one into its view."""
        before, self.groups = self.groups, groups
        if (groups.short, groups.long) == (before.short, before.long):
            return
        for entry in self.registry:
            if entry.view is not None:
                entry.view = replace(entry.view, group=groups.of(entry.id))
        self._changed()
        if groups.num_moves != before.num_moves and (move := groups.last_move) is not None:
            logger.info("worker %s moves to the group of %s prompts: %s", move.worker, move.to, move.reason)


def _condition(report: WorkerReport) -> tuple[object, ...]:
    """Returns what a report says besides the load."""
    return report.epoch, report.state, report.paused, report.trouble, report.identity, report.num_flushes
