"""The description of the routes: what it says of replies and errors is what the server answers."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
import pytest

from tests.server.conftest import MODEL
from tests.server.live import LiveServer
from tests.server.routes import ROUTES

ASK = {"model": MODEL, "max_tokens": 4}
CHAT = {**ASK, "messages": [{"role": "user", "content": "Hello"}]}
TEXT = {**ASK, "prompt": "Hello"}
RESPONSE = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}
NATIVE = {"sampling_params": {"max_new_tokens": 4}}
NATIVE_IDS = {"sampling_params": {"max_tokens": 4, "logprobs": 1}}
NO_CONTENT = {"/abort_request"}
# Method, path as it is sent, body, status.
CALLS: list[tuple[str, str, Any, int]] = [
    *(("GET", path, None, 200) for path in ("/health", "/ready", "/ping", "/health_generate")),
    *(("GET", path, None, 200) for path in ("/version", "/metrics", "/v1/models", f"/v1/models/{MODEL}")),
    ("GET", "/v1/models/another", None, 404),
    ("POST", "/v1/chat/completions", CHAT, 200),
    ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, 200),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True}, 200),
    ("POST", "/v1/chat/completions", {**CHAT, "temperature": 3}, 400),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "another"}, 404),
    ("POST", "/v1/responses", RESPONSE, 200),
    ("POST", "/v1/responses", {**RESPONSE, "stream": True}, 200),
    ("POST", "/v1/responses", {**RESPONSE, "store": 1, "previous_response_id": "resp_1"}, 400),
    ("POST", "/v1/messages", {**CHAT, "stop_sequences": ["x"]}, 200),
    ("POST", "/v1/messages", {**CHAT, "stream": True}, 200),
    ("POST", "/v1/messages", {**CHAT, "container": "c"}, 400),
    ("POST", "/v1/messages", {**CHAT, "model": "another"}, 404),
    ("POST", "/v1/messages/count_tokens", {"messages": CHAT["messages"]}, 200),
    ("POST", "/v1/messages/count_tokens", {}, 400),
    ("POST", "/v1/completions", {**TEXT, "logprobs": 2}, 200),
    ("POST", "/v1/completions", {**TEXT, "prompt": ["Hello", "World"]}, 200),
    ("POST", "/v1/completions", "Hello", 400),
    ("POST", "/generate", {**NATIVE, "text": "Hello"}, 200),
    ("POST", "/generate", {**NATIVE, "text": ["Hello", "World"], "return_logprob": True}, 200),
    ("POST", "/generate", {**NATIVE, "text": "Hello", "stream": True}, 200),
    ("POST", "/generate", NATIVE, 400),
    ("POST", "/inference/v1/generate", {"token_ids": [5, 6], **NATIVE_IDS}, 200),
    ("POST", "/inference/v1/generate", {}, 400),
    ("POST", "/tokenize", {"prompt": "Hello"}, 200),
    ("POST", "/tokenize", {}, 400),
    ("POST", "/detokenize", {"tokens": [5]}, 200),
    ("POST", "/detokenize", {}, 400),
    ("POST", "/v1/chat/completions/render", CHAT, 200),
    ("POST", "/v1/completions/render", TEXT, 200),
    ("POST", "/abort_request", {"rid": "none"}, 200),
    ("POST", "/pause_generation", {"mode": "in_place"}, 200),
    ("GET", "/is_paused", None, 200),
    ("POST", "/continue_generation", None, 200),
    ("POST", "/pause_generation", {"mode": "never"}, 400),
    ("POST", "/pause?mode=keep", None, 200),
    ("POST", "/resume", None, 200),
    ("GET", "/flush_cache", None, 200),
    ("POST", "/flush_cache?timeout=soon", None, 400),
    ("GET", "/is_sleeping", None, 200),
    ("POST", "/sleep", None, 400),
    ("POST", "/release_memory_occupation", {"tags": ["weights"]}, 400),
    *(("GET", path, None, 200) for path in ("/server_info", "/get_server_info", "/model_info")),
    *(("GET", path, None, 200) for path in ("/weight_version", "/weights_update_status")),
    ("POST", "/drain", {"drain": True}, 200),
    ("POST", "/drain", {"drain": False}, 200),
    ("POST", "/update_weights_from_disk", {"model_path": 1}, 400),
    ("POST", "/prepare_weights_update", {"buckets": [], "group_name": "none"}, 200),
    ("POST", "/update_weight_version", {}, 400),
]


@pytest.fixture(scope="module")
def document(shared_server: LiveServer) -> Any:
    return shared_server.client.get("/openapi.json").json()


def resolved(document: Any, node: Any) -> Any:
    """A node with its references replaced by what they refer to."""
    if isinstance(node, dict):
        if isinstance(at := node.get("$ref"), str):
            found = document
            for step in at.removeprefix("#/").split("/"):
                found = found[step]
            return resolved(document, found)
        return {name: resolved(document, each) for name, each in node.items()}
    return [resolved(document, each) for each in node] if isinstance(node, list) else node


def described(document: Any, method: str, path: str) -> Any:
    """The replies of the route that takes this path."""
    plain = path.partition("?")[0]
    for template, operations in document["paths"].items():
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", ".+", re.escape(template)), plain):
            return resolved(document, operations[method.lower()]["responses"])
    raise AssertionError(f"{path} is not described")


def check(document: Any, response: httpx.Response, method: str, path: str) -> None:
    content = described(document, method, path)[str(response.status_code)].get("content", {})
    if path in NO_CONTENT and response.status_code == 200:
        assert not content and not response.content
        return
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in content, (path, response.status_code, kind)
    if kind == "application/json":
        jsonschema.validate(response.json(), content[kind]["schema"], jsonschema.Draft202012Validator)


def test_replies_are_as_described(server: LiveServer, document: Any) -> None:
    for method, path, body, status in CALLS:
        response = server.client.request(method, path, json=body)
        assert response.status_code == status, (path, response.text)
        check(document, response, method, path)


def test_a_reply_that_is_not_as_described_is_found(document: Any) -> None:
    wrong = httpx.Response(200, json={"object": "list", "data": [{"id": 1}]})
    with pytest.raises(jsonschema.ValidationError):
        check(document, wrong, "GET", "/v1/models")


def test_every_reply_is_described_and_every_error_has_a_form(document: Any) -> None:
    assert "$defs" not in str(document), "nothing refers to what the document does not have"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            replies = resolved(document, operation["responses"])
            assert path in NO_CONTENT or replies["200"]["content"], path
            for status, reply in replies.items():
                assert status == "200" or "application/json" in reply["content"], (path, method, status)
            assert "503" in replies and ("415" in replies) == (method == "post")


def test_the_bounds_of_a_chats_fields_are_described_as_they_are_checked(
    server: LiveServer, document: Any
) -> None:
    operation = document["paths"]["/v1/chat/completions"]["post"]
    fields = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    bounds = {
        (name, bound): kind[bound]
        for name, field in fields.items()
        for kind in field.get("anyOf", ())
        for bound in ("minimum", "exclusiveMinimum", "maximum")
        if bound in kind
    }
    names = {name for name, _ in bounds}
    assert names >= {"temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "max_completion_tokens"}
    assert names >= {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    step = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1}
    needs = {"top_logprobs": {"logprobs": True}, "max_completion_tokens": {"max_tokens": None}}
    for (name, bound), value in bounds.items():
        body = {**CHAT, **needs.get(name, {})}
        beyond = server.client.post("/v1/chat/completions", json={**body, name: value + step[bound]})
        assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, name)
        if bound != "exclusiveMinimum":
            reply = server.client.post("/v1/chat/completions", json={**body, name: value})
            assert reply.status_code == 200, (name, value, reply.text)
    assert fields["messages"]["minItems"] == 1
    empty = server.client.post("/v1/chat/completions", json={**CHAT, "messages": []})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "messages")


def test_another_method_is_answered_with_those_of_the_path(server: LiveServer) -> None:
    methods: dict[str, set[str]] = {}
    for route in ROUTES:
        methods.setdefault(route.path, set()).update(route.methods)
    assert methods["/flush_cache"] == {"GET", "POST"}
    for path in ("/flush_cache", "/health", "/generate", "/v1/models"):
        response = server.client.put(path)
        assert response.status_code == 405
        assert set(response.headers["allow"].split(", ")) == methods[path]
