"""What a client has of a reply that comes from several legs."""

from __future__ import annotations

from segue.messages.leg import LegOutput
from segue.router.splice import Splice


def test_what_the_frames_of_all_legs_name_is_joined_by_prompt() -> None:
    splice = Splice()
    splice.take([LegOutput(0, b"aaaa", b"p"), LegOutput(1, b"bbbb")])
    splice.take([LegOutput(0, b"ccccdddd", b"qr")])
    assert splice.outputs() == [LegOutput(0, b"aaaaccccdddd", b"pqr"), LegOutput(1, b"bbbb")]
    assert splice.num_tokens == 4


def test_the_end_of_a_prompt_is_kept() -> None:
    splice = Splice()
    splice.take([LegOutput(2, b"aaaa")])
    splice.take([LegOutput(2, end=b"stop")])
    splice.take([LegOutput(0, b"bbbb")])
    assert splice.outputs() == [LegOutput(0, b"bbbb"), LegOutput(2, b"aaaa", b"", b"stop")]


def test_a_reply_that_has_not_begun_has_no_outputs() -> None:
    splice = Splice()
    splice.take([])
    assert splice.outputs() == [] and splice.num_frames == splice.num_tokens == 0


def test_an_end_without_tokens_is_something_new() -> None:
    splice = Splice()
    splice.take([LegOutput(0, end=b"length")])
    assert splice.num_frames == 1 and splice.num_tokens == 0
