"""Legs that are refused, that fail, or whose router leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from segue.guided import beginning
from segue.messages.leg import LEG_PATH, Data, End, LegOutput
from segue.messages.requests import pack_ids
from segue.server import responses
from segue.server.body import INLINE_BYTES
from tests.server.leg_fleet import CASES, ROOMS, Case, Fleet, in_stream, native
from tests.server.legs import failure, frames, leg_of, post, reading, whole_body
from tests.server.live import LiveServer
from tests.support.held_steps import hold_here


def test_a_router_that_leaves_ends_the_requests(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_here(tmp_path / "steps", monkeypatch).close_after(300)  # they cannot end before the router leaves
    path, body = in_stream(native(["Hello", "Paris"], {"max_new_tokens": 400}))
    with reading(fleet.one, leg_of(path, body)) as told:
        next(told)
        before = fleet.one.runtime.manager.stats.finished["abort"]
    fleet.one.assert_nothing_left()
    assert fleet.one.runtime.manager.stats.finished["abort"] == before + 2


@pytest.fixture
def slow(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    with LiveServer(tiny_model) as server:
        yield server


LONG = native("a" * 300, {"max_new_tokens": 300})


def test_silence_is_broken_by_empty_frames(slow: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_S", 0.01)
    path, body = in_stream(LONG)
    with reading(slow, leg_of(path, body)) as told:
        while (frame := next(told)) != Data(b"", []):
            assert isinstance(frame, Data)


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_a_shutdown_lets_the_router_try_elsewhere(slow: LiveServer, streams: bool) -> None:
    path, body = in_stream(LONG) if streams else LONG
    with reading(slow, leg_of(path, body)) as told:
        if streams:
            next(told)
        slow.call(slow.runtime.shutdown())
        failed = failure(list(told))
    assert (failed.code, failed.retryable, failed.status) == ("draining", True, 503)
    assert failed.payload.startswith(b"data: {" if streams else b"{")
    assert b"the engine is shutting down" in failed.payload


def test_a_dead_engine_lets_the_router_try_elsewhere(slow: LiveServer) -> None:
    path, body = in_stream(LONG)
    with reading(slow, leg_of(path, body)) as told:
        first = next(told)
        assert isinstance(first, Data)
        for process in slow.runtime.worker_pids:
            os.kill(process, signal.SIGKILL)
        failed = failure(list(told))
    assert (failed.code, failed.retryable) == ("engine_dead", True)


@pytest.mark.parametrize("rid", ["leg-1", "of the client"])
def test_an_abort_is_an_end(slow: LiveServer, rid: str) -> None:
    slow.client.headers["x-request-id"] = "of the client"  # the router passes it on
    path, body = in_stream(LONG)
    with reading(slow, leg_of(path, body)) as told:
        next(told)
        assert slow.client.post("/abort_request", json={"rid": rid}).status_code == 200
        assert isinstance(list(told)[-1], End)
    assert slow.runtime.manager.stats.finished["abort"] == 1


@pytest.mark.parametrize("rid", [None, "mine"])
def test_a_leg_takes_the_place_of_an_earlier_one_of_the_same_request(
    slow: LiveServer, rid: str | None
) -> None:
    """The router has left the earlier one, but the engine may not have noticed."""
    case = native("a" * 300, {"max_new_tokens": 300}, **({} if rid is None else {"rid": rid}))
    path, body = in_stream(case)
    short = in_stream(native("a", {"max_new_tokens": 3}, **({} if rid is None else {"rid": rid})))
    with reading(slow, leg_of(path, body)) as told:
        next(told)
        assert isinstance(frames(slow, leg_of(*short))[-1], End)
        assert isinstance(list(told)[-1], End)
        assert slow.runtime.manager.stats.finished["abort"] == 1
    slow.assert_nothing_left()


def test_a_rid_of_another_leg_is_in_use(slow: LiveServer) -> None:
    path, body = in_stream(native("a" * 300, {"max_new_tokens": 300}, rid="mine"))
    with reading(slow, leg_of(path, body)) as told:
        next(told)
        refused = post(slow, leg_of(path, body, id="leg-2"))
        assert refused.status_code == 400 and "rid='mine' is in flight" in refused.text


# --- what is refused ---


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "another epoch": ({"epoch": 1}, 503, "the leg is for epoch 1, and this engine has epoch 0"),
    "another path": ({"path": "/v1/embeddings"}, 400, "path='/v1/embeddings': must be one of /v1/chat/comp"),
    "another role": ({"kind": "prefill", "room": 5}, 400, "--role is decode, and the leg is of kind prefill"),
    "no room": (
        {"kind": "decode", "peer": "h:1"},
        400,
        "room=0: a leg of kind decode needs a number",
    ),
    "no peer": ({"kind": "decode", "room": 5}, 400, "peer='': a leg of kind decode needs"),
    "a peer that is not allowed": (
        {"kind": "decode", "room": 5, "peer": "169.254.169.254:80"},
        400,
        "peer='169.254.169.254:80': this engine may not connect there",
    ),
    "a peer without port": ({"kind": "decode", "room": 5, "peer": "h"}, 400, "peer='h'"),
    "an index": ({"outputs": [LegOutput(1, b"1234")]}, 400, "outputs of prompt 1, of 1; each prompt"),
    "twice": ({"outputs": [LegOutput(0), LegOutput(0)]}, 400, "outputs of prompt 0, of 1; each prompt"),
    "half an id": ({"outputs": [LegOutput(0, b"12345")]}, 400, "5 bytes are not the ids of fewer than 512"),
    "many ids": (
        {"outputs": [LegOutput(0, bytes(4 * 17))]},
        400,
        "begins with 17 output tokens, but may",
    ),
    "more ids": ({"outputs": [LegOutput(0, bytes(4 * 512))]}, 400, "2048 bytes are not the ids of fewer"),
    "a foreign id": (
        {"outputs": [LegOutput(0, b"\0\0\1\0")]},
        400,
        "outputs contains token id 65536",
    ),
    "logprobs": ({"outputs": [LegOutput(0, bytes(4), b"12")]}, 400, "2 bytes of logprobs are not those of 1"),
    "no end": (
        {"outputs": [LegOutput(0, bytes(4), b"", b"x")]},
        400,
        "the end of prompt 0 is b'x', which",
    ),
}


@pytest.mark.parametrize(("fields", "status", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_a_leg_that_does_not_fit_is_refused(
    fleet: Fleet, fields: dict[str, Any], status: int, text: str
) -> None:
    path, body = CASES["completion"]
    leg = structs.replace(leg_of(path, body), **fields)
    answer = post(fleet.one, leg)
    assert answer.status_code == status
    assert text in answer.text


@pytest.mark.parametrize("data", [b"", b"{}", b"\x80", b"\xc1", bytes(1 << 15)])
def test_what_is_no_leg_is_refused(fleet: Fleet, data: bytes) -> None:
    answer = fleet.one.client.post(LEG_PATH, content=data)
    assert answer.status_code == 400 and "this is no leg of a router" in answer.json()["message"]


def test_a_router_chooses_the_prefill_engine(fleet: Fleet) -> None:
    path, body = CASES["completion"]
    body = body | {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
    leg = leg_of(path, body, kind="decode", room=next(ROOMS), peer=fleet.peer)
    answer = post(fleet.one, leg)
    assert answer.status_code == 400 and "leave the bootstrap fields out" in answer.text


def test_a_prefill_engine_takes_whole_requests_of_one_token(fleet: Fleet) -> None:
    path, body = CASES["completion"]
    answer = post(fleet.prefill, leg_of(path, body))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_role")
    one = leg_of(path, body | {"max_tokens": 1})
    assert whole_body(frames(fleet.prefill, one)) == whole_body(frames(fleet.two, one))


@pytest.mark.parametrize("case", [CASES["completion"], CASES["native"]], ids=["OpenAI", "native"])
def test_a_client_s_error_is_that_of_its_route(fleet: Fleet, case: Case) -> None:
    path, body = case
    for wrong in (body | {"stream": 3}, body | {"text": 1, "prompt": 1}, {}):
        answer, public = post(fleet.one, leg_of(path, wrong)), fleet.one.client.post(path, json=wrong)
        assert public.status_code == 400
        assert (answer.status_code, answer.json()) == (public.status_code, public.json())


def test_a_large_body_is_decoded_as_on_its_route(fleet: Fleet) -> None:
    path, body = native("Hello world" * 2000)
    answer, public = post(fleet.one, leg_of(path, body)), fleet.one.client.post(path, json=body)
    assert len(leg_of(path, body).body) > INLINE_BYTES and public.status_code == 400
    assert (answer.status_code, answer.json()) == (public.status_code, public.json())


def test_a_body_has_the_limit_of_its_route(tiny_model: Path) -> None:
    with LiveServer(tiny_model, max_body_mib=1) as server:
        path, body = native("a" * (1 << 20))
        answer = post(server, leg_of(path, body))
        assert answer.status_code == 413 and "larger than 1 MiB; send less" in answer.json()["message"]


def test_a_leg_needs_the_api_key(tiny_model: Path) -> None:
    with LiveServer(tiny_model, api_key="secret") as server:
        leg = leg_of(*CASES["completion"])
        assert post(server, leg).status_code == 401
        server.client.headers["authorization"] = "Bearer secret"
        assert post(server, leg).status_code == 200


def test_another_engine_decides_about_a_grammar_only_if_the_sender_may_control_this_one(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beginning, "MAX_COMPILE_S", 1e-9)  # this machine is much slower
    monkeypatch.setattr(beginning, "ACCEPTED_PATIENCE", 1e12)
    path, body = native(params={"regex": "[a-z]{3}"})
    outputs = [LegOutput(0, pack_ids([5]))]
    with LiveServer(tiny_model, role="decode", api_key="user", admin_api_key="admin") as server:

        def is_taken(key: str, **fields: Any) -> bool:
            content = msgspec.msgpack.encode(leg_of(path, body, **fields))
            headers = {"authorization": f"Bearer {key}"}
            with server.client.stream("POST", LEG_PATH, content=content, headers=headers) as answer:
                if answer.status_code != 200:
                    assert answer.status_code == 400 and "to compile" in answer.read().decode()
                return answer.status_code == 200

        legs: list[dict[str, Any]] = [
            {"outputs": outputs},
            {"kind": "decode", "room": 5, "peer": "127.0.0.1:9"},
            {},
        ]
        assert [is_taken("admin", **leg) for leg in legs] == [True, True, False]
        assert [is_taken("user", **leg) for leg in legs] == [False, False, False]
