"""The groups of trainers: which ones every rank has joined, and the calls that wait for another one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from segue.messages.weight_operations import Group, JoinGroup, LeaveGroup
from segue.messages.weight_update import Join, Leave, RankReply, StopJoin, WeightCall, WeightCommand
from segue.weight_update.control.outbox import Outbox, Refusal
from segue.weight_update.control.state_machine import WeightMachine

MAX_JOINS = 4
_GRACE_S = 1.0  # the ranks have the same deadline and know more, so their error is to come first


@dataclass(slots=True, eq=False)
class Joining:
    """The joining of one group, until every rank has replied."""

    group: Group
    waiting: dict[int, tuple[float, float]] = field(default_factory=dict)  # call -> deadline, its timeout_s
    is_stopped: bool = False  # no call waits for it any more, and the ranks got a ``StopJoin``


class TrainerGroups:
    """Joins and leaves groups on all ranks; a group that is lost ends the session that receives from it."""

    def __init__(self, outbox: Outbox[WeightCommand], machine: WeightMachine) -> None:
        self.joined: dict[str, Group] = {}  # by name
        self._outbox = outbox
        self._machine = machine
        self._joins: list[Joining] = []

    def join(self, asked: WeightCall, request: JoinGroup, now: float) -> None:
        """Have every rank join a group; calls for the same group share one join.

        Raises:
            Refusal: the offset does not fit the group, or too many other groups are being joined.
        """
        group, size = request.group, self._outbox.num_ranks
        if not 1 <= group.rank_offset <= group.world_size - size:
            raise Refusal(
                f"rank_offset={group.rank_offset} in world_size={group.world_size}: rank_offset must be 1 to "
                f"world_size - {size} (rank 0 is the trainer, this engine has {size} ranks)"
            )
        joining = next((each for each in self._joins if each.group == group and not each.is_stopped), None)
        if joining is None:
            # The ranks give up an older join of this name for the new one.
            others = [each.group for each in self._joins if each.group.name != group.name or each.is_stopped]
            if len(others) >= MAX_JOINS:
                named = [f"{each.name!r} at {each.master_address}:{each.master_port}" for each in others]
                raise Refusal(
                    f"{len(others)} groups are being joined ({'; '.join(named)}); the limit is {MAX_JOINS}; "
                    "retry later"
                )
            joining = Joining(group)
            self._joins.append(joining)
            command = Join(group=group, timeout_s=request.timeout_s)
            self._outbox.command(command, then=partial(self._on_joined, joining))
        joining.waiting[asked.call] = now + request.timeout_s + _GRACE_S, request.timeout_s

    def _on_joined(self, joining: Joining, replies: list[RankReply], wrong: str, now: float) -> None:
        """Take the replies to a `Join`, and answer the calls that wait for it.

        A rank finds groups that have lost their trainer when it joins one: their session is aborted if it
        still receives. A session of a group that was joined anew is aborted too, since its connections are
        gone. If only some ranks have joined, they leave.
        """
        self._joins.remove(joining)
        name = joining.group.name
        for lost in {lost for reply in replies for lost in reply.fields.get("dropped", ())} - {name}:
            self.joined.pop(lost, None)
            self._machine.abort_session_of(lost, "has lost its trainer", now, if_received=False)
        is_new = any(reply.fields.get("is_new") for reply in replies)
        if is_new:
            self._machine.abort_session_of(name, "was joined anew", now)
        if not wrong:
            self.joined[name] = joining.group
        elif is_new:  # some ranks have joined and others have not
            self.joined.pop(name, None)
            self._outbox.command(Leave(name=name))
        self._outbox.answer(list(joining.waiting), not wrong, wrong or f"Joined group {name!r}.")

    def leave(self, asked: WeightCall, request: LeaveGroup, now: float) -> None:
        """Have every rank leave a group.

        Raises:
            Refusal: there is no group of this name.
        """
        name = request.group_name
        if name not in self.joined:
            raise Refusal(self.unknown(name))
        self._machine.abort_session_of(name, "was destroyed", now)
        self._machine.last_ended = None  # no later call gets the answer of a session before this call
        del self.joined[name]

        def left(replies: list[RankReply], wrong: str, now: float) -> None:
            self._outbox.answer([asked.call], not wrong, wrong or f"Left group {name!r}.")

        self._outbox.command(Leave(name=name), then=left)

    def unknown(self, name: str) -> str:
        """The refusal of a call that names a group that is not joined."""
        names = ", ".join(map(repr, sorted(self.joined)))
        known = f"known: {names}" if names else "no group is known"
        return f"unknown group {name!r} ({known}); join it with /init_weights_update_group first"

    def withdraw(self, call: int) -> None:
        """Note that a call's client has gone."""
        for joining in self._joins:
            joining.waiting.pop(call, None)

    def advance(self, now: float) -> None:
        """Refuse the calls whose deadline is over, and stop joins that no call waits for any more."""
        for joining in self._joins:
            for call, (deadline, timeout_s) in list(joining.waiting.items()):
                if now >= deadline:
                    del joining.waiting[call]
                    text = (
                        f"group {joining.group.name!r} was not joined within {timeout_s:g} s: start the "
                        "trainer and all engines of the group, or raise timeout_s"
                    )
                    self._outbox.answer([call], False, text)
            if not joining.waiting and not joining.is_stopped:
                joining.is_stopped = True
                why = "no client waits for it any more"
                self._outbox.command(StopJoin(group=joining.group, why=why))

    @property
    def next_deadline(self) -> float | None:
        """When the first waiting call expires; None if no call waits."""
        return min((at for each in self._joins for at, _ in each.waiting.values()), default=None)
