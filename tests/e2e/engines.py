"""Drives a `segue.Engine` from threads, so that requests run while the test pauses them."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import segue
from tests.support.held_steps import hold_here

_THREADS = ThreadPoolExecutor(64)
Futures = dict[str, "Future[Any]"]


def greedy(count: int) -> dict[str, Any]:
    """Returns sampling parameters of a request that ends after exactly ``count`` tokens."""
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}


def state(engine: segue.Engine) -> dict[str, Any]:
    internal: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return internal


def until(engine: segue.Engine, timeout: float = 60.0, **facts: Any) -> dict[str, Any]:
    """Waits until the state agrees with ``facts``, and returns the state."""
    deadline = time.monotonic() + timeout
    while True:
        now = state(engine)
        differs = {name: now[name] for name, value in facts.items() if now[name] != value}
        if not differs:
            return now
        if time.monotonic() > deadline:
            pytest.fail(f"the state did not become {facts} within {timeout:g} s; it is {differs}")


def given(prompt: Any) -> dict[str, Any]:
    """Returns the argument of ``generate`` for a text, or for token ids."""
    return {"prompt": prompt} if isinstance(prompt, str) else {"input_ids": prompt}


def begin(engine: segue.Engine, prompts: list[Any], params: Any, **fields: Any) -> Futures:
    """Queues requests ``r0``, ``r1``, … in a pause, lets them run, and returns futures of their replies."""
    engine.pause_generation("in_place")
    futures: Futures = {}
    for index, prompt in enumerate(prompts):
        rid = f"r{index}"
        fields |= {"sampling_params": params, "rid": rid}
        futures[rid] = _THREADS.submit(engine.generate, **given(prompt), **fields)
        until(engine, waiting_queue_rids=list(futures))
    engine.continue_generation()
    return futures


def results(futures: Futures) -> list[Any]:
    return [future.result(300) for future in futures.values()]


def interrupted(
    engine: segue.Engine, prompts: list[Any], params: Any, *, pauses: int, random: Random, **fields: Any
) -> list[Any]:
    """Returns the replies of concurrent requests, all retracted ``pauses`` times at random moments."""
    start = state(engine)["num_generated_tokens"]
    # Pauses come in the first half of the tokens, when no request has ended, though some are ahead of others.
    half = len(prompts) * params["max_new_tokens"] // 2
    moments = sorted(random.sample(range(1, half), pauses))
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        gate = hold_here(Path(directory) / "steps", patch)
        gate.close_at(start + half + half // 10)  # however late this thread is
        futures = begin(engine, prompts, params, **fields)
        made = start
        for moment in moments:
            while not made < state(engine)["num_generated_tokens"] >= start + moment:
                pass
            paused = engine.pause_generation("retract")
            assert (paused.num_running, paused.num_waiting) == (0, len(prompts)), "every request is retracted"
            made = state(engine)["num_generated_tokens"]
            if moment == moments[-1]:
                gate.open()
            engine.continue_generation()
        return results(futures)


def bits(replies: list[Any]) -> list[tuple[list[int], list[float]]]:
    """Returns the token ids of each reply, and their log-probabilities to the last bit."""
    return [
        (reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
        for reply in replies
    ]


def check_retracted_is_uninterrupted(
    engine: segue.Engine, prompts: list[Any], count: int, *, pauses: int, seed: int
) -> None:
    """Asserts that pauses change neither the token ids nor the log-probability bits of any request."""
    params, fields = greedy(count), {"return_logprob": True}
    expected = bits(results(begin(engine, prompts, params, **fields)))
    for flush in (False, True):  # with a warm prefix cache, and with a cold one
        if flush:
            assert engine.flush_cache(timeout=10).success
        random = Random(f"{seed} {flush}")
        found = bits(interrupted(engine, prompts, params, pauses=pauses, random=random, **fields))
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one[0] == other[0], f"request {index}: different tokens"
            assert one[1] == other[1], f"request {index}: the same tokens, different bits"
