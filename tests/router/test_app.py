"""The routes for operators, and who may use which."""

from __future__ import annotations

import pytest

from segue.router.app import create_router_app
from segue.router.config import RouterConfig
from segue.router.entry import LEFT
from segue.router.webpage import RouterFeedSource
from tests.router.fake_servers import STREAM, Exchange, FakeWorker, routed, run, until
from tests.router.test_relay import begin_only


def test_health_is_200_while_a_worker_serves_and_names_the_reasons_else() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            for path in ("/health", "/ready", "/ping"):
                assert (await router.http.get(path)).json() == {"status": "ok", "workers": 1, "serving": 1}
            await worker.die()
            await until(lambda: not router.serves(worker), "it is lost")
            reply = await router.http.get("/health")
            assert reply.status_code == 503 and worker.id in reply.json()["message"]

    run(test())


def test_without_workers_health_and_requests_say_so() -> None:
    async def test() -> None:
        async with routed() as router:
            for reply in (await router.http.get("/health"), await router.generate()):
                assert reply.status_code == 503
                assert "no worker is registered" in reply.json()["message"]

    run(test())


def test_a_draining_router_refuses_requests_and_is_not_ready() -> None:
    async def test() -> None:
        async with routed(FakeWorker()) as router:
            router.router.is_draining = True
            for reply in (await router.http.get("/ready"), await router.generate()):
                assert reply.status_code == 503 and "shutting down" in reply.json()["message"]

    run(test())


def test_workers_can_be_added_and_are_listed() -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start()
        async with routed() as router:
            reply = await router.http.post("/workers", json={"url": worker.url + "/"})
            assert (reply.status_code, reply.json()["id"]) == (201, worker.id)
            await until(lambda: router.serves(worker), "it serves")
            (listed,) = (await router.http.get("/workers")).json()["workers"]
            assert (listed["serves"], listed["breaker"], listed["in_flight"]) == (True, "closed", 0)
            assert listed["record"]["worker_id"] == worker.id
        await worker.die()

    run(test())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"url": "gpu-1:30000"}, "expected a server's URL"),
        ({"url": "http://gpu-1:1/v1"}, "expected a server's URL"),
        ({"address": "http://gpu-1:1"}, "address"),
        ({}, "url"),
    ],
)
def test_a_wrong_body_adds_no_worker(body: dict[str, str], said: str) -> None:
    async def test() -> None:
        async with routed() as router:
            reply = await router.http.post("/workers", json=body)
            assert reply.status_code == 400 and said in reply.json()["message"]
            assert not list(router.registry)

    run(test())


def test_a_worker_is_registered_once() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            reply = await router.http.post("/workers", json={"url": worker.url})
            assert reply.status_code == 400 and "registered already" in reply.json()["message"]

    run(test())


def test_a_worker_that_is_removed_ends_its_requests_first() -> None:
    async def test() -> None:
        worker = FakeWorker(begin_only)
        async with routed(worker) as router:
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                await anext(reply.aiter_raw())
                removed = await router.http.delete(f"/workers/{worker.id}")
                assert removed.json() == {"id": worker.id, "in_flight": 1}
                assert router.reason(worker) == "it is being drained"
                assert not worker.exchanges[0].gone.is_set()
            await until(lambda: not list(router.registry), "it is forgotten")

    run(test())


def test_an_idle_worker_is_removed_at_once() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            await router.http.post("/generate", json=STREAM)
            assert router.registry.counters.requests == {(worker.id, "answered"): 1}
            await router.http.delete(f"/workers/{worker.id}")
            assert not list(router.registry)
            # Not by its id any more: engines come and go for weeks, and each has another one.
            assert router.registry.counters.requests == {(LEFT, "answered"): 1}
            assert (await router.http.delete(f"/workers/{worker.id}")).status_code == 404

    run(test())


def test_the_models_come_from_a_worker() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            await router.http.get("/v1/models")
            assert (worker.exchanges[0].method, worker.exchanges[0].path) == ("GET", "/v1/models")

    run(test())


def test_a_model_is_asked_for_by_its_name() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            path = "/v1/models/org/a%20model"
            assert (await router.http.get(path)).status_code == 200
            assert (worker.exchanges[0].method, worker.exchanges[0].path) == ("GET", path)

    run(test())


@pytest.mark.parametrize("name", ["%2e%2e/%2e%2e/server_info", "a/%2e%2e", "%2e"])
def test_a_models_name_leads_to_no_other_path_of_a_worker(name: str) -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            assert (await router.http.get(f"/v1/models/{name}")).status_code == 404
            assert not worker.exchanges

    run(test())


def test_laps_status_has_the_groups() -> None:
    async def test() -> None:
        workers = [FakeWorker(), FakeWorker()]
        async with routed(*workers, enable_laps_alloc=True) as router:
            found = (await router.http.get("/laps_status")).json()
            assert found["enabled"] and found["threshold"] == 256
            assert found["short_group"] == [workers[0].url] and found["long_group"] == [workers[1].url]

    run(test())


def test_laps_status_says_why_there_are_no_groups() -> None:
    async def test() -> None:
        async with routed(FakeWorker()) as router:
            found = (await router.http.get("/laps_status")).json()
            assert found == {"enabled": False, "reason": "--enable-laps-alloc is not given"}

    run(test())


def test_prompts_go_to_the_group_of_their_class() -> None:
    async def test() -> None:
        workers = [FakeWorker(), FakeWorker()]
        async with routed(*workers, enable_laps_alloc=True) as router:
            for _ in range(3):
                await router.generate(text="short")
                await router.generate(input_ids=list(range(4000)))
            assert [len(worker.exchanges) for worker in workers] == [3, 3]
            assert all(b"short" in exchange.body for exchange in workers[0].exchanges)

    run(test())


def test_the_metrics_count_requests_by_worker_and_end() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            await router.generate()
            text = (await router.http.get("/metrics")).text
            assert f'segue:router_requests_total{{end="answered",worker="{worker.id}"}} 1.0' in text
            assert f'segue:router_worker_serves{{worker="{worker.id}"}} 1.0' in text
            source = RouterFeedSource(router.router)
            assert source.sample(1.0)["first_token_s"] is None

            async def answer(exchange: Exchange) -> None:
                exchange.begin()
                exchange.send(b"data: 1\n\n")
                exchange.send(b"data: 2\n\n")
                exchange.end(b"data: [DONE]\n\n")

            worker.answer = answer
            await router.generate(stream=True)
            text = (await router.http.get("/metrics")).text
            counts = {"queue_time": 2, "time_to_first_token": 1, "e2e_request_latency": 2}  # one is no stream
            for name, count in counts.items():
                assert f"segue:router_{name}_seconds_count {count}.0" in text
                assert f'segue:router_{name}_seconds_bucket{{le="+Inf"}} {count}.0' in text
            assert source.sample(1.0)["first_token_s"] > 0  # since the sample before
            assert source.sample(1.0)["first_token_s"] is None

    run(test())


@pytest.mark.parametrize(
    ("method", "path", "needs"),
    [
        ("POST", "/generate", "user"),
        ("POST", "/v1/chat/completions", "user"),
        ("POST", "/v1/completions", "user"),
        ("POST", "/v1/responses", "user"),
        ("POST", "/v1/messages", "user"),
        ("POST", "/v1/messages/count_tokens", "user"),
        ("GET", "/v1/models", "user"),
        ("GET", "/v1/models/m", "user"),
        ("GET", "/workers", "admin"),
        ("POST", "/workers", "admin"),
        ("DELETE", "/workers/x", "admin"),
        ("POST", "/workers/x/drain", "admin"),
        ("POST", "/workers/x/role", "admin"),
        ("POST", "/pause_generation", "admin"),
        ("GET", "/server_info", "admin"),
        ("POST", "/update_weights_from_disk", "admin"),
        ("GET", "/health_generate", ""),
        ("GET", "/laps_status", "admin"),
        ("GET", "/metrics", "user"),
        ("GET", "/version", "user"),
        ("GET", "/health", ""),
    ],
)
def test_each_route_needs_its_key(method: str, path: str, needs: str) -> None:
    async def test() -> None:
        async with routed(api_key="user", admin_api_key="admin") as router:
            for key, opens in (("", ()), ("user", ("user",)), ("admin", ("user", "admin"))):
                for header in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    router.http.headers = header if key else {}
                    reply = await router.http.request(method, path)
                    assert (reply.status_code != 401) == (not needs or needs in opens), key

    run(test())


def test_the_description_has_every_route() -> None:
    async def test() -> None:
        async with routed() as router:
            described = (await router.http.get("/openapi.json")).json()["paths"]
            paths = {route.path for route in create_router_app(RouterConfig()).routes}  # type: ignore[attr-defined]
            paths = {path.replace(":path}", "}") for path in paths}
            assert set(described) == paths - {"/openapi.json", "/watch", "/", "/page/{name}", "/page_events"}
            pause = described["/pause_generation"]["post"]
            assert pause["tags"] == ["Control"] and "requestBody" in pause
            assert described["/workers/{worker}/drain"]["post"]["parameters"][0]["name"] == "worker"
            assert "ttl_s" in str(described["/workers"]["post"])

    run(test())


def test_a_body_that_is_too_large_is_refused() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker, max_body_mib=1) as router:
            reply = await router.generate(text="x" * (1 << 20))
            assert reply.status_code == 413 and not worker.exchanges

    run(test())
