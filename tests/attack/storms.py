"""Requests that most clients abandon at a random point, amid pauses, aborts, flushes and version changes."""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import Any

import httpx

from tests.attack.target import Finding, Target, run_clients

NUM_CLIENTS = 32
LEAVING = 0.6  # share of requests whose client disconnects before it has its answer
ANSWER_S = 60.0  # time in which a request has to be answered if its client stays
MAX_TOKENS = 16
WORDS = ("the", "river", "seven", "geese", "was", "crossed", "\N{SNOWMAN}", "of", "\n", "lighthouse", "42")
MODES = (*("retract", "in_place") * 5, "abort", "wait")


def run(target: Target, budget_s: float, rng: Random) -> list[Finding]:
    """Send requests and disconnect at random until the budget is spent; clients that stay get answers."""
    return run_clients(_Storm(target, rng).run(time.monotonic() + budget_s))


class _Storm:
    """The clients and controllers of one storm, on one event loop."""

    def __init__(self, target: Target, rng: Random) -> None:
        self._target = target
        self._rng = rng
        self._findings: list[Finding] = []
        self._rids: set[str] = set()  # of requests whose clients wait for the answer

    async def run(self, until: float) -> list[Finding]:
        async with self._target.client(timeout=ANSWER_S) as http:
            controllers = (self._pause, self._pause, self._abort, self._flush, self._announce, self._look)
            controlling = [self._repeat(http, each, until) for each in controllers]
            asking = [self._repeat(http, self._ask, until) for _ in range(NUM_CLIENTS)]
            clients = asyncio.gather(*asking)
            await asyncio.gather(*controlling)
            while not clients.done():  # abort running requests, so that the storm ends soon
                await self._post(http, "/continue_generation", {})
                await self._post(http, "/abort_request", {"abort_all": True})
                await asyncio.wait([clients], timeout=0.2)
            await clients
        return self._findings

    async def _repeat(self, http: httpx.AsyncClient, act: Any, until: float) -> None:
        rng = Random(self._rng.random())  # one per task, so that the order of tasks does not change the draws
        while time.monotonic() < until:
            try:
                await act(http, rng)
            except httpx.HTTPError as error:
                seen = f"no answer: {error!r}; each request whose client stays has to get one"
                self._findings.append(Finding(what=act.__name__.strip("_"), seen=seen))

    # --- clients ---

    async def _ask(self, http: httpx.AsyncClient, rng: Random) -> None:
        path, body = _request(rng, self._target.model)
        leaves_after = rng.choice([0.0, rng.uniform(0, 0.05), rng.uniform(0, 1.0)])
        leaves = rng.random() < LEAVING
        if rid := body.get("rid"):
            self._rids.add(rid)
        try:
            answering = self._answer(http, path, body)
            await (asyncio.wait_for(answering, leaves_after) if leaves else answering)
        except TimeoutError:
            self._target.tried["storms: left"] += 1
        finally:
            self._rids.discard(rid or "")

    async def _answer(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        kind = "stream" if body["stream"] else "request"
        async with http.stream("POST", path, json=body) as response:
            text = await response.aread()
        self._note(f"storms: {kind} to {path}", response, text)
        if response.status_code == 200 and body["stream"] and not text.endswith(b"data: [DONE]\n\n"):
            seen = f"the stream ended with {text[-200:]!r}; it has to end with [DONE]"
            self._findings.append(Finding(what=f"stream to {path}", seen=seen))

    # --- controllers ---

    async def _pause(self, http: httpx.AsyncClient, rng: Random) -> None:
        await asyncio.sleep(rng.uniform(0, 0.5))
        if rng.random() < 0.8:
            body = {"mode": rng.choice(MODES), "ttl_s": rng.uniform(0.01, 0.5)}
            await self._post(http, "/pause_generation", body)
        else:
            await self._post(http, f"/pause?mode={rng.choice(['abort', 'keep', 'keep'])}", {})
        await asyncio.sleep(rng.choice([0, rng.uniform(0, 0.1)]))
        await self._post(http, rng.choice(["/continue_generation", "/resume"]), {})

    async def _abort(self, http: httpx.AsyncClient, rng: Random) -> None:
        await asyncio.sleep(rng.uniform(0, 0.3))
        body = {"rid": rng.choice([*sorted(self._rids), "nobody"])}
        await self._post(http, "/abort_request", {"abort_all": True} if rng.random() < 0.1 else body)

    async def _flush(self, http: httpx.AsyncClient, rng: Random) -> None:
        await asyncio.sleep(rng.uniform(0, 0.5))
        await self._post(http, f"/flush_cache?timeout={rng.choice([0, 0, 0.05])}", {})

    async def _announce(self, http: httpx.AsyncClient, rng: Random) -> None:
        await asyncio.sleep(rng.uniform(0, 1.0))
        body = {"new_version": f"storm-{rng.randrange(1000)}", "abort_all_requests": rng.random() < 0.1}
        await self._post(http, "/update_weight_version", body)

    async def _look(self, http: httpx.AsyncClient, rng: Random) -> None:
        await asyncio.sleep(rng.uniform(0, 0.2))
        path = rng.choice(["/server_info", "/metrics", "/v1/models", "/is_paused", "/weights_update_status"])
        response = await http.get(path)
        self._note(f"storms: {path}", response, response.content)

    async def _post(self, http: httpx.AsyncClient, path: str, body: Any) -> None:
        response = await http.post(path, json=body)
        self._note(f"storms: {path.partition('?')[0]}", response, response.content)

    def _note(self, what: str, response: httpx.Response, text: bytes) -> None:
        if finding := self._target.check(what, response.status_code, response.headers, text):
            self._findings.append(finding)


def _request(rng: Random, model: str) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of a random valid request."""
    count = rng.choice([1, 2, 5, 5, 5, 60, 60, 300])
    text = " ".join(rng.choices(WORDS, k=count))
    tokens, stream = rng.randint(1, MAX_TOKENS), rng.random() < 0.7
    sampling = {"temperature": rng.choice([0, 0.7, 1.5]), "top_p": rng.choice([1, 0.5])}
    common = {"model": model, "max_tokens": tokens, "stream": stream} | sampling
    match rng.randrange(4):
        case 0:
            return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}
        case 1:
            return "/v1/completions", common | {"prompt": rng.choice([text, [text, text[:20]]])}
        case _:
            params = sampling | {"max_new_tokens": tokens, "ignore_eos": True}
            body: dict[str, Any] = {"text": text, "sampling_params": params, "stream": stream}
            return "/generate", body | {"rid": f"storm-{rng.randrange(10**9)}"}
