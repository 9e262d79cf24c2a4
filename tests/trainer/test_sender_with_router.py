"""`WeightSender` with a router's URL: the engines are the ones that the router has at each send."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from segue.trainer import Endpoint, WeightSender, WeightSendError
from tests.trainer.conftest import FakeEngine
from tests.trainer.fake_engine import describe


class FakeRouter(ThreadingHTTPServer):
    """Answers ``/workers`` with the engines that the test gives it; nothing else is asked of it."""

    daemon_threads = True
    engines: list[FakeEngine]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Workers(BaseHTTPRequestHandler):
    server: FakeRouter

    def do_GET(self) -> None:
        assert (self.path, self.headers["authorization"]) == ("/workers", "Bearer key")
        workers = [{"url": engine.url, "takes_weights": True} for engine in self.server.engines]
        data = json.dumps({"workers": workers}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def router(engines: list[FakeEngine]) -> Iterator[FakeRouter]:
    with FakeRouter(("127.0.0.1", 0), Workers) as server:
        server.engines = list(engines)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def sender(router: FakeRouter, weights: dict[str, torch.Tensor]) -> WeightSender:
    return WeightSender(Endpoint(url=router.url, api_key="key"), weights, timeout_s=5.0)


def test_every_engine_of_the_router_gets_the_weights(router: FakeRouter) -> None:
    weights = {"a": torch.randn(10)}
    with sender(router, weights) as sending:
        for _ in range(2):
            weights["a"].add_(1)
            report = sending.send()
            assert [answer.url for answer in report.endpoints] == [each.url for each in router.engines]
            for engine in router.engines:
                assert engine.seen()["weights"] == {"a": describe(weights["a"])}


def test_an_engine_that_has_joined_the_router_gets_the_next_weights(
    router: FakeRouter, engines: list[FakeEngine]
) -> None:
    weights = {"a": torch.randn(10)}
    router.engines = engines[:1]
    with sender(router, weights) as sending:
        sending.send()
        assert engines[0].seen()["joined"]["world_size"] == 2
        router.engines = engines
        sending.send()
        for engine in engines:
            assert engine.seen()["joined"]["world_size"] == 3
            assert engine.seen()["weights"] == {"a": describe(weights["a"])}


def test_a_router_without_engines_is_an_error(router: FakeRouter) -> None:
    router.engines = []
    says = pytest.raises(WeightSendError, match="has no engines; its /workers lists them")
    with sender(router, {"a": torch.randn(10)}) as sending, says:
        sending.send()
