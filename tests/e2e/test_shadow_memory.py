"""Engines of a cohort with --enable-memory-saver: what is released, and what a successor takes to wake."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.shadows import WAIT_S, ShadowProcess, wait_until

# The real worker in place of the fake one.
PROGRAM = """
import sys, tests.server.fake_server as program
from segue.launch.processes import WORKER_COMMAND
program.COMMAND = WORKER_COMMAND
sys.exit(program.main())
"""
KV_TOKENS = 1 << 18
OPTIONS: dict[str, Any] = {
    **{"device": "cpu", "dtype": "float32", "num_kv_tokens": KV_TOKENS, "deterministic": True},
    **{"enable_memory_saver": True, "health_check_interval_s": 0.2},
}
KV_BYTES = KV_TOKENS * 2 * 2 * 2 * 16 * 4  # K and V of 2 layers, 2 heads of 16 floats


def has_kv(engine: ShadowProcess) -> bool:
    """Whether the engine's worker can write to a KV cache. Nothing else of it takes as much memory."""
    (pid,) = engine.workers()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        borders, permissions, *_, name = line.split()
        begin, end = (int(each, 16) for each in borders.split("-"))
        if permissions.startswith("rw") and name != "[heap]" and end - begin >= KV_BYTES:
            return True
    return False


def post(engine: ShadowProcess, path: str, body: Any = None) -> dict[str, Any]:
    reply = httpx.post(f"{engine.url}{path}", json=body, timeout=WAIT_S)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def tokens(engine: ShadowProcess) -> list[int]:
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    found: list[int] = post(engine, "/generate", {"text": "abc", "sampling_params": params})["output_ids"]
    return found


def test_a_successor_takes_its_memory_at_its_wake_and_a_release_is_no_fault(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr("tests.support.shadows.PROGRAM", str(program))
    cohort = tmp_path / "cohort"
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        engines = [
            stack.enter_context(ShadowProcess(tiny_model, cohort, name, **OPTIONS)) for name in ("a", "b")
        ]
        wait_until(lambda: sorted(each.state for each in engines) == ["active", "standby"], "both engines")
        first, second = sorted(engines, key=lambda each: each.state)
        expected = tokens(first)
        assert (has_kv(first), has_kv(second)) == (True, False), "a shadow has one page of the KV cache"
        with suppress(httpx.ConnectError):
            httpx.post(f"{second.url}/sleep", timeout=WAIT_S)
            pytest.fail("a shadow takes no calls")

        assert post(first, "/sleep?level=1")["tags"] == ["kv_cache"]
        assert not has_kv(first)
        waiting = threads.submit(tokens, first)
        assert [first.probe(name)[0] for name in ("startup", "live", "health")] == [200] * 3
        post(first, "/wake_up")
        assert waiting.result(WAIT_S) == expected and has_kv(first)
        steps = num_steps(first)
        wait_until(lambda: num_steps(first) > steps, "a health check")
        assert first.probe("live")[0] == 200

        post(first, "/release_memory_occupation")  # the weights too: what was in them is lost
        assert first.probe("ready")[0] == 503, "it can take no requests"
        assert first.probe("live")[0] == 200, "nobody may kill it for that"
        assert second.state == "standby", "it waits until the lock is free"
        first.process.kill()
        second.until("active")
        assert has_kv(second)
        assert tokens(second) == expected


def num_steps(engine: ShadowProcess) -> float:
    """The number of steps that the engine has run; a health check takes two."""
    found = re.search(
        r"^segue:engine_steps_total\S* (\S+)$", engine.system.get("/metrics").text, re.MULTILINE
    )
    assert found is not None
    return float(found[1])
