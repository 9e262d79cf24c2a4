from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from segue.api.openai.replies import ChatDialect, Chunks, CompletionDialect, choice, usage
from segue.api.openai.requests import Wanted
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import GenerateRequest, Output
from segue.frontend.sampling_options import SamplingOptions
from segue.messages.requests import Finished, TokenLogprob

TABLE = TokenTable([b"a", b"b", b"\xe6"])
END = Finished(
    rid="i",
    reason="stop",
    matched=None,
    message=None,
    num_tokens=3,
    prompt_tokens=5,
    cached_tokens=4,
    versions=[("0", 0, 3)],
)
IMPOSSIBLE = Output("a", [0], [TokenLogprob(0, float("-inf"), [(0, float("-inf"))])], [0], None)


def chunks(dialect: Any, *outputs: Output, logprobs: int = -1, begun: tuple[int, ...] = ()) -> list[Any]:
    request = GenerateRequest(rid="i", prompt=[1], options=SamplingOptions(logprobs=logprobs), outputs=begun)
    wanted = Wanted(
        id="i",
        created=1,
        model="m",
        requests=[request],
        batch_id=None,
        stream=True,
        usage_in_stream=False,
    )
    made = Chunks(dialect, wanted)
    data = b"".join(made.of(0, output) for output in outputs)
    return [json.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event]


@pytest.mark.parametrize("dialect", [ChatDialect(TABLE), CompletionDialect(TABLE)])
def test_impossible_tokens_have_a_logprob_that_json_can_write(dialect: Any) -> None:
    assert "-9999.0" in json.dumps(dialect.logprobs(IMPOSSIBLE), allow_nan=False)


def test_an_output_without_text_makes_no_chunk_unless_logprobs_are_wanted() -> None:
    silent = Output("", [2], [TokenLogprob(2, -1.0)], [0], None)
    assert chunks(CompletionDialect(TABLE), silent) == []
    (chunk,) = chunks(CompletionDialect(TABLE), silent, logprobs=0)
    assert chunk["choices"][0]["logprobs"]["tokens"] == ["\ufffd"]


def test_only_a_choice_that_begins_here_has_a_chunk_with_its_role() -> None:
    news = Output("b", [1], [], [], None), Output("a", [0], [], [], None)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(ChatDialect(TABLE), *news)]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "b"}, {"content": "a"}]
    resumed = chunks(ChatDialect(TABLE), *news, begun=(0,))
    assert [chunk["choices"][0]["delta"] for chunk in resumed] == deltas[1:]


def test_the_last_chunk_has_the_reason_and_no_text() -> None:
    *_, last = chunks(ChatDialect(TABLE), Output("b", [1], [], [], END))
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}


@pytest.mark.parametrize("text", ['"quoted"', "line\nbreak", "\\", "\u2028 🙂", "\x00"])
def test_any_text_survives_the_encoding(text: str) -> None:
    (chunk,) = chunks(CompletionDialect(TABLE), Output(text, [0], [], [], None))
    assert chunk["choices"][0]["text"] == text


def test_usage_adds_up_choices() -> None:
    assert usage([END, END]) == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


@pytest.mark.parametrize("dialect", [ChatDialect(TABLE), CompletionDialect(TABLE)])
def test_a_prefill_engine_says_length_where_a_request_goes_on_elsewhere(dialect: Any) -> None:
    output = Output("a", [0], [], [0], structs.replace(END, reason="handoff", num_tokens=1))
    assert choice(dialect, 0, output, logprobs=False)["finish_reason"] == "length"
    assert chunks(dialect, output)[-1]["choices"][0]["finish_reason"] == "length"
