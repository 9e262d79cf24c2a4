"""Events of a native stream, which are encoded bit by bit, against replies encoded as a whole."""

from __future__ import annotations

import asyncio
import random
import re
import time
from typing import Any

import msgspec
import pytest

from segue.api.native import NativeReplies, parse_call
from segue.bootstrap_hosts import BootstrapHosts
from segue.failover.life import Life
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import GenerateRequest, Generation, RequestState
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.messages.control import EngineLimits, Ready
from segue.messages.requests import Finished, SamplingParams, TokenLogprob
from segue.messages.weight_update import WeightNotice

# Whole characters, parts of one, what JSON escapes, bytes that are no UTF-8, nothing, and a special token.
TOKENS = [*"aé東🙂", '"', "\\", "\x00", "\n", "\x7f", "stop", "st", "", "\u2028"]
TABLE = TokenTable([t.encode() for t in TOKENS] + [b"\xf0", b"\x9f", b"\x99\x82", b"\xff", b"<s>"], (17,))
VOCABULARY = len(TABLE.tokens)
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"text": "x", "rid": 'r","completion_tokens":0'},
    "batch": {"text": ["x", "y", "z"]},
    "logprobs": {"text": "x", "return_logprob": True},
    "texts of tokens": {"text": "x", "return_logprob": True, "return_text_in_logprobs": True},
    "likeliest tokens": {"text": ["x", "y"], "return_logprob": True, "top_logprobs_num": 2},
    "logprobs of the prompt": {"text": "x", "return_logprob": True, "logprob_start_len": 0},
    "likeliest tokens of a part of the prompt": {
        "text": ["x", "y"],
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
    },
}


def manager() -> TokenizerManager:
    limits = EngineLimits(
        max_seq_len=512, num_pages=10, page_size=16, max_running_requests=4, chunked_prefill_size=64
    )
    ready = Ready(
        limits=limits,
        vocab_size=VOCABULARY,
        device="cpu",
        dtype="float32",
        attention_backend="fake",
        weight_bytes=0,
        kv_bytes=0,
        init_steps=[],
    )
    made = TokenizerManager(
        None,
        ready,
        lambda message: None,
        life=Life(),
        max_queued_requests=9,
        bootstrap_hosts=BootstrapHosts("*", "127.0.0.1"),
        bootstrap_port=0,
    )
    made.table = TABLE
    return made


def entry(rng: random.Random, num_top: int) -> TokenLogprob:
    tokens = [(rng.randrange(VOCABULARY), rng.choice([-0.25, -1e-7, -float("inf")])) for _ in range(num_top)]
    return TokenLogprob(rng.randrange(VOCABULARY), -rng.random(), tokens)


class Twin:
    """A request in flight in two generations: one is read as objects, the other as JSON."""

    def __init__(
        self, request: GenerateRequest, rng: random.Random, both: tuple[Generation, Generation]
    ) -> None:
        options, self.rng, self.count = request.options, rng, 0
        self.params = SamplingParams(
            max_new_tokens=100,
            logprobs=options.logprobs,
            prompt_logprobs_start=options.prompt_logprobs_start,
            num_prompt_top=options.num_prompt_top,
        )
        now = time.monotonic()
        self.states = [
            RequestState(request, [1, 2, 3, 4], self.params, TABLE, now, generation.changed)
            for generation in both
        ]
        if self.params.prompt_logprobs_start >= 0:
            self.add_prompt(rng.randrange(3))
        if rng.random() < 0.5:  # as after a hand-over: the client has the beginning
            ids = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))]
            entries = [entry(rng, 2) for _ in ids] if options.logprobs >= 0 else []
            for state in self.states:
                state.prime(ids, entries)
            self.count = len(ids)
        for state, generation in zip(self.states, both, strict=True):
            generation.states.append(state)

    @property
    def is_over(self) -> bool:
        return self.states[0].is_over

    def add_prompt(self, count: int) -> None:
        entries = [entry(self.rng, self.params.num_prompt_top) for _ in range(count)]
        for state in self.states:
            state.prompt_logprobs += entries

    def add(self, count: int) -> None:
        """Add tokens; end the request at a stop string, and sometimes just so."""
        for _ in range(count):
            token = self.rng.randrange(VOCABULARY)
            logprob = entry(self.rng, 2) if self.params.logprobs >= 0 else None
            for state in self.states:
                state.add(token, logprob, is_stop=False)
        self.count += count
        if self.states[0].cut >= 0 or self.rng.random() < 0.1:
            versions = [("0", 0, 1), ("new", 1, self.count)]
            reason = self.rng.choice(["length", "abort"])
            end = Finished(
                rid="r",
                reason=reason,
                num_tokens=self.count,
                prompt_tokens=4,
                cached_tokens=2,
                versions=versions,
            )
            for state in self.states:
                state.finish(end)
        for state in self.states:
            state.changed.set()


def without_time(data: bytes) -> bytes:
    return re.sub(rb'"e2e_latency":[0-9.e-]+', b"", data)


@pytest.mark.parametrize("name", BODIES)
def test_events_have_the_bytes_of_the_whole_reply(name: str) -> None:
    async def work(seed: int) -> int:
        rng, engine = random.Random(seed), manager()
        body = BODIES[name] | {"sampling_params": {"stop": ["stop"] if rng.random() < 0.5 else []}}
        call, num_updates = parse_call(body, 9), 0
        both = Generation(1, lambda *_: None), Generation(1, lambda *_: None)
        twins = [Twin(request, rng, both) for request in call.requests]
        objects = NativeReplies(engine, call, both[0]).updates()
        replies, news = NativeReplies(engine, call, both[1]), both[1].updates()
        while running := [twin for twin in twins if not twin.is_over]:
            if rng.random() < 0.2:
                engine.weights = WeightNotice(version=f'version "{rng.random()}"')
            twin = rng.choice(running)
            if twin.params.prompt_logprobs_start >= 0 and rng.random() < 0.3:
                twin.add_prompt(1)
            twin.add(rng.randrange(1, 4))
            expected = await anext(objects)
            index, output = await anext(news)
            event = b"data: " + msgspec.json.encode(expected) + b"\n\n"
            assert without_time(replies.event(index, output)) == without_time(event)
            num_updates += 1
        assert [each async for each in objects] == [each async for each in news] == []
        return num_updates

    assert sum(asyncio.run(work(seed)) for seed in range(40)) > 100
