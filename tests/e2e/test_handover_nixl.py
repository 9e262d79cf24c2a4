"""A prefill and a decode engine hand KV over by NIXL, over TCP, and reply as one engine."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import segue
from segue.disagg import lease_machine
from segue.disagg.transports.nixl_agent import has_nixl
from segue.worker import kv_links
from tests.conftest import WaitUntil
from tests.e2e.pair import OPTIONS, PAGE_SIZE, Pair, greedy, ids

pytestmark = [
    pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed"),
    pytest.mark.usefixtures("nixl_over_tcp"),
]


@pytest.fixture(scope="module", params=[False, True], ids=["overlap", "no overlap"])
def pair(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(tiny_model, deterministic=True, disable_overlap=request.param, pd_transport="nixl")
    yield pair
    pair.close()


@pytest.mark.parametrize("count", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 24, 25, 100])
def test_at_the_edges_of_pages_and_chunks(pair: Pair, count: int) -> None:
    pair.compare(input_ids=ids(count, seed=count), sampling_params=greedy())
    assert pair.num_adopted == 1


@pytest.mark.parametrize("warm", [("prefill",), ("decode",), ("prefill", "decode")], ids="+".join)
def test_prompts_that_an_engine_has_in_its_prefix_cache(pair: Pair, warm: tuple[str, ...]) -> None:
    prompt = ids(41, seed=90 + len("".join(warm)))
    for name in warm:
        getattr(pair, name).generate(input_ids=prompt[:30], sampling_params=greedy(1))
    pair.compare(input_ids=prompt, sampling_params=greedy())
    assert pair.num_adopted == 1


def test_sampling_and_logprobs(pair: Pair) -> None:
    params = {"temperature": 0.9, "sampling_seed": 12, "top_k": 20, "max_new_tokens": 16}
    pair.compare(input_ids=ids(21, seed=70), sampling_params=params, logprob_start_len=0, top_logprobs_num=3)


def test_a_batch(pair: Pair) -> None:
    prompts = [ids(count, seed=count) for count in (3, 40, 17, 64, 5, 33, 4, 90, 12, 28, 7, 55)]
    pair.compare(input_ids=prompts, sampling_params=[greedy(4 + index) for index in range(len(prompts))])
    assert pair.num_adopted == len(prompts)


@pytest.mark.parametrize(
    "sizes",
    [(2, 1), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((1, 2), (2, 2), (4, 2)))],
    ids=str,
)
def test_engines_of_several_ranks(tiny_model: Path, sizes: tuple[int, int]) -> None:
    """Each rank gets its heads of each page, whose bytes are those that the prefill ranks had."""
    pair = Pair(tiny_model, tp=sizes, pd_transport="nixl", pd_checksum=True)
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
        assert pair.handover(pair.decode)["recomputed"] == {}
    finally:
        pair.close()


def own_address() -> str:
    """Returns an address of this machine that is not a loopback one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.254", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        address: str = sock.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this machine has loopback addresses only")
    return address


def test_engines_of_two_hosts_with_a_key_choose_nixl(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = itertools.count()
    monkeypatch.setattr(kv_links, "boot_id", lambda: f"host {next(hosts)}")
    pair = Pair(tiny_model, deterministic=True, pd_key="secret", host=own_address())
    try:
        pair.compare(input_ids=ids(41), sampling_params=greedy())
        assert pair.num_adopted == 1
    finally:
        pair.close()


SHORT_S = 2.0  # in place of LOST_S


def test_pages_of_a_killed_prefill_engine_come_home_after_a_while(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    monkeypatch.setattr(lease_machine, "LOST_S", SHORT_S)
    options = OPTIONS | {"model": str(tiny_model), "pd_transport": "nixl"}
    rooms = itertools.count(1_000_000)
    with (
        segue.Engine(**options, role="decode", embedded=True) as decode,
        segue.Engine(**options, role="prefill", disaggregation_bootstrap_port=0) as prefill,
        ThreadPoolExecutor(64) as threads,
    ):
        host, port = prefill.get_server_info()["decided"]["control_address"].rsplit(":", 1)
        (pid,) = prefill._runtime.worker_pids

        def states() -> dict[str, int]:
            """The decode engine's leases by state."""
            return decode.get_server_info()["internal_states"][0]["handover"]["leases"]

        def load() -> list[Future[Any]]:
            """Send requests to both engines; returns the decode engine's replies."""
            seconds = []
            for _ in range(8):
                where = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": next(rooms)}
                call = {"input_ids": ids(100), "sampling_params": greedy(4)} | where
                threads.submit(prefill.generate, **call)
                seconds.append(threads.submit(decode.generate, **call))
            return seconds

        seconds: list[Future[Any]] = []
        while not states().get("granted"):  # until the prefill engine is stopped where it may write
            os.kill(pid, signal.SIGCONT)
            seconds += (sent := load())
            wait_until(
                lambda sent=sent: states().get("granted") or all(each.done() for each in sent),
                what="leases are granted, or were",
            )
            os.kill(pid, signal.SIGSTOP)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for second in seconds:
            assert len(second.result(30)["output_ids"]) == 4, "the decode engine computes the prompt itself"
        wait_until(lambda: not states(), what="the pages come home")
        assert time.monotonic() - killed_at > SHORT_S, "somebody may still have written to them"
        assert decode.flush_cache(timeout=10).success
        assert (
            decode.get_server_info()["internal_states"][0]["available_kv_tokens"] == options["num_kv_tokens"]
        )
