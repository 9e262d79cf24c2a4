"""The stalls of decoding streams while the server prefills a long prompt."""

import asyncio

import pytest

from bench import intrusion
from bench.intrusion import Intrusion, gaps_around
from segue.bench.client import Client
from tests.server.live import LiveServer
from tests.support.tiny_model import write_model


def test_a_gap_counts_if_it_overlaps_the_span():
    streams = [[0.0, 1.0, 2.5, 3.0], [0.5, 2.0, 9.0], [5.0]]
    assert sorted(gaps_around(streams, 1.2, 2.2)) == [1.5, 1.5, 7.0]
    assert gaps_around(streams, 10.0, 11.0) == []


def measured(server, scene):
    client = Client(server.url, "tiny-model")
    return asyncio.run(asyncio.wait_for(intrusion.measure(client, scene), 60))


def test_the_longest_gap_is_found_while_a_slow_server_prefills(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_S", "0.01")
    monkeypatch.setattr(intrusion, "SETTLE_S", 0.1)
    scene = Intrusion(decodes=3, decode_tokens=300, prompt=40, chunk=20, repeats=2, max_id=300)
    with LiveServer(write_model(tmp_path / "tiny-model"), chunked_prefill_size=20) as server:
        found = measured(server, scene)
        server.assert_nothing_left()
    assert found["step_s"] >= 0.01
    assert len(found["worst_gap_s"]) == len(found["ttft_s"]) == 2
    assert all(gap >= 0.01 for gap in found["worst_gap_s"])
    assert all(ttft >= 0.02 for ttft in found["ttft_s"])  # two chunks
    assert found["allowed_gap_s"] == found["chunk_s"] + 2 * found["step_s"]


def test_streams_that_end_too_early_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(intrusion, "SETTLE_S", 0.1)
    scene = Intrusion(decodes=2, decode_tokens=4, prompt=40, chunk=20, repeats=1, max_id=300)
    with LiveServer(write_model(tmp_path / "tiny-model")) as server:
        with pytest.raises(RuntimeError, match="give the Intrusion more decode_tokens"):
            measured(server, scene)
        server.assert_nothing_left()


def test_a_stream_that_stalls_to_the_end_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(intrusion, "SETTLE_S", 0.3)
    read = intrusion.StreamingRequest.timeline

    def only_the_first_events(connection):
        timeline = read(connection)
        del timeline.times[40:]
        return timeline

    monkeypatch.setattr(intrusion.StreamingRequest, "timeline", only_the_first_events)
    scene = Intrusion(decodes=1, decode_tokens=380, prompt=40, chunk=20, repeats=1, max_id=300)
    monkeypatch.setenv("FAKE_STEP_S", "0.005")
    with LiveServer(write_model(tmp_path / "tiny-model"), chunked_prefill_size=20) as server:
        found = measured(server, scene)
        server.assert_nothing_left()
    assert found["worst_gap_s"][0] > 0.3
