"""The narrow port through which weight updates read and change the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from segue.messages.control import PauseMode, SchedulerOutput
from segue.scheduler.pause import PauseState

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler

HOLDER: Literal["weight_commit"] = "weight_commit"


class SchedulerPort:
    """The scheduler's side of :class:`segue.weight_update.control.state_machine.Port`, which explains it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def poisoned(self) -> str | None:
        return self._scheduler.poisoned

    @poisoned.setter
    def poisoned(self, why: str | None) -> None:
        self._scheduler.poisoned = why

    @property
    def weight_version(self) -> str:
        return self._scheduler.weight_version

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stands_still(self) -> bool:
        return self._scheduler.control.state is PauseState.PAUSED

    @property
    def receive_requires_pause(self) -> bool:
        return self._scheduler.limits.receive_requires_pause

    def hold(self, mode: PauseMode) -> int:
        self._scheduler.control.hold(HOLDER, mode)
        return len(self._scheduler.running)

    def release(self) -> None:
        self._scheduler.control.release(HOLDER)

    def commit(self, version: str | None, *, flush_cache: bool) -> None:
        scheduler = self._scheduler
        scheduler.set_weight_version(version or self._next_version())
        if flush_cache:
            scheduler.forget_cache()

    def rename(self, version: str) -> None:
        self._scheduler.weight_version = version  # cached KV stays valid

    def abort_all(self, message: str | None = None) -> SchedulerOutput:
        return self._scheduler.output(finished=self._scheduler.abort_all(message))

    def _next_version(self) -> str:
        version = self.weight_version
        is_number = version.isascii() and version.isdigit()
        return str(int(version) + 1) if is_number else str(self._scheduler.kv_epoch + 1)
