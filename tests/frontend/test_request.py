from __future__ import annotations

import asyncio
from typing import Any

import pytest

from segue.errors import EngineDeadError, InvalidRequestError
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import GenerateRequest, Generation, RequestState
from segue.frontend.sampling_options import SamplingOptions
from segue.frontend.signal import Signal
from segue.messages.requests import Finished, FinishReason, SamplingParams, TokenLogprob

WORDS = [b"zero", b"one ", b"two ", b"three ", b"\xe6", b"\x9d", b"\xb1", b"<end>"]
TABLE = TokenTable(WORDS, special_ids=(7,))


def make(min_tokens: int = 0, logprobs: int = -1, **options: Any) -> RequestState:
    request = GenerateRequest(rid="r", prompt=[1], options=SamplingOptions(**options))
    params = SamplingParams(max_new_tokens=100, min_new_tokens=min_tokens, logprobs=logprobs)
    return RequestState(request, [1], params, TABLE, created=0.0, changed=Signal())


def generation(*states: RequestState) -> Generation:
    made = Generation(len(states), abort=lambda rid: None)
    made.states += states
    return made


def ended(count: int, reason: FinishReason = "length", **fields: Any) -> Finished:
    fields = {"prompt_tokens": 1, "cached_tokens": 0} | fields
    return Finished(rid="r", reason=reason, num_tokens=count, **fields)


def push(state: RequestState, *tokens: int) -> list[bool]:
    return [state.add(token, None, is_stop=False) for token in tokens]


def test_text_arrives_with_its_tokens() -> None:
    state = make()
    push(state, 1, 2)
    assert state.take().text == "one two "
    push(state, 3)
    state.finish(ended(3))
    output = state.take()
    assert (output.text, output.token_ids) == ("three ", [3])
    assert output.end is not None
    assert output.end.reason == "length"


def test_a_stop_string_cuts_text_ids_and_versions() -> None:
    state = make(stop=("e two",))
    assert push(state, 1, 2, 3) == [False, True, False]
    assert state.cut == 2
    end = state.finish(ended(3, versions=[("0", 0, 1), ("1", 1, 2), ("2", 2, 3)]))
    output = state.take()
    assert (output.text, output.token_ids) == ("on", [1, 2])
    assert (end.reason, end.matched, end.num_tokens) == ("stop", "e two", 2)
    assert end.versions == [("0", 0, 1), ("1", 1, 2)]


def test_a_stop_string_wins_over_an_end_by_length_that_the_scheduler_saw_first() -> None:
    state = make(stop=("two",))
    push(state, 1, 2)
    assert state.finish(ended(2, "length")).reason == "stop"


def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    state = make(stop=("two three and",))
    push(state, 1, 2)
    assert state.take().text == "one "
    state.finish(ended(2))
    assert state.take().text == "two "


def test_a_stop_token_counts_but_is_not_text() -> None:
    state = make()
    push(state, 1)
    state.add(2, None, is_stop=True)
    end = state.finish(ended(2, "stop", matched=2))
    assert state.take().text == "one "
    assert (end.num_tokens, end.matched) == (2, 2)


def test_keep_stop_leaves_stop_tokens_and_strings_in_the_text() -> None:
    token, string = make(keep_stop=True), make(keep_stop=True, stop=("wo",))
    token.add(2, None, is_stop=True)
    assert token.take().text == "two "
    push(string, 2)
    assert string.take().text == "two"


def test_stop_strings_count_only_after_min_tokens() -> None:
    state = make(stop=("one",), min_tokens=2)
    assert push(state, 1, 1, 1) == [False, False, True]
    assert state.take().text == "one one "


def test_a_character_that_was_never_completed_is_replaced_at_the_end() -> None:
    state = make()
    push(state, 4, 5)
    assert state.take().text == ""
    state.finish(ended(2))
    assert state.take().text == "\ufffd"


def test_logprobs_have_the_offset_of_their_token_in_the_text() -> None:
    state = make(logprobs=0)
    for token in (1, 4, 5, 6, 2):
        state.add(token, TokenLogprob(token, -1.0), is_stop=False)
    output = state.take()
    assert [entry.token for entry in output.logprobs] == [1, 4, 5, 6, 2]
    assert output.offsets == [0, 4, 4, 4, 5]


def test_an_error_after_the_end_changes_nothing() -> None:
    state = make()
    state.finish(ended(0, "abort"))
    state.fail(EngineDeadError("gone"))
    assert state.error is None


def test_counted_tokens_that_never_arrived_are_a_bug() -> None:
    state = make()
    with pytest.raises(AssertionError, match="0 tokens came, not 1"):
        state.finish(ended(1))


# --- requests that begin with outputs ---


def whole(tokens: list[int], **options: Any) -> tuple[RequestState, list[str]]:
    """A request that gets all tokens here, and the text that each of them gives."""
    state, texts = make(logprobs=0, **options), []
    for token in tokens:
        state.add(token, TokenLogprob(token, -float(token)), is_stop=False)
        texts.append(state.take().text)
    return state, texts


@pytest.mark.parametrize("stop", [(), ("three",), ("e t", "wo three one"), ("東one", "nothing")])
@pytest.mark.parametrize("border", range(1, 8))
def test_a_request_that_begins_with_outputs_goes_on_exactly_where_it_was(
    stop: tuple[str, ...], border: int
) -> None:
    tokens = [1, 2, 4, 5, 6, 1, 2, 3]
    same, texts = whole(tokens, stop=stop)
    state = make(logprobs=0, stop=stop)
    state.prime(tokens[:border], [TokenLogprob(token, -float(token)) for token in tokens[:border]])
    assert not state.has_unread and state.whole().text == "".join(texts[:border])
    for token, text in zip(tokens[border:], texts[border:], strict=True):
        state.add(token, TokenLogprob(token, -float(token)), is_stop=False)
        assert state.take().text == text
    assert (state.ids, state.logprobs, state.offsets, state.cut) == (
        same.ids,
        same.logprobs,
        same.offsets,
        same.cut,
    )
    end = ended(len(same.ids), versions=[("0", border, 8)])
    assert state.finish(end) == same.finish(end)
    assert state.take() == same.take()


def test_what_the_client_has_already_is_part_of_the_result() -> None:
    async def work() -> None:
        state = make(logprobs=0)
        state.prime([1, 4], [TokenLogprob(1, -1.0), TokenLogprob(4, -2.0)])
        for token in (5, 6):
            state.add(token, TokenLogprob(token, -3.0), is_stop=False)
        state.finish(ended(4))
        (output,) = await generation(state).outputs()
        assert (output.text, output.token_ids, output.offsets) == ("one 東", [1, 4, 5, 6], [0, 4, 4, 4])
        assert [entry.token for entry in output.logprobs] == [1, 4, 5, 6]

    asyncio.run(work())


def test_outputs_may_end_in_the_stop_token_which_is_not_text() -> None:
    request = GenerateRequest(rid="r", prompt=[1], options=SamplingOptions(stop=("two three",)))
    params = SamplingParams(max_new_tokens=100, stop_token_ids=(2,))
    state = RequestState(request, [1], params, TABLE, created=0.0, changed=Signal())
    state.prime([1, 2], [])
    state.finish(ended(2, "stop", matched=2))
    assert state.take().text == ""


def test_outputs_have_a_logprob_each_if_they_were_requested() -> None:
    with pytest.raises(InvalidRequestError, match="2 tokens have 1 logprobs; the reply needs one"):
        make(logprobs=0).prime([1, 2], [TokenLogprob(1, -1.0)])


def test_nothing_is_new_of_a_request_whose_end_the_client_has() -> None:
    before, running = make(stop=("two three and",)), make()
    before.prime([1, 2], [], ended(2, "abort", cached_tokens=7))
    push(running, 3)
    running.finish(ended(1))
    both = generation(before, running)

    async def read() -> list[tuple[int, str]]:
        return [(index, output.text) async for index, output in both.updates()]

    assert asyncio.run(read()) == [(1, "three ")]
    assert [(end.reason, end.cached_tokens) for end in both.ends] == [("abort", 7), ("length", 0)]
    assert [output.text for output in asyncio.run(both.outputs())] == ["one two ", "three "]


def test_an_end_belongs_to_all_tokens_of_its_output() -> None:
    with pytest.raises(InvalidRequestError, match="has ended after 3 tokens, but has 2; send all of them"):
        make().prime([1, 2], [], ended(3))
