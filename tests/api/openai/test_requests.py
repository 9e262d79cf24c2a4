from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from segue.api.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    chat_call,
    completion_call,
)
from segue.api.validation import parse
from segue.errors import ModelNotFoundError
from segue.frontend.tokenizer import PromptEncoder, ServedModel


async def render(messages: list[dict[str, Any]]) -> str:
    return str(messages)


MODEL = ServedModel(
    names=["name", "path/to"], max_prompts=10, encoder=cast(PromptEncoder, SimpleNamespace(render=render))
)


CHAT = {"model": "name", "messages": [{"role": "user", "content": "x"}]}


def chat(**fields: Any) -> Any:
    return asyncio.run(chat_call(parse(ChatCompletionRequest, CHAT | fields), MODEL))


def complete(**fields: Any) -> Any:
    body = parse(CompletionRequest, {"model": "name", "prompt": "x", **fields})
    return completion_call(body, MODEL)


def test_a_rendered_template_has_its_own_special_tokens_and_a_text_gets_them() -> None:
    assert chat().requests[0].add_special_tokens is False
    assert complete().requests[0].add_special_tokens is True


def test_defaults_are_openais() -> None:
    options = chat().requests[0].options
    assert (options.temperature, options.top_p, options.max_tokens, options.seed) == (1.0, 1.0, None, None)
    assert options.must_fit


def test_zero_is_a_value_and_not_a_missing_one() -> None:
    options = complete(temperature=0, seed=0, min_tokens=0).requests[0].options
    assert (options.temperature, options.seed) == (0, 0)


def test_the_models_path_is_a_name_too() -> None:
    complete(model="path/to")
    with pytest.raises(ModelNotFoundError, match="'other'"):
        complete(model="other")


def test_choices_of_a_batch_have_rids_of_their_own() -> None:
    two, one = complete(prompt=["a", "b"]), complete()
    assert [request.rid for request in two.requests] == [f"{two.id}-0", f"{two.id}-1"]
    assert [request.rid for request in one.requests] == [one.id]


def test_an_id_and_a_time_are_made_for_each_call() -> None:
    body = parse(CompletionRequest, {"model": "name", "prompt": ["a", "b"]})
    made, other = (completion_call(body, MODEL) for _ in range(2))
    assert made.id.startswith("cmpl-") and made.id != other.id and made.batch_id == made.id
    assert abs(made.created - time.time()) < 60
    assert asyncio.run(chat_call(parse(ChatCompletionRequest, CHAT), MODEL)).id.startswith("chatcmpl-")
