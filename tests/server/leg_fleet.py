"""Real engines that take legs, the calls that their tests make, and what must hold wherever a leg is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from segue.messages.leg import End, Frame, Leg, LegOutput
from tests.server.legs import frames, leg_of, named, payload
from tests.server.live import LiveServer

MODEL = "tiny-model"
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "page_size": 4,
    "num_kv_tokens": 1024,
    "max_running_requests": 8,
    "deterministic": True,
    "real": True,
}
ROOMS = itertools.count(1, 1000)
BYTES = {str(token): 100 for token in (165, 254, 112)}  # E6 9D B1, of which 東 consists


class Fleet:
    """A prefill engine and two decode engines, which serve whole requests too."""

    def __init__(self, model: Path) -> None:
        self.prefill = LiveServer(model, role="prefill", disaggregation_bootstrap_port=0, **OPTIONS)
        self.one, self.two = (LiveServer(model, role="decode", **OPTIONS) for _ in range(2))
        address = self.prefill.runtime.manager.ready.control_address
        assert address is not None
        self.peer = address
        self.threads = ThreadPoolExecutor(8)

    def pair(self, path: str, body: dict[str, Any], **fields: Any) -> list[Frame]:
        """Returns the frames of the decode engine of a pair; asserts that it has computed no prompt."""
        where = {"room": next(ROOMS), "peer": self.peer} | fields
        first = self.threads.submit(frames, self.prefill, leg_of(path, body, kind="prefill", **where))
        found = frames(self.one, leg_of(path, body, kind="decode", **where))
        assert first.result(60) == [End(b"")]
        assert self.handover()["recomputed"] == {}
        return found

    def handover(self) -> dict[str, Any]:
        answer = self.one.client.get("/server_info").json()
        found: dict[str, Any] = answer["internal_states"][0]["handover"]
        return found

    def close(self) -> None:
        for server in (self.prefill, self.one, self.two):
            server.__exit__(None, None, None)
        self.threads.shutdown()


# --- calls ---

Case = tuple[str, dict[str, Any]]
CHAT: Case = ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]})
COMPLETION: Case = ("/v1/completions", {"model": MODEL, "prompt": "Hello world"})
USAGE = {"stream_options": {"include_usage": True}}


def openai(case: Case, **fields: Any) -> Case:
    return case[0], case[1] | {"max_tokens": 16, "ignore_eos": True} | fields


def native(text: Any = "Hello world", params: dict[str, Any] | None = None, **fields: Any) -> Case:
    params = {"max_new_tokens": 16, "ignore_eos": True} | (params or {})
    return "/generate", {"text": text, "sampling_params": params} | fields


CASES: dict[str, Case] = {
    "native": native(),
    "native, all logprobs": native(return_logprob=True, top_logprobs_num=2, logprob_start_len=0),
    "native, special tokens": native(params={"skip_special_tokens": False}),
    "native, bytes of characters": native(params={"logit_bias": BYTES, "max_new_tokens": 30}),
    "native, batch": (
        "/generate",
        {
            "text": ["Hello", "How are you?", "Paris"],
            "sampling_params": [{"max_new_tokens": count, "ignore_eos": True} for count in (2, 12, 6)],
        },
    ),
    "native, batch, all logprobs": (
        "/generate",
        {
            "text": ["Hello", "How are you?"],
            "sampling_params": [{"max_new_tokens": count, "ignore_eos": True} for count in (2, 12)],
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    ),
    "native, rid": native(rid="mine", params={"sampling_seed": 3}),
    "native, choices": native(rid="mine", params={"sampling_seed": 3, "n": 2, "max_new_tokens": 6}),
    "chat": openai(CHAT),
    "chat, usage and logprobs": openai(CHAT, logprobs=True, top_logprobs=3, **USAGE),
    "chat, bytes of characters": openai(CHAT, logit_bias=BYTES, max_tokens=30),
    "chat, penalties": openai(CHAT, frequency_penalty=1.0, presence_penalty=0.5, min_tokens=4),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "temperature": 0},
    ),
    "completion": openai(COMPLETION),
    "completion, logprobs": openai(COMPLETION, logprobs=2, **USAGE),
    "completion, batch": openai(COMPLETION, prompt=["Hello", "How are you?"], **USAGE),
    "completion, choices": openai(COMPLETION, prompt=["Hello", "Hi"], n=2, max_tokens=6, **USAGE),
    "completion, greedy": openai(COMPLETION, temperature=0),
    "completion, echo and ids": openai(
        COMPLETION, echo=True, logprobs=1, return_token_ids=True, max_tokens=3
    ),
    "response": (
        "/v1/responses",
        {"model": MODEL, "input": "Hello", "max_output_tokens": 16, "ignore_eos": True, "min_p": 0.01},
    ),
    "tokens": (
        "/inference/v1/generate",
        {
            "token_ids": [40, 70, 77, 80],
            "sampling_params": {"max_tokens": 8, "ignore_eos": True, "logprobs": 2},
            "return_token_ids": True,
            **USAGE,
        },
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def in_stream(case: Case) -> Case:
    return case[0], case[1] | {"stream": True}


def in_whole(case: Case) -> Case:
    """The same call without a stream."""
    return case[0], {name: value for name, value in case[1].items() if name != "stream_options"}


# --- cuts ---

some_cuts = pytest.mark.parametrize(
    "every", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["every third cut", "every cut"]
)


def cuts(told: list[Frame], every: int) -> range:
    """Returns how many frames come before each cut, one of ``every``. The first depends on the reply."""
    return range(len(payload(told)) % every, len(told), every)


def tokens(outputs: list[LegOutput]) -> list[tuple[int, bytes, bytes, bool]]:
    """Returns what outputs name; each engine has a cache of its own, so their ends are not compared."""
    return sorted((each.index, each.ids, each.logprobs, bool(each.end)) for each in outputs)


def check_each_cut(
    told: list[Frame],
    leg: Callable[..., Leg],
    server: LiveServer,
    says: Callable[[bytes], Any],
    every: int = 1,
) -> None:
    """Asserts that a leg behind any of these frames, or one of ``every``, gives what they do not."""
    assert isinstance(told[-1], End)
    for count in cuts(told, every):
        before = told[:count]
        after = frames(server, leg(outputs=named(before)))
        assert isinstance(after[-1], End)
        assert says(payload(before) + payload(after)) == says(payload(told)), f"cut behind frame {count}"
        assert tokens(named(after, named(before))) == tokens(named(told))
