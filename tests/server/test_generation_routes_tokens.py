"""Token ids in and out on a deterministic engine: the same ids and bits whichever route asks."""

from __future__ import annotations

from typing import Any

import pytest

from segue.api.openai import replies
from segue.frontend.thread_pool import INLINE_ENTRIES
from tests.server.events import read_stream
from tests.server.leg_fleet import MODEL, Fleet

PROMPT = [40, 70, 77, 80, 3, 90]
PARAMS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "logprobs": 3, "ignore_eos": True}


def generate(fleet: Fleet, **fields: Any) -> Any:
    body = {"token_ids": PROMPT, "sampling_params": PARAMS} | fields
    response = fleet.one.client.post("/inference/v1/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def complete(fleet: Fleet, **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": PROMPT} | fields
    response = fleet.one.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def native(fleet: Fleet, **params: Any) -> Any:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"ignore_eos": True, "max_new_tokens": 24, "temperature": 0.8, "sampling_seed": 5}
        | params,
        **{"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3},
    }
    return fleet.one.client.post("/generate", json=body).json()


def test_every_route_gives_the_same_tokens_and_logprobs(fleet: Fleet) -> None:
    expected = native(fleet)
    ids = expected["output_ids"]
    logprobs = [p for p, _, _ in expected["meta_info"]["output_token_logprobs"]]
    (choice,) = generate(fleet)["choices"]
    assert choice["token_ids"] == ids and len(ids) == 24
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == logprobs
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == ids
    fields = {name: value for name, value in PARAMS.items() if name != "logprobs"}
    (choice,) = complete(fleet, logprobs=0, return_token_ids=True, **fields)["choices"]
    assert choice["token_ids"] == ids and choice["prompt_token_ids"] == PROMPT
    assert choice["logprobs"]["token_logprobs"] == logprobs


def test_a_stream_joined_is_the_whole_reply(fleet: Fleet) -> None:
    whole = generate(fleet, return_token_ids=True)
    (choice,) = whole["choices"]
    body = {"token_ids": PROMPT, "sampling_params": PARAMS, "return_token_ids": True}
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last, done = read_stream(fleet.one.client, "/inference/v1/generate", body | usage)
    assert done == "[DONE]" and last["usage"] == whole["usage"] | {
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
    }
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    assert [e for part in parts for e in part["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert chunks[0]["prompt_token_ids"] == PROMPT == whole["prompt_token_ids"]


def test_prompts_are_scored_alike(fleet: Fleet) -> None:
    expected = native(fleet, max_new_tokens=1)["meta_info"]["input_token_logprobs"]
    logprobs = [p for p, _, _ in expected]
    (choice,) = complete(fleet, max_tokens=0, echo=True, logprobs=2)["choices"]
    assert choice["logprobs"]["token_logprobs"] == logprobs and logprobs[0] is None
    assert [top and len(top) for top in choice["logprobs"]["top_logprobs"]] == [None] + [2] * 5
    scored = generate(fleet, sampling_params={"max_tokens": 1, "prompt_logprobs": 2})["prompt_logprobs"]
    assert [entry and next(iter(entry.items())) for entry in scored][1:] == [
        (str(token), entry[str(token)]) for token, entry in zip(PROMPT[1:], scored[1:], strict=True)
    ]
    assert [entry and entry[str(t)]["logprob"] for t, entry in zip(PROMPT, scored, strict=True)] == logprobs
    assert all(entry[str(token)]["rank"] > 0 for token, entry in zip(PROMPT[1:], scored[1:], strict=True))
    best = [max(each["logprob"] for each in entry.values()) for entry in scored[1:]]
    assert best == [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:]]
    beside = complete(fleet, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert beside == scored
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tokens": PROMPT}
    reply = fleet.one.client.post(
        "/v1/chat/completions/tokens", json=chat | {"max_tokens": 1, "prompt_logprobs": 2}
    ).json()
    assert reply["prompt_logprobs"] == scored


@pytest.mark.parametrize("most_inline", [INLINE_ENTRIES, 1])  # a longer echo is made in a thread
def test_an_echo_and_its_continuation(
    fleet: Fleet, most_inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "INLINE_ENTRIES", most_inline)
    asked = {"echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    (choice,) = complete(fleet, prompt="Hello", **asked)["choices"]
    (alone,) = complete(fleet, prompt="Hello", **asked | {"echo": False})["choices"]
    assert choice["text"] == "Hello" + alone["text"]
    num = len(choice["logprobs"]["tokens"]) - 3
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert choice["logprobs"][name][num:] == alone["logprobs"][name]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[num:] == [5 + each for each in alone["logprobs"]["text_offset"]]
    # As an evaluation reads it: the context's and the last token are cut off.
    continuation = choice["logprobs"]["token_logprobs"][1:-3]
    assert all(isinstance(value, float) and value < 0 for value in continuation)
    body = {"model": MODEL, "prompt": "Hello", **asked}
    *chunks, _ = read_stream(fleet.one.client, "/v1/completions", body)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, values in choice["logprobs"].items():
        assert [each for part in parts if part["logprobs"] for each in part["logprobs"][name]] == values
