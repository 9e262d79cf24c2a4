from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from segue.frontend.detokenizer import StopMatcher

LETTERS = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def run(stops: tuple[str, ...], pieces: list[str], *, keep: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, keep=keep)
    shown = ""
    for piece in pieces:
        text, found = matcher.push(piece)
        shown += text
        if found is not None:
            return shown, found
    return shown + matcher.flush(), None


def first_end(stops: tuple[str, ...], text: str) -> tuple[int, str] | None:
    """Return the end of the shortest prefix that ends with a stop string, and its longest such string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@given(stops=STOPS, text=LETTERS, data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    stops: tuple[str, ...], text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    match = first_end(stops, text)
    expected = (text, None) if match is None else (text[: match[0] - len(match[1])], match[1])
    assert run(stops, pieces) == expected


@given(stops=STOPS, text=LETTERS)
def test_kept_stop_strings_end_the_text(stops: tuple[str, ...], text: str) -> None:
    shown, found = run(stops, list(text), keep=True)
    assert text.startswith(shown)
    assert found is None or shown.endswith(found)


@given(stops=STOPS, text=LETTERS)
def test_only_what_could_begin_a_stop_string_is_held_back(stops: tuple[str, ...], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for char in text:
        piece, found = matcher.push(char)
        shown += piece
        if found is not None:
            return
    held = text[len(shown) :]
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_long_stop_string_over_many_pieces_is_found() -> None:
    assert run(("<end of it>",), ["say <end", " of", " it", "> more"]) == ("say ", "<end of it>")


def test_a_long_prefix_that_does_not_match_costs_little() -> None:
    length = 200_000
    matcher = StopMatcher(("=" * length + "end",))
    matcher.push("=" * length)
    begin = time.thread_time()
    assert matcher.push("x") == ("=" * length + "x", None)
    assert time.thread_time() - begin < 1.0  # trying every position anew takes several seconds
