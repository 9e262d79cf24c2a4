"""A prefill engine and a decode engine give what one engine gives, on a real model and by shared memory."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import segue
from segue.errors import InvalidRequestError
from segue.frontend import handing_over
from segue.server.app import create_app
from tests.e2e.pair import OPTIONS, PAGE_SIZE, Pair, greedy, ids
from tests.support.held_steps import hold_here

TEXT = "The capital of France is Paris. Hello world, how are you today? " * 4


@pytest.fixture(scope="module", params=[False, True], ids=["overlap", "no overlap"])
def pair(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(tiny_model, deterministic=True, disable_overlap=request.param)
    yield pair
    pair.close()


@pytest.mark.parametrize("count", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 24, 25, 100])
def test_at_the_edges_of_pages_and_chunks(pair: Pair, count: int) -> None:
    pair.compare(input_ids=ids(count, seed=count), sampling_params=greedy())
    assert pair.num_adopted == 1


@pytest.mark.parametrize("count", [1, 2])
def test_few_tokens(pair: Pair, count: int) -> None:
    pair.compare(input_ids=ids(9, seed=50), sampling_params=greedy(count))
    assert pair.num_adopted == count - 1, "after the last token there is nothing to hand over"


def test_a_stop_token_as_first_token(pair: Pair) -> None:
    first = pair.whole.generate(input_ids=ids(10, seed=3), sampling_params=greedy(1))["output_ids"][0]
    params = greedy(12, stop_token_ids=[first])
    reply = pair.compare(input_ids=ids(10, seed=3), sampling_params=params)
    assert reply["output_ids"] == [first] and pair.num_adopted == 0


def test_guided_output_goes_on_behind_the_first_token(pair: Pair) -> None:
    prompt = ids(10, seed=4)
    for regex in ("[ab]{12}(xy|yx)", "a"):
        reply = pair.compare(input_ids=prompt, sampling_params=greedy(40, regex=regex))
        assert re.fullmatch(regex, reply["text"]) and pair.num_adopted == (regex != "a")
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}


@pytest.mark.parametrize("warm", [("prefill",), ("decode",), ("prefill", "decode")], ids="+".join)
def test_prompts_that_an_engine_has_in_its_prefix_cache(pair: Pair, warm: tuple[str, ...]) -> None:
    prompt = ids(41, seed=90 + len("".join(warm)))
    for name in warm:
        getattr(pair, name).generate(input_ids=prompt[:30], sampling_params=greedy(1))
    pair.compare(input_ids=prompt, sampling_params=greedy())
    assert pair.num_adopted == 1


def test_an_idle_decode_engine_answers_a_late_claim_at_once(pair: Pair) -> None:
    call = {"input_ids": ids(20, seed=44), "sampling_params": greedy(2)}
    seconds = []
    for _ in range(4):
        where = pair.where()
        pair.prefill.generate(**call, **where)  # its first token is known before the claim
        begin = time.monotonic()
        pair.decode.generate(**call, **where)
        seconds.append(time.monotonic() - begin)
    # A stall of the machine does not come with each of them.
    assert min(seconds) < 0.5, "a grant waits for the next ping, which comes after a second"


def test_the_same_prompt_again(pair: Pair) -> None:
    for _ in range(3):
        pair.compare(input_ids=ids(32, seed=8), sampling_params=greedy())
        assert pair.num_adopted == 1


def test_a_salt_is_that_of_both_engines(pair: Pair) -> None:
    prompt = ids(32, seed=9)
    for salt, found in (("one", 0), ("other", 0), ("one", 28), (None, 0)):
        decoded = pair.compare(input_ids=prompt, sampling_params=greedy(), cache_salt=salt)
        assert pair.num_adopted == 1 and decoded["meta_info"]["cached_tokens"] == found


def test_log_probabilities_that_are_too_large_are_computed_by_both_engines(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores: dict[str, Any] = {"logprob_start_len": 0, "top_logprobs_num": 2}
    call = {"input_ids": ids(30, seed=11), "sampling_params": greedy()} | scores
    for most, num_adopted in ((30 * 46, 1), (30 * 46 - 1, 0)):  # bytes of 30 tokens, two alternatives each
        monkeypatch.setattr(handing_over, "MOST_LOGPROB_BYTES", most)
        pair.compare(**call)
        assert pair.num_adopted == num_adopted


def test_both_engines_compute_a_prompt_without_output(pair: Pair) -> None:
    scores: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    call = {"input_ids": ids(30, seed=10), "sampling_params": {"max_new_tokens": 0}} | scores
    pair.compare(**call)
    assert pair.num_adopted == 0
    first, second = pair.split(**call)
    for name in ("input_token_logprobs", "input_top_logprobs", "finish_reason"):
        assert first["meta_info"][name] == second["meta_info"][name]
    assert first["output_ids"] == [] and len(first["meta_info"]["input_top_logprobs"]) == 30


@pytest.mark.parametrize("start", [-1, 0, 5])
def test_log_probabilities(pair: Pair, start: int) -> None:
    pair.compare(
        input_ids=ids(30, seed=60 + start),
        sampling_params=greedy(),
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=3,
    )


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9, "sampling_seed": 11},
        {"temperature": 0.9, "sampling_seed": 12, "top_k": 20, "top_p": 0.8},
        {"temperature": 0.7, "sampling_seed": 13, "frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {"9": 5.0}},
        {"temperature": 0.0, "min_new_tokens": 4},
    ],
    ids=["seed", "filters", "penalties", "bias", "min"],
)
def test_sampling(pair: Pair, params: dict[str, Any]) -> None:
    pair.compare(input_ids=ids(21, seed=70), sampling_params={"max_new_tokens": 16} | params)


def test_a_prompt_goes_on_with_the_seed_of_its_first_token(pair: Pair) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
    seeded, prompt, where = params | {"sampling_seed": 11}, ids(12, seed=5), pair.where()
    whole = pair.whole.generate(input_ids=prompt, sampling_params=seeded)
    first = pair.prefill.generate(input_ids=prompt, sampling_params=seeded, **where)
    decoded = pair.decode.generate(input_ids=prompt, sampling_params=params, **where)
    assert decoded["output_ids"] == whole["output_ids"]
    assert first["output_ids"] == whole["output_ids"][:1]
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 1}


def test_stop_strings_that_begin_in_the_first_token(pair: Pair) -> None:
    text = pair.whole.generate(TEXT, greedy(8))["text"]
    for begin in range(0, 3):
        for end in range(begin + 1, begin + 4):
            if stop := text[begin:end]:
                reply = pair.compare(prompt=TEXT, sampling_params=greedy(8, stop=[stop]))
                assert stop not in reply["text"]


def test_a_batch(pair: Pair) -> None:
    prompts = [ids(count, seed=count) for count in (3, 40, 17, 64, 5, 33, 4, 90, 12, 28, 7, 55)]
    params = [greedy(4 + index) for index in range(len(prompts))]
    pair.compare(input_ids=prompts, sampling_params=params)
    assert pair.num_adopted == len(prompts)


def test_a_stream(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call: dict[str, Any] = {"input_ids": ids(37, seed=21), "sampling_params": greedy(10)}
    whole = list(pair.whole.generate(**call, stream=True))
    where, gate = pair.where(), hold_here(tmp_path / "steps", monkeypatch)
    gate.close_after(6)  # two of the prefill engine, and some of the other one: no stream is over
    pair.threads.submit(pair.prefill.generate, **call, **where)
    stream = pair.decode.generate(**call, **where, stream=True)
    decoded = [next(stream)]
    gate.open()
    decoded += stream
    assert decoded[-1]["output_ids"] == whole[-1]["output_ids"] and decoded[-1]["text"] == whole[-1]["text"]
    assert 1 < len(decoded) <= 10, "tokens that come together are one event"


def post(engine: segue.Engine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a body to an engine's HTTP routes."""
    app = create_app(engine.config)
    app.state.runtime = engine._runtime

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, json=body)

    response = engine._thread.call(send())
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/completions", {"prompt": [ids(30, seed=1), ids(9, seed=2)]}, 2),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, None),
    ],
    ids=["completions", "chat"],
)
def test_a_balancer_sends_one_openai_body_to_both_engines(
    pair: Pair, path: str, body: dict[str, Any], count: int | None
) -> None:
    body = body | {"model": pair.model, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    before = pair.handover(pair.decode)["num_adopted"]
    whole, split = post(pair.whole, path, body), body | pair.where(count)
    first = pair.threads.submit(post, pair.prefill, path, split)
    decoded = post(pair.decode, path, split)
    assert (decoded["choices"], decoded["usage"]) == (whole["choices"], whole["usage"])
    assert {choice["finish_reason"] for choice in first.result(60)["choices"]} == {"length"}
    assert first.result()["usage"]["completion_tokens"] == (count or 1)
    assert pair.handover(pair.decode)["num_adopted"] - before == (count or 1)


def test_nothing_is_left_behind(pair: Pair) -> None:
    pair.split(input_ids=ids(30, seed=33), sampling_params=greedy())
    for engine in (pair.prefill, pair.decode):
        assert pair.handover(engine)["leases"] == {} and pair.handover(engine)["offers"] == {}
        assert engine.flush_cache(timeout=10)
        state = engine.get_server_info()["internal_states"][0]
        assert state["available_kv_tokens"] == OPTIONS["num_kv_tokens"]


def test_both_engines_count_the_pages_and_have_empty_queues(pair: Pair) -> None:
    before = [pair.handover(engine)["num_pages"] for engine in (pair.prefill, pair.decode)]
    pair.compare(input_ids=ids(5 * PAGE_SIZE + 1, seed=77), sampling_params=greedy(3))
    after = [pair.handover(engine) for engine in (pair.prefill, pair.decode)]
    assert [now["num_pages"] - then for now, then in zip(after, before, strict=True)] == [6, 6]
    assert after[1]["adopt_s"] > 0
    for engine in (pair.whole, pair.prefill, pair.decode):
        state = engine.get_server_info()["internal_states"][0]
        assert [size for name, size in state.items() if name.startswith("disagg_")] == [0] * 4


def test_a_prefill_engine_that_is_not_there(pair: Pair) -> None:
    where = pair.where() | {"bootstrap_port": 1}
    reply = pair.decode.generate(input_ids=ids(10), sampling_params=greedy(4), **where)
    assert len(reply["output_ids"]) == 4, "an engine that answers alone computes the prompt itself"


def test_a_request_without_a_role_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidRequestError, match=r"bootstrap_room=1: .*--role prefill"):
        pair.whole.generate("x", bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=1)


def test_a_prefill_engine_refuses_to_decode(pair: Pair) -> None:
    with pytest.raises(InvalidRequestError, match="--role is prefill, and the request may have 5 output"):
        pair.prefill.generate("x", greedy(5))


def test_a_room_is_used_once(pair: Pair) -> None:
    where = pair.where()
    pair.prefill.generate("x", greedy(5), **where)
    with pytest.raises(InvalidRequestError, match="draw another id for every request"):
        pair.prefill.generate("x", greedy(5), **where)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_engines_of_several_ranks(tiny_model: Path, sizes: tuple[int, int]) -> None:
    """Each rank sends its heads of each page to the ranks that need them."""
    pair = Pair(tiny_model, tp=sizes)
    try:
        for count in (PAGE_SIZE, 41):
            call = {"input_ids": ids(count, seed=count), "sampling_params": greedy(6)}
            whole, (_, decoded) = (
                each(**call, return_logprob=True) for each in (pair.whole.generate, pair.split)
            )
            assert decoded["output_ids"] == whole["output_ids"]
            one, two = (
                [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
                for reply in (whole, decoded)
            )
            assert two == pytest.approx(one, abs=1e-5)  # ranks add in another order
        assert pair.handover(pair.decode)["num_adopted"] == 2
    finally:
        pair.close()
