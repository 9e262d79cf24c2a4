"""What engines say over HTTP, and what it means when they do not finish the sentence."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from segue.trainer.endpoint import Answer, Endpoint, everywhere

CUT_SHORT = b'HTTP/1.1 400 Bad Request\r\ncontent-length: 100\r\n\r\n{"success": false, "mess'


@pytest.fixture
def cutting() -> Iterator[Endpoint]:
    """Answers one request, and closes the connection in the middle of the body."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def answer() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.settimeout(10)
                received = b""
                while not received.endswith(b"\r\n\r\n{}"):
                    received += connection.recv(4096)
                connection.sendall(CUT_SHORT)

        thread = threading.Thread(target=answer)
        thread.start()
        yield Endpoint(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(10)


def test_a_refusal_that_is_cut_short_is_a_failure(cutting: Endpoint) -> None:
    answer = cutting.post("/prepare_weights_update", {}, 5)
    assert not answer.success and "IncompleteRead" in answer.message


def test_an_engine_without_an_answer_has_failed() -> None:
    failures: list[int] = []

    def ask(index: int, endpoint: Endpoint) -> Answer:
        if index == 1:
            raise RuntimeError("lost")
        return Answer(url=endpoint.url, success=True)

    endpoints = [Endpoint(url="http://a"), Endpoint(url="http://b")]
    answers = everywhere(endpoints, ask, on_failure=lambda: failures.append(1))
    assert [(each.url, each.success) for each in answers] == [("http://a", True), ("http://b", False)]
    assert "lost" in answers[1].message and failures == [1]
