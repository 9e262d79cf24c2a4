"""Token ids in and out on a deterministic engine: the same ids and bits whichever route asks."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_every_chunk_of_openai_s_streams_has_ids(fleet: Fleet, kind: str) -> None:
    """Also the last chunk of a choice, which has the finish reason and no token."""
    prompt = {"prompt": PROMPT} if kind == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    body = {"model": MODEL, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True, **prompt}
    *chunks, _ = read_stream(fleet.one.client, f"/v1/{kind}", body)
    first = 0 if kind == "completions" else 1  # a chat begins with the role
    ids = [chunk["choices"][0]["token_ids"] for chunk in chunks[first:]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length" and ids[-1] == []
    assert sum(map(len, ids)) == 5


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


def test_each_route_gives_the_same_choices_and_the_first_is_what_one_alone_is(fleet: Fleet) -> None:
    alone = generate(fleet)["choices"][0]
    reply = generate(fleet, sampling_params=PARAMS | {"n": 3})
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["choices"][0] == alone
    ids = [choice["token_ids"] for choice in reply["choices"]]
    assert len(set(map(tuple, ids))) == 3
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (6, 3 * 24)
    assert [each["output_ids"] for each in native(fleet, n=3)] == ids
    fields = {name: value for name, value in PARAMS.items() if name != "logprobs"}
    pairs = complete(fleet, prompt=[PROMPT, PROMPT[1:]], n=3, return_token_ids=True, **fields)["choices"]
    assert [choice["token_ids"] for choice in pairs[:3]] == ids
    assert [choice["prompt_token_ids"] for choice in pairs] == [PROMPT] * 3 + [PROMPT[1:]] * 3
    assert [choice["index"] for choice in pairs] == list(range(6))
    equal = complete(fleet, n=2, max_tokens=4, temperature=0)["choices"]
    assert equal[0] | {"index": 1} == equal[1]


def test_choices_are_streamed_side_by_side(fleet: Fleet) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 3, "seed": 1}
    body |= {"max_tokens": 8, "ignore_eos": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = read_stream(fleet.one.client, "/v1/chat/completions", body)
    del body["stream_options"]
    whole = fleet.one.client.post("/v1/chat/completions", json=body).json()
    parts: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        parts[choice["index"]].append(choice)
    for choice in whole["choices"]:
        found = parts[choice["index"]]
        assert found[0]["delta"]["role"] == "assistant" and found[-1]["finish_reason"] == "length"
        assert "".join(part["delta"].get("content", "") for part in found) == choice["message"]["content"]
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order), "no choice waits for the one before it"
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] < 60
    assert last["usage"]["completion_tokens"] == 24


def test_the_prompt_of_several_choices_is_computed_once(fleet: Fleet) -> None:
    ids = [(7 * i) % 200 + 5 for i in range(200)]
    body = {"input_ids": ids, "sampling_params": {"n": 5, "max_new_tokens": 2, "ignore_eos": True}}
    replies = fleet.two.client.post("/generate", json=body).json()
    assert [each["meta_info"]["cached_tokens"] for each in replies] == [0] + [196] * 4  # all full pages
    usage = fleet.two.client.post(
        "/v1/completions", json={"prompt": ids[::-1], "n": 5, "max_tokens": 1}
    ).json()
    assert usage["usage"]["prompt_tokens"] == 200
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_choices_go_on_behind_a_pause(fleet: Fleet, mode: str) -> None:
    """The pause falls in the middle, once each choice has a token; the abort of the id ends all."""
    client, body = fleet.one.client, {"token_ids": PROMPT, "stream": True, "request_id": "mine"}
    params = PARAMS | {"n": 3, "max_tokens": 400, "logprobs": None}
    expected = generate(fleet, sampling_params=params | {"max_tokens": 60})["choices"]
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    is_paused = is_aborted = False
    reasons = []
    with client.stream("POST", "/inference/v1/generate", json=body | {"sampling_params": params}) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            ids[choice["index"]] += choice["token_ids"]
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
            if not is_paused and all(ids.values()):
                is_paused = True
                client.post("/pause_generation", json={"mode": mode})
                client.post("/continue_generation")
            if not is_aborted and min(map(len, ids.values())) >= 60:
                is_aborted = True
                client.post("/abort_request", json={"rid": "mine"})
    assert [ids[i][:60] for i in range(3)] == [choice["token_ids"] for choice in expected]
    assert reasons == ["abort"] * 3


def test_only_allowed_tokens_come_and_no_bad_words(fleet: Fleet) -> None:
    params = PARAMS | {"allowed_token_ids": [70, 71, 72], "n": 2, "temperature": 2.0}
    reply = generate(fleet, sampling_params=params)
    ids = [token for choice in reply["choices"] for token in choice["token_ids"]]
    assert set(ids) == {70, 71, 72}
    assert [choice["token_ids"] for choice in reply["choices"]] == [
        each["output_ids"] for each in native(fleet, n=2, temperature=2.0, allowed_token_ids=[70, 71, 72])
    ]
    text = fleet.one.client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    twos = {text[i : i + 2] for i in range(0, 40) if text[i] != text[i + 1]}
    without = generate(fleet, sampling_params=params | {"bad_words": [*twos]})
    for choice in without["choices"]:
        found = fleet.one.client.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"]
        assert len(found) == 24 and not any(word in found for word in twos)


@pytest.mark.parametrize(("keeps", "text"), [(True, "d" * 9), (False, "d" * 6)])
def test_a_stop_string_counts_behind_min_tokens_and_may_stay_in_the_text(
    fleet: Fleet, keeps: bool, text: str
) -> None:
    fields = {"allowed_token_ids": [70], "max_tokens": 20, "min_tokens": 6, "stop": "ddd"}
    (choice,) = complete(fleet, **fields, include_stop_str_in_output=keeps)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
