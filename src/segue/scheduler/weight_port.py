"""What a weight update sees of the scheduler, and the name of the KV that is computed now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segue.messages.control import PauseMode, SchedulerOutput
from segue.messages.kv import KVIdentity
from segue.messages.requests import FIRST_WEIGHT_VERSION, Finished
from segue.scheduler.pause import PauseState

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler


class WeightPort:
    """The version of the served weights; it is the `Port` of `weight_update.control.state_machine`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.receive_requires_pause = scheduler.config.weight_recv_requires_pause
        self.shares_weights = scheduler.config.shares_weights
        self.weight_version = FIRST_WEIGHT_VERSION
        self.is_updating = False  # whether an update of the weights is open, which may end in a commit
        self.kv_epoch = 0  # grows with every commit of weights, even if the version's name stays the same
        self.poisoned: str | None = None  # why the weights are unusable and requests rejected; None: usable
        self.missing: str | None = (
            None  # what is missing of weights that were released or reset; None: nothing
        )
        self.unavailable: str | None = None  # why their memory may not be read or written now; None: it may
        self._commits: dict[str, int] = {}  # version -> how often it was committed

    @property
    def kv_identity(self) -> KVIdentity:
        """The name of the KV that is computed now."""
        return KVIdentity(self.weight_version, self._commits.get(self.weight_version, 0))

    def has_served(self, identity: KVIdentity) -> bool:
        """Whether KV of this name is or was computed here; a worker's first weights have 0 commits."""
        return identity.commits <= self._commits.get(identity.version, 0)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stands_still(self) -> bool:
        return self._scheduler.control.state is PauseState.PAUSED

    def hold(self, mode: PauseMode) -> int:
        self._scheduler.control.hold("weight_commit", mode)
        return len(self._scheduler.running)

    def release(self) -> None:
        self._scheduler.control.release("weight_commit")

    def hold_until_whole(self) -> None:
        """As a release of the weights' memory does, whose hold ends once nothing is missing (`Standby`)."""
        self._scheduler.control.hold("memory_release", "retract")

    def version_after(self, version: str | None) -> str:
        """Returns the name of the next weights, if their sender calls them ``version``.

        Without one it is the next number, or the number of commits if the present name is no number.
        """
        old = self.weight_version
        is_number = old.isascii() and old.isdigit()
        return version or str(int(old) + 1 if is_number else self.kv_epoch + 1)

    def commit(self, version: str | None, *, flush_cache: bool) -> None:
        """Serve new weights. Requests keep their KV, but it is not shared any more."""
        assert not self._scheduler.in_flight, "weights change between steps"
        before, self.weight_version = self.kv_identity, self.version_after(version)
        self.kv_epoch += 1
        self._commits[self.weight_version] = self._commits.get(self.weight_version, 0) + 1
        self._scheduler.handover.committed(before, self.kv_identity)
        if (publisher := self._scheduler.resources.publisher) is not None:
            publisher.forget_all()
        if flush_cache:
            self._scheduler.forget_cache()

    def abort_all(self, message: str | None = None) -> list[Finished]:
        return self._scheduler.abort_all(message)

    def output(self, *, finished: list[Finished]) -> SchedulerOutput:
        return self._scheduler.output(finished=finished)
