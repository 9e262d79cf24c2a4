"""The states of an engine from its start to its end, and what each of them means to those who ask."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto

from segue.errors import DrainingError, EngineHungError, EngineStartError, SegueError

STARTING = "the engine is starting; retry in a moment"
DRAINED = 'an operator drains this engine; send the request to another one, or POST /drain {"drain": false}'


class LifeState(Enum):
    """The states of an engine, from its start to its end."""

    INIT = auto()  # the workers load the model
    STANDBY = auto()  # the model is loaded; the engine waits until it is to serve
    WAKING = auto()  # the engine prepares to serve: memory, a test request, its API port
    ACTIVE = auto()  # requests are taken
    DRAINED = auto()  # an operator has new requests refused; those in flight go on
    DRAINING = auto()  # the server shuts down: requests in flight may end, and new ones are refused
    DEAD = auto()  # the engine has ended, by itself or by a shutdown


# The states that may follow each state. There is no way back to STANDBY: an engine wakes once.
NEXT_STATES: dict[LifeState, frozenset[LifeState]] = {
    LifeState.INIT: frozenset({LifeState.STANDBY, LifeState.DEAD}),
    LifeState.STANDBY: frozenset({LifeState.WAKING, LifeState.DEAD}),
    LifeState.WAKING: frozenset({LifeState.ACTIVE, LifeState.DEAD}),
    LifeState.ACTIVE: frozenset({LifeState.DRAINED, LifeState.DRAINING, LifeState.DEAD}),
    LifeState.DRAINED: frozenset({LifeState.ACTIVE, LifeState.DRAINING, LifeState.DEAD}),
    LifeState.DRAINING: frozenset({LifeState.DEAD}),
    LifeState.DEAD: frozenset(),
}
TIMED = frozenset({LifeState.WAKING, LifeState.DRAINING})  # states that may have a deadline


class Life:
    """An engine's state, and what is wrong with it. :class:`segue.launch.runtime.Runtime` alone writes it.

    Times are those of ``clock``, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = LifeState.INIT
        self.error: SegueError | None = None  # why the engine is dead
        self.hung: str | None = None  # why the engine counts as hung: it may answer again
        self.deadline: float | None = None  # until when the state may last; None: for ever
        self.entered = dict.fromkeys(LifeState, 0)  # how often each state was entered
        self.num_failovers = 0  # wakes in the place of another engine
        self.wake_phases: dict[str, float] = {}  # seconds of each phase of the wake
        self._clock = clock
        self._since = self._progress_at = clock()
        self.entered[self.state] = 1

    def advance(
        self, state: LifeState, error: SegueError | None = None, *, within_s: float | None = None
    ) -> float:
        """Enter the next state; returns the seconds that the one before it has lasted.

        Args:
            state: the next state, which must be one of :data:`NEXT_STATES`.
            error: why the engine is dead; for that state alone.
            within_s: the seconds that the new state may last; None: there is no limit.

        Raises:
            ValueError: the state cannot follow the present one.
        """
        if state not in NEXT_STATES[self.state]:
            raise ValueError(f"an engine that is {self.state.name} cannot become {state.name}")
        assert (state is LifeState.DEAD) == (error is not None)
        assert within_s is None or state in TIMED
        now, before = self._clock(), self._since
        self.state, self.error, self._since = state, error, now
        self.deadline = None if within_s is None else now + within_s
        self.entered[state] += 1
        return now - before

    @property
    def is_late(self) -> bool:
        """Whether the state lasts longer than it may."""
        return self.deadline is not None and self._clock() > self.deadline

    def note_progress(self) -> None:
        """Take a sign that the start gets on."""
        self._progress_at = self._clock()

    @property
    def stuck_s(self) -> float:
        """The seconds since the last sign that the start gets on."""
        return self._clock() - self._progress_at

    @property
    def silence(self) -> SegueError | None:
        """Why the workers answer no call: the engine is dead, or it hangs. None: they answer."""
        if self.error is not None:
            return self.error
        return None if self.hung is None else EngineHungError(self.hung)

    @property
    def trouble(self) -> SegueError | None:
        """Why no new request can be served; None: requests are taken, as far as the weights allow it."""
        if self.state is LifeState.DRAINING:
            return DrainingError("the server is shutting down; send the request to another one")
        if self.state is LifeState.DRAINED:
            return DrainingError(DRAINED)
        if self.state in (LifeState.INIT, LifeState.STANDBY, LifeState.WAKING):
            return EngineStartError(STARTING)
        return self.silence
