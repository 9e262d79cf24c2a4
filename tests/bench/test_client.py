"""The client parses replies that arrive in any pieces, and records when each event arrived."""

import asyncio
import random
import socket

import pytest

from bench.launch import free_port
from segue.bench.client import Client, Job, _read, clock
from segue.bench.load import Lengths
from tests.server.live import LiveServer
from tests.support.tiny_model import write_model

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"choices":[{"index":0,"text":" a"}],"usage":null}\n\n',
    b'data: {"choices":[{"index":0,"text":" b"}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
]


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LiveServer(write_model(tmp_path_factory.mktemp("client") / "tiny-model")) as live:
        yield live
        live.assert_nothing_left()


def test_an_event_has_the_time_of_its_last_byte():
    pieces = [(1.0, HEAD + chunk(EVENTS[0])), (2.0, chunk(EVENTS[1])[:9]), (3.0, chunk(EVENTS[1])[9:])]
    pieces.append((4.0, b"".join(map(chunk, EVENTS[2:])) + chunk(b"")))
    assert _read(pieces) == ([1.0, 3.0], 2, None)


def test_piece_and_chunk_boundaries_do_not_change_the_result():
    rng = random.Random(0)
    body = b"".join(EVENTS)
    for _ in range(200):
        cuts = sorted(rng.sample(range(1, len(body)), 6))
        chunks = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        raw = HEAD + b"".join(map(chunk, chunks)) + chunk(b"")
        cuts = sorted(rng.sample(range(1, len(raw)), 9))
        pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        times, tokens, error = _read(list(enumerate(pieces)))
        assert (len(times), tokens, error) == (2, 2, None)


def test_a_reply_without_chunked_encoding_is_read_to_its_end():
    raw = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"".join(EVENTS)
    assert _read([(1.0, raw[:30]), (2.0, raw[30:])]) == ([2.0, 2.0], 2, None)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", "no reply"),
        (HEAD + chunk(EVENTS[0]), "the stream was cut"),
        (b"HTTP/1.1 503 Busy\r\n\r\nlater", "HTTP/1.1 503 Busy: later"),
        (HEAD + chunk(b'data: {"error":{"message":"died"}}\n\n'), "{'message': 'died'}"),
    ],
)
def test_a_failed_reply_gives_its_error(raw, error):
    assert _read([(1.0, raw)])[2] == error


def test_tokens_without_text_are_an_error_because_nothing_can_be_timed():
    connection = Client("http://127.0.0.1:1", "m").connection(job(3, 2), due=0.0)
    connection.pieces = [(1.0, HEAD + b"".join(map(chunk, EVENTS[2:])) + chunk(b""))]
    assert connection.timeline().error == "2 tokens came, but no text: nothing to time"


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


def job(length, tokens, due=0.0):
    return Job(prompt=[10 + i % 80 for i in range(length)], max_tokens=tokens, due=due)


def test_requests_of_an_open_loop_are_sent_when_they_are_due(server):
    client, begin = Client(server.url, "tiny-model"), clock() + 0.05
    jobs = [job(5 + i, 8, due=0.02 * i) for i in range(10)]
    found = [each.timeline() for each in run(client.open_loop(jobs, begin, begin + 20))]
    for expected, timeline in zip(jobs, found, strict=True):
        assert timeline.error is None
        assert not timeline.given_up
        assert timeline.tokens == timeline.max_tokens == expected.max_tokens
        assert timeline.prompt_tokens == len(expected.prompt)
        assert timeline.due == begin + expected.due <= timeline.sent <= timeline.times[0]
        assert timeline.times == sorted(timeline.times)


def test_a_closed_loop_runs_every_job_and_keeps_its_concurrency(server):
    client, begin = Client(server.url, "tiny-model"), clock()
    found = run(client.closed_loop([job(9, 20) for _ in range(12)], 3, begin, begin + 20))
    timelines = [each.timeline() for each in found]
    assert [timeline.error for timeline in timelines] == [None] * 12
    starts = sorted((timeline.sent, 1) for timeline in timelines)
    ends = sorted((timeline.times[-1], -1) for timeline in timelines)
    running = max_running = 0
    for _, change in sorted(starts + ends):
        running += change
        max_running = max(max_running, running)
    assert max_running <= 3


def test_a_request_unfinished_at_the_end_is_given_up_without_an_error(server):
    client, begin = Client(server.url, "tiny-model"), clock()
    (found,) = run(client.open_loop([job(9, 400)], begin, begin + 0.02))
    assert found.timeline().given_up
    assert found.timeline().error is None


def test_a_request_that_could_not_be_sent_is_late():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # no process accepts connections
        client, begin = Client(f"http://127.0.0.1:{full.getsockname()[1]}", "m"), clock()
        jobs = [job(1, 1) for _ in range(8)]
        found = [each.timeline() for each in run(client.open_loop(jobs, begin, begin + 0.3))]
    assert all(timeline.given_up for timeline in found)
    assert max(timeline.sent - timeline.due for timeline in found) >= 0.29


def test_a_refused_request_gives_the_status(server):
    client, begin = Client(server.url, "another-model"), clock()
    (found,) = run(client.open_loop([job(9, 4)], begin, begin + 5))
    assert "404" in found.timeline().error


def test_a_prompt_may_be_text(server):
    client, begin = Client(server.url, "tiny-model"), clock()
    work = Lengths(prompt=(4, 4), output=(6, 6), text=True).job(random.Random(0))
    assert len(work.prompt.split()) == 4
    (found,) = run(client.open_loop([work], begin, begin + 20))
    assert found.timeline().error is None


def test_another_scheme_is_refused():
    with pytest.raises(ValueError, match="must be a server's URL"):
        Client("ftp://127.0.0.1:1", "m")


def test_without_a_server_each_request_has_an_error():
    client, begin = Client(f"http://127.0.0.1:{free_port()}", "m"), clock()
    (found,) = run(client.open_loop([job(9, 4)], begin, begin + 5))
    assert found.timeline().error
    assert found.timeline().times == []
