"""Estimates of the size of prompts."""

from __future__ import annotations

import msgspec
import pytest

from segue.router.prompts import (
    FIRST_GUESS,
    SEVERAL,
    BytesPerToken,
    RequestFacts,
    cached_tokens,
    prompt_tokens,
)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"input_ids": [1, 2, 3]}', 3),
        (b'{"prompt": [1, 2, 3, 4]}', 4),
        (b'{"prompt": [[1, 2], [3, 4, 5]]}', 5),
        (b'{"text": "%b"}' % (b"x" * 398), 100),
        (b'{"text": null, "prompt": null, "input_ids": [1, 2]}', 2),
        (b'{"input_ids": null, "text": "%b"}' % (b"x" * 398), 100),
        (b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"x" * 1000), 258),
        (b'{"messages": [{"content": "%b"}], "tools": ["%b"]}' % (b"x" * 383, b"y" * 396), 200),
        (b'{"input": "%b", "text": {"format": {"type": "text"}}}' % (b"x" * 398), 100),
        (b'{"input": ["%b"], "tools": ["%b"], "instructions": "%b"}' % ((b"x" * 396,) * 3), 300),
        (b'{"messages": [], "tools": [1], "tokens": [1, 2, 3]}', 3),
        (b'{"token_ids": [1, 2, 3, 4, 5], "sampling_params": {}}', 5),
        (b'{"messages": [{"role": "user", "content": "x"}], "tokens": [1, 2]}', 2),
        (b"{}", 1),
        (b"x" * 400, 100),
    ],
)
def test_tokens_are_counted_or_estimated_from_bytes(body: bytes, tokens: int) -> None:
    assert BytesPerToken().facts("/generate", body).num_tokens == tokens


def test_a_route_learns_from_replies() -> None:
    sizes = BytesPerToken()
    size = RequestFacts(num_tokens=100, num_bytes=400)
    for _ in range(100):
        sizes.learn("/generate", size, b'{"meta_info": {"prompt_tokens": 200}}')
        sizes.learn("/v1/responses", size, b'{"usage":{"input_tokens":50,"output_tokens":3}}')
    assert sizes.rate("/generate") == pytest.approx(2.0, rel=0.01)
    assert sizes.rate("/v1/responses") == pytest.approx(8.0, rel=0.01)
    assert sizes.rate("/v1/completions") == FIRST_GUESS


def test_tokens_of_a_prompt_are_those_that_were_cached_and_the_others() -> None:
    start = b'{"usage": {"input_tokens": 200, "cache_read_input_tokens": 0, "output_tokens": 0}}'
    end = b'{"usage": {"input_tokens": 50, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 150}}'
    assert prompt_tokens(end) == prompt_tokens(start) == 200 and cached_tokens(start + end) == 150
    assert prompt_tokens(b'{"text": "no count"}') is None
    said = msgspec.json.encode({"text": '"input_tokens": 7'})
    assert prompt_tokens(said) is None, "what a model writes counts nothing"
    body = b'{"system": "%b", "messages": [1], "tools": [2]}' % (b"x" * 390)
    facts = BytesPerToken().facts("/v1/messages", body)
    assert facts.prompt_bytes == 392 + 6
    assert facts.native_route == "/v1/messages", "not every server has this route"
    assert not BytesPerToken().facts("/v1/chat/completions", body).native_route


def test_nothing_is_learned_from_counted_prompts_or_replies_without_a_count() -> None:
    sizes = BytesPerToken()
    sizes.learn("/generate", RequestFacts(num_tokens=100, num_bytes=0), b'{"prompt_tokens": 5}')
    sizes.learn("/generate", RequestFacts(num_tokens=100, num_bytes=400), b"{}")
    sizes.learn("/generate", RequestFacts(num_tokens=100, num_bytes=400), b'{"prompt_tokens": 0}')
    assert sizes.rate("/generate") == FIRST_GUESS


def test_a_native_batch_is_estimated_and_teaches_nothing() -> None:
    facts = BytesPerToken().facts("/generate", b'{"text": ["%b", "x"]}' % (b"x" * 391))
    assert (facts.num_tokens, facts.num_bytes, facts.prompt_bytes) == (100, 0, 400)


@pytest.mark.parametrize(
    ("body", "is_stream"),
    [
        (b'{"stream": true}', True),
        (b'{"stream": false, "stream": true}', True),
        (b'{"stream": null}', False),
        (b'{"stream": 1}', False),
        (b"{}", False),
        (b"not JSON", False),
    ],
)
def test_a_body_says_whether_it_asks_for_a_stream(body: bytes, is_stream: bool) -> None:
    assert BytesPerToken().facts("/generate", body).is_stream is is_stream


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"max_tokens": 1}', 1),
        (b'{"max_completion_tokens": 1}', 1),
        (b'{"max_output_tokens": 1}', 1),
        (b'{"sampling_params": {"max_new_tokens": 1}}', 1),
        (b'{"sampling_params": {"max_new_tokens": 0}}', 1),
        (b'{"sampling_params": null, "max_completion_tokens": null, "max_tokens": 1}', 1),
        (b'{"sampling_params": {"max_new_tokens": 16}}', SEVERAL),
        (b'{"sampling_params": [{"max_new_tokens": 1}]}', SEVERAL),
        (b'{"sampling_params": {}}', SEVERAL),
        (b'{"sampling_params": {"max_tokens": 1}}', SEVERAL),  # no field of the native API
        (b'{"token_ids": [1], "sampling_params": {"max_tokens": 1}}', 1),
        (b'{"max_tokens": 0}', 1),
        (b'{"max_tokens": 10}', SEVERAL),
        (b"{}", SEVERAL),
    ],
)
def test_a_body_says_whether_one_token_is_enough(body: bytes, tokens: int) -> None:
    assert BytesPerToken().facts("/v1/completions", body).max_new_tokens == tokens


def test_equal_beginnings_of_prompts_have_equal_keys() -> None:
    turn = b'{"messages": [{"role": "user", "content": "%b"}%b]}'
    first, second = (
        BytesPerToken().facts("/v1/chat/completions", turn % (b"x" * 1000, rest)).keys
        for rest in (b"", b', {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}')
    )
    assert first and second[: len(first)] == first


def test_replies_say_how_many_tokens_were_cached() -> None:
    reply = b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}}'
    assert cached_tokens(reply) == 7 and cached_tokens(b"{}") is None
