"""The three levels of length-aware prefill, in every combination: graphs, scheduler, groups of a router."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import httpx

from tests.e2e.served import Served
from tests.e2e.test_router import routing
from tests.model_runner import making
from tests.server.live import LiveServer

THRESHOLD = 8  # tokens of the longest short prompt
COMMON: dict[str, Any] = {
    "deterministic": True,
    "num_kv_tokens": 4096,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
    "disable_prefix_cache": True,  # else later combinations would have nothing to compute
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Which levels are on."""

    graphs: bool  # level 1: graphs of batches of prompts, on the engines
    scheduler: bool  # level 2: short prompts first, on the engines
    groups: bool  # level 3: engines for short and for long prompts, on the router

    def __str__(self) -> str:
        names = [name for name in self.__slots__ if getattr(self, name)]
        return "+".join(names) or "none"

    @property
    def engine_options(self) -> dict[str, Any]:
        """The options of the engines."""
        options = dict(COMMON)
        if self.graphs:
            options |= {"enable_batch_prefill_cuda_graph": True}
        if self.scheduler:
            options |= {"enable_laps_scheduler": True, "laps_length_threshold": THRESHOLD}
        return options

    @property
    def router_options(self) -> dict[str, str]:
        """The options of the router: each of two groups has its own prompts, unless it is a minute slower."""
        if not self.groups:
            return {}
        return {"enable_laps_alloc": "", "laps_alloc_threshold": str(THRESHOLD), "laps_overflow_ms": "60000"}


ALL = [Levels(graphs=a, scheduler=b, groups=c) for a, b, c in itertools.product((False, True), repeat=3)]
NONE = ALL[0]
ENGINES = [levels for levels in ALL if not levels.groups]  # the kinds of engines that are needed


def engines_of(levels: Levels) -> Levels:
    """Returns the kind of engines that a combination needs."""
    return replace(levels, groups=False)


@contextmanager
def routed(engines: Sequence[Served | LiveServer], levels: Levels) -> Iterator[str]:
    """Runs a router in front of two engines; yields its URL once its groups are as they should be."""
    with routing(*engines, policy="cost", **levels.router_options) as url:
        status = httpx.get(f"{url}/laps_status", timeout=60).json()
        assert status["enabled"] is levels.groups, status
        if levels.groups:
            assert [len(status["short_group"]), len(status["long_group"])] == [1, 1]
        yield url


def replies(url: str, max_id: int) -> list[Any]:
    """Returns tokens and logprobs of short and long prompts, which are sent at the same time."""
    random = Random(7)
    lengths = [random.randint(40, 300) if index % 4 == 0 else random.randint(1, 8) for index in range(24)]

    def one(index: int) -> Any:
        body = {
            "input_ids": [token % max_id for token in making.prompt(lengths[index], seed=index)],
            "sampling_params": {
                "max_new_tokens": 8,
                "temperature": 0.8,
                "sampling_seed": index,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        reply = httpx.post(f"{url}/generate", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()["output_ids"], reply.json()["meta_info"]["output_token_logprobs"]

    with ThreadPoolExecutor(len(lengths)) as threads:
        return list(threads.map(one, range(len(lengths))))


def states(engines: Sequence[Served | LiveServer]) -> list[dict[str, Any]]:
    """Returns the engines' ``internal_states``."""
    answers = [httpx.get(f"{engine.url}/server_info", timeout=60).json() for engine in engines]
    return [answer["internal_states"][0] for answer in answers]
