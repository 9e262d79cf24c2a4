"""Changes of a scheduler's role, without another worker; tests/disagg has them with transfers."""

from __future__ import annotations

import pytest

from segue.disagg.offer import UNCLAIMED_S
from segue.errors import InvalidRequestError, RoleChangedError, WrongRoleError
from segue.messages.control import SetRole
from segue.messages.fleet import Role
from segue.messages.requests import Handoff, SamplingParams
from segue.scheduler.role import WORK, RoleControl, kind_of
from tests.disagg.cluster import Worker

PREFILL, DECODE = Handoff(id=1, part="prefill"), Handoff(id=1, part="decode", peer="p:1")


def worker(role: Role) -> Worker:
    return Worker("w", role, "w#1")


def roles_of(role: Role) -> RoleControl:
    return worker(role).scheduler.roles


@pytest.mark.parametrize("role", WORK)
@pytest.mark.parametrize(("handoff", "count"), [(PREFILL, 9), (DECODE, 9), (None, 9), (None, 1)])
def test_a_role_takes_its_kinds_of_work(role: Role, handoff: Handoff | None, count: int) -> None:
    roles = roles_of(role)
    if kind_of(handoff, count) in WORK[role]:
        roles.check(handoff, count)
    else:
        with pytest.raises(WrongRoleError, match=f"--role is {role}, and the request"):
            roles.check(handoff, count)


def test_an_idle_worker_enters_its_role_at_once() -> None:
    roles = roles_of("prefill")
    roles.set(SetRole(7, "decode", 1.0), 0.0)
    assert roles.due(0.0) == "decode"
    roles.enter("h:1")
    (reply,) = roles.replies
    assert (reply.call, reply.role, reply.control_address, reply.error) == (7, "decode", "h:1", "")
    with pytest.raises(RoleChangedError):  # who sends it may not know yet
        roles.check(PREFILL, 9)


def test_a_role_that_cannot_be_entered_leaves_the_old_one() -> None:
    roles = roles_of("decode")
    roles.set(SetRole(7, "prefill", 1.0), 0.0)
    assert roles.due(0.0) == "prefill"
    roles.fail(InvalidRequestError("port 8998 is in use"))
    (reply,) = roles.replies
    assert reply.error == "the role is still decode, and not prefill: port 8998 is in use"
    roles.check(None, 9)


def test_a_second_call_takes_the_place_of_the_first() -> None:
    busy = worker("decode")
    busy.start("r", [1, 2], SamplingParams(max_new_tokens=5), None)
    roles = busy.scheduler.roles
    roles.set(SetRole(1, "prefill", 9.0), 0.0)
    assert roles.due(0.0) is None
    roles.set(SetRole(2, "decode", 9.0), 1.0)
    assert [reply.call for reply in roles.replies] == [1] and "another call" in roles.replies[0].error
    assert roles.due(1.0) == "decode", "the present role can be entered at once: the change is undone"


def test_a_first_token_that_ended_its_request_is_kept_for_its_decode_worker() -> None:
    source = worker("prefill")
    handoff = Handoff(id=1, part="prefill")
    source.start("r", [1, 2], SamplingParams(max_new_tokens=1), handoff)
    while source.launch() is not None:
        source.apply()
    assert source.finished["r"].reason == "length" and not list(source.machine.offers)
    roles = source.scheduler.roles
    roles.set(SetRole(1, "decode", 99.0), source.now)
    assert roles.due(source.now) is None, "the claim may be on its way"
    source.scheduler.now = source.now + UNCLAIMED_S
    assert roles.due(source.scheduler.now) == "decode"
