"""Clients and controllers that send random calls at random times to a server, and check every answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import httpx

from tests.e2e.served import greedy

NUM_CLIENTS = 8
MODES = [*["retract", "in_place"] * 6, "abort", "wait"]
MAX_TOKENS = 12


class Fuzz:
    """A fuzz of one server.

    ``whole`` maps each prompt to its longest output; each reply must be a prefix of that output.
    """

    def __init__(self, url: str, whole: dict[str, list[int]], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._url = url
        self._whole = whole
        self._random = Random(seed)
        self._live: set[str] = set()  # ids of requests whose clients wait

    def run(self, seconds: float, wanted: Sequence[str] = ()) -> None:
        """Send calls for some seconds, and on until each wanted kind has occurred, at most a minute more."""
        self._until, self._wanted = time.monotonic() + seconds, wanted
        asyncio.run(self._run())

    def _goes_on(self) -> bool:
        over = time.monotonic() - self._until
        return over < 0 or (over < 60 and not all(self.counts[kind] for kind in self._wanted))

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=60, limits=limits) as http:
            # Two independent controllers that pause, one that flushes and one that aborts.
            control = [self._control(http) for _ in range(2)]
            controllers = [*control, self._flush(http), self._abort(http)]
            clients = [self._ask(http, number) for number in range(NUM_CLIENTS)]
            asking = asyncio.gather(*clients)
            await asyncio.gather(
                *controllers
            )  # they leave the server unpaused, so every client gets its answer
            await asyncio.wait_for(asking, 60)

    # --- controllers ---

    async def _control(self, http: httpx.AsyncClient) -> None:
        random = self._random
        while self._goes_on():
            await asyncio.sleep(random.uniform(0, 0.3))
            for _ in range(random.choice([1, 1, 1, 2])):
                mode = random.choice(MODES)
                ttl = {"ttl_s": random.uniform(0.01, 0.3)} if random.random() < 0.2 else {}
                reply = await self._post(http, "/pause_generation", {"mode": mode} | ttl)
                assert reply.json()["status"] == "ok"
                self.counts[f"pause {mode}"] += 1
            if random.random() < 0.8:  # otherwise the ttl or a later turn ends the pause
                await asyncio.sleep(random.choice([0, 0, random.uniform(0, 0.1)]))
                await self._post(http, "/continue_generation", {})
        await self._post(http, "/continue_generation", {})

    async def _flush(self, http: httpx.AsyncClient) -> None:
        while self._goes_on():
            await asyncio.sleep(self._random.uniform(0, 0.3))
            timeout = self._random.choice([0, 0, 0.05])
            reply = await self._post(http, f"/flush_cache?timeout={timeout}", {}, 200, 400)
            assert ("Reason: " in reply.text) == (reply.status_code == 400)
            self.counts[f"flush {reply.status_code}"] += 1

    async def _abort(self, http: httpx.AsyncClient) -> None:
        random = self._random
        while self._goes_on():
            await asyncio.sleep(random.uniform(0, 2))
            if random.random() < 0.1:
                await self._post(http, "/abort_request", {"abort_all": True})
            else:
                rid = random.choice([*sorted(self._live), "unknown"])
                await self._post(http, "/abort_request", {"rid": rid})
            self.counts["asked to abort"] += 1

    async def _post(self, http: httpx.AsyncClient, path: str, body: Any, *statuses: int) -> httpx.Response:
        reply = await http.post(path, json=body)
        assert reply.status_code in (statuses or (200,)), (path, body, reply.status_code, reply.text)
        return reply

    # --- clients ---

    async def _ask(self, http: httpx.AsyncClient, number: int) -> None:
        random, turn, num_left = self._random, 0, 0
        while self._goes_on():
            turn += 1
            # Ids are reused, but none of a request that the client left: nobody tells when that has ended.
            rid = f"{number}-{num_left}-{turn % 2}"
            prompt, count = random.choice(sorted(self._whole)), random.randint(1, MAX_TOKENS)
            body = {"text": prompt, "sampling_params": greedy(count), "rid": rid}
            disconnects_after = random.choice([None, None, None, random.uniform(0, 0.5)])
            ask = self._stream if random.random() < 0.5 else self._post_generate
            self._live.add(rid)
            try:
                reply = await asyncio.wait_for(ask(http, body), disconnects_after)
                self._check(reply, prompt, count)
            except TimeoutError:
                self.counts["disconnected"] += 1
                num_left += 1
            finally:
                self._live.discard(rid)

    async def _post_generate(self, http: httpx.AsyncClient, body: Any) -> Any:
        return (await self._post(http, "/generate", body)).json()

    async def _stream(self, http: httpx.AsyncClient, body: Any) -> Any:
        events: list[Any] = []
        ended = False
        async with http.stream("POST", "/generate", json=body | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                assert not ended or not line, "data after the end of the stream"
                if line == "data: [DONE]":
                    ended = True
                elif line and not line.startswith(":"):
                    events.append(json.loads(line.removeprefix("data: ")))
        assert ended, "the stream broke off"
        ends = [event["meta_info"]["finish_reason"] is not None for event in events]
        assert ends.index(True) == len(ends) - 1, "a request must end once, with its last event"
        for earlier, later in pairwise(events):
            assert later["text"].startswith(earlier["text"]), "text was taken back"
            assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        return events[-1]

    def _check(self, reply: Any, prompt: str, count: int) -> None:
        ids, meta = reply["output_ids"], reply["meta_info"]
        reason = meta["finish_reason"]["type"]
        assert ids == self._whole[prompt][: len(ids)], "a token was lost, repeated or invented"
        assert meta["completion_tokens"] == len(ids)
        assert (len(ids) == count) if reason == "length" else (reason == "abort" and len(ids) <= count)
        self.counts[reason] += 1
