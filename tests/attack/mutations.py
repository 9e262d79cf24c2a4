"""Sends valid bodies of the POST routes with a few bytes changed, cut off, repeated or made absurd."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import count
from random import Random
from typing import Any

import httpx

from tests.attack.target import Finding, Target, run_clients

NUM_CLIENTS = 8
ANSWER_S = 30.0
SAMPLING = {"max_new_tokens": 3, "temperature": 0.7, "stop": ["a"], "logit_bias": {"5": 1.0}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "stream": True, "seed": 1}
BUCKETS = [{"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}]
MOVED = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": "none"}
BODIES: dict[str, Any] = {
    "/generate": {"text": "Hello", "sampling_params": SAMPLING, "rid": None, "return_logprob": True},
    "/v1/chat/completions": CHAT | {"logprobs": True, "top_logprobs": 2},
    "/v1/messages": {**{name: CHAT[name] for name in ("messages", "max_tokens", "stream")}, "top_k": 5},
    "/v1/completions": {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 3, "temperature": 0},
    "/v1/responses": {
        "input": CHAT["messages"],
        "instructions": "Hi",
        "max_output_tokens": 3,
        "stream": True,
    },
    "/pause_generation": {"mode": "retract", "ttl_s": 0.05},
    "/continue_generation": {},
    "/abort_request": {"rid": "nobody", "abort_all": False},
    "/prepare_weights_update": {"num_buckets": 1, "buckets": BUCKETS, "group_name": "none", "timeout_s": 1},
    "/complete_weights_update": {"group_name": "none", "flush_cache": False},
    "/commit_weights_update": {"session_id": "none"},
    "/abort_weights_update": {"session_id": "none"},
    "/update_weights_from_distributed": MOVED,
    "/update_weights_from_tensor": {"serialized_named_tensors": ["gASVAAAA"], "load_format": None},
    "/update_weight_version": {"new_version": "7"},
    "/update_weights_from_disk": {"model_path": "/no/such/model", "load_format": None},
    "/destroy_weights_update_group": {"group_name": "none"},
    "/get_weights_by_name": {"name": "model.norm.weight", "truncate_size": 3},
    "/weights_checker": {"action": "checksum"},
}
ABSURD = (
    b"null", b"true", b"-1", b"1e309", b"1e-400", b"NaN", b"9" * 400, b'"\\ud800"', b'"\\u0000"', b"[]",
    b"[" * 3000, b'{"a":' * 3000, b"\x00", b"\xff\xfe", b'"' + b"\xf0\x9f\xa6\x86" * 2000 + b'"', b"0.1",
    b"{}", b"2147483648", b"-9223372036854775809", b'"/proc/self/mem"', b'"../../../../etc/passwd"',
)  # fmt: skip
TYPES = ("application/json", "application/json", "application/json", "text/plain", "multipart/form-data", "")


def run(target: Target, budget_s: float, rng: Random) -> list[Finding]:
    """Send changed bodies until the budget is spent; each must be answered, not with an undocumented 5xx."""
    return run_clients(_run(target, time.monotonic() + budget_s, rng))


async def _run(target: Target, until: float, rng: Random) -> list[Finding]:
    findings: list[Finding] = []
    async with target.client(timeout=ANSWER_S) as http:

        async def client(rng: Random) -> None:
            while time.monotonic() < until:
                path = rng.choice(sorted(BODIES))
                body = mutated(json.dumps(BODIES[path] | _model(path, target)).encode(), rng)
                try:
                    response = await http.post(
                        path, content=body, headers={"content-type": rng.choice(TYPES)}
                    )
                except httpx.HTTPError as error:
                    seen = f"{error!r} for the body {body[:300]!r}; each body gets an answer"
                    findings.append(Finding(what=f"mutations: {path}", seen=seen))
                    continue
                where, content = f"mutations: {path}", response.content
                if found := target.check(where, response.status_code, response.headers, content):
                    findings.append(Finding(what=where, seen=f"{found.seen}; the body: {body[:300]!r}"))

        async def keep_running() -> None:  # a changed body may pause for ever, or ask for many tokens
            for turn in count():
                await http.post("/continue_generation", json={})
                if turn % 10 == 9:
                    await http.post("/abort_request", json={"abort_all": True})
                await asyncio.sleep(0.2)

        running = asyncio.create_task(keep_running())
        await asyncio.gather(*(client(Random(rng.random())) for _ in range(NUM_CLIENTS)))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return findings


def _model(path: str, target: Target) -> dict[str, str]:
    return {"model": target.model} if path.startswith("/v1/") else {}


def mutated(body: bytes, rng: Random) -> bytes:
    """Returns the body with up to three changes."""
    for _ in range(rng.randint(1, 3)):
        at, to = sorted(rng.randrange(len(body) + 1) for _ in range(2))
        match rng.randrange(6):
            case 0:  # flip one bit
                index = min(at, len(body) - 1)
                body = body[:index] + bytes([body[index] ^ 1 << rng.randrange(8)]) + body[index + 1 :]
            case 1:  # cut off the end
                body = body[:at] or b" "
            case 2:  # repeat a part
                body = body[:to] + body[at:]
            case 3:  # leave out a part
                body = body[:at] + body[to:] or b"{"
            case _:  # replace a value
                values = [i for i, byte in enumerate(body) if byte in b":[,"] or [0]
                start = rng.choice(values) + 1
                ends = [i for i in range(start, len(body)) if body[i] in b",]}"] or [len(body)]
                body = body[:start] + rng.choice(ABSURD) + body[ends[0] :]
    return body
