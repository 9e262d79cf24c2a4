"""What an engine says of itself by SGLang's names, for options that a server of one rank does not show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from segue.launch import engine_info
from segue.messages.control import EngineLimits


def told(role: str, *, tp: int = 1, control_address: str | None = None) -> dict[str, Any]:
    limits = EngineLimits(
        num_pages=4, page_size=16, max_seq_len=64, max_running_requests=4, chunked_prefill_size=32
    )
    manager = SimpleNamespace(
        role=role, control_address=control_address, ready=SimpleNamespace(limits=limits, dtype="bfloat16")
    )
    source = SimpleNamespace(tokenizer_directory=None, config=SimpleNamespace(quantization="fp8"))
    runtime: Any = SimpleNamespace(manager=manager, config=SimpleNamespace(tp=tp, model=None), source=source)
    return engine_info._as_sglang(runtime)


def test_every_rank_gets_weights() -> None:
    info = told("both", tp=4)
    assert (info["tp_size"], info["num_gpus"], info["pp_size"], info["dp_size"]) == (4, 4, 1, 1)
    assert info["quantization"] == "fp8"


@pytest.mark.parametrize(
    ("role", "mode", "method", "balances"),
    [
        ("both", "null", "round_robin", False),
        ("prefill", "prefill", "follow_bootstrap_room", False),
        ("decode", "decode", "round_robin", True),
    ],
)
def test_a_role_is_told_as_slime_checks_it(role: str, mode: str, method: str, balances: bool) -> None:
    info = told(role)
    assert (info["disaggregation_mode"], info["load_balance_method"]) == (mode, method)
    assert info["prefill_round_robin_balance"] is balances
    assert "disaggregation_bootstrap_port" not in info, "the option has it"


def test_a_port_that_was_chosen_at_the_start_is_told() -> None:
    assert told("prefill", control_address="127.0.0.1:4711")["disaggregation_bootstrap_port"] == 4711
