"""The life of an engine: which state it is in, and why it cannot serve."""

from __future__ import annotations

from enum import Enum, auto

from segue.errors import DrainingError, EngineHungError, EngineStartError, SegueError

STARTING = "the engine is starting; retry in a moment"


class LifeState(Enum):
    """The states of an engine, from its start to its end."""

    INIT = auto()  # the workers load the model
    STANDBY = auto()  # the model is loaded, and another engine serves
    WAKING = auto()  # the engine takes over from another one
    ACTIVE = auto()  # requests are taken
    DRAINING = auto()  # requests in flight may end, and new ones are refused
    DEAD = auto()  # the engine has ended, by itself or by a shutdown


# The states that may follow each state. No engine stands by yet: an engine that has started is active.
_NEXT = {
    LifeState.INIT: {LifeState.ACTIVE, LifeState.DEAD},
    LifeState.ACTIVE: {LifeState.DRAINING, LifeState.DEAD},
    LifeState.DRAINING: {LifeState.DEAD},
}


class Life:
    """An engine's state, and what is wrong with it. :class:`segue.launch.runtime.Runtime` alone writes it."""

    def __init__(self) -> None:
        self.state = LifeState.INIT
        self.error: SegueError | None = None  # why the engine is dead
        self.hung: str | None = None  # why the engine counts as hung: it may answer again

    def advance(self, state: LifeState, error: SegueError | None = None) -> None:
        """Enter the next state; ``error``: why the engine is dead."""
        if state not in _NEXT.get(self.state, ()):
            raise ValueError(f"an engine that is {self.state.name} cannot become {state.name}")
        assert (state is LifeState.DEAD) == (error is not None)
        self.state, self.error = state, error

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
        if self.state in (LifeState.INIT, LifeState.STANDBY, LifeState.WAKING):
            return EngineStartError(STARTING)
        return self.silence
