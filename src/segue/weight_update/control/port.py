"""What a weight update may read and change of the scheduler; `segue.scheduler.weight_port` is that part."""

from __future__ import annotations

from typing import Protocol

from segue.messages.control import PauseMode, SchedulerMessage
from segue.messages.requests import Finished


class Port(Protocol):
    """The part of the scheduler that a weight update may read and change."""

    missing: str | None  # what is missing of weights that were released or reset; None: nothing
    unavailable: str | None  # why the weights' memory may not be read or written now; None: it may
    poisoned: str | None  # why the weights are poisoned and every new request is refused; None: they are not
    weight_version: str  # the name of the served weights
    is_updating: bool  # whether a session is open
    receive_requires_pause: bool  # whether weights may be received only while generation is paused
    shares_weights: bool  # whether the memory service has the weights, and engines serve generations of them

    @property
    def has_work(self) -> bool:
        """Whether steps are being planned: a request runs or waits, and no pause stops it."""

    @property
    def stands_still(self) -> bool:
        """Whether a hold has taken effect: no step is in flight, and none is planned."""

    def hold(self, mode: PauseMode) -> int:
        """Stop the planning of steps until :meth:`release`; returns the number of running requests."""

    def release(self) -> None:
        """End the hold."""

    def hold_until_whole(self) -> None:
        """Stop the planning of steps until nothing is :attr:`missing`; requests give their KV back."""

    def version_after(self, version: str | None) -> str:
        """Returns what :meth:`commit` will call the weights."""

    def commit(self, version: str | None, *, flush_cache: bool) -> None:
        """Serve new weights from the next step on, as this version; None takes the next number."""

    def abort_all(self, message: str | None = None) -> list[Finished]:
        """End every request."""

    def output(self, *, finished: list[Finished]) -> SchedulerMessage:
        """Returns the message for the frontend that reports these ends."""
