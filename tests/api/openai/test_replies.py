from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from segue.api.openai.replies import ChatDialect, Chunks, CompletionDialect, ReplyChoices, encode, usage
from segue.api.openai.requests import Wanted
from segue.api.openai.token_fields import NOTHING, Shown
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import GenerateRequest, Output, RequestState
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


def call(
    kind: Any,
    logprobs: int = -1,
    begun: tuple[int, ...] = (),
    shown: Shown = NOTHING,
    prompt: Any = (1, 0, 1),
) -> tuple[ReplyChoices, Wanted]:
    """A call whose prompt is "bab", of which the last two tokens are known to be as likely as 1 and 2."""
    request = GenerateRequest(
        rid="i", prompt=prompt, options=SamplingOptions(logprobs=logprobs), outputs=begun
    )
    wanted = Wanted(
        id="i",
        created=1,
        model="m",
        requests=[request],
        batch_id=None,
        stream=True,
        usage_in_stream=False,
        shown=shown,
    )
    entries = [
        TokenLogprob(0, -1.0, [(1, -0.5), (0, -1.0)], 2),
        TokenLogprob(1, -2.0, [(0, -0.25), (2, -1.5)], 3),
    ]
    state = cast(RequestState, SimpleNamespace(prompt_ids=[1, 0, 1], prompt_logprobs=entries, ids=[0]))
    return ReplyChoices(kind, wanted, [state], TABLE), wanted


def chunks(kind: Any, *outputs: Output, **of_call: Any) -> list[Any]:
    made = Chunks(*call(kind, **of_call))
    data = b"".join(made.of(0, output) for output in outputs)
    return [json.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event]


@pytest.mark.parametrize("kind", [ChatDialect, CompletionDialect])
def test_impossible_tokens_have_a_logprob_that_json_can_write(kind: Any) -> None:
    assert "-9999.0" in json.dumps(kind(TABLE, TABLE.text).logprobs(IMPOSSIBLE), allow_nan=False)


def test_an_output_without_text_makes_no_chunk_unless_logprobs_are_wanted() -> None:
    silent = Output("", [2], [TokenLogprob(2, -1.0)], [0], None)
    assert chunks(CompletionDialect, silent) == []
    (chunk,) = chunks(CompletionDialect, silent, logprobs=0)
    assert chunk["choices"][0]["logprobs"]["tokens"] == ["\ufffd"]


def test_only_a_choice_that_begins_here_has_a_chunk_with_its_role() -> None:
    news = Output("b", [1], [], [], None), Output("a", [0], [], [], None)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(ChatDialect, *news)]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "b"}, {"content": "a"}]
    resumed = chunks(ChatDialect, *news, begun=(0,))
    assert [chunk["choices"][0]["delta"] for chunk in resumed] == deltas[1:]


def test_the_last_chunk_has_the_reason_and_no_text() -> None:
    *_, last = chunks(ChatDialect, Output("b", [1], [], [], END))
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}


@pytest.mark.parametrize("text", ['"quoted"', "line\nbreak", "\\", "\u2028 🙂", "\x00"])
def test_any_text_survives_the_encoding(text: str) -> None:
    (chunk,) = chunks(CompletionDialect, Output(text, [0], [], [], None))
    assert chunk["choices"][0]["text"] == text


def test_usage_adds_up_choices() -> None:
    assert usage([END, END], 1) == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


@pytest.mark.parametrize("kind", [ChatDialect, CompletionDialect])
def test_a_prefill_engine_says_length_where_a_request_goes_on_elsewhere(kind: Any) -> None:
    output = Output("a", [0], [], [0], structs.replace(END, reason="handoff", num_tokens=1))
    choices, _ = call(kind)
    assert choices.whole(0, output)["finish_reason"] == "length"
    assert chunks(kind, output)[-1]["choices"][0]["finish_reason"] == "length"


# --- vLLM's fields ---

PARTS = (
    Output("", [2], [TokenLogprob(2, -1.0, [(2, -1.0)])], [0], None),
    Output(
        "a", [0, 1], [TokenLogprob(0, -0.5, [(0, -0.5)]), TokenLogprob(1, -3.0, [(2, -0.5)])], [0, 1], END
    ),
)


def joined(parts: list[Any], field: str) -> list[Any]:
    """What the chunks of a completion have in a field of their logprobs, together."""
    found = [part["choices"][0]["logprobs"] for part in parts]
    return [item for logprobs in found if logprobs for item in logprobs[field]]


def test_ids_stand_where_vllm_has_them() -> None:
    shown = Shown(token_ids=True)
    choices, _ = call(ChatDialect, shown=shown)
    whole = choices.whole(0, PARTS[0].joined(PARTS[1]))
    assert whole["token_ids"] == [2, 0, 1] and "prompt_token_ids" not in whole
    assert choices.common() == {"prompt_token_ids": [1, 0, 1]}
    first, *others = chunks(ChatDialect, *PARTS, shown=shown)
    assert first["prompt_token_ids"] == [1, 0, 1] and "token_ids" not in first["choices"][0]
    assert [each["choices"][0].get("token_ids") for each in others] == [[2], [0, 1], []]
    assert not any("prompt_token_ids" in each for each in others)

    choices, _ = call(CompletionDialect, shown=shown)
    whole = choices.whole(0, PARTS[0].joined(PARTS[1]))
    assert (whole["token_ids"], whole["prompt_token_ids"]) == ([2, 0, 1], [1, 0, 1])
    assert choices.common() == {}
    made = [each["choices"][0] for each in chunks(CompletionDialect, *PARTS, shown=shown)]
    assert [each.get("prompt_token_ids") for each in made] == [[1, 0, 1], None, None]
    assert [each.get("token_ids") for each in made] == [[2], [0, 1], []]
    resumed = chunks(CompletionDialect, PARTS[1], shown=shown, begun=(2,))
    assert "prompt_token_ids" not in resumed[0]["choices"][0]


def test_nothing_of_this_is_shown_unless_it_is_asked_for() -> None:
    choices, _ = call(CompletionDialect)
    assert set(choices.whole(0, PARTS[1])) == {"index", "text", "logprobs", "finish_reason"}


def test_tokens_in_logprobs_can_be_written_as_ids() -> None:
    choices, _ = call(CompletionDialect, logprobs=1, shown=Shown(as_ids=True))
    logprobs = choices.whole(0, PARTS[1])["logprobs"]
    assert logprobs["tokens"] == ["token_id:0", "token_id:1"]
    assert logprobs["top_logprobs"] == [{"token_id:0": -0.5}, {"token_id:2": -0.5}]
    choices, _ = call(ChatDialect, logprobs=1, shown=Shown(as_ids=True))
    (first, _) = choices.whole(0, PARTS[1])["logprobs"]["content"]
    assert (first["token"], first["top_logprobs"][0]["token"]) == ("token_id:0", "token_id:0")


def test_logprobs_of_the_prompt_begin_with_its_own_token() -> None:
    choices, _ = call(CompletionDialect, shown=Shown(num_prompt_top=1))
    first, second, third = json.loads(encode(choices.whole(0, PARTS[1])["prompt_logprobs"]))
    assert first is None
    assert list(second.items()) == [
        ("0", {"logprob": -1.0, "rank": 2, "decoded_token": "a"}),
        ("1", {"logprob": -0.5, "rank": 1, "decoded_token": "b"}),
    ]
    assert third["1"] == {"logprob": -2.0, "rank": 3, "decoded_token": "b"}


def test_an_echo_is_the_same_in_chunks_and_whole() -> None:
    asked: dict[str, Any] = {"logprobs": 1, "shown": Shown(echo=True)}
    whole = call(CompletionDialect, **asked)[0].whole(0, PARTS[0].joined(PARTS[1]))
    assert whole["text"] == "baba"
    assert whole["logprobs"] == {
        "tokens": ["b", "a", "b", "\ufffd", "a", "b"],
        "token_logprobs": [None, -1.0, -2.0, -1.0, -0.5, -3.0],
        "top_logprobs": [None, {"b": -0.5}, {"a": -0.25}, {"\ufffd": -1.0}, {"a": -0.5}, {"\ufffd": -0.5}],
        "text_offset": [0, 1, 2, 3, 3, 4],
    }
    made = chunks(CompletionDialect, *PARTS, **asked)
    assert "".join(each["choices"][0]["text"] for each in made) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert joined(made, name) == values
    assert [each["choices"][0]["text"] for each in made] == ["bab", "", "a", ""]
    resumed = chunks(CompletionDialect, PARTS[1], begun=(2,), **asked)
    assert resumed == made[2:]
    prepared = Chunks(*call(CompletionDialect, **asked))
    prepared.open(0)
    assert prepared.of(0, PARTS[0]) == Chunks(*call(CompletionDialect, **asked)).of(0, PARTS[0])


def test_an_echo_alone_is_one_chunk_with_the_prompt() -> None:
    end = Output("", [], [], [], structs.replace(END, reason="length", num_tokens=0))
    first, last = chunks(CompletionDialect, end, logprobs=0, shown=Shown(echo=True))
    assert first["choices"][0]["text"] == "bab"
    assert first["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "length")
