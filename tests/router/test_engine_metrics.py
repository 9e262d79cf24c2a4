"""The metrics of all workers, as a router answers them."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from segue.router.engine_metrics import WorkersCollector
from tests.router.fake_servers import Exchange, FakeWorker, routed, run

TEXT = """# HELP segue:tokens_total Tokens.
# TYPE segue:tokens_total counter
segue:tokens_total{model_name="m"} %d
# HELP segue:s Seconds.
# TYPE segue:s histogram
segue:s_bucket{le="+Inf",model_name="m"} 1
segue:s_count{model_name="m"} 1
segue:s_sum{model_name="m"} 2
"""


def samples(text: str) -> dict[tuple[str, str], float]:
    """The samples by name and worker; each family must come once."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {(s.name, s.labels["worker"]): s.value for family in families for s in family.samples}


def test_each_metric_has_the_samples_of_all_workers() -> None:
    texts = {"a:1": TEXT % 3, "b:2": TEXT % 4, "c:3": None, "d:4": "<html> 1 2 3"}
    found = samples(generate_latest(WorkersCollector(texts)).decode())
    assert (found["segue:tokens_total", "a:1"], found["segue:tokens_total", "b:2"]) == (3, 4)
    assert found["segue:s_bucket", "b:2"] == 1 and found["segue:s_sum", "a:1"] == 2
    scraped = {
        worker: value for (name, worker), value in found.items() if name == "segue:router_worker_scraped"
    }
    assert scraped == {"a:1": 1, "b:2": 1, "c:3": 0, "d:4": 0}


def test_the_router_asks_its_workers_with_their_key() -> None:
    async def answer(exchange: Exchange) -> None:
        assert exchange.path == "/metrics" and exchange.headers["authorization"] == "Bearer w"
        await exchange.whole((TEXT % 5).encode(), kind="text/plain")

    async def refuse(exchange: Exchange) -> None:
        await exchange.whole(b"no", 500)

    async def test() -> None:
        good, bad = FakeWorker(answer), FakeWorker(refuse)
        async with routed(good, bad, worker_api_key="w") as router:
            reply = await router.http.get("/engine_metrics")
            assert reply.headers["content-type"].startswith("text/plain")
            found = samples(reply.text)
            assert found["segue:tokens_total", good.id] == 5
            assert found["segue:router_worker_scraped", bad.id] == 0

    run(test())
