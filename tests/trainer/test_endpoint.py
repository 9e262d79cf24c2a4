"""Answers of engines over HTTP: complete, cut short, redirected, without end, and missing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

import segue.trainer.endpoint as endpoint_module
from segue.messages.weight_operations import BeginUpdate
from segue.trainer.endpoint import Answer, Endpoint, everywhere

CUT_SHORT = b'HTTP/1.1 400 Bad Request\r\ncontent-length: 100\r\n\r\n{"success": false, "mess'


@pytest.fixture
def cutting() -> Iterator[Endpoint]:
    """An engine that answers one request, and closes the connection in the middle of the body."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)

        def answer() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.settimeout(60)
                received = b""
                while not received.endswith(b"\r\n\r\n{}"):
                    received += connection.recv(4096)
                connection.sendall(CUT_SHORT)

        thread = threading.Thread(target=answer)
        thread.start()
        yield Endpoint(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(60)


def test_an_answer_that_is_cut_short_is_a_failure(cutting: Endpoint) -> None:
    answer = cutting.post(BeginUpdate(), 5)
    assert not answer.success and "IncompleteRead" in answer.message


def test_a_request_that_raises_is_a_failed_answer() -> None:
    failures: list[int] = []

    def ask(index: int, endpoint: Endpoint) -> Answer:
        if index == 1:
            raise RuntimeError("lost")
        return Answer(url=endpoint.url, success=True)

    endpoints = [Endpoint(url="http://a"), Endpoint(url="http://b")]
    answers = everywhere(endpoints, ask, on_failure=lambda: failures.append(1))
    assert [(each.url, each.success) for each in answers] == [("http://a", True), ("http://b", False)]
    assert "lost" in answers[1].message and failures == [1]


def test_a_redirect_is_not_followed() -> None:
    with engine_that_sends(
        b"HTTP/1.1 302 Found\r\nlocation: /stolen\r\ncontent-length: 0\r\n\r\n"
    ) as endpoint:
        answer = replace(endpoint, api_key="secret").get("server_info", 5)
    assert not answer.success and answer.status == 302


@pytest.mark.parametrize("piece", [b" " * (1 << 16), b" "])
def test_an_answer_without_end_is_a_failure(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_BODY_S", 0.5 if len(piece) == 1 else 60)
    monkeypatch.setattr(endpoint_module, "_MAX_BODY", 1 << 20)
    with engine_that_sends(b"HTTP/1.1 200 OK\r\n\r\n", piece) as endpoint:
        answer = endpoint.get("server_info", 5)
    assert not answer.success
    assert ("not complete after 0.5 s" if len(piece) == 1 else "more than 1048576 bytes") in answer.message


@contextmanager
def engine_that_sends(head: bytes, piece: bytes = b"") -> Iterator[Endpoint]:
    """An engine that answers one request with ``head``, then repeats ``piece`` until the connection closes.

    A piece of one byte is sent every 20 ms.
    """
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)

        def answer() -> None:
            connection = listener.accept()[0]
            with connection, suppress(OSError):
                connection.settimeout(60)
                connection.recv(4096)
                connection.sendall(head)
                while piece and not over.wait(0.02 if len(piece) == 1 else 0):
                    connection.sendall(piece)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield Endpoint(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            over.set()
            thread.join(60)
