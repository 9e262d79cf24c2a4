"""Two engines swap their roles while requests run, on a real model and by shared memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import segue
from segue.errors import RoleChangeError
from segue.messages.fleet import Role
from tests.e2e.test_handover import Pair, greedy, ids

DEADLINE_S = 30.0


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp1", "tp2"])
def pair(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(tiny_model, tp=(request.param, request.param), deterministic=request.param == 1)
    yield pair
    pair.close()


def set_role(engine: segue.Engine, role: Role, timeout_s: float = DEADLINE_S) -> None:
    engine._thread.call(engine._runtime.manager.calls.set_role(role, timeout_s))


def swap(pair: Pair) -> None:
    """Give each engine the other one's role."""
    set_role(pair.prefill, "decode")
    set_role(pair.decode, "prefill")
    pair.prefill, pair.decode = pair.decode, pair.prefill
    address = pair.prefill._runtime.manager.control_address
    assert address is not None
    pair.host, pair.port = address.rsplit(":", 1)[0], int(address.rsplit(":", 1)[1])


def test_after_a_swap_the_pair_still_replies_what_one_engine_replies(pair: Pair) -> None:
    for turn in range(3):
        for count in (5, 30):
            pair.compare(
                input_ids=ids(count, seed=count + turn), sampling_params=greedy(), return_logprob=False
            )
            assert pair.num_adopted == 1
        swap(pair)


def test_requests_that_run_while_roles_change_reply_as_ever(pair: Pair) -> None:
    call = {"input_ids": ids(40, seed=3), "sampling_params": greedy(60)}
    whole = pair.whole.generate(**call)
    where = pair.where()
    first = pair.threads.submit(pair.prefill.generate, **call, **where)
    second = pair.threads.submit(pair.decode.generate, **call, **where)
    first.result(DEADLINE_S)  # the request is accepted, and the transfer may still be under way
    swap(pair)
    assert second.result(DEADLINE_S)["output_ids"] == whole["output_ids"]
    assert pair.handover(pair.prefill)["recomputed"] == {}
    pair.compare(input_ids=ids(41, seed=3), sampling_params=greedy(), return_logprob=False)


def test_an_engine_whose_port_is_in_use_keeps_its_role(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = segue.Engine(
            model=str(tiny_model), load_format="dummy", device="cpu", role="decode", log_level="error",
            num_kv_tokens=2048, disaggregation_bootstrap_port=port, embedded=True,
        )  # fmt: skip
        try:
            with pytest.raises(RoleChangeError, match=f"still decode, and not prefill: .*{port}"):
                set_role(engine, "prefill")
            assert engine.generate(input_ids=[5, 6], sampling_params=greedy(3))["output_ids"]
        finally:
            engine.shutdown()
