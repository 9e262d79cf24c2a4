"""Commands with ``--url`` against servers that answer wrongly, or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from segue.cli.backends import RemoteModel, TextQuery
from segue.cli.remote import Remote, RemoteError

OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
MODELS = OK + b'{"data": [{"id": "some-model"}]}'
HELLO = b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\n'


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """Yields the URL of a server that gives one answer per connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            for answer in answers:
                try:
                    connection, _ = listener.accept()
                except OSError:  # the test has ended, and opened no connection
                    return
                with connection:
                    connection.settimeout(60)
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):  # otherwise the connection is reset
                        pass

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "cannot reach"),
        (b"SSH-2.0-x\r\n", "cannot reach"),
        (OK + b"<html>", "does not answer as"),
        (OK + b"[]", "does not answer as"),
        (OK + b'{"data": []}', "does not answer as"),
        (b'HTTP/1.1 404 No\r\n\r\n{"error": "nothing here"}', "404 nothing here"),
        (b'HTTP/1.1 404 No\r\n\r\n{"error": {"message": "nothing here"}}', "404 nothing here"),
        (b"HTTP/1.1 500 Broken\r\n\r\n<html>", "500 Broken"),
    ],
)
def test_a_server_that_is_not_openai_compatible_is_a_clear_error(answer: bytes, words: str) -> None:
    with answering(answer) as url, pytest.raises(RemoteError, match=words):
        RemoteModel(Remote(url, None))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_requests_to_this_machine_bypass_the_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where no process listens
    with answering(MODELS) as url:
        assert RemoteModel(Remote(url.replace("127.0.0.1", host), None)).name == "some-model"


def test_requests_to_other_machines_use_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(MODELS) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        assert RemoteModel(Remote("http://models.invalid:30000", None)).name == "some-model"


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (HELLO, "ended in the middle"),
        (HELLO + b"data: {\n\n", "does not answer as"),
        (HELLO + b'data: {"error": {"message": "too bad"}}\n\n', "too bad"),
        (HELLO + b'data: {"error": "too bad"}\n\n', "too bad"),
    ],
)
def test_an_answer_that_breaks_off_raises_the_reason(events: bytes, words: str) -> None:
    with answering(MODELS, OK + events) as url:
        reply = RemoteModel(Remote(url, None)).stream(TextQuery())
        assert next(reply) == "Hello"
        with pytest.raises(RemoteError, match=words):
            next(reply)


def test_comments_and_chunks_without_a_choice_are_skipped() -> None:
    events = b": ping\n\n" + HELLO + b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'
    with answering(MODELS, OK + events) as url:
        assert list(RemoteModel(Remote(url, None)).stream(TextQuery())) == ["Hello"]


def test_reasoning_is_shown_within_its_marks() -> None:
    reasoning = b'data: {"choices": [{"delta": {"reasoning_content": "So"}}]}\n\n'
    events = reasoning * 2 + HELLO * 2 + b"data: [DONE]\n\n"
    with answering(MODELS, OK + events) as url:
        answer = "".join(RemoteModel(Remote(url, None)).stream(TextQuery(messages=[])))
    assert answer == "<think>\nSoSo\n</think>\n\nHelloHello"


def test_a_redirect_is_an_error_and_the_key_is_not_sent_on() -> None:
    with answering(MODELS) as other:
        moved = b"HTTP/1.1 302 Found\r\nlocation: " + other.encode() + b"/v1/models\r\n\r\n"
        with answering(moved) as url, pytest.raises(RemoteError, match="302 Found"):
            RemoteModel(Remote(url, "secret"))
