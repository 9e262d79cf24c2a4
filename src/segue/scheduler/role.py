"""Which work a worker takes, and how that changes while it serves.

    STEADY -> LEAVING -> STEADY

A *role* is a set of kinds of work. A change refuses new requests of the kinds that the next role does not
take, and lets those that are here end. Once nothing of these kinds is left, the next role can be entered. If
that takes too long, the old role is back, as if nobody had asked.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Literal

from segue.errors import RoleChangedError, SegueError, WrongRoleError
from segue.messages.control import RoleSet, SetRole
from segue.messages.fleet import Role
from segue.messages.requests import Handoff

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler

# prefill, decode: one of the two parts of a request that two workers share. whole: a request that this
# worker serves alone. single: the same, but it ends with its first token, so a prefill worker can serve it.
WorkKind = Literal["prefill", "decode", "whole", "single"]

WORK: dict[Role, frozenset[WorkKind]] = {
    "both": frozenset(("whole", "single")),
    "prefill": frozenset(("prefill", "single")),
    "decode": frozenset(("decode", "whole", "single")),
}


CHECK_S = 0.1  # how often a change looks whether the old work has ended


def kind_of(handoff: Handoff | None, most_outputs: int) -> WorkKind:
    """Returns the kind of work that a request is, which may have so many output tokens."""
    if handoff is not None:
        return handoff.part
    return "whole" if most_outputs > 1 else "single"


class RoleControl:
    """The role of one scheduler. It sends nothing: the caller takes :attr:`replies` and empties it."""

    def __init__(self, scheduler: Scheduler, role: Role) -> None:
        """Begin with a role; a worker that begins with ``both`` cannot hand KV over, and stays what it is."""
        self._scheduler = scheduler
        self.role = role
        self.next_role: Role | None = None  # None: no change is under way
        self.next_deadline = inf  # when `due` must be called even if nothing else happens
        self.replies: list[RoleSet] = []
        self._hands_over = role != "both"
        self._has_changed = False
        self._call: SetRole | None = None  # the one that is to be answered
        self._until = inf  # when the old role is back, unless the next one is entered before

    def check(self, handoff: Handoff | None, most_outputs: int) -> None:
        """Let a request in, which may have so many output tokens.

        Raises:
            WrongRoleError: the role does not take it.
            RoleChangedError: the same, but the role changes or has changed, so the sender may not have known.
        """
        kind = kind_of(handoff, most_outputs)
        if kind not in WORK[self.role]:
            text = f"this engine's --role is {self.role}, and " + _REFUSALS[kind].format(most_outputs)
            raise RoleChangedError(text) if self._has_changed else WrongRoleError(text)
        if self.next_role is not None and kind not in WORK[self.next_role]:
            raise RoleChangedError(
                f"this engine's role changes from {self.role} to {self.next_role}, which does not take the "
                "request; send it to another engine"
            )

    def set(self, message: SetRole, now: float) -> None:
        """Begin to change the role; a change that is under way ends without effect."""
        if self._call is not None:
            self._stop(f"another call asked for role {message.role} meanwhile")
        self._call = message
        if message.role != self.role and not self._hands_over:
            self._stop(
                "this engine was started with --role both, so no other process can map its KV pool; start it "
                f"with --role {message.role}"
            )
            return
        self.next_role, self.next_deadline = message.role, now
        self._until = now + message.timeout_s

    def due(self, now: float) -> Role | None:
        """Returns the role that can be entered now, if there is one. Applies the change's time-out.

        The caller enters it by :meth:`enter`, or says by :meth:`fail` why it could not.
        """
        if self.next_role is None:
            return None
        left = self._left()
        if not any(left.values()):
            return self.next_role
        self.next_deadline = now + CHECK_S
        if now >= self._until:
            counts = " and ".join(f"{count} {name}" for name, count in left.items() if count)
            assert self._call is not None
            self._stop(
                f"after {self._call.timeout_s:g} s there are {counts} of the role {self.role} left; wait for "
                "them or abort them, and try again with a longer timeout"
            )
        return None

    def enter(self, address: str | None) -> None:
        """Enter the next role; ``address``: where KV is handed over in it."""
        assert self.next_role is not None and self._call is not None
        if self.next_role != self.role:
            self._has_changed = True
            self._scheduler.handover.machine.leave_all("its role has changed", self._scheduler.now)
        self.role, self.next_role, self.next_deadline = self.next_role, None, inf
        self.replies.append(RoleSet(call=self._call.call, role=self.role, control_address=address))
        self._call = None

    def fail(self, error: SegueError) -> None:
        """Stay in the present role: the next one cannot be entered."""
        self._stop(error.message)

    def _stop(self, why: str) -> None:
        """End the change in the role that it began with, and answer so."""
        assert self._call is not None
        text = f"the role is still {self.role}, and not {self._call.role}: {why}"
        self.replies.append(RoleSet(call=self._call.call, role=self.role, error=text))
        self.next_role, self.next_deadline, self._call = None, inf, None

    def _left(self) -> dict[str, int]:
        """Returns what is left of the work that the next role does not take."""
        assert self.next_role is not None
        going = WORK[self.role] - WORK[self.next_role]
        handover = self._scheduler.handover
        return {
            "requests": sum(
                kind_of(r.handoff, r.most_outputs) in going for r in self._scheduler.requests.values()
            ),
            "offers": handover.machine.offers.num_open(self._scheduler.now) if "prefill" in going else 0,
            "leases": sum(1 for _ in handover.machine.leases) if "decode" in going else 0,
        }


_REFUSALS: dict[WorkKind, str] = {  # every role takes the kind "single"
    "prefill": "the request is for --role prefill; send it there",
    "decode": "the request is for --role decode; send it there",
    "whole": "the request may have {} output tokens; send it to another engine, set max_new_tokens to 1, or "
    "hand it over (bootstrap_room)",
}
