"""What one leg has begun, another one on another engine ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from segue.api.legs import pack_end
from segue.messages.leg import Data, End, LegOutput
from segue.messages.requests import Finished
from segue.server import leg_routes
from tests.server.leg_fleet import (
    CASES,
    COMPLETION,
    USAGE,
    Case,
    Fleet,
    check_each_cut,
    cuts,
    each_case,
    in_stream,
    in_whole,
    native,
    openai,
    some_cuts,
)
from tests.server.legs import frames, leg_of, named, payload, reading, stream, whole_body
from tests.support.held_steps import hold_here

decode_end = msgspec.msgpack.Decoder(Finished).decode


@each_case
@some_cuts
def test_a_stream_goes_on_at_another_engine_behind_any_frame(fleet: Fleet, case: Case, every: int) -> None:
    path, body = in_stream(case)
    told = frames(fleet.one, leg_of(path, body))
    check_each_cut(told, lambda **more: leg_of(path, body, **more), fleet.two, stream, every)


def test_a_stream_is_cut_twice(fleet: Fleet) -> None:
    path, body = in_stream(CASES["chat, usage and logprobs"])
    told = frames(fleet.one, leg_of(path, body))
    first = told[:3]
    second = frames(fleet.two, leg_of(path, body, outputs=named(first)))[:3]
    outputs = named(second, named(first))
    third = frames(fleet.one, leg_of(path, body, outputs=outputs))
    assert stream(payload(first) + payload(second) + payload(third)) == stream(payload(told))


@pytest.mark.parametrize("name", ["native", "chat", "completion, logprobs", "native, all logprobs"])
def test_a_stop_string_across_the_cut(fleet: Fleet, name: str) -> None:
    path, body = CASES[name]
    params = body.get("sampling_params", body)
    reply = whole_body(frames(fleet.one, leg_of(path, in_whole(CASES[name])[1])))
    text = reply["text"] if path == "/generate" else reply["choices"][0].get("text")
    if text is None:
        text = reply["choices"][0]["message"]["content"]
    # The first one completes behind some text; of the second one, only the beginning ever comes.
    stops = [text[8:12], text[4:7] + "#####"]
    options = params | {"stop": stops}
    stopped = body | {"stream": True} | ({"sampling_params": options} if params is not body else options)
    told = frames(fleet.one, leg_of(path, stopped))
    assert b'"stop"' in payload(told)
    check_each_cut(told, lambda **more: leg_of(path, stopped, **more), fleet.two, stream)


def test_a_client_s_stream_says_what_a_leg_s_does(fleet: Fleet) -> None:
    path, body = in_stream(openai(COMPLETION, temperature=0, **USAGE))
    told = payload(frames(fleet.one, leg_of(path, body)))
    answer = fleet.two.client.post(path, json=body)
    (_, usage, choices), (_, usage_of_leg, choices_of_leg) = stream(answer.content), stream(told)
    assert (usage, choices) == (usage_of_leg, choices_of_leg)


@each_case
@some_cuts
def test_a_whole_reply_goes_on_at_another_engine(
    fleet: Fleet, case: Case, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leg_routes, "NAME_EVERY_S", 0.001)
    path, body = in_whole(case)
    if {"logprob_start_len", "echo"}.isdisjoint(body):
        gate = hold_here(tmp_path / "steps", monkeypatch)
        gate.close_after(2)  # the next steps come once the router has a frame, twice
        with reading(fleet.one, leg_of(path, body)) as found:
            told = [next(found)]
            gate.close_after(2)
            told.append(next(found))
            gate.open()
            told += found
        assert len(told) > 2
    else:  # nothing is named before the end
        told = frames(fleet.one, leg_of(path, body))
    for count in cuts(told, every):
        after = frames(fleet.two, leg_of(path, body, outputs=named(told[:count])))
        assert whole_body(after) == whole_body(told), f"cut behind frame {count}"


def test_a_whole_reply_is_that_of_the_route(fleet: Fleet) -> None:
    for path, body in (CASES["completion, greedy"], native(params={"temperature": 0}, rid="mine")):
        told = frames(fleet.one, leg_of(path, body))
        answer = whole_body([End(fleet.two.client.post(path, json=body).content)])
        found = whole_body(told)
        if path == "/generate":
            assert found == answer
        else:
            assert found["choices"] == answer["choices"] and found["usage"] == answer["usage"]
            assert (found["id"], found["created"]) == ("leg-1", 1_700_000_000)


def test_an_end_keeps_what_only_the_engine_that_made_it_knew(fleet: Fleet) -> None:
    path, body = CASES["completion, batch"]
    told = frames(fleet.one, leg_of(path, in_stream((path, body))[1]))
    ends = [output for frame in told if isinstance(frame, Data) for output in frame.outputs if output.end]
    assert len(ends) == 2
    outputs = named(told)
    again = whole_body(frames(fleet.two, leg_of(path, in_whole((path, body))[1], outputs=outputs)))
    assert again["usage"]["completion_tokens"] == 32
    assert fleet.two.client.get("/server_info").json()["internal_states"][0]["running_batch_size"] == 0


def test_a_prompt_without_output_may_have_ended(fleet: Fleet) -> None:
    """A request that was aborted before it ran has an end, and no tokens."""
    path, body = in_stream(openai(COMPLETION, prompt=["Hello", "Paris"], **USAGE))
    told = frames(fleet.one, leg_of(path, body))
    (end,) = [each.end for frame in told if isinstance(frame, Data) for each in frame.outputs][-1:]
    finished = pack_end(structs.replace(decode_end(end), reason="abort", num_tokens=0, versions=[]))
    after = payload(frames(fleet.two, leg_of(path, body, outputs=[LegOutput(1, end=finished)])))
    _, (usage,), choices = stream(after)
    assert set(choices) == {0} and usage["completion_tokens"] == 16
