"""The sizes that all engines of a cohort have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from segue.errors import ConfigError
from segue.memory.geometry import KVGeometry, check_pinned

FIRST = KVGeometry(
    num_pages=100,
    page_size=16,
    page_bytes=1000,
    max_seq_len=1600,
    max_running_requests=8,
    chunked_prefill_size=512,
)


def test_a_geometry_is_made_of_its_numbers_again() -> None:
    assert KVGeometry.of(FIRST.numbers) == FIRST and FIRST.kv_bytes == 101_000


def test_the_number_of_pages_of_the_first_engine_holds() -> None:
    own = replace(FIRST, num_pages=70, max_seq_len=1120)
    check_pinned(FIRST, own=own, max_len=1600, num_kv_tokens=None)
    check_pinned(FIRST, own=own, max_len=4096, num_kv_tokens=1590)  # as many pages


@pytest.mark.parametrize(
    ("own", "max_len", "num_kv_tokens", "param", "text"),
    [
        ({"page_size": 32}, 1600, None, "page_size", "page_size is 32 on this engine, and 16 .* --page-size"),
        ({"page_bytes": 500}, 1600, None, "kv_cache_dtype", "--kv-cache-dtype alike"),
        ({"max_running_requests": 9}, 1600, None, "max_running_requests", "--max-running-requests alike"),
        ({"chunked_prefill_size": 64}, 1600, None, "chunked_prefill_size", "--chunked-prefill-size alike"),
        ({}, 1600, 800, "num_kv_tokens", "num_pages is 50 on this engine, and 100 .* --num-kv-tokens alike"),
        (
            {},
            1000,
            None,
            "max_model_len",
            "max_seq_len is 1000 .*, and 1600 .* or another --cohort",
        ),
    ],
)
def test_an_option_with_another_value_is_named(
    own: dict[str, int], max_len: int, num_kv_tokens: int | None, param: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        check_pinned(FIRST, own=replace(FIRST, **own), max_len=max_len, num_kv_tokens=num_kv_tokens)
    assert caught.value.param == param
