"""Wrong requests: a clear 4xx that names the field, and nothing left behind."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import httpx
import pytest

from tests.conftest import is_within
from tests.server.conftest import MODEL, Api
from tests.server.live import LiveServer

JSON = {"content-type": "application/json"}


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": "1"}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": -(10**400)}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": "x"}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 21}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 10**400}, "min_tokens"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"rid": 5}, "rid"),
        ({"request_id": ["a"]}, "request_id"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"model": 5}, "model"),
    ],
)
def test_a_wrong_value_is_named_on_both_routes(api: Api, fields: dict[str, Any], param: str) -> None:
    for response in (api.chat(**fields), api.complete(**fields)):
        error = error_of(response)
        assert error["param"] == param
        assert param in error["message"]
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        ([{"role": "bob", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content",
        ),
        ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}],
            "messages[1].tool_calls[0].function",
        ),
        ([{"role": "user", "content": "refuse"}], "messages"),
        ([5], "messages[0]"),
    ],
)
def test_wrong_messages_are_named(api: Api, messages: Any, param: str) -> None:
    assert error_of(api.chat(messages=messages))["param"] == param


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("", "empty"),
        ([], "empty"),
        ([[]], "empty"),
        (["a", ""], "empty"),
        ([1, 99999], "99999"),
        ([-1], "-1"),
        ([2**40], str(2**40)),
        ([1.5], "expected a string"),
        ({"text": "x"}, "expected a string"),
        (5, "expected a string"),
        (["a", 5], "expected a string"),
        ([[1], "a"], "expected a string"),
        (None, "expected a string"),
    ],
)
def test_wrong_prompts_are_named(api: Api, prompt: Any, word: str) -> None:
    error = error_of(api.complete(prompt))
    assert error["param"] == "prompt"
    assert word in error["message"]


def test_missing_fields_are_named(server: LiveServer) -> None:
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        error = error_of(server.client.post(path, json={"model": MODEL}))
        assert (error["param"], "required" in error["message"]) == (field, True)


@pytest.mark.parametrize(
    "field", ["foo", "Temperature", "max_new_tokens", "__class__", "suffix2", "adapter", "repeat_penalty"]
)
def test_unknown_fields_are_named(api: Api, field: str) -> None:
    for response in (api.chat(**{field: 1}), api.complete(**{field: 1})):
        error = error_of(response)
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("structural_tag", "{}"),
    ],
)
def test_fields_of_the_contract_that_are_not_there_yet_are_refused_by_name(
    api: Api, field: str, value: Any
) -> None:
    error = error_of(api.chat(**{field: value}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"regex": "("}, "regex", "unclosed group"),
        ({"regex": r"(a)\1"}, "regex", "backreferences are not supported"),
        ({"regex": "a", "choice": ["b"]}, "regex", "choice and regex both guide the output"),
        ({"ebnf": "root ::= missing"}, "ebnf", "'missing' not found"),
        ({"ebnf": "nonsense"}, "ebnf", "Expected ::="),
        ({"choice": []}, "choice", "at least 1"),
        ({"guided_choice": [1]}, "guided_choice[0]", "string"),
        ({"guided_json": "{"}, "guided_json", "EOF while parsing"),
        ({"guided_json": {"type": "what"}}, "guided_json", "Invalid type: what"),
        ({"json_schema": {"enum": []}}, "json_schema", "Unsatisfiable"),
        ({"json_schema": '"' + "a" * 70000 + '"'}, "json_schema", "at most 65536"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "a JSON schema"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "a list of strings"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "not support",
        ),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "not known"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "not known"),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {"type": "object"}}}},
            "response_format.json_schema.schema",
            "the type is text; give that type",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            'Unimplemented keys: ["not"]',
        ),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_named_with_its_reason(
    api: Api, fields: dict[str, Any], param: str, reason: str
) -> None:
    for response in (api.chat(**fields), api.complete(**fields)):
        error = error_of(response)
        assert error["param"] == param and reason in error["message"], error


@pytest.mark.parametrize("value", [0, 1, "false"])
def test_only_the_very_value_that_asks_for_nothing_is_accepted(api: Api, value: Any) -> None:
    assert error_of(api.chat(use_beam_search=value))["param"] == "use_beam_search"


@pytest.mark.parametrize(("field", "value"), [("best_of", 2), ("suffix", "x"), ("n", 129), ("n", True)])
def test_fields_of_completions_that_are_not_there_yet(api: Api, field: str, value: Any) -> None:
    assert error_of(api.complete(**{field: value}))["param"] == field


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 5},
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 0, "stream": True},
    ],
)
def test_wrong_logprobs_of_chat(api: Api, fields: dict[str, Any]) -> None:
    assert error_of(api.chat(**fields))["param"] in fields


def test_contradicting_limits(api: Api) -> None:
    assert error_of(api.chat(max_tokens=3, max_completion_tokens=4))["param"] == "max_tokens"


def test_a_prompt_that_is_too_long_is_refused_at_once(api: Api) -> None:
    def ask() -> None:
        long = "word " * 100_000
        for response in (api.chat(long), api.complete(long), api.complete([70] * 512)):
            error = error_of(response)
            assert error["code"] == "context_length_exceeded"
            assert "512" in error["message"]

    assert is_within(2.0, ask)


def test_max_tokens_that_do_not_fit(api: Api) -> None:
    for field, response in (
        ("max_tokens", api.complete([70] * 500, max_tokens=13)),
        ("max_completion_tokens", api.chat("x", max_tokens=None, max_completion_tokens=512)),
    ):
        error = error_of(response)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert api.complete([70] * 500, max_tokens=12).status_code == 200


def test_an_unknown_model_is_404(api: Api) -> None:
    for response in (api.chat(model="gpt-4"), api.complete(model="")):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert MODEL in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"model": "x",}',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"\xff": 1}',
        b'{"a": NaN}',
        b"[" * 100_000,
        b'{"model": "\\ud800"}',
        b"[]",
        b"5",
        b"null",
        b'"text"',
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_is_not_a_json_object_is_400(server: LiveServer, path: str, body: bytes) -> None:
    error_of(server.client.post(path, content=body, headers=JSON))


def test_an_empty_body_lacks_its_fields(server: LiveServer) -> None:
    assert "required" in error_of(server.client.post("/v1/completions"))["message"]


def test_a_lone_surrogate_is_refused(server: LiveServer) -> None:
    body = b'{"model": "tiny-model", "prompt": "a\\ud83d", "max_tokens": 2}'
    assert server.client.post("/v1/completions", content=body).status_code in (200, 400)


def test_a_body_of_20_mb_is_refused_without_being_read(server: LiveServer) -> None:
    error = error_of(server.client.post("/v1/completions", content=b"x" * 20_000_000), 413)
    assert error["code"] == "request_too_large"
    assert "16 MiB" in error["message"]


def test_a_client_that_reads_only_after_it_has_sent_20_mb_gets_the_answer(server: LiveServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", body=b"x" * 20_000_000)
    with connection.getresponse() as response:
        assert (response.status, json.loads(response.read())["error"]["code"]) == (413, "request_too_large")
    connection.close()


def test_a_body_of_20_mb_in_chunks_is_refused(server: LiveServer) -> None:
    def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 1_000_000

    error_of(server.client.post("/v1/completions", content=chunks()), 413)


def test_wrong_routes_and_methods(server: LiveServer) -> None:
    assert error_of(server.client.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(server.client.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    other = server.client.get("/nothing")
    assert (other.status_code, other.json()["object"], other.json()["code"]) == (404, "error", 404)


def test_streams_are_refused_before_they_begin(api: Api) -> None:
    error_of(api.chat(stream=True, max_tokens=100_000))
    error_of(api.complete([99999], stream=True))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny-model", "prompt": [' + b"1.5," * 2_000_000 + b"1.5]}",
        b'{"model": "tiny-model", "prompt": [' + b"[1]," * 2_000_000 + b"[1]]}",
        b'{"model": "tiny-model", "messages": [' + b"{}," * 2_000_000 + b"{}]}",
        b"{" + b"".join(b'"x%d":0,' % number for number in range(500_000)) + b'"x":0}',
        b'{"model": "tiny-model", "prompt": "a", "logit_bias": {'
        + b"".join(b'"x%d":0,' % number for number in range(500_000))
        + b'"x":0}}',
        b'{"model": "' + b"x" * 10_000_000 + b'", "prompt": "a"}',
        b'{"' + b"x" * 10_000_000 + b'": 1}',
    ],
    ids=["numbers", "lists", "messages", "fields", "biases", "model", "name"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_millions_of_mistakes_cost_no_more_than_one(server: LiveServer, path: str, body: bytes) -> None:
    def ask() -> None:
        response = server.client.post(path, content=body, headers=JSON)
        assert response.status_code in (400, 404)
        assert len(response.content) < 1000

    assert is_within(3.0, ask)


def test_more_prompts_than_the_queue_takes_are_refused_by_number(api: Api) -> None:
    assert "at most 4096" in error_of(api.complete(["a"] * 4097))["message"]
    response = api.generate(["a"] * 4097)
    assert (response.status_code, "at most 4096" in response.text) == (400, True)


def test_a_bias_is_for_300_tokens_at_most(api: Api) -> None:
    bias = {str(token): 1 for token in range(301)}
    for response in (api.chat(logit_bias=bias), api.complete(logit_bias=bias)):
        error = error_of(response)
        assert (error["param"], "301 entries; at most 300" in error["message"]) == ("logit_bias", True)
    del bias["300"]
    assert api.chat(logit_bias=bias).status_code == api.complete(logit_bias=bias).status_code == 200
    native = api.generate(sampling_params={"max_new_tokens": 2, "logit_bias": bias | {"300": 1}})
    assert native.status_code == 200


def test_entries_of_options_times_prompts_are_bounded(api: Api) -> None:
    bias = {str(token): 1 for token in range(300)}
    stops = list(range(300))
    prompts = ["a"] * 1000
    error = error_of(api.complete(prompts, logit_bias=bias))
    assert "300 entries for 1000 choices, 300000 in all; at most 262144" in error["message"]
    assert error_of(api.complete(prompts, stop_token_ids=stops))["param"] == "logit_bias"
    params = {"max_new_tokens": 1, "logit_bias": bias}
    for each in (params, [params] * 1000):
        response = api.generate(prompts, sampling_params=each)
        assert (response.status_code, "at most 262144" in response.text) == (400, True)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (HEAD, b"X-A: " + b"a" * 8000 + b"\r\n"),
        (HEAD + b"X-A: ", b"a" * 8000),
        (b"GET /", b"a" * 8000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-A: " + b"a" * 8000 + b"\r\n"),
    ],
    ids=["headers", "header", "line", "trailers"],
)
def test_endless_headers_are_refused_and_not_kept(server: LiveServer, begin: bytes, more: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(begin)
        with pytest.raises(OSError):  # closed by the server
            for _ in range(5000):
                connection.sendall(more)


def test_long_headers_and_a_long_body_in_one_piece_are_fine(server: LiveServer) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2, "user": "x" * 300_000})
    for _ in range(2):
        headers = JSON | {"x-long": "x" * 30_000}
        assert server.client.post("/v1/completions", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("cut", [None, 30])
def test_an_upgrade_to_another_protocol_is_ignored_and_the_body_read(
    server: LiveServer, cut: int | None
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2}).encode()
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEA\r\nUpgrade: h2c\r\n"
    request = HEAD + upgrade + b"Content-Length: %d\r\n\r\n" % len(body) + body
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for _ in range(2):  # the second on the same connection
            connection.sendall(request[:cut])
            if cut:
                connection.sendall(request[cut:])
            with http.client.HTTPResponse(connection) as response:
                response.begin()
                assert (response.status, b"text_completion" in response.read()) == (200, True)
