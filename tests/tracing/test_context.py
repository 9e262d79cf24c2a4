"""Headers about traces."""

from __future__ import annotations

import pytest

from segue.tracing.context import MOST_STATE, TraceContext, context_of, passed_on

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


def context(*parents: str, state: tuple[str, ...] = ()) -> TraceContext | None:
    headers = [(b"traceparent", each.encode("latin-1")) for each in parents]
    return context_of([(b"host", b"x"), *headers, *((b"tracestate", each.encode()) for each in state)])


def test_what_the_headers_say_is_what_they_become_again() -> None:
    found = context(VALID, state=("a=1,b=2", "c=3"))
    assert found == TraceContext(int(TRACE, 16), int(SPAN, 16), 1, "a=1,b=2,c=3")
    assert found.is_sampled
    assert found.headers == [(b"traceparent", VALID.encode()), (b"tracestate", b"a=1,b=2,c=3")]
    not_kept = context(VALID[:-2] + "00")
    assert not_kept is not None and not not_kept.is_sampled
    assert context_of(TraceContext(5, 6, 3).headers) == TraceContext(5, 6, 3)


def test_a_later_version_may_have_more_fields() -> None:
    assert context(f"01-{TRACE}-{SPAN}-01-more") == context(VALID)


@pytest.mark.parametrize(
    "parents",
    [
        (),
        (VALID, VALID),
        ("",),
        (VALID.upper(),),
        (VALID[:-1],),
        (VALID + "-more",),
        (f"ff-{TRACE}-{SPAN}-01",),
        (f"00-{'0' * 32}-{SPAN}-01",),
        (f"00-{TRACE}-{'0' * 16}-01",),
    ],
)
def test_what_is_not_valid_counts_as_nothing(parents: tuple[str, ...]) -> None:
    assert context(*parents) is None


@pytest.mark.parametrize("state", ["a" * (MOST_STATE + 1), "a=\x01"])
def test_a_state_that_cannot_be_passed_on_is_dropped(state: str) -> None:
    found = context(VALID, state=(state,))
    assert found is not None and found.state == ""


def test_headers_are_passed_on_as_they_came() -> None:
    headers = [(b"host", b"x"), (b"traceparent", b"?"), (b"tracestate", b"a=1")]
    assert passed_on(headers) == headers[1:]
