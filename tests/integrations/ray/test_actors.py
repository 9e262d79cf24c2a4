"""What the actor of a trainer asks a router; Ray itself is not needed for that."""

import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import msgspec
import pytest

from segue.integrations.ray import actors
from segue.listener import bind
from segue.trainer.endpoint import Endpoint


class Fleet(ThreadingHTTPServer):
    """A router, and the one engine that it has behind it, at the same port."""

    dead: str
    lists_with_the_dead: int
    num_lists = 0


class Handler(BaseHTTPRequestHandler):
    server: ClassVar[Any]

    def do_GET(self) -> None:
        fleet, body = self.server, b"{}"
        if self.path == "/workers":
            fleet.num_lists += 1
            urls = [url_of(fleet)] + [fleet.dead] * (fleet.num_lists <= fleet.lists_with_the_dead)
            body = msgspec.json.encode({"workers": [{"url": url, "takes_weights": True} for url in urls]})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def url_of(fleet: Fleet) -> str:
    return f"http://127.0.0.1:{fleet.server_port}"


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(actors, "RETRY_S", 0.01)
    with Fleet(("127.0.0.1", 0), Handler) as server, closing(bind("127.0.0.1", 0)) as never_listens:
        server.dead = f"http://127.0.0.1:{never_listens.getsockname()[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def trainer_of(fleet: Fleet) -> actors.TrainerActor:
    """A trainer's actor without its process, which only its start needs."""
    actor = object.__new__(actors.TrainerActor)
    actor._router = Endpoint(url=url_of(fleet))
    return actor


def test_an_engine_that_has_died_is_waited_for_until_the_router_forgets_it(fleet: Fleet) -> None:
    fleet.lists_with_the_dead = 3
    assert list(trainer_of(fleet)._engines()) == [url_of(fleet)]
    assert fleet.num_lists == 4


def test_an_engine_that_stays_registered_and_away_is_an_error_that_names_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "REGISTER_TTL_S", 0.05)
    fleet.lists_with_the_dead = 10**6
    with pytest.raises(actors.TrainerActorError, match=f"{fleet.dead}; start them again"):
        trainer_of(fleet)._engines()
