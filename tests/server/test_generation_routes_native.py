from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Api
from tests.server.events import read_stream
from tests.server.live import LiveServer


def test_generate_answers_in_sglangs_shape(api: Api) -> None:
    reply = api.generate("abc", sampling_params={"max_new_tokens": 4}).json()
    assert reply["text"] == "abca"
    assert reply["output_ids"] == [67, 68, 69, 67]
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert reply["meta_info"]["weight_version"] == "0"


def test_the_default_is_128_tokens(api: Api) -> None:
    assert api.generate("abc").json()["meta_info"]["completion_tokens"] == 128


def test_a_batch_is_a_list(api: Api) -> None:
    body = {"sampling_params": {"max_new_tokens": 2}, "rid": "batch"}
    replies = api.generate(["ab", "cd"], **body).json()
    assert [reply["text"] for reply in replies] == ["ab", "cd"]
    assert [reply["meta_info"]["id"] for reply in replies] == ["batch_0", "batch_1"]
    assert isinstance(api.generate(["ab"], **body).json(), list)


def test_token_ids(api: Api, server: LiveServer) -> None:
    body = {"input_ids": [[67], [68]], "sampling_params": {"max_new_tokens": 2}}
    assert [r["output_ids"] for r in server.client.post("/generate", json=body).json()] == [
        [67, 67],
        [68, 68],
    ]


def test_a_stream_is_cumulative(server: LiveServer) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 6}, "return_logprob": True}
    *updates, done = read_stream(server.client, "/generate", body)
    assert done == "[DONE]"
    assert updates[-1]["text"] == "abcabc"
    for update in updates:
        count = update["meta_info"]["completion_tokens"]
        assert count == len(update["output_ids"]) == len(update["meta_info"]["output_token_logprobs"])


def test_unknown_fields_are_ignored(api: Api) -> None:
    assert api.generate(
        extra=1, sampling_params={"max_new_tokens": 1, "spaces_between_special_tokens": False}
    ).is_success


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "text or input_ids"),
        ({"text": ""}, "text is empty"),
        ({"input_ids": [1, 99999]}, "99999"),
        ({"text": 5}, "text: expected a string"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"text": "a", "sampling_params": {"n": 2}}, "n=2"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema: the json schema cannot"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "regex and ebnf both guide"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "return_routed_experts": True}, "return_routed_experts"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a" * 600}, "maximum context length"),
        ([], "JSON object"),
    ],
)
def test_bad_input_is_named(server: LiveServer, body: Any, word: str) -> None:
    response = server.client.post("/generate", json=body)
    error = response.json()
    assert response.status_code == error["code"] == 400
    assert error["object"] == "error"
    assert word in error["message"]


def test_invalid_json_is_400(server: LiveServer) -> None:
    assert server.client.post("/generate", content=b"{").status_code == 400
