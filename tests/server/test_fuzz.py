"""Random bodies: no answer is a 5xx, no request hangs, and no request is left in the engine."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.api.asks_nothing import FIELDS
from segue.api.native import NativeGenerate, NativeSampling
from segue.api.openai.requests import ChatCompletionRequest, CompletionRequest
from tests.server.conftest import MODEL
from tests.server.live import LiveServer

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 600)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from([10**400, "user", "text", "abc", "<|im_end|>", MODEL, ""])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "x"]) | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "tool", "x"]), "content": st.text() | VALUES}
    ),
    max_size=3,
)
GOOD: dict[str, Any] = {
    "model": st.just(MODEL),
    "messages": MESSAGES,
    "prompt": st.text(min_size=1, max_size=30) | st.lists(st.integers(-1, 330), max_size=5),
    "max_tokens": st.integers(1, 20),
    "max_new_tokens": st.integers(1, 20),
    "text": st.text(min_size=1, max_size=30),
    "stream": st.booleans(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "rid": st.none(),
    "request_id": st.none(),
}


def bodies(names: list[str], required: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Draws bodies: mostly the required fields and other fields of any value, sometimes any fields."""
    fields = {name: GOOD.get(name, VALUES) | VALUES for name in names}
    usual = {name: GOOD[name] for name in required}
    rest = {name: value for name, value in fields.items() if name not in usual}
    return st.fixed_dictionaries(usual, optional=rest) | st.fixed_dictionaries({}, optional=fields)


CHAT = bodies(
    [*ChatCompletionRequest.__struct_fields__, *FIELDS["chat"]],
    ["model", "messages", "max_tokens"],
)
COMPLETION = bodies([*CompletionRequest.__struct_fields__], ["model", "prompt", "max_tokens"])
SAMPLING = bodies([*NativeSampling.__struct_fields__], ["max_new_tokens"])
NATIVE = bodies([name for name in NativeGenerate.__struct_fields__ if name != "sampling_params"], ["text"])

FUZZ = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def post(server: LiveServer, path: str, body: Any) -> None:
    response = server.client.post(
        path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        content = response.json()
        assert content.get("error", content)["message"]


@FUZZ
@given(body=CHAT)
def test_chat(server: LiveServer, body: Any) -> None:
    post(server, "/v1/chat/completions", body)


@FUZZ
@given(body=COMPLETION)
def test_completions(server: LiveServer, body: Any) -> None:
    post(server, "/v1/completions", body)


@FUZZ
@given(body=NATIVE, sampling=SAMPLING | VALUES)
def test_generate(server: LiveServer, body: dict[str, Any], sampling: Any) -> None:
    post(server, "/generate", body | {"sampling_params": sampling})


@FUZZ
@given(body=VALUES)
def test_control(server: LiveServer, body: Any) -> None:
    post(server, "/abort_request", body)
