"""How often a request goes on elsewhere, and where it does not."""

from __future__ import annotations

import pytest

from segue.router.attempts import MOST_RESUMES, MOST_TRIES, MUCH_OUTPUT, Attempts, FailureKind, kind_of
from segue.router.breaker import LegEnd
from tests.router.workers import view

A, B = view("a"), view("b")


@pytest.mark.parametrize(
    ("end", "status", "code", "retryable", "kind"),
    [
        ("connect", 0, None, False, FailureKind.UNREACHED),
        ("cut", 0, None, False, FailureKind.LOST),
        ("cut", 200, None, False, FailureKind.LOST),
        ("timeout", 200, None, False, FailureKind.HUNG),
        ("answered", 503, "engine_dead", False, FailureKind.LOST),
        ("answered", 200, "engine_dead", True, FailureKind.LOST),
        ("answered", 503, "overloaded", False, FailureKind.REFUSED),
        ("answered", 503, None, False, FailureKind.REFUSED),
        ("answered", 503, "kv_peer_lost", False, FailureKind.BROKEN_OFF),
        ("answered", 400, "wrong_role", False, FailureKind.REFUSED),
        ("answered", 400, "invalid_value", False, FailureKind.FINAL),
        ("answered", 500, None, False, FailureKind.FINAL),
        ("answered", 200, "kv_peer_lost", True, FailureKind.BROKEN_OFF),
        ("answered", 200, "internal_error", False, FailureKind.FINAL),
    ],
)
def test_the_end_of_a_leg_says_how_it_failed(
    end: LegEnd, status: int, code: str | None, retryable: bool, kind: FailureKind
) -> None:
    assert kind_of(end, status, code, retryable) is kind


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind is not FailureKind.FINAL])
def test_a_request_that_has_not_begun_is_tried_at_three_workers(kind: FailureKind) -> None:
    attempts = Attempts()
    assert [attempts.note(A, kind, False) for _ in range(MOST_TRIES)] == [True, True, False]


def test_a_request_that_has_begun_is_resumed_three_times() -> None:
    attempts = Attempts()
    more = [attempts.note(A, FailureKind.LOST, True) for _ in range(MOST_RESUMES + 1)]
    assert more == [True, True, True, False]


def test_a_long_reply_may_outlive_many_workers() -> None:
    attempts = Attempts()
    for _ in range(10 * MOST_RESUMES):
        attempts.progressed(MUCH_OUTPUT)
        assert attempts.note(A, FailureKind.LOST, True)
    for _ in range(MOST_RESUMES - 1):
        attempts.progressed(MUCH_OUTPUT - 1)
        assert attempts.note(A, FailureKind.LOST, True)
    assert not attempts.note(A, FailureKind.LOST, True)


@pytest.mark.parametrize("kind", [FailureKind.UNREACHED, FailureKind.REFUSED])
def test_a_leg_that_had_not_begun_is_no_resume(kind: FailureKind) -> None:
    attempts = Attempts()
    assert all(attempts.note(A, kind, True) for _ in range(10)) and attempts.resumes == 0


@pytest.mark.parametrize("has_output", [False, True])
def test_an_error_of_the_request_is_final(has_output: bool) -> None:
    assert not Attempts().note(A, FailureKind.FINAL, has_output)


def test_a_lost_process_never_gets_the_request_again_but_another_in_its_place_does() -> None:
    attempts = Attempts()
    attempts.note(A, FailureKind.LOST, True)
    assert not attempts.forgive(refusals=True)
    assert attempts.avoided([A, B]) == {"a"}
    again = view("a", record_fields={"incarnation": "second"})
    assert attempts.avoided([again, B]) == frozenset()


def test_a_worker_that_broke_off_may_be_asked_again_and_one_that_refused_only_later() -> None:
    attempts = Attempts()
    attempts.note(A, FailureKind.BROKEN_OFF, False)
    attempts.note(B, FailureKind.REFUSED, False)
    assert attempts.avoided([A, B]) == {"a", "b"}
    assert attempts.forgive(refusals=False) and attempts.avoided([A, B]) == {"b"}
    assert attempts.forgive(refusals=True) and attempts.avoided([A, B]) == frozenset()
