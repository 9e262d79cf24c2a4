"""Where the engines of a prompt meet: the same fields, rules and errors in every dialect."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from segue.api.native import parse_call
from segue.api.openai.requests import chat_call, completion_call, parse_chat, parse_completion
from segue.errors import InvalidRequestError, UnsupportedFieldError
from segue.frontend.request import Bootstrap, GenerateRequest
from segue.frontend.tokenizer import PromptEncoder, ServedModel

WHERE = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
HERE = Bootstrap(host="10.0.0.1", port=8998, room=7)


async def render(messages: list[dict[str, Any]]) -> str:
    return str(messages)


MODEL = ServedModel(
    names=["name"], max_prompts=10, encoder=cast(PromptEncoder, SimpleNamespace(render=render))
)


def native(count: int, **fields: Any) -> list[GenerateRequest]:
    text: Any = "x" if count == 1 else ["x"] * count
    return parse_call({"text": text} | fields, 10).requests


def completion(count: int, **fields: Any) -> list[GenerateRequest]:
    prompt: Any = "x" if count == 1 else ["x"] * count
    return completion_call(parse_completion({"model": "name", "prompt": prompt} | fields), MODEL).requests


def chat(count: int, **fields: Any) -> list[GenerateRequest]:
    assert count == 1, "a chat has one prompt"
    body = {"model": "name", "messages": [{"role": "user", "content": "x"}]}
    return asyncio.run(chat_call(parse_chat(body | fields), MODEL)).requests


every_dialect = pytest.mark.parametrize("requests", [native, completion, chat])
with_batches = pytest.mark.parametrize("requests", [native, completion])


@every_dialect
def test_a_prompt_has_what_its_body_says(requests: Any) -> None:
    assert [request.bootstrap for request in requests(1, **WHERE)] == [HERE]


@every_dialect
def test_a_list_of_one_value_is_taken_for_one_prompt(requests: Any) -> None:
    where = {name: [value] for name, value in WHERE.items()}
    assert [request.bootstrap for request in requests(1, **where)] == [HERE]


@every_dialect
@pytest.mark.parametrize("fields", [{}, dict.fromkeys(WHERE)])
def test_without_the_fields_one_engine_does_all_of_it(requests: Any, fields: dict[str, Any]) -> None:
    assert [request.bootstrap for request in requests(1, **fields)] == [None]


@with_batches
def test_prompts_of_a_batch_have_values_of_their_own_or_in_common(requests: Any) -> None:
    made = requests(2, **WHERE | {"bootstrap_port": [1, 2], "bootstrap_room": [5, 6]})
    assert [request.bootstrap for request in made] == [
        Bootstrap(host="10.0.0.1", port=1, room=5),
        Bootstrap(host="10.0.0.1", port=2, room=6),
    ]


@every_dialect
@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"bootstrap_host": None}, "bootstrap_host", "bootstrap_host is missing; give bootstrap_host and"),
        ({"bootstrap_room": None}, "bootstrap_room", "bootstrap_room is missing"),
        ({"bootstrap_host": None, "bootstrap_room": None}, "bootstrap_host", "bootstrap_host is missing"),
        ({"bootstrap_room": [1, 2]}, "bootstrap_room", "has 2 values for 1 prompts; give one each"),
        ({"bootstrap_port": []}, "bootstrap_port", "has 0 values for 1 prompts"),
        ({"bootstrap_port": 0}, "bootstrap_port", "bootstrap_port=0: must be between 1 and 65535"),
        ({"bootstrap_port": 65536}, "bootstrap_port", "must be between 1 and 65535"),
        ({"bootstrap_room": -1}, "bootstrap_room", "must be between 0 and 2**63 - 1"),
        ({"bootstrap_room": 1 << 63}, "bootstrap_room", "must be between 0 and 2**63 - 1"),
        ({"bootstrap_host": 5}, "bootstrap_host", "expected a string or a list of strings"),
        ({"bootstrap_port": "8998"}, "bootstrap_port", "expected an integer or a list of integers"),
        ({"bootstrap_room": True}, "bootstrap_room", "expected an integer or a list of integers"),
        ({"bootstrap_room": 0.5}, "bootstrap_room", "expected an integer or a list of integers"),
    ],
)
def test_a_wrong_field_names_value_and_rule(
    requests: Any, changes: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        requests(1, **WHERE | changes)
    assert raised.value.param == param and words in raised.value.message


@with_batches
def test_no_two_prompts_may_have_one_room(requests: Any) -> None:
    for room in (7, [7, 7]):
        with pytest.raises(InvalidRequestError, match="every prompt needs a bootstrap_room of its own"):
            requests(2, **WHERE | {"bootstrap_room": room})


@with_batches
@pytest.mark.parametrize("port", [None, [None, None]])
def test_a_balancers_warm_up_has_no_port_and_perhaps_one_room(requests: Any, port: Any) -> None:
    where = {"bootstrap_host": ["2.2.2.2"] * 2, "bootstrap_port": port, "bootstrap_room": [0, 0]}
    made = [request.bootstrap for request in requests(2, **where)]
    assert made == [Bootstrap(host="2.2.2.2", port=None, room=0)] * 2


def test_an_openai_body_still_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UnsupportedFieldError, match="bootstrap_key: this field is not known"):
        completion(1, bootstrap_key="x")
