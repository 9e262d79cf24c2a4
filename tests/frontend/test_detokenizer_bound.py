"""Tests of the bound of characters per token: no text exceeds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from segue.frontend.detokenizer import TokenTable, max_chars_per_token
from tests.frontend.test_tokenizer import byte_level, sentencepiece
from tests.support.tiny_model import make_tokenizer

PIECES = st.sampled_from(
    [
        "a",
        "he",
        "ll",
        "hello",
        " ",
        "     ",
        "\n",
        "é",
        "e\u0301",
        "\u03b1\u0313\u0300\u0345",
        "각",
        "東",
        "🙂",
        "<|end|>",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=60).map("".join)


def bound_of(backend: Tokenizer) -> int | None:
    return max_chars_per_token(backend, TokenTable.of(backend, (), 0).tokens)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, make_tokenizer])
def test_no_text_has_more_characters_per_token(make: Callable[[], Tokenizer]) -> None:
    backend = make()
    bound = bound_of(backend)
    assert bound is not None

    @settings(max_examples=300, deadline=None)
    @given(text=TEXTS)
    def check(text: str) -> None:
        text = text.encode("utf-8", "ignore").decode()
        count = len(backend.encode(text, add_special_tokens=False))
        assert len(text) <= bound * count

    check()


def test_composition_counts() -> None:
    """Four characters become one, which a bound from the vocabulary alone would miss."""
    backend = byte_level()
    longest = max(len(token.decode("utf-8", "ignore")) for token in TokenTable.of(backend, (), 0).tokens)
    assert bound_of(backend) == 4 * longest


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", normalizers.Strip()),
        ("normalizer", normalizers.StripAccents()),
        ("normalizer", normalizers.Replace(Regex(" +"), " ")),
        ("normalizer", normalizers.Replace("  ", " ")),
        ("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Nmt()])),
        ("normalizer", normalizers.BertNormalizer()),
        ("pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        ("pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])),
        ("model", models.BPE(vocab={"a": 0}, merges=[], unk_token="a", fuse_unk=True)),
        ("model", models.WordLevel(vocab={"a": 0}, unk_token="a")),
    ],
)
def test_there_is_no_bound_where_characters_may_vanish(part: str, value: Any) -> None:
    backend = byte_level()
    setattr(backend, part, value)
    assert bound_of(backend) is None


def test_there_is_no_bound_with_a_token_that_absorbs_spaces() -> None:
    backend = byte_level()
    assert bound_of(backend) is not None
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    assert len(backend.encode(" " * 1000 + "<mask>", add_special_tokens=False)) == 1
    assert bound_of(backend) is None
