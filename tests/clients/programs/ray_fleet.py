"""A fleet in a Ray cluster of this machine: weights, killed processes, Ray Serve, and the end.

Arguments: the directory of a model, and ``whole``, or ``left`` for a program that is to be killed once its
fleet serves. The last line of its output is an object with what was seen.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import ray
from ray import serve

from segue.config import EngineConfig
from segue.integrations.ray import FleetConfig, RayFleet, TrainerConfig
from segue.integrations.ray.ingress import ingress
from segue.router.config import RouterConfig

DEADLINE_S = 90.0
NAME = "policy"
TEXTS = ["the river ran past a small stone house", "and the house was old"]
PROMPT = [5, 17, 3, 11, 2]
TOKENS = 96


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition, and return what it says."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {DEADLINE_S:g} s")
        time.sleep(0.1)
    return found


def call(url: str, path: str, body: Any = None, key: str | None = None) -> Any:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body)
    try:
        connection.request("GET" if data is None else "POST", f"{parts.path}{path}", data, headers)
        reply = connection.getresponse()
        text = reply.read()
    finally:
        connection.close()
    if reply.status != 200:
        raise RuntimeError(f"{path}: {reply.status} {text[:300]!r}")
    return json.loads(text)


def tokens(url: str, key: str | None = None, **fields: Any) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params} | fields
    found: list[int] = call(url, "/generate", body, key)["output_ids"]
    return found


def events(url: str, **fields: Any) -> tuple[list[dict[str, Any]], list[float]]:
    """The events of a streamed reply, and when they came."""
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "stream": True} | fields
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    found, times = [], []
    try:
        connection.request(
            "POST", f"{parts.path}/generate", json.dumps(body), {"content-type": "application/json"}
        )
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"/generate: {reply.status} {reply.read()[:300]!r}")
        while line := reply.readline():
            if line.startswith(b"data: {"):
                found.append(json.loads(line[6:]))
                times.append(time.monotonic())
                if "error" in found[-1]:
                    raise RuntimeError(str(found[-1]))
    finally:
        connection.close()
    return found, times


class Load:
    """Clients that ask for one streamed reply after the other."""

    def __init__(self, url: str, expected: list[int], count: int = 4) -> None:
        self.errors: list[str] = []
        self.replies = 0
        self._url, self._expected, self._ends = url, expected, threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._ends.is_set():
            try:
                found, _ = events(self._url)
                if (last := found[-1]["output_ids"]) != self._expected:
                    self.errors.append(f"other tokens: {last}")
                self.replies += 1
            except Exception as error:
                self.errors.append(repr(error))

    def until_more(self) -> None:
        """Wait for two replies per client."""
        wanted = self.replies + 2 * len(self._threads)
        until(lambda: self.replies >= wanted or self.errors, "replies")

    def end(self) -> dict[str, Any]:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        return {"errors": self.errors, "replies": self.replies}


def config_of(model: str, *, trainer: bool) -> FleetConfig:
    engine = EngineConfig(
        model=model,
        served_model_name=NAME,
        device="cpu",
        dtype="float32",
        num_kv_tokens=16384,
        deterministic=True,
        exit_grace=0.1,
    )
    return FleetConfig(
        engine=engine,
        router=RouterConfig(port=int(os.environ["TEST_ROUTER_PORT"]), drain_s=5.0),
        trainer=TrainerConfig(model=model, learning_rate=1e-2) if trainer else None,
        engines=2,
        start_timeout_s=180.0,
    )


def workers(fleet: RayFleet) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call(fleet.url, "/workers", key=fleet.endpoint.api_key)["workers"]
    return found


def weights(fleet: RayFleet) -> dict[str, Any]:
    """A training step, and its weights at both engines."""
    first = tokens(fleet.url)
    step = ray.get(fleet.trainer.train_step.remote(TEXTS))
    sent = ray.get(fleet.trainer.sync.remote())
    key = fleet.endpoint.worker_api_key
    engines = fleet.describe()[1:3]
    return {
        "step": step["num_steps"],
        "sent": sorted(each["url"] for each in sent["endpoints"]),
        "engines": sorted(each.url for each in engines),
        "versions": [call(each.url, "/weight_version", key=key)["weight_version"] for each in engines],
        "before": first,
        "after": [tokens(each.url, key) for each in engines],
    }


def kill(fleet: RayFleet, number: int, whom: str) -> dict[str, Any]:
    """Kill an engine's process or that of its actor under load; wait until it is back."""
    expected = events(fleet.url)[0][-1]["output_ids"]
    load = Load(fleet.url, expected)
    load.until_more()
    before = fleet.describe()[1 + number]
    os.kill(before.pid if whom == "engine" else before.actor_pid, signal.SIGKILL)
    load.until_more()
    after = ray.get(fleet.engines[number].info.remote())
    fleet.wait_ready(DEADLINE_S)
    load.until_more()
    return load.end() | {
        "restarted": [before.is_restarted, after.is_restarted],
        "other": after.pid != before.pid and after.actor_pid != before.actor_pid,
        "left": os.path.exists(f"/proc/{before.pid}"),
    }


def kill_router(fleet: RayFleet) -> dict[str, Any]:
    before = fleet.describe()[0]
    os.kill(before.pid, signal.SIGKILL)
    after = until(lambda: (now := fleet.describe()[0]).pid != before.pid and now, "the router's restart")
    fleet.wait_ready(DEADLINE_S)
    return {"same_url": after.url == before.url, "restarted": after.is_restarted, "tokens": tokens(fleet.url)}


def through_serve(fleet: RayFleet) -> dict[str, Any]:
    port = int(os.environ["TEST_SERVE_PORT"])
    serve.start(http_options={"port": port, "location": "HeadOnly"})
    serve.run(ingress(fleet.config.name), name="llm", route_prefix="/llm")
    url = f"http://127.0.0.1:{port}/llm"
    body = {"model": NAME, "prompt": "hello", "max_tokens": 8, "temperature": 0}
    found, times = events(url)
    refused = None
    try:
        tokens(url, sampling_params={"temperature": -1})
    except RuntimeError as error:
        refused = str(error)
    result = {
        "stream": found[-1]["output_ids"] == events(fleet.url)[0][-1]["output_ids"],
        "events": len(found),
        "spread_s": times[-1] - times[0],
        "models": [each["id"] for each in call(url, "/v1/models")["data"]],
        "texts": [call(each, "/v1/completions", body)["choices"][0]["text"] for each in (url, fleet.url)],
        "refused": refused,
        "after_leaving": leave(url, fleet),
    }
    serve.shutdown()
    return result


def leave(url: str, fleet: RayFleet) -> bool:
    """Leave in the middle of a long reply: the router soon has no request any more."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    params = {"temperature": 0, "max_new_tokens": 8000, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "stream": True}
    connection.request(
        "POST", f"{parts.path}/generate", json.dumps(body), {"content-type": "application/json"}
    )
    reply = connection.getresponse()
    reply.readline()
    busy = sum(each["in_flight"] for each in workers(fleet))
    reply.close()
    connection.close()
    until(lambda: not sum(each["in_flight"] for each in workers(fleet)), "the end of the request")
    return busy == 1


def main(model: str, part: str) -> None:
    ray.init(
        num_cpus=6,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=80 << 20,
        configure_logging=True,
        log_to_driver=True,
    )
    if part == "left":
        fleet = RayFleet.start(config_of(model, trainer=False))
        print(json.dumps({"url": fleet.url}), flush=True)
        signal.pause()
    seen: dict[str, Any] = {}
    with RayFleet.start(config_of(model, trainer=True)) as fleet:
        # Before any update: an engine that comes back has the weights of `--model`.
        seen["engine"] = kill(fleet, 0, "engine")
        seen["actor"] = kill(fleet, 1, "actor")
        seen["weights"] = weights(fleet)
        seen["router"] = kill_router(fleet)
        seen["again"] = weights(fleet)
        seen["serve"] = through_serve(fleet)
        last = fleet.describe()
        seen["pids"] = [each.pid for each in last]
    seen["left"] = [pid for pid in seen["pids"] if os.path.exists(f"/proc/{pid}")]
    # Ray ends actors behind the call that asks for it.
    until(lambda: not any(os.path.exists(f"/proc/{each.actor_pid}") for each in last), "the actors' end")
    ray.shutdown()
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
