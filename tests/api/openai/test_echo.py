"""How a prompt is shown before its continuation."""

from __future__ import annotations

from segue.api.openai.echo import Echo
from segue.frontend.detokenizer import TokenTable

#                    0       1        2      3     4        5
TABLE = TokenTable([b"<s>", b"Hello", b" a", b"<|x|>", b"\xe6\x9d", b"\xb1"], special_ids=[0, 3])


def test_a_special_token_that_was_added_takes_up_no_text() -> None:
    echo = Echo.of("Hello<|x|> a", [0, 1, 3, 2], TABLE)
    assert (echo.text, echo.offsets) == ("Hello<|x|> a", [0, 0, 5, 10])


def test_token_ids_are_shown_with_special_tokens() -> None:
    echo = Echo.of([0, 1, 2], [0, 1, 2], TABLE)
    assert (echo.text, echo.offsets) == ("<s>Hello a", [0, 3, 8])


def test_a_character_of_several_tokens_begins_once() -> None:
    echo = Echo.of([1, 4, 5, 2], [1, 4, 5, 2], TABLE)
    assert (echo.text, echo.offsets) == ("Hello東 a", [0, 5, 5, 6])
    assert Echo.of([4], [4], TABLE).text == "\ufffd"


def test_offsets_stay_within_a_text_that_the_tokenizer_has_changed() -> None:
    assert Echo.of("Hell", [1, 2], TABLE).offsets == [0, 4]
