"""Weight updates of a running server by a trainer process, with every failure of the documented table."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import WaitUntil
from tests.e2e.syncing import GREEDY, PROMPTS, Syncing, split, syncing, tensors_of, write_checkpoints
from tests.weight_update.conftest import trainer_address as trainer_address

pytestmark = pytest.mark.timeout(180)
# Deterministic, so that the bits of a reply do not depend on the batch.
OPTIONS = ("--dtype", "float32", "--deterministic", "--num-kv-tokens", "4096")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"), "llama-tied", 3)


@pytest.fixture(scope="module")
def running(trainer_address: str, checkpoints: list[Path]) -> Iterator[Syncing]:
    with syncing(trainer_address, checkpoints[0], options=OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def right(running: Syncing, checkpoints: list[Path]) -> list[Any]:
    """Returns the replies of a server with the weights of each checkpoint."""
    replies = []
    for checkpoint in checkpoints:
        assert running.ask("/update_weights_from_disk", model_path=str(checkpoint))["success"]
        replies.append(running.replies())
    assert replies[0] != replies[1] != replies[2]
    return replies


@pytest.fixture
def sync(running: Syncing, checkpoints: list[Path], right: list[Any]) -> Iterator[Syncing]:
    """Yields the server with the first weights, connected to a new trainer that has the second."""
    assert running.ask("/update_weights_from_disk", model_path=str(checkpoints[0]))["success"]
    assert running.replies() == right[0]
    running.new_trainer(checkpoints[1])
    running.meet()
    yield running
    running.ask("/abort_weights_update")
    running.ask("/destroy_weights_update_group", group_name="g")
    assert running.trainer is not None
    running.trainer.close()
    running.ask("/continue_generation")
    state = running.http.get("/server_info").json()["internal_states"][0]
    assert (state["running_batch_size"], state["waiting_queue_size"]) == (0, 0)


def version(sync: Syncing) -> str:
    name: str = sync.http.get("/weight_version").json()["weight_version"]
    return name


@pytest.mark.parametrize("flattened", [False, True])
def test_an_update_serves_the_new_weights(
    sync: Syncing, checkpoints: list[Path], right: list[Any], flattened: bool
) -> None:
    before = version(sync)
    done = sync.update(checkpoints[1], flattened=flattened)
    assert done["success"] and done["num_buckets_received"] == 3
    assert version(sync) == done["weight_version"] == str(int(before) + 1)
    assert sync.replies() == right[1]


@pytest.mark.parametrize("flattened", [False, True])
def test_a_trainer_killed_during_an_update_changes_nothing(
    sync: Syncing, checkpoints: list[Path], right: list[Any], flattened: bool
) -> None:
    buckets = split(tensors_of(checkpoints[1]), 4)
    checksum = sync.checksum()
    form = {"load_format": "flattened_bucket" if flattened else None}
    assert sync.prepare(buckets, timeout_s=20.0, **form)["status"] == "ready"
    sync.send(buckets[:2], flattened=flattened)
    sync.until(num_buckets_received=2)
    waiting = sync.later("/complete_weights_update", group_name="g")
    assert sync.trainer is not None
    sync.trainer.kill()
    seconds = []
    while not waiting.done():
        began = time.monotonic()
        assert sync.http.get("/health").status_code == 200
        seconds.append(time.monotonic() - began)
    assert min(seconds, default=0.0) < 1.0  # a stall of the machine does not come with each request
    assert not waiting.result()["success"] and waiting.result()["message"]
    assert sync.status()["state"] == "idle"
    assert sync.checksum() == checksum
    assert sync.replies() == right[0]
    sync.new_trainer(checkpoints[1])
    sync.meet()
    assert sync.update(checkpoints[1], flattened=flattened)["success"], (
        "a new trainer must be able to send again without a restart"
    )
    assert sync.replies() == right[1]


def test_a_restarted_trainer_can_use_its_port_again(
    sync: Syncing, checkpoints: list[Path], right: list[Any]
) -> None:
    port = sync.port
    assert sync.trainer is not None
    sync.trainer.kill()
    sync.new_trainer(checkpoints[1])
    sync.meet(port=port)  # with equal parameters, the dead group is replaced
    assert sync.update(checkpoints[1])["success"]
    assert sync.replies() == right[1]


NAME = "model.norm.weight"


def _changed(buckets: list[list[Any]], change: str) -> list[list[Any]]:
    first, *rest = [list(bucket) for bucket in buckets]
    name, dtype, shape = first[0]
    match change:
        case "unknown":
            first[0] = ("model.nonsense", dtype, shape)
        case "missing":
            first = first[1:]
        case "duplicate":
            rest[0].append(first[0])
        case "shape":
            first[0] = (name, dtype, [*shape, 2])
        case "dtype":
            first[0] = (name, "int32", shape)
        case "no dtype":
            first[0] = (name, "float31", shape)
    return [first, *rest]


@pytest.mark.parametrize("change", ["unknown", "missing", "duplicate", "shape", "dtype", "no dtype"])
def test_a_bad_manifest_is_refused(
    sync: Syncing, checkpoints: list[Path], right: list[Any], change: str
) -> None:
    buckets = split(tensors_of(checkpoints[1]), 3)
    name = buckets[0][0][0]
    answer = sync.prepare(_changed(buckets, change))
    assert answer["status"] == "error"
    assert ("model.nonsense" if change == "unknown" else name) in answer["message"]
    assert sync.status()["state"] == "idle"
    assert sync.replies() == right[0]
    assert sync.update(checkpoints[1])["success"], (
        "no collective may have started, so the group must still work"
    )


def test_lists_of_different_lengths_and_a_wrong_count_are_refused(
    sync: Syncing, checkpoints: list[Path]
) -> None:
    buckets = split(tensors_of(checkpoints[1]), 2)
    bucket = {"names": ["a", "b"], "dtypes": ["float32"], "shapes": [[1]]}
    body = {"num_buckets": 1, "buckets": [bucket], "group_name": "g"}
    answer = sync.ask("/prepare_weights_update", **body)
    assert answer["status"] == "error" and "2" in answer["message"] and "1" in answer["message"]
    assert "num_buckets=7" in sync.prepare(buckets, num_buckets=7)["message"]


def test_an_update_that_is_received_and_aborted_changes_nothing(
    sync: Syncing, checkpoints: list[Path], right: list[Any]
) -> None:
    buckets = split(tensors_of(checkpoints[1]), 2)
    sync.prepare(buckets)
    sync.send(buckets)
    sync.until(state="received")
    sync.sent()
    assert sync.replies() == right[0]
    assert sync.ask("/abort_weights_update")["success"]
    assert sync.replies() == right[0]
    assert sync.update(checkpoints[1])["success"]


def test_a_wrong_checksum_is_refused(sync: Syncing, checkpoints: list[Path], right: list[Any]) -> None:
    buckets = split(tensors_of(checkpoints[1]), 2)
    sync.prepare(buckets, checksums={NAME: 1234})
    sync.send(buckets)
    answer = sync.complete()
    sync.sent()
    assert not answer["success"] and NAME in answer["message"]
    assert sync.replies() == right[0]


def test_a_non_finite_value_is_refused(
    sync: Syncing, checkpoints: list[Path], right: list[Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoints[1] / "model.safetensors")
    weights[NAME][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    assert sync.trainer is not None
    sync.trainer.do("load", path=str(tmp_path / "model.safetensors"))
    answer = sync.update(checkpoints[1])
    assert not answer["success"] and NAME in answer["message"]
    assert sync.replies() == right[0]


def test_complete_can_be_repeated_and_needs_a_session(
    sync: Syncing, checkpoints: list[Path], right: list[Any]
) -> None:
    assert "no session is open" in sync.complete()["message"]
    done = sync.update(checkpoints[1])
    assert sync.complete() == done, "a repeated call must give the same reply, since the first may be lost"
    assert not sync.complete(session_id="another")["success"]
    assert sync.replies() == right[1]
    assert sync.ask("/destroy_weights_update_group", group_name="g")["success"]
    assert "no session is open" in sync.complete()["message"]
    assert not sync.ask("/destroy_weights_update_group", group_name="g")["success"]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place", "wait"])
@pytest.mark.parametrize("flush", [False, True])
def test_an_update_while_paused_keeps_the_pause(
    sync: Syncing, checkpoints: list[Path], right: list[Any], mode: str, flush: bool
) -> None:
    body = {"input_ids": PROMPTS[0], "sampling_params": GREEDY | {"max_new_tokens": 60}, "rid": "r"}
    future = sync.later("/generate", **body)
    while not sync.http.get("/server_info").json()["internal_states"][0]["num_generated_tokens"]:
        assert not future.done()
    assert sync.ask("/pause_generation", mode=mode)["status"] == "ok"
    done = sync.update(checkpoints[1], flush_cache=flush)
    assert done["success"]
    state = sync.http.get("/server_info").json()["internal_states"][0]
    assert (state["engine_paused"], state["pause_mode"]) == (True, mode)
    if flush:
        assert state["running_batch_size"] == state["tree_cache_size"] == 0
    sync.ask("/continue_generation")
    assert future.result()["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    assert sync.replies() == right[1]


def test_an_update_under_load_reports_the_versions_of_each_reply(
    sync: Syncing, checkpoints: list[Path], right: list[Any]
) -> None:
    body = {"sampling_params": GREEDY | {"max_new_tokens": 100}, "return_logprob": True}
    futures = [sync.later("/generate", input_ids=PROMPTS[i % 3], **body) for i in range(16)]
    before = version(sync)
    done = sync.update(checkpoints[1])
    assert done["success"]
    assert sync.replies() == right[1], "new requests must get the replies of a fresh server"
    spanning = 0
    for reply in [future.result() for future in futures]:
        meta = reply["meta_info"]
        assert meta["finish_reason"]["type"] == "length"
        spans = meta["weight_versions"]
        assert spans[0]["start"] == 0 and spans[-1]["end"] == len(reply["output_ids"]) == 100
        assert all(a["end"] == b["start"] for a, b in pairwise(spans))
        names = [span["version"] for span in spans]
        assert names in ([before, done["weight_version"]], [before], [done["weight_version"]])
        spanning += len(names) > 1
    print(f"{spanning} of 16 requests span the update")


def test_a_bad_checkpoint_is_refused(
    sync: Syncing, checkpoints: list[Path], right: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    endless = ("/proc/self/pagemap", "/dev/zero")  # reading them would never end
    for path in ("/nowhere", str(tmp_path), *endless, "/a" * 3000, "a" * 300, "a\0b"):
        answer = sync.ask("/update_weights_from_disk", model_path=path)
        assert not answer["success"] and answer["message"]
        assert sync.http.get("/model_info").json()["model_path"] == str(checkpoints[0])
    assert sync.replies() == right[0]


def test_joins_of_disconnected_clients_leave_no_threads(
    sync: Syncing, checkpoints: list[Path], right: list[Any], wait_until: WaitUntil
) -> None:
    [worker] = sync.servers[0].workers()

    def num_threads() -> int:
        return len(list(Path(f"/proc/{worker}/task").iterdir()))

    before, host = num_threads(), sync.http.base_url
    with socket.create_server(("127.0.0.1", 0), backlog=500) as silent:
        body = {"master_address": "127.0.0.1", "master_port": silent.getsockname()[1], "rank_offset": 1}
        body |= {"world_size": 2, "backend": "gloo", "timeout_s": 86400}
        max_threads = 0
        for index in range(100):
            content = json.dumps(body | {"group_name": f"left{index}"}).encode()
            head = f"POST /init_weights_update_group HTTP/1.1\r\nhost: {host.host}\r\n"
            head += f"content-length: {len(content)}\r\n\r\n"
            with socket.create_connection((host.host, host.port)) as client:
                client.sendall(head.encode() + content)
            max_threads = max(max_threads, num_threads())
        assert max_threads <= before + 20
        assert sync.http.get("/health").status_code == 200
        wait_until(lambda: num_threads() <= before + 1, 30, what="the end of the joining threads")
    assert sync.update(checkpoints[1])["success"]
    assert sync.replies() == right[1]


def test_empty_sessions_and_buckets_are_accepted(
    sync: Syncing, checkpoints: list[Path], right: list[Any]
) -> None:
    assert sync.prepare([], partial=True)["status"] == "ready"
    assert sync.complete()["success"]
    assert sync.replies() == right[0]
    tensors = tensors_of(checkpoints[1])
    buckets = [[], tensors[:1], [], tensors[1:], []]
    for flattened in (False, True):
        form = {"load_format": "flattened_bucket" if flattened else None}
        assert sync.prepare(buckets, **form)["status"] == "ready"
        sync.send(buckets, flattened=flattened)
        assert sync.complete()["num_buckets_received"] == 5
        sync.sent()
    assert sync.replies() == right[1]


def _single(sync: Syncing, bucket: Any, **fields: Any) -> dict[str, Any]:
    names, dtypes, shapes = ([each[i] for each in bucket] for i in range(3))
    answer = sync.later(
        "/update_weights_from_distributed",
        **({"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": "g"} | fields),
    )
    sync.send([bucket])
    assert "error" not in sync.sent(), "the trainer must not hang"
    return answer.result()


def test_single_update_calls_of_sglang_serve_their_weights(
    sync: Syncing, checkpoints: list[Path], right: list[Any]
) -> None:
    first, second = split(tensors_of(checkpoints[1]), 2)
    assert _single(sync, first, weight_version="9")["success"]
    assert _single(sync, second, weight_version="9")["success"]
    assert version(sync) == "9"
    assert sync.replies() == right[1]
    sync.ask("/update_weight_version", new_version="10")
    assert version(sync) == "10"


def test_single_update_calls_can_form_one_update(
    sync: Syncing, checkpoints: list[Path], right: list[Any]
) -> None:
    assert sync.ask("/begin_weight_update")["success"]
    for bucket in split(tensors_of(checkpoints[1]), 3):
        assert _single(sync, bucket)["success"]
        assert sync.replies() == right[0], "no new weights may be served yet"
    assert sync.ask("/end_weight_update")["success"]
    assert sync.replies() == right[1]


def test_a_wrong_single_call_does_not_block_a_client_that_already_sends(
    sync: Syncing, checkpoints: list[Path], right: list[Any]
) -> None:
    first, _ = split(tensors_of(checkpoints[1]), 2)
    wrong = [("model.nonsense", "float32", [5]), *first]
    answer = _single(sync, wrong)
    assert not answer["success"] and "model.nonsense" in answer["message"]
    assert sync.replies() == right[0]
    assert sync.update(checkpoints[1])["success"], "the group must still work"


@pytest.mark.slow  # tests/e2e/test_clients.py has the short form, with WeightSender
def test_two_engines_both_take_an_update_or_neither(trainer_address: str, checkpoints: list[Path]) -> None:
    with syncing(trainer_address, checkpoints[0], checkpoints[0], options=OPTIONS) as sync:
        one, other = sync.clients
        old = sync.replies()
        sync.new_trainer(checkpoints[1])
        sync.meet()
        buckets = split(tensors_of(checkpoints[1]), 2)
        # One engine refuses to prepare: nothing is sent, and the other engine's session is aborted.
        assert sync.prepare(buckets, one)["status"] == "ready"
        assert sync.prepare(_changed(buckets, "unknown"), other)["status"] == "error"
        assert sync.ask("/abort_weights_update", one)["success"]
        assert [sync.replies(one), sync.replies(other)] == [old, old]
        # One engine receives a wrong checksum: the other engine does not commit.
        sync.ask("/destroy_weights_update_group", other, group_name="g")
        sync.ask("/destroy_weights_update_group", one, group_name="g")
        sync.new_trainer(checkpoints[1])
        sync.meet()
        sync.prepare(buckets, one)
        sync.prepare(buckets, other, checksums={NAME: 1})
        sync.send(buckets)
        answers = [
            sync.threads.submit(sync.complete, client, commit=False).result() for client in (one, other)
        ]
        assert [answer["success"] for answer in answers] == [True, False]
        assert sync.ask("/abort_weights_update", one)["success"]
        sync.sent()
        assert [sync.replies(one), sync.replies(other)] == [old, old]
        for client in (one, other):
            sync.prepare(buckets, client)
        sync.send(buckets)
        assert all(sync.complete(client, commit=False)["success"] for client in (one, other))
        sync.sent()
        assert [sync.replies(one), sync.replies(other)] == [old, old]
        assert all(sync.ask("/commit_weights_update", client)["success"] for client in (one, other))
        assert sync.checksum(one) == sync.checksum(other)
        new = sync.replies(one)
        assert sync.replies(other) == new
        assert new != old
