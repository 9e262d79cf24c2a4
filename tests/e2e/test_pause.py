"""Pausing, continuing, aborting and flushing over HTTP with the real model, as clients see it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import least_seconds
from tests.e2e.served import MODEL, Client, greedy, serve
from tests.support.held_steps import StepGate

KV_TOKENS = 512
OPTIONS = ("--dtype", "float32", "--page-size", "16", "--num-kv-tokens", str(KV_TOKENS))
LIMITS = ("--max-running-requests", "4", "--chunked-prefill-size", "64")
# Six prompts on four slots: two wait.
PROMPTS = {
    "a": "Once upon a time",
    "b": "The capital of France is",
    "c": "A list of animals:",
    "d": "My favourite book is",
    "e": "In the year 2050",
    "f": "Two and two make",
}
RIDS = list(PROMPTS)
STORY = PROMPTS["a"]
COUNT = 9
LONG = "The quick brown fox jumps over the lazy dog. " * 30  # 300 tokens: five chunks
slow_in_place = pytest.mark.parametrize("mode", ["retract", pytest.param("in_place", marks=pytest.mark.slow)])
each_gentle_mode = pytest.mark.parametrize("mode", ["in_place", "retract"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    gate = StepGate(tmp_path_factory.mktemp("gate") / "steps")
    with serve(*OPTIONS, *LIMITS, gate=gate) as served:
        client = Client(served, gate)
        yield client
        client.close()


@pytest.fixture(scope="module")
def whole(shared: Client) -> dict[str, dict[str, Any]]:
    """Returns the replies of uninterrupted requests."""
    texts = [*PROMPTS.values(), LONG]
    replies = shared.generate(texts, greedy(COUNT))
    return dict(zip([*RIDS, "long"], replies, strict=True))


@pytest.fixture
def client(shared: Client) -> Iterator[Client]:
    """Yields the client; after each test no request may run or wait, and a flush must free all KV pages."""
    assert shared.flush().status_code == 200
    yield shared
    gate_of(shared).open()
    shared.proceed()
    shared.abort(abort_all=True)  # a failed test may leave requests
    shared.until(running_batch_size=0, waiting_queue_size=0, req_to_token_pool_used=0)
    assert shared.flush(timeout=5).status_code == 200
    shared.until(available_kv_tokens=KV_TOKENS, tree_cache_size=0, engine_paused=False)


def gate_of(client: Client) -> StepGate:
    """The gate of the server's steps; closed, it keeps requests from ending before the test's pause."""
    assert client.gate is not None
    return client.gate


def start_all(client: Client, **params: Any) -> dict[str, Any]:
    """Starts the six requests, and returns their futures when four run and two wait.

    None of them can end before the gate is open, which a pause does.
    """
    client.pause("in_place")
    futures = {}
    for index, rid in enumerate(RIDS):  # one after the other, because tests check their order
        futures[rid] = client.start(PROMPTS[rid], greedy(COUNT, **params), rid=rid)
        client.waiting(*RIDS[: index + 1])
    gate_of(client).close_after(COUNT - 1)
    client.proceed()
    client.until(running_batch_rids=RIDS[:4])
    return futures


def assert_whole(reply: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (reply["text"], reply["output_ids"]) == (expected["text"], expected["output_ids"])
    assert reply["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])


def assert_aborted(reply: dict[str, Any], expected: dict[str, Any]) -> None:
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    ids = reply["output_ids"]
    assert reply["meta_info"]["completion_tokens"] == len(ids) < len(expected["output_ids"])
    assert ids == expected["output_ids"][: len(ids)]
    assert expected["text"].startswith(reply["text"])


# --- the modes ---


@pytest.mark.parametrize("mode", ["wait", "in_place", "retract", "abort"])
def test_a_step_in_flight_is_awaited_and_its_tokens_are_delivered(
    client: Client, whole: dict[str, Any], mode: str
) -> None:
    before = client.state()["num_generated_tokens"]
    gate_of(client).close_after(COUNT - 1)
    stream = client.stream(STORY, greedy(COUNT))
    stream.wait(2)
    reply = client.pause(mode)
    state = client.state()
    assert reply["mode"] == state["pause_mode"] == mode
    assert (state["engine_paused"], state["cur_batch_is_none"], state["last_batch_is_none"]) == (True,) * 3
    assert reply["num_running"] == state["running_batch_size"] == (mode == "in_place")
    assert (
        reply["num_waiting"] == reply["num_retracted"] == state["waiting_queue_size"] == (mode == "retract")
    )
    assert reply["num_aborted"] == (mode == "abort")
    made = state["num_generated_tokens"] - before
    stream.wait(made)
    assert len(stream.ids) == made
    assert client.state()["num_generated_tokens"] == before + made, "nothing may run in a pause"
    client.proceed()
    result = stream.result()
    if mode == "abort":
        assert_aborted(result, whole["a"])
        assert len(result["output_ids"]) == made
    else:
        assert_whole(result, whole["a"])


def test_a_pause_without_a_mode_aborts(client: Client, whole: dict[str, Any]) -> None:
    futures = start_all(client)
    reply = client.pause()
    assert (reply["mode"], reply["num_aborted"], reply["num_running"]) == ("abort", 6, 0)
    state = client.state()
    assert (state["running_batch_size"], state["waiting_queue_size"]) == (0, 0)
    for rid, future in futures.items():
        assert_aborted(future.result(30), whole[rid])
    assert futures["f"].result()["meta_info"]["finish_reason"]["message"] == "Abort before prefill"


def test_retract_queues_running_requests_in_order_and_frees_their_kv(
    client: Client, whole: dict[str, Any]
) -> None:
    futures = start_all(client)
    reply = client.pause("retract")
    assert (reply["num_retracted"], reply["num_waiting"], reply["num_running"]) == (4, 6, 0)
    state = client.waiting(*RIDS)
    assert (state["running_batch_rids"], state["req_to_token_pool_used"]) == ([], 0)
    assert (state["available_kv_tokens"], state["tree_cache_size"]) == (KV_TOKENS, 0)
    client.proceed()
    for rid, future in futures.items():
        assert_whole(future.result(30), whole[rid])


def test_in_place_moves_no_request_and_may_be_written_with_a_hyphen(
    client: Client, whole: dict[str, Any]
) -> None:
    futures = start_all(client)
    assert client.pause("in-place")["mode"] == "in_place"
    before = client.state()
    client.pause("in_place")
    after = client.state()
    same = ("running_batch_rids", "waiting_queue_rids", "available_kv_tokens", "tree_cache_size")
    assert [before[name] for name in same] == [after[name] for name in same]
    assert (before["running_batch_rids"], before["waiting_queue_rids"]) == (RIDS[:4], RIDS[4:])
    client.proceed()
    for rid, future in futures.items():
        assert_whole(future.result(30), whole[rid])


def test_wait_lets_running_requests_finish_and_admits_none(client: Client, whole: dict[str, Any]) -> None:
    futures = start_all(client)
    reply = client.pause("wait")
    assert (reply["mode"], reply["num_running"], reply["num_waiting"]) == ("wait", 0, 2)
    assert all(futures[rid].done() or futures[rid].result(30) for rid in RIDS[:4])
    assert client.state()["waiting_queue_rids"] == RIDS[4:]
    client.proceed()
    for rid, future in futures.items():
        assert_whole(future.result(30), whole[rid])


def test_an_unknown_mode_is_refused(client: Client) -> None:
    response = client.http.post("/pause_generation", json={"mode": "sleep"})
    assert response.status_code == 400
    assert all(mode in response.json()["message"] for mode in ("sleep", "abort", "retract", "in_place"))


# --- cases ---


@each_gentle_mode
def test_pause_in_the_middle_of_a_chunked_prefill(client: Client, whole: dict[str, Any], mode: str) -> None:
    gate_of(client).close_after(3)  # of five chunks
    future = client.start(LONG, greedy(COUNT), rid="long")
    client.until(chunked_req_rids=["long"])
    client.pause(mode)
    state = client.state()
    if mode == "in_place":
        assert state["chunked_req_rids"] == state["running_batch_rids"] == ["long"]
        assert state["available_kv_tokens"] < KV_TOKENS
    else:
        assert (state["chunked_req_is_none"], state["waiting_queue_rids"]) == (True, ["long"])
        assert state["available_kv_tokens"] == KV_TOKENS
    assert state["num_generated_tokens"] == client.state()["num_generated_tokens"]
    client.proceed()
    assert_whole(future.result(30), whole["long"])


@slow_in_place
def test_a_request_that_arrives_while_paused_is_queued(
    client: Client, whole: dict[str, Any], mode: str
) -> None:
    client.pause(mode)
    future = client.start(STORY, greedy(COUNT), rid="late")
    state = client.waiting("late")
    assert (state["engine_paused"], state["pause_mode"]) == (True, mode)
    client.proceed()
    assert_whole(future.result(30), whole["a"])


@each_gentle_mode
def test_abort_while_paused_works_for_running_and_waiting_requests(
    client: Client, whole: dict[str, Any], mode: str
) -> None:
    futures = start_all(client)
    stream = client.stream(STORY, greedy(COUNT), rid="stream")
    client.until(waiting_queue_size=3)
    client.pause(mode)
    late = client.start(STORY, greedy(COUNT), rid="late")
    client.until(waiting_queue_size=8 if mode == "retract" else 4)
    held = client.state()
    for rid in ("b", "e", "stream", "late", "unknown"):  # running, waiting, waiting, arrived in the pause
        client.abort(rid)
    for future, expected in ((futures["b"], "b"), (futures["e"], "e"), (late, "a")):
        assert_aborted(future.result(30), whole[expected])
    assert stream.result()["meta_info"]["finish_reason"]["type"] == "abort", (
        "there must be a final event and [DONE]"
    )
    state = client.state()
    assert state["engine_paused"]
    left = ["a", "c", "d", "f"]
    assert state["running_batch_rids"] + state["waiting_queue_rids"] == left
    if mode == "in_place":
        assert state["req_to_token_pool_used"] == held["req_to_token_pool_used"] - 1
        assert state["available_kv_tokens"] > held["available_kv_tokens"], "its KV must be free at once"
    client.proceed()
    for rid in left:
        assert_whole(futures[rid].result(30), whole[rid])


@slow_in_place
def test_abort_all_while_paused(client: Client, whole: dict[str, Any], mode: str) -> None:
    futures = start_all(client)
    client.pause(mode)
    client.abort(abort_all=True, aborted_message="enough")
    for rid, future in futures.items():
        reply = future.result(30)
        assert_aborted(reply, whole[rid])
        assert reply["meta_info"]["finish_reason"]["message"] == "enough"
    state = client.until(running_batch_size=0, waiting_queue_size=0, req_to_token_pool_used=0)
    assert state["engine_paused"] and state["available_kv_tokens"] + state["tree_cache_size"] == KV_TOKENS


def test_a_flush_while_paused_by_retract_succeeds(client: Client, whole: dict[str, Any]) -> None:
    futures = start_all(client)
    client.pause("retract")
    response = client.flush()
    assert response.status_code == 200
    assert response.text.startswith("Cache flushed.") and "Reason" not in response.text
    state = client.state()
    assert (state["available_kv_tokens"], state["tree_cache_size"]) == (KV_TOKENS, 0), (
        "all pages must be free"
    )
    assert state["waiting_queue_rids"] == RIDS
    client.proceed()
    for rid, future in futures.items():
        assert_whole(future.result(30), whole[rid])


def test_a_flush_while_requests_are_paused_in_place_is_refused(client: Client, whole: dict[str, Any]) -> None:
    future = client.begin(STORY, greedy(COUNT), "r")
    client.pause("in_place")
    response = client.flush()
    assert response.status_code == 400
    reason = response.text.partition("Reason: ")[2]
    assert "1 request" in reason and "retract" in reason, "the text must have the reason and the remedy"
    client.pause("retract")
    assert client.flush().status_code == 200
    client.proceed()
    assert_whole(future.result(30), whole["a"])


def test_a_flush_while_requests_run_or_wait_is_refused_unless_it_may_wait(client: Client) -> None:
    futures = start_all(client)
    refused = client.flush()
    assert refused.status_code == 400
    assert all(part in refused.text for part in ("Reason: ", "4 requests run", "2 wait"))
    too_soon = client.flush(timeout=0.05)
    assert too_soon.status_code == 400
    gate_of(client).open()
    waited = client.flush(timeout=30)  # until nothing runs or waits
    assert waited.status_code == 200
    assert all(future.done() or future.result(30) for future in futures.values())
    state = client.state()
    assert (state["available_kv_tokens"], state["tree_cache_size"]) == (KV_TOKENS, 0)
    assert (state["forward_ct_decode"], state["new_token_ratio"]) == (0, state["init_new_token_ratio"])


def test_a_flush_reports_its_size_and_the_next_prompt_finds_an_empty_cache(client: Client) -> None:
    client.generate(LONG, greedy(1))
    assert client.state()["tree_cache_size"] > 200
    assert client.generate(LONG, greedy(1))["meta_info"]["cached_tokens"] > 200
    cached = client.state()["tree_cache_size"]
    response = client.http.get("/flush_cache")
    assert (response.status_code, f"Flushed items: {cached}" in response.text) == (200, True)
    assert client.generate(LONG, greedy(1))["meta_info"]["cached_tokens"] == 0
    assert client.flush().status_code == 200, "a finished request must not make a flush fail"


def test_pause_twice_and_continue_twice(client: Client, whole: dict[str, Any]) -> None:
    client.proceed()
    future = client.begin(STORY, greedy(COUNT), "r")
    first, second = client.pause("retract"), client.pause("retract")
    assert (first["num_retracted"], second["num_retracted"]) == (1, 0)
    assert client.pause("in_place")["mode"] == "retract", (
        "a weaker mode must change nothing, and must return the current mode"
    )
    client.proceed()
    client.proceed()
    assert_whole(future.result(30), whole["a"])


def test_a_pause_can_be_raised_to_each_stronger_mode(client: Client, whole: dict[str, Any]) -> None:
    future = client.begin(STORY, greedy(COUNT), "r")
    for mode in ("in_place", "retract", "abort"):
        assert client.pause(mode)["mode"] == client.state()["pause_mode"] == mode
    assert_aborted(future.result(30), whole["a"])


def test_a_second_abort_pause_aborts_requests_that_were_queued_in_between(client: Client) -> None:
    client.pause("abort")
    future = client.start(STORY, greedy(COUNT), rid="late")
    client.waiting("late")
    assert client.pause("in_place")["mode"] == "abort"
    assert client.state()["waiting_queue_rids"] == ["late"], "a weaker pause must abort nothing"
    assert client.pause("abort")["num_aborted"] == 1
    assert future.result(30)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("mode", "streams"),
    [
        ("retract", True),
        ("in_place", False),
        pytest.param("retract", False, marks=pytest.mark.slow),
        pytest.param("in_place", True, marks=pytest.mark.slow),
    ],
    ids=lambda each: {True: "streaming", False: "waiting for the whole"}.get(each, each),
)
def test_a_client_that_disconnects_while_paused_is_aborted_at_once(
    client: Client, mode: str, streams: bool
) -> None:
    gate_of(client).close_after(COUNT - 1)
    if streams:
        stream = client.stream(STORY, greedy(COUNT), rid="leaves")
        stream.wait(2)
        client.pause(mode)
        stream.leave()
    else:
        body = {"text": STORY, "sampling_params": greedy(COUNT), "rid": "leaves"}
        connection = http.client.HTTPConnection(client.http.base_url.host, client.http.base_url.port)
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        client.until(running_batch_rids=["leaves"])
        client.pause(mode)
        connection.close()
    state = client.until(running_batch_rids=[], waiting_queue_rids=[], req_to_token_pool_used=0)
    assert state["engine_paused"]
    assert state["available_kv_tokens"] + state["tree_cache_size"] == KV_TOKENS


def test_a_stream_across_pauses_gives_each_piece_of_text_once(client: Client, whole: dict[str, Any]) -> None:
    body = {"model": MODEL, "prompt": STORY, "max_tokens": COUNT, "temperature": 0}
    pieces: list[str] = []
    completions = client.served.openai.completions
    for number, chunk in enumerate(completions.create(**body, stream=True)):
        pieces.append(chunk.choices[0].text)
        if number in (2, 5, 8):
            client.pause("retract" if number == 5 else "in_place")
            client.proceed()
    assert "".join(pieces) == whole["a"]["text"]


@pytest.mark.slow
def test_a_stream_that_is_silent_for_15_seconds_gets_a_comment(client: Client, whole: dict[str, Any]) -> None:
    stream = client.stream(STORY, greedy(COUNT))
    stream.wait(2)
    client.pause("retract")
    time.sleep(16)
    assert len(stream.comments) == 1
    client.proceed()
    assert_whole(stream.result(), whole["a"])


def test_pauses_do_not_change_logprobs_penalties_seeds_and_stop_strings(client: Client) -> None:
    stop, count = "years w", 20
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (greedy(count), {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}),
        (greedy(count, presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.1), {}),
        (greedy(count, temperature=0.9, top_p=0.9, sampling_seed=5), {}),
        (greedy(30, stop=stop), {"return_logprob": True}),
    ]

    def ask(pauses: int) -> list[Any]:
        client.pause("in_place")
        futures = [client.start(STORY, params, **fields) for params, fields in cases]
        client.until(waiting_queue_size=len(cases))
        for number in range(pauses):
            made = client.state()["num_generated_tokens"]
            gate_of(client).close_after(5)  # three times, and the requests go on
            client.proceed()
            client.until_more(made)
            reply = client.pause(("retract", "in_place")[number % 2])
            assert number or reply["num_running"] + reply["num_waiting"] == len(cases)
        client.proceed()
        return [future.result(30) for future in futures]

    interrupted, plain = ask(3), ask(0)
    for one, other in zip(interrupted, plain, strict=True):
        assert_whole(one, other)
    logprobs = [
        reply["meta_info"]["output_token_logprobs"]
        for reply in interrupted
        if "output_token_logprobs" in reply["meta_info"]
    ]
    assert [len(entries) for entries in logprobs] == [count, len(plain[3]["output_ids"])]
    assert [entry[1] for entry in logprobs[0]] == interrupted[0]["output_ids"]
    theirs = plain[0]["meta_info"]
    for name in ("output_token_logprobs", "input_token_logprobs"):
        ours = [entry[0] for entry in interrupted[0]["meta_info"][name]]
        assert ours == pytest.approx([entry[0] for entry in theirs[name]], abs=1e-3)
    assert interrupted[3]["meta_info"]["finish_reason"]["matched"] == stop
    assert stop not in interrupted[3]["text"]


def test_a_pause_with_a_ttl_ends_by_itself(client: Client, whole: dict[str, Any]) -> None:
    future = client.begin(STORY, greedy(COUNT), "r")
    began = time.monotonic()
    client.pause("retract", ttl_s=2.5)
    assert_whole(future.result(30), whole["a"])
    assert time.monotonic() - began > 2.5
    assert not client.state()["engine_paused"]


@slow_in_place
def test_a_rid_can_be_reused_only_after_its_request_has_ended(
    client: Client, whole: dict[str, Any], mode: str
) -> None:
    future = client.begin(STORY, greedy(COUNT), "same")
    client.pause(mode)
    body = {"text": STORY, "sampling_params": greedy(COUNT), "rid": "same"}
    refused = client.http.post("/generate", json=body)
    assert refused.status_code == 400 and "same" in refused.json()["message"]
    client.abort("same")
    assert_aborted(future.result(30), whole["a"])
    again = client.start(STORY, greedy(COUNT), rid="same")
    client.proceed()
    assert_whole(again.result(30), whole["a"])


def test_a_batch_across_a_pause_is_complete(client: Client, whole: dict[str, Any]) -> None:
    gate_of(client).close_after(COUNT - 1)
    batch = client.start(list(PROMPTS.values()), greedy(COUNT), rid="batch")
    client.until(running_batch_size=4)
    client.pause("retract")
    client.proceed()
    for reply, expected in zip(batch.result(30), whole.values(), strict=False):
        assert_whole(reply, expected)


def test_prompts_that_share_a_prefix_survive_pauses(client: Client, whole: dict[str, Any]) -> None:
    assert_whole(client.generate(LONG, greedy(COUNT)), whole["long"])
    client.pause("in_place")
    futures = [client.start(LONG, greedy(COUNT)) for _ in range(4)]
    client.until(waiting_queue_size=4)
    gate_of(client).close_after(COUNT - 1)
    client.proceed()
    client.until(running_batch_size=4)
    for mode in ("in_place", "retract"):
        client.pause(mode)
        client.proceed()
    for future in futures:
        reply = future.result(30)
        assert_whole(reply, whole["long"])
        assert reply["meta_info"]["cached_tokens"] > 200


@slow_in_place
def test_a_pause_when_no_page_is_free(client: Client, mode: str) -> None:
    """Four requests of 128 tokens fill the KV cache; they are paused when no page is free."""
    ids = [[number] * 124 for number in range(300, 304)]
    params = greedy(5)  # the fifth token is never fed back, so each request takes 128 positions
    bodies = [{"input_ids": each, "sampling_params": params} for each in ids]
    futures = [
        client.run(lambda body=body: client.http.post("/generate", json=body).json()) for body in bodies
    ]
    client.until(available_kv_tokens=0)
    client.pause(mode)
    state = client.state()
    if mode == "retract":
        assert state["available_kv_tokens"] + state["tree_cache_size"] == KV_TOKENS
    client.proceed()
    assert [len(future.result(60)["output_ids"]) for future in futures] == [5] * 4


def test_the_routes_of_vllm(client: Client, whole: dict[str, Any]) -> None:
    def is_paused() -> bool:
        return bool(client.http.get("/is_paused").json()["is_paused"])

    assert not is_paused()
    future = client.begin(STORY, greedy(COUNT), "r")
    paused = client.http.post("/pause", params={"mode": "keep"})
    assert (paused.status_code, paused.json()["status"]) == (200, "paused")
    assert is_paused() and client.state()["running_batch_rids"] == ["r"]
    gate_of(client).open()
    resumed = client.http.post("/resume")
    assert (resumed.status_code, resumed.json()["status"], is_paused()) == (200, "resumed", False)
    assert_whole(future.result(30), whole["a"])


def test_health_and_metrics_show_the_pause(client: Client) -> None:
    assert "paused" not in client.http.get("/health").text
    client.pause("retract")
    for path in ("/health", "/health_generate"):

        def check(path: str = path) -> None:
            health = client.http.get(path)
            assert (health.status_code, "paused" in health.text) == (200, True)

        assert least_seconds(check) < 1
    assert "paused" in client.http.get("/metrics").text


def cpu_seconds(pids: list[int]) -> float:
    """Returns the CPU seconds of processes and all their threads since they began."""
    threads = [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


@slow_in_place
def test_a_paused_server_takes_less_than_2_percent_of_a_core(client: Client, mode: str) -> None:
    futures = start_all(client)
    client.pause(mode)
    pids = [client.served.process.pid, *client.served.workers()]
    before, began = cpu_seconds(pids), time.monotonic()
    time.sleep(2)  # the measured time
    share = (cpu_seconds(pids) - before) / (time.monotonic() - began)
    print(f"paused ({mode}) with 6 requests: {share:.2%} of a core")
    assert share < 0.02
    client.abort(abort_all=True)
    for future in futures.values():
        future.result(30)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_rank_is_drained(whole: dict[str, Any]) -> None:
    with serve(*OPTIONS, "--tp", "3") as served, closing(Client(served)) as client:
        for mode in ("wait", "in_place", "retract", "abort"):
            future = client.begin(STORY, greedy(COUNT), "r")
            reply = client.pause(mode)
            assert reply["mode"] == mode
            if mode != "in_place":
                assert client.flush().status_code == 200
            pids = served.workers()
            before = cpu_seconds(pids)
            time.sleep(0.5)
            assert cpu_seconds(pids) - before < 0.02, "no rank may run anything"
            client.proceed()
            (assert_aborted if mode == "abort" else assert_whole)(future.result(60), whole["a"])


@pytest.mark.slow
def test_a_server_may_refuse_requests_while_paused() -> None:
    body = {"text": STORY, "sampling_params": greedy(2)}
    with serve(*OPTIONS, "--paused-policy", "reject") as served, closing(Client(served)) as client:
        client.pause("retract")
        for stream in (False, True):
            refused = client.http.post("/generate", json=body | {"stream": stream})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            assert "paused" in refused.json()["message"]
        with pytest.raises(openai.APIStatusError) as error:
            served.openai.completions.create(model=MODEL, prompt=STORY)
        assert error.value.status_code == 503
        client.proceed()
        assert client.generate(STORY, greedy(2))["meta_info"]["completion_tokens"] == 2
