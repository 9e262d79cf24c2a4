"""vLLM's route with token ids in and out: its bodies, and its replies."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from segue.api.openai.replies import encode
from segue.api.openai.requests import Wanted
from segue.api.token_generate import TokenReplies, parse_token_call
from segue.errors import InvalidRequestError, ModelNotFoundError, UnsupportedFieldError
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import Generation, Output
from segue.frontend.tokenizer import PromptEncoder, ServedModel
from segue.messages.requests import Finished, TokenLogprob

MODEL = ServedModel(names=["name"], max_prompts=10, encoder=cast(PromptEncoder, None))


def call(params: dict[str, Any] | None = None, **fields: Any) -> Wanted:
    return parse_token_call({"token_ids": [3, 4], "sampling_params": params or {}, **fields}, MODEL)


def test_names_are_vllms() -> None:
    params = {
        **{"max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_k": -1, "logprobs": 2, "seed": 3},
        **{"stop": "x", "stop_token_ids": [7], "prompt_logprobs": 1, "include_stop_str_in_output": True},
    }
    wanted = call(params, priority=2, request_id="mine", model="name", return_token_ids=True, cache_salt="s")
    (request,) = wanted.requests
    options = request.options
    assert (options.max_tokens, options.min_tokens, options.temperature, options.seed) == (5, 1, 0.5, 3)
    assert (options.logprobs, options.prompt_logprobs_start, options.num_prompt_top) == (2, 0, 1)
    assert (options.stop, options.stop_token_ids, options.must_fit) == (("x",), [7], False)
    assert (request.rid, request.priority, request.prompt) == ("mine", -2, [3, 4])
    assert request.cache_salt == "s"
    assert (wanted.id, wanted.shown.token_ids, wanted.batch_id) == ("mine", True, None)


def test_without_parameters_the_output_fills_the_context() -> None:
    options = call().requests[0].options
    assert (options.max_tokens, options.temperature, options.logprobs) == (None, 1.0, -1)
    assert options.prompt_logprobs_start == -1


def test_what_asks_for_nothing_is_taken() -> None:
    nothing = {"features": None, "kv_transfer_params": {}, "output_mode": "tokens", "of_the_client": 1}
    params = {
        **{"n": 1, "best_of": 1, "bad_words": [], "structured_outputs": None, "output_kind": 2},
        **{"flat_logprobs": True, "detokenize": False, "extra_args": {"x": True}, "length_penalty": 1.0},
    }
    assert call(params, **nothing).requests[0].options.logprobs == -1


@pytest.mark.parametrize(
    ("params", "fields", "param"),
    [
        ({"n": 2}, {}, "n"),
        ({"structured_outputs": {"structural_tag": "{}"}}, {}, "structured_outputs.structural_tag"),
        ({"allowed_token_ids": [1]}, {}, "allowed_token_ids"),
        ({"extra_args": {"kv_transfer_params": {"a": 1}}}, {}, "kv_transfer_params"),
        ({}, {"features": {"mm_hashes": {}}}, "features"),
        ({}, {"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({}, {"output_mode": "text"}, "output_mode"),
        (
            {},
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    ],
)
def test_what_is_not_there_is_refused_by_name(params: Any, fields: Any, param: str) -> None:
    with pytest.raises(UnsupportedFieldError) as raised:
        call(params, **fields)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("params", "fields", "param"),
    [
        ({"logprobs": -1}, {}, "logprobs"),
        ({"temperature": "hot"}, {}, "temperature"),
        ({"prompt_logprobs": 0}, {"stream": True}, "prompt_logprobs"),
        ({}, {"token_ids": "text"}, "token_ids"),
        ({}, {"token_ids": None}, "token_ids"),
        ({}, {"request_id": "x" * 300}, "request_id"),
        ({}, {"priority": 1 << 40}, "priority"),
        ({}, {"cache_salt": "x" * 2000}, "cache_salt"),
        ({}, {"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_wrong_values_are_named(params: Any, fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        call(params, **fields)
    assert raised.value.param == param


def test_another_model_is_unknown() -> None:
    with pytest.raises(ModelNotFoundError):
        call(model="other")


# --- replies ---

TABLE = TokenTable([b"a", b"b", b"c"])
END = Finished(
    rid="i",
    reason="stop",
    matched=2,
    num_tokens=2,
    prompt_tokens=2,
    cached_tokens=1,
    versions=[("0", 0, 1), ("1", 1, 2)],
)
FIRST = Output("", [0], [TokenLogprob(0, -1.0, [(1, -0.5), (0, -1.0)])], [0], None)
LAST = Output("", [2], [TokenLogprob(2, -3.0, [(0, -0.5), (1, -1.5)])], [1], END)


def replies(wanted: Wanted) -> TokenReplies:
    entries = [TokenLogprob(4, -0.25, [(1, -0.125)], 9)]
    generation = SimpleNamespace(
        states=[SimpleNamespace(prompt_ids=[3, 4], prompt_logprobs=entries)], ends=[END]
    )
    return TokenReplies(TABLE, wanted, cast(Generation, generation))


def test_a_stream_joined_is_the_whole_reply() -> None:
    asked: dict[str, Any] = {"return_token_ids": True, "request_id": "i"}
    params = {"logprobs": 2, "stop_token_ids": [2]}
    whole = replies(call(params, **asked)).whole([FIRST.joined(LAST)])
    stream = replies(call(params, stream=True, stream_options={"include_usage": True}, **asked))
    chunks = [stream.chunk(0, FIRST), stream.chunk(0, LAST), stream.last_chunk()]
    (choice,) = whole["choices"]
    first, last = (chunk["choices"][0] for chunk in chunks[:2] if chunk)
    assert first["token_ids"] + last["token_ids"] == choice["token_ids"] == [0, 2]
    content = [each["logprobs"]["content"] for each in (first, last)]
    assert content[0] + content[1] == choice["logprobs"]["content"]
    assert (first["finish_reason"], last["finish_reason"]) == (None, choice["finish_reason"])
    assert (
        last["weight_versions"]
        == choice["weight_versions"]
        == [
            {"version": "0", "start": 0, "end": 1},
            {"version": "1", "start": 1, "end": 2},
        ]
    )
    assert [chunk and chunk.get("prompt_token_ids") for chunk in chunks] == [[3, 4], None, None]
    assert chunks[2] == {"request_id": "i", "choices": [], "usage": whole["usage"]}
    assert (whole["request_id"], whole["prompt_token_ids"], choice["stop_reason"]) == ("i", [3, 4], 2)


def test_logprobs_begin_with_the_chosen_token_and_name_it_as_every_release_does() -> None:
    reply = replies(call({"logprobs": 2})).whole([LAST])
    (entry,) = reply["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["token_id"], entry["logprob"]) == ("token_id:2", 2, -3.0)
    assert [each["token_id"] for each in entry["top_logprobs"]] == [2, 0]
    reply = replies(call({"logprobs": 0})).whole([LAST])
    assert [each["token_id"] for each in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]] == [2]
    assert replies(call()).whole([LAST])["choices"][0]["logprobs"] is None


def test_the_end_of_a_text_is_no_stop_reason_of_the_client() -> None:
    assert replies(call()).whole([LAST])["choices"][0]["stop_reason"] is None


def test_logprobs_of_the_prompt_are_by_token() -> None:
    reply = replies(call({"prompt_logprobs": 1, "max_tokens": 1})).whole([LAST])
    assert json.loads(encode(reply["prompt_logprobs"])) == [
        None,
        {
            "4": {"logprob": -0.25, "rank": 9, "decoded_token": ""},
            "1": {"logprob": -0.125, "rank": 1, "decoded_token": "b"},
        },
    ]
