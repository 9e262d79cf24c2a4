from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from segue.errors import UnsupportedModelError
from segue.frontend.detokenizer import Detokenizer, TokenTable
from tests.support.tiny_model import EOS_ID, TEXT, make_tokenizer

TOKENIZER = make_tokenizer()
SIZE = TOKENIZER.get_vocab_size(with_added_tokens=True)
TABLE = TokenTable.of(TOKENIZER, {0, 1, 2}, SIZE + 8)


def pieces(ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(TABLE, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, SIZE - 1), max_size=60), st.booleans())
def test_text_equals_the_tokenizers_for_any_ids(ids: list[int], skip: bool) -> None:
    assert "".join(pieces(ids, skip=skip)) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=40))
def test_valid_text_never_shows_half_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    *shown, rest = pieces(ids, skip=False)
    assert "".join(shown) == text
    assert rest == ""
    assert "\ufffd" not in "".join(shown) or "\ufffd" in text


def test_bytes_of_a_character_wait_for_the_last_one() -> None:
    ids = TOKENIZER.encode("東").ids
    assert len(ids) == 3
    assert pieces(ids) == ["", "", "東", ""]


def test_a_character_cut_off_at_the_end_is_replaced() -> None:
    ids = TOKENIZER.encode("a東").ids[:-1]
    assert pieces(ids) == ["a", "", "", "\ufffd"]


def test_a_special_token_amid_a_character_is_left_out_too() -> None:
    first, *rest = TOKENIZER.encode("東").ids
    assert "".join(pieces([first, EOS_ID, *rest])) == "東"


def test_special_tokens_are_left_out_unless_requested() -> None:
    assert "".join(pieces([EOS_ID])) == ""
    assert "".join(pieces([EOS_ID], skip=False)) == "<|im_end|>"


def test_ids_of_the_model_that_the_tokenizer_lacks_are_empty() -> None:
    assert pieces([SIZE + 3]) == ["", ""]
    assert TABLE.text(SIZE + 3) == ""


def test_sentencepiece_tokens_become_text_and_bytes() -> None:
    vocabulary = {"▁Hello": 0, "▁world": 1, "<0xE6>": 2, "<0x9D>": 3, "<0xB1>": 4, "<s>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    detokenizer = Detokenizer(TokenTable.of(tokenizer, {5}, 6))
    assert [detokenizer.push(token) for token in (5, 0, 1, 2, 3, 4)] == ["", " Hello", " world", "", "", "東"]


def test_another_kind_of_tokenizer_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        TokenTable.of(tokenizer, (), 2)


def test_a_step_of_256_requests_costs_little() -> None:
    ids = TOKENIZER.encode(TEXT).ids
    requests = [Detokenizer(TABLE) for _ in range(256)]
    best = float("inf")
    for token in ids[:32]:
        start = time.perf_counter()
        for request in requests:
            request.push(token)
        best = min(best, time.perf_counter() - start)
    assert best < 0.5e-3  # measured: 0.04 ms
