"""What a client is told when nobody can take its request."""

from __future__ import annotations

from segue.router.choice import MOST_NAMED, Refuse


def test_the_error_names_the_problem_each_worker_and_its_reason() -> None:
    error = Refuse(
        problem="no worker can take the request", reasons=[("a", "it is paused"), ("b", "it left")]
    ).error()
    assert (error.status, error.code) == (503, "no_worker")
    assert error.message == (
        "no worker can take the request (a: it is paused; b: it left); "
        "retry later, and see /workers for the state of each"
    )


def test_without_reasons_it_has_none() -> None:
    assert Refuse(problem="no worker is registered", reasons=[]).error().message == (
        "no worker is registered; retry later, and see /workers for the state of each"
    )


def test_of_many_workers_some_are_named() -> None:
    reasons = [(f"w{n}", "it is paused") for n in range(MOST_NAMED + 5)]
    message = Refuse(problem="no worker", reasons=reasons).error().message
    assert f"w{MOST_NAMED - 1}: it is paused; and 5 more)" in message and f"w{MOST_NAMED}:" not in message
