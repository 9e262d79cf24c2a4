from __future__ import annotations

from pathlib import Path

from segue.frontend.bad_words import token_sequences
from segue.frontend.tokenizer import Tokenizer


def encode(text: str) -> list[int]:
    """Words with a space before them are tokens of their own; 99 is a token without a logit."""
    known = {"bad": [1], " bad": [2], "worse": [3, 4], " worse": [5], " ": [6], "  ": [6, 6], "x": [99]}
    return known.get(text, [ord(each) for each in text])


def test_a_word_is_banned_as_it_begins_a_text_and_as_it_follows_a_space() -> None:
    words = ["bad", "worse"]
    assert token_sequences(words, encode, 50) == ((1,), (2,), (3, 4), (5,))
    assert token_sequences(["  bad", "bad", " worse"], encode, 50) == ((1,), (2,), (3, 4), (5,))


def test_a_word_of_spaces_is_banned_as_it_is_and_a_token_without_a_logit_need_not_be() -> None:
    assert token_sequences([" "], encode, 50) == ((6,), (6, 6))
    assert token_sequences(["x"], encode, 50) == ()


def test_with_a_real_tokenizer_no_special_tokens_are_added(tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    found = token_sequences(["ab"], lambda text: tokenizer.encode(text, add_special_tokens=False), 320)
    assert [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in found] == ["ab", " ab"]
