"""A stream that was cut behind any token goes on to the byte, for each kind of call."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from segue.api.legs import leg_requests
from segue.frontend.request import Generation, RequestState
from segue.launch.runtime import Runtime
from segue.messages.leg import Data, Frame
from segue.messages.requests import Finished, TokenLogprob
from segue.server.calls import CALL_KINDS
from segue.server.leg_routes import _stream, _with
from tests.server.leg_fleet import MODEL
from tests.server.legs import leg_of, named, payload, stream
from tests.server.live import LiveServer

TEXT = "Köln, 東京 and 🙂 end. Then more"
STOPS = ["nd. T", "京 and no"]
_decode = msgspec.msgpack.Decoder(Frame).decode

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("/generate", {"text": "x", "sampling_params": {"stop": STOPS}, "return_logprob": True}),
    "chat": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "stop": STOPS,
            "stream_options": {"include_usage": True},
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "stop_sequences": STOPS,
            "max_tokens": 100,
        },
    ),
    "completion": ("/v1/completions", {"model": MODEL, "prompt": "x", "stop": STOPS, "logprobs": 1}),
    "completion without stop": ("/v1/completions", {"model": MODEL, "prompt": "x"}),
    "echo": (
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": "xyz",
            "stop": STOPS,
            "logprobs": 1,
            "echo": True,
            "return_token_ids": True,
        },
    ),
    "chat of tokens": (
        "/v1/chat/completions/tokens",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "tokens": [5, 6],
            "return_token_ids": True,
        },
    ),
    "response": ("/v1/responses", {"model": MODEL, "input": "x", "stop": STOPS}),
    "tokens": (
        "/inference/v1/generate",
        {
            "token_ids": [5, 6],
            "sampling_params": {"stop": STOPS, "logprobs": 2},
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        },
    ),
}


async def tell(runtime: Runtime, path: str, body: dict[str, Any], before: list[Frame]) -> list[Frame]:
    """Returns the frames of a leg behind ``before``, one token of `TEXT` per step."""
    kind = CALL_KINDS[path]
    leg = leg_of(path, body | {"stream": True}, outputs=named(before))
    call = await kind.parse(runtime, leg.body, leg.id)
    requests = await leg_requests(leg, call.requests, runtime.manager.encoder)
    generation = Generation(1, abort=lambda rid: None)
    ((ids, params),) = await runtime.manager.encoder.encode_call(requests, generation)
    state = RequestState(requests[0], ids, params, runtime.manager.table, 0.0, generation.changed)
    if params.prompt_logprobs_start == 0:
        state.prompt_logprobs = [TokenLogprob(token, -0.5, [(token, -0.5)]) for token in ids[1:]]
    state.prime(requests[0].outputs, requests[0].output_logprobs, requests[0].output_end)
    generation.states.append(state)
    frames = _stream(generation, kind.reply(runtime, _with(call, leg, requests), generation))
    tokenizer = runtime.manager.encoder.tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    found = []
    for number, token in enumerate(tokens[len(state.ids) :], len(state.ids) + 1):
        if state.end is not None:
            break
        logprob = TokenLogprob(token, -float(number), [(token, -1.0)])
        if state.add(token, logprob, is_stop=False) or number == len(tokens):
            end = Finished(rid="x", reason="length", num_tokens=number, prompt_tokens=1, cached_tokens=0)
            state.finish(end)
        state.changed.set()
        found.append(_decode((await anext(frames))[4:]))
    return found + [_decode(frame[4:]) async for frame in frames]


@pytest.mark.parametrize("name", CALLS)
def test_a_stream_goes_on_to_the_byte(server: LiveServer, name: str) -> None:
    path, body = CALLS[name]

    async def work() -> None:
        told = await tell(server.runtime, path, body, [])
        assert len(told) > len(TEXT) // 2 and isinstance(told[0], Data)
        stream(payload(told))  # says once what may come once
        for count in range(len(told)):
            after = await tell(server.runtime, path, body, told[:count])
            assert without_time(payload(told[:count] + after)) == without_time(payload(told)), count

    server.call(asyncio.wait_for(work(), 60))


def without_time(data: bytes) -> bytes:
    return re.sub(rb'"e2e_latency":[0-9.e-]+', b"", data)


def test_the_calls_are_those_of_the_public_routes(server: LiveServer) -> None:
    described = json.loads(server.client.get("/openapi.json").content)["paths"]
    assert set(CALL_KINDS) <= set(described) and "/leg" not in described
