"""Fields that are not implemented: what asks for nothing is taken, and all else is refused by name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from segue.api.asks_nothing import ANYTHING, FIELDS, Place, unsupported, without_nothing
from segue.api.native import parse_call
from segue.api.openai.requests import chat_call, completion_call, parse_chat, parse_completion
from segue.api.openai.responses.call import parse_responses, responses_call
from segue.errors import UnsupportedFieldError
from segue.frontend.request import GenerateRequest
from segue.frontend.sampling_options import RequestLimits
from segue.frontend.thread_pool import ThreadPool
from segue.frontend.tokenizer import PromptEncoder, ServedModel
from segue.messages.requests import SamplingParams

BODIES = json.loads((Path(__file__).parents[1] / "fixtures" / "default_bodies.json").read_text())
LIMITS = RequestLimits(max_seq_len=200, vocab_size=50, eos_ids=(2,))
PLACES: tuple[Place, ...] = get_args(Place)
MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "generate": {"text": "Hi"},
}


async def render(messages: list[dict[str, Any]]) -> str:
    return str(messages)


MODEL = ServedModel(
    names=["tiny-model"],
    max_prompts=10,
    encoder=cast(PromptEncoder, SimpleNamespace(render=render, thread_pool=ThreadPool())),
)


def request_of(route: str, body: dict[str, Any]) -> GenerateRequest:
    """The only request of a body, checked as its route does."""
    match route:
        case "chat":
            requests = asyncio.run(chat_call(parse_chat(body), MODEL)).requests
        case "completions":
            requests = completion_call(parse_completion(body), MODEL).requests
        case "responses":
            requests = asyncio.run(responses_call(parse_responses(body), MODEL)).requests
        case _:
            requests = parse_call(body, 10).requests
    (request,) = requests
    return request


def asked(request: GenerateRequest) -> tuple[Any, ...]:
    """What a request asks for: all that can change its reply, except its length."""
    options = request.options
    params: SamplingParams = options.shared_params(LIMITS)
    shown = tuple(options.stop), options.skip_special_tokens, options.keep_stop
    return params, shown, request.prompt, request.add_special_tokens, request.priority, request.cache_salt


@pytest.mark.parametrize("case", BODIES, ids=lambda case: f"{case['who']}, {case['route']} {case['when']}")
def test_a_body_with_its_writers_defaults_asks_for_the_same_as_one_without(case: dict[str, Any]) -> None:
    assert asked(request_of(case["route"], case["body"])) == asked(
        request_of(case["route"], MINIMAL[case["route"]])
    )


@pytest.mark.parametrize("place", PLACES)
def test_null_asks_for_nothing_in_every_field_and_anything_else_is_named(place: Place) -> None:
    assert without_nothing(dict.fromkeys(FIELDS[place]) | {"other": 1}, place) == {"other": 1}
    for name in unsupported(place):
        with pytest.raises(UnsupportedFieldError, match=f"^{name} is not supported") as raised:
            without_nothing({name: "something"}, place)
        assert raised.value.param == name
    assert without_nothing({n: "x" for n, v in FIELDS[place].items() if v is ANYTHING}, place) == {}


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        ("chat", "use_beam_search", 0),
        ("chat", "use_beam_search", True),
        ("chat", "echo", True),
        ("chat", "kv_transfer_params", {"do_remote_decode": True}),
        ("completions", "length_penalty", 2.0),
        ("completions", "return_routed_experts", True),
        ("completions", "data_parallel_rank", 3),
        ("responses", "previous_response_id", "resp_1"),
        ("responses", "conversation", "conv_1"),
        ("responses", "prompt", {"id": "pmpt_1"}),
        ("responses", "background", True),
        ("responses", "include", ["reasoning.encrypted_content"]),
        ("responses", "top_logprobs", 2),
        ("responses", "truncation", "auto"),
        ("responses", "max_tool_calls", 1),
        ("generate", "return_routed_experts", True),
        ("generate", "return_sampling_mask", True),
        ("generate", "return_prompt_token_ids", True),
        ("generate", "routed_experts_start_len", 4),
        ("generate", "extra_key", "mine"),
        ("generate", "lora_path", ["one"]),
    ],
)
def test_what_would_change_the_reply_is_refused_by_name(route: str, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedFieldError) as raised:
        request_of(route, MINIMAL[route] | {field: value})
    assert raised.value.param == field and raised.value.message.startswith(f"{field} is not supported")


@pytest.mark.parametrize(
    "field", ["structural_tag", "custom_params", "beam_width", "structured_outputs", "guided_json"]
)
def test_so_it_is_within_sampling_params(field: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=field):
        request_of("generate", {"text": "a", "sampling_params": [{field: {"a": 1}}]})


def test_what_a_response_is_by_default_may_be_written_out() -> None:
    names = ["previous_response_id", "conversation", "prompt", "max_tool_calls", "reasoning", "metadata"]
    given = {
        "background": False,
        "include": [],
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "auto",
        "store": True,
        "stream": False,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": "me",
    }
    body = MINIMAL["responses"] | dict.fromkeys(names) | given
    assert asked(request_of("responses", body)) == asked(request_of("responses", MINIMAL["responses"]))


def test_an_integer_may_stand_for_a_float() -> None:
    for route in ("chat", "completions"):
        request_of(route, MINIMAL[route] | {"length_penalty": 1})
