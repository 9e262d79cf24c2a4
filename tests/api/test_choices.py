from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from segue.api.native import NativeCall, parse_call
from segue.api.openai.replies import usage
from segue.api.openai.requests import CompletionRequest, Wanted, completion_call
from segue.api.token_generate import parse_token_call
from segue.api.validation import parse
from segue.errors import SegueError
from segue.frontend.tokenizer import PromptEncoder, ServedModel
from segue.messages.requests import Finished

MODEL = ServedModel(names=["m"], max_prompts=6, encoder=cast(PromptEncoder, SimpleNamespace()))


def complete(**fields: Any) -> Wanted:
    return completion_call(parse(CompletionRequest, {"prompt": "x"} | fields), MODEL)


def native(**fields: Any) -> NativeCall:
    return parse_call({"text": "x"} | fields, MODEL.max_prompts)


def tokens(**params: Any) -> Wanted:
    return parse_token_call({"token_ids": [1], "request_id": "r", "sampling_params": params}, MODEL)


def test_choices_come_by_prompt_and_each_prompt_s_id_names_its_own() -> None:
    call = complete(prompt=["a", "b"], n=3, best_of=3, rid="r")
    assert [request.rid for request in call.requests] == [f"r-{p}-{i}" for p in "01" for i in range(3)]
    assert [request.group for request in call.requests] == ["r-0"] * 3 + ["r-1"] * 3
    assert [request.prompt for request in call.requests] == ["a"] * 3 + ["b"] * 3
    assert [request.choice for request in call.requests] == [0, 1, 2] * 2
    assert (call.batch_id, call.n) == ("r", 3)
    batch = native(text=["a", "b"], rid=["x", "y"], sampling_params={"n": 2})
    assert [request.rid for request in batch.requests] == ["x_0", "x_1", "y_0", "y_1"]
    one = native(rid="r", sampling_params={"n": 2})
    assert ([request.rid for request in one.requests], one.batch_id) == (["r_0", "r_1"], "r")
    assert [request.rid for request in tokens(n=2).requests] == ["r-0", "r-1"]
    assert tokens().requests[0].rid == "r" and tokens().batch_id is None


def test_each_choice_has_a_room_of_its_own() -> None:
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_room": [5, 9]}
    call = complete(prompt=["a", "b"], n=3, **where)
    assert [request.bootstrap and request.bootstrap.room for request in call.requests] == [5, 6, 7, 9, 10, 11]
    with pytest.raises(SegueError, match="the rooms of two prompts overlap") as error:
        complete(prompt=["a", "b"], n=3, **(where | {"bootstrap_room": [5, 7]}))
    assert error.value.param == "bootstrap_room"


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"n": 0}, "n", "n=0: must be at least 1"),
        ({"n": 129}, "n", "n=129: must be at most 128"),
        ({"n": True}, "n", "must be an integer"),
        ({"n": 2, "best_of": 3}, "best_of", "best_of=3 is supported only where it is n, which is 2"),
        ({"best_of": 2}, "best_of", "which is 1; leave it out"),
        ({"n": 4, "prompt": ["a", "b"]}, "n", "n=4 for 2 prompts makes 8 choices; at most 6"),
        ({"n": 2, "rid": "r" * 255}, "rid", "has 257 characters"),
    ],
)
def test_a_number_of_choices_that_breaks_its_rule(fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(SegueError, match=text) as error:
        complete(**fields)
    assert error.value.param == param


def test_the_prompts_of_a_native_batch_have_the_same_number_of_choices() -> None:
    with pytest.raises(SegueError, match=r"n differs between the prompts of a call \(1, 2\)"):
        native(text=["a", "b"], sampling_params=[{"n": 2}, {}])
    with pytest.raises(SegueError, match="n=0: must be at least 1"):
        native(sampling_params={"n": 0})
    native(sampling_params={"n": 2, "best_of": 2})
    with pytest.raises(SegueError, match="best_of=3 is supported only where it is n, which is 1") as error:
        native(sampling_params={"best_of": 3})
    assert error.value.param == "best_of"
    with pytest.raises(SegueError, match="best_of=4"):
        tokens(n=2, best_of=4)


def test_usage_has_each_prompt_once() -> None:
    ends = [
        Finished(
            rid=str(i), reason="stop", num_tokens=10 + i, prompt_tokens=7 + i // 2, cached_tokens=4 * (i % 2)
        )
        for i in range(4)
    ]
    assert usage(ends, 2) == {
        "prompt_tokens": 7 + 8,
        "completion_tokens": 10 + 11 + 12 + 13,
        "total_tokens": 15 + 46,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
