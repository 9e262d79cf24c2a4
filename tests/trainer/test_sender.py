"""`WeightSender` with two engines, in processes of their own, that may refuse, fail or die."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist

from segue.errors import ConfigError
from segue.trainer import Endpoint, Progress, WeightSender, WeightSendError
from segue.trainer.endpoint import Answer
from segue.trainer.group import BroadcastSender
from tests.conftest import WaitUntil
from tests.support.ports import free_port
from tests.trainer.conftest import FakeEngine
from tests.trainer.fake_engine import describe

STATUSES: list[dict[str, Any]] = [{"generating": True}, {"generating": False}, {}]  # of engines
WHOLE = ["prepare_weights_update", "complete_weights_update", "commit_weights_update"]


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.trainer.sender.POLL_S", 0.1)


def make_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(300, 1000),
        "odd": torch.randn(7).bfloat16(),  # misaligns the float32 tensors that follow
        "scalar": torch.tensor(2.5),
        "turned": torch.randn(5, 9).T,
        "last": torch.randn(3, 2, 1),
    }


def sender(engines: list[FakeEngine], weights: Any, **options: Any) -> WeightSender:
    options = {"buffer_size_mb": 1, "timeout_s": 5.0} | options
    return WeightSender([engine.url for engine in engines], weights, **options)


def assert_has(engine: FakeEngine, weights: dict[str, torch.Tensor]) -> None:
    assert engine.seen()["weights"] == {name: describe(tensor) for name, tensor in weights.items()}


@pytest.mark.parametrize("flattened", [False, True])
def test_every_engine_has_the_weights_of_each_send(engines: list[FakeEngine], flattened: bool) -> None:
    weights, reported = make_weights(), []
    with sender(engines, weights, flattened=flattened, on_progress=reported.append) as sending:
        for _ in range(2):
            weights["matrix"].add_(1)
            report = sending.send()
            for engine in engines:
                assert_has(engine, weights)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    assert (report.num_buckets, report.bytes) == (2, num_bytes)
    assert report.gb_per_s == pytest.approx(num_bytes / 1e9 / report.seconds)
    assert report.broadcast_seconds < report.seconds
    versions = [answer.fields["weight_version"] for answer in report.endpoints]
    assert versions == [str(engine.seen()["version"]) for engine in engines]
    progress: Progress = reported[-1]
    assert (progress.num_buckets, progress.total_buckets) == (2, 2)
    assert progress.num_bytes == progress.total_bytes == num_bytes


def test_a_group_that_cannot_be_made_leaves_no_open_port(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    def fail(*arguments: Any) -> None:
        made.append(arguments[-1])
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("segue.trainer.sender.TrainerGroup", fail)
    with sender(engines, make_weights()) as sending, pytest.raises(RuntimeError, match="can't start"):
        sending.send()
    assert [listener.fileno() for listener in made] == [-1]


def test_engines_get_consecutive_ranks_and_join_once(engines: list[FakeEngine]) -> None:
    with sender(engines, make_weights()) as sending:
        sending.send()
        sending.send("seven")
    for rank, engine in enumerate(engines, 1):
        seen = engine.seen()
        assert (seen["joined"]["rank_offset"], seen["joined"]["world_size"]) == (rank, 3)
        start = ["server_info", "init_weights_update_group"]
        assert seen["log"] == [*start, *WHOLE, *WHOLE, "destroy_weights_update_group"]


def test_one_engine_commits_as_it_completes(engines: list[FakeEngine]) -> None:
    with sender(engines[:1], make_weights()) as sending:
        assert sending.send().endpoints[0].fields["num_buckets_received"] == 2
    assert "commit_weights_update" not in engines[0].seen()["log"]


def test_a_trainer_that_torchrun_started_hosts_the_group_itself(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun does
    weights = make_weights()
    with sender(engines, weights) as sending:
        sending.send()
    for engine in engines:
        assert_has(engine, weights)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("init_weights_update_group", "no room"),
        ("prepare_weights_update", "no room"),
        ("prepare_weights_update", "hang"),
        ("receive", "no room"),
        ("receive", "hang"),
        ("complete_weights_update", "no room"),
    ],
)
def test_one_failure_leaves_all_engines_as_they_were(
    engines: list[FakeEngine], fault: str, message: str
) -> None:
    weights, port = make_weights(), free_port()
    threads = threading.active_count()
    with sender(engines, weights, master_port=port) as sending:
        sending.send()
        sending.close()
        before = [engine.seen() for engine in engines]
        weights["matrix"].add_(1)
        engines[1].fault(**{fault: message})
        began = time.monotonic()
        with pytest.raises(WeightSendError) as failed:
            sending.timeout_s = 2.0
            sending.send()
        assert time.monotonic() - began < 20
        text = failed.value.message
        if fault == "receive":
            assert (
                "an engine ended its session" if message == "no room" else "made no progress for 2 s"
            ) in text
        if message == "no room":
            assert f"{engines[1].url}: no room" in text
        for engine, was in zip(engines, before, strict=True):
            seen = engine.seen()
            assert (seen["version"], seen["weights"]) == (was["version"], was["weights"])
            assert "commit_weights_update" not in seen["log"] or engine is engines[0]
            aborted = fault != "init_weights_update_group"  # no session was open yet
            assert ("abort_weights_update" in seen["log"]) == aborted
        engines[1].fault()
        sending.timeout_s = 5.0
        sending.send()
        for engine in engines:
            assert_has(engine, weights)
        if fault == "init_weights_update_group":  # no engine was in the group: its port was free at once
            assert engines[0].seen()["joined"]["master_port"] == port
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("fault", "asked"),
    [
        ("prepare_weights_update", "prepare_weights_update"),
        ("receive", "weights_update_status"),
        ("complete_weights_update", "complete_weights_update"),
    ],
)
def test_closing_ends_a_send_that_is_stuck(
    engines: list[FakeEngine], fault: str, asked: str, wait_until: WaitUntil
) -> None:
    engines[1].fault(**{fault: "hang"})
    sending = sender(engines, make_weights(), timeout_s=60.0)
    ended: list[WeightSendError] = []

    def send() -> None:
        with pytest.raises(WeightSendError, match="the sender was closed") as failed:
            sending.send()
        ended.append(failed.value)

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: asked in engines[1].seen()["log"])
    began = time.monotonic()
    sending.close()
    thread.join(60)
    assert ended and time.monotonic() - began < 30
    engines[1].fault()
    with sending:
        sending.send()


def test_a_partial_commit_reports_which_engines_committed(engines: list[FakeEngine]) -> None:
    engines[1].fault(commit_weights_update="too late")
    with sender(engines, make_weights()) as sending, pytest.raises(WeightSendError) as failed:
        sending.send()
    assert failed.value.message.startswith(f"committed by {engines[0].url} only")
    assert [answer.success for answer in failed.value.answers] == [True, False]


def test_an_engine_that_dies_in_the_middle_fails_the_send(
    engines: list[FakeEngine], mortal: Callable[[], FakeEngine]
) -> None:
    weights, dying = {f"w{n}": torch.randn(300_000) for n in range(4)}, mortal()
    version = engines[0].seen()["version"]

    def kill(progress: Progress) -> None:
        if progress.num_buckets == 1:
            dying.process.kill()

    with (
        sender([engines[0], dying], weights, on_progress=kill) as sending,
        pytest.raises(WeightSendError, match=dying.url),
    ):
        sending.send()
    assert engines[0].seen()["version"] == version
    with sender(engines, weights) as sending:
        sending.send()
        assert_has(engines[0], weights)


def test_an_unreachable_engine_is_reported_at_once(engines: list[FakeEngine]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    why = f"{url}: its number of ranks is unknown"
    sending = WeightSender([engines[0].url, url], make_weights())
    with pytest.raises(WeightSendError, match=why):
        sending.send()


def test_a_port_in_use_is_replaced(engines: list[FakeEngine]) -> None:
    taken = int(engines[0].url.rpartition(":")[2])
    with sender(engines, make_weights(), master_port=taken) as sending:
        sending.send()
    assert engines[0].seen()["joined"]["master_port"] not in (0, taken)


def test_the_endpoints_world_size_is_used_for_an_engine_that_reports_none(engines: list[FakeEngine]) -> None:
    engines[0].fault(server_info="no such route")
    weights = make_weights()
    with WeightSender([Endpoint(url=engines[0].url, world_size=1)], weights) as sending:
        sending.send()
    assert_has(engines[0], weights)


def test_empty_weights_can_be_sent(engines: list[FakeEngine]) -> None:
    with sender(engines, {}) as sending:
        report = sending.send()
    assert (report.num_buckets, report.bytes) == (0, 0)


def test_a_default_group_of_the_trainer_stays_as_it_is(engines: list[FakeEngine]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with sender(engines, make_weights()) as sending:
            sending.send()
        mine = torch.ones(3)
        dist.all_reduce(mine)
        assert mine.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_sends_of_several_threads_take_turns(engines: list[FakeEngine]) -> None:
    before = engines[0].seen()["version"]
    with sender(engines, make_weights()) as sending:
        threads = [threading.Thread(target=sending.send) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert engines[0].seen()["version"] == before + 3


def test_a_restarted_engine_is_joined_again(engines: list[FakeEngine]) -> None:
    weights = make_weights()
    with sender(engines, weights) as sending:
        sending.send()
        engines[1].fault()  # clears its log
        httpx.post(f"{engines[1].url}/destroy_weights_update_group", json={})
        sending.send()
        assert engines[1].seen()["log"].count("init_weights_update_group") == 1
        for engine in engines:
            assert_has(engine, weights)


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[BroadcastSender]:
    """All `BroadcastSender` objects that a sender makes."""
    made: list[BroadcastSender] = []

    class Seen(BroadcastSender):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr("segue.trainer.sender.BroadcastSender", Seen)
    return made


def send_until_closed(sending: WeightSender) -> threading.Thread:
    """Start a thread with a send that hangs until the sender is closed."""

    def send() -> None:
        with pytest.raises(WeightSendError, match="closed during the send"):
            sending.send()

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_broadcasts_are_slowed_down_while_an_engine_generates(
    engines: list[FakeEngine], broadcasts: list[BroadcastSender], wait_until: WaitUntil
) -> None:
    with sender(engines, make_weights()) as sending:
        sending.send()
        engines[1].fault(generating="yes")
        sending.send()
        assert [each.gb_per_s for each in broadcasts] == [math.inf, 25.0]
        engines[1].fault(receive="hang")
        thread = send_until_closed(sending)
        wait_until(lambda: len(broadcasts) == 3, what="the broadcast begun")
        assert broadcasts[2].gb_per_s == math.inf
        engines[1].fault(receive="hang", generating="yes")
        wait_until(lambda: broadcasts[2].gb_per_s == 25.0, what="the engine's requests noticed")
        engines[1].fault(receive="hang")
        wait_until(lambda: broadcasts[2].gb_per_s == math.inf, what="their end noticed")
        sending.close()
        thread.join(60)
    assert not thread.is_alive()


def test_one_generating_engine_slows_the_broadcast_down_until_all_engines_are_idle(
    engines: list[FakeEngine],
    broadcasts: list[BroadcastSender],
    wait_until: WaitUntil,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy, idle, silent = (Answer(url="", success=True, fields=fields) for fields in STATUSES)
    answers = [[busy, silent], [idle, silent], [idle, silent], [idle, idle]]
    seen: list[float] = []

    def statuses(session: str) -> list[Answer]:
        seen.append(broadcasts[0].gb_per_s)
        return answers[min(len(seen), len(answers)) - 1]

    with sender(engines, make_weights()) as sending:
        monkeypatch.setattr(sending, "_statuses", statuses)
        engines[1].fault(receive="hang")
        thread = send_until_closed(sending)
        wait_until(lambda: len(seen) >= 5, what="five polls")
        sending.close()
        thread.join(60)
    assert seen[:5] == [math.inf, 25.0, 25.0, 25.0, math.inf]


@pytest.mark.parametrize("speed", [0.0, -0.5, float("nan")])
def test_a_speed_limit_must_be_positive(speed: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        WeightSender(["http://127.0.0.1:1"], make_weights(), gb_per_s_while_serving=speed)
