"""``/engine_metrics``: the metrics of all workers together, where only the router can reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from segue.router.fan_out import WorkerRequest, ask_all
from segue.router.router import Router, key_header, router_of
from segue.server.access import Access, Routes

SCRAPE_S = 5.0  # for a worker to answer
LABEL = "worker"

routes = Routes(Access.METRICS, "Health")


@routes.get("/engine_metrics")
async def show_metrics_of_engines(request: Request) -> Response:
    """Returns the metrics of all workers that answer, each with the worker's id as the label ``worker``."""
    router, state = router_of(request), request.app.state
    # It may be open to everybody, so concurrent calls share what the workers say.
    if state.scrape is None or state.scrape.done():
        state.scrape = asyncio.create_task(_scrape(router))
        state.scrape.add_done_callback(lambda task: task.cancelled() or task.exception())
    return Response(await asyncio.shield(state.scrape), media_type=CONTENT_TYPE_LATEST)


async def _scrape(router: Router) -> bytes:
    config = router.config
    headers = key_header(config.worker_api_key or config.worker_admin_key)
    sent = WorkerRequest(method=b"GET", path=b"/metrics", headers=headers)
    replies = await ask_all(router.registry.addressed, sent, SCRAPE_S)
    texts = {
        worker: reply.body.decode("utf-8", "replace") if reply.is_ok else None
        for worker, reply in replies.items()
    }
    return await asyncio.to_thread(lambda: generate_latest(WorkersCollector(texts)))


class WorkersCollector(Collector):
    """The metrics of several workers."""

    def __init__(self, texts: Mapping[str, str | None]) -> None:
        """Take each worker's metrics in Prometheus' text format; None: it has not answered."""
        self._texts = texts

    def collect(self) -> list[Metric]:
        """Returns each metric once, with the samples of all workers, and whose could be read."""
        found: dict[str, Metric] = {}
        answers = GaugeMetricFamily(
            "segue:router_worker_scraped", "Whether a worker's metrics could be read.", labels=[LABEL]
        )
        for worker, text in self._texts.items():
            own: list[Metric] | None = None
            with suppress(ValueError):
                own = None if text is None else list(text_string_to_metric_families(text))
            answers.add_metric([worker], own is not None)
            for each in own or ():
                metric = found.setdefault(each.name, Metric(each.name, each.documentation, each.type))
                metric.samples += [s._replace(labels={**s.labels, LABEL: worker}) for s in each.samples]
        return [answers, *found.values()]
