"""``segue cluster`` with real engines: from one command to nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.conftest import WaitUntil
from tests.e2e.clustering import KEY, clustered


def test_workers_and_router_come_back_and_a_drain_lets_requests_end(
    tmp_path: Path, tiny_model: Path, wait_until: WaitUntil
) -> None:
    with clustered(tmp_path, tiny_model, wait_until, "--workers", "2") as cluster:
        assert cluster.generate().status_code == 200, "requests are served once the status line is there"
        assert cluster.status.endswith("/v1): 2 workers\n") and cluster.serving() == 2
        assert {line.split()[0] for line in cluster.log} == {"router", "worker-0", "worker-1"}

        # The workers have a key, which no command line shows, and which is not the clients'.
        listed = httpx.get(f"{cluster.url}/workers", headers=KEY, timeout=60).json()["workers"]
        urls = [f"http://{worker['id']}" for worker in listed]
        assert all(url.startswith("http://127.0.0.1:") for url in urls)
        assert cluster.generate(urls[0]).status_code == 401
        assert not any("users-key" in " ".join(words) for words in cluster.children("serve").values())

        # A worker is killed; the others serve, and it comes back at its address.
        before = cluster.children("serve")
        victim = next(iter(before))
        with cluster.starting_nothing():
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: cluster.serving() == 1, what="the router notices")
            assert [cluster.generate().status_code for _ in range(4)] == [200] * 4
        wait_until(lambda: cluster.serving() == 2, timeout=60, what="the worker is back")
        after = cluster.children("serve")
        assert victim not in after and sorted(after.values()) == sorted(before.values())

        # The router is killed; the workers stay.
        os.kill(next(iter(cluster.children("router"))), signal.SIGKILL)
        wait_until(lambda: cluster.serving() == 2, timeout=60, what="the router is back")
        assert cluster.children("serve").keys() == after.keys()
        assert cluster.generate().status_code == 200

        # SIGTERM: a stream goes on to its end.
        body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        with httpx.stream("POST", f"{cluster.url}/generate", json=body, headers=KEY, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            cluster.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert '"completion_tokens":400' in "".join(rest) and "data: [DONE]" in rest
        assert cluster.process.wait(60) == 0


@pytest.mark.slow  # `test_failover` has the same of a cluster with a shadow
def test_ctrl_c_ends_all_of_it_within_seconds(
    tmp_path: Path, tiny_model: Path, wait_until: WaitUntil
) -> None:
    with clustered(tmp_path, tiny_model, wait_until, "--workers", "1") as cluster:
        worker = next(iter(cluster.children("serve")))
        os.kill(worker, signal.SIGSTOP)  # it cannot even answer a signal
        cluster.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(60) == 0
        assert time.monotonic() - began < 12


def test_a_cluster_that_is_killed_leaves_nothing(
    tmp_path: Path, tiny_model: Path, wait_until: WaitUntil
) -> None:
    with clustered(tmp_path, tiny_model, wait_until, "--workers", "1") as cluster:
        cluster.process.kill()
        cluster.process.wait(60)


def test_a_worker_that_cannot_start_ends_the_cluster_with_its_reason(
    tmp_path: Path, tiny_model: Path
) -> None:
    words = ["--workers", "1", "--port", "0", "--model", str(tiny_model)]
    result = subprocess.run(
        [sys.executable, "-m", "segue", "cluster", *words, "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1 and result.stdout == ""
    assert "worker-0 | segue: " in result.stderr
    assert "segue: worker-0 ended with exit code 1 before it was ready; see its log above" in result.stderr


@pytest.mark.slow  # `test_cluster_faults` kills a decode worker of such a cluster
def test_prefill_and_decode_workers_serve_together_and_come_back(
    tmp_path: Path, tiny_model: Path, wait_until: WaitUntil
) -> None:
    with clustered(tmp_path, tiny_model, wait_until, "--prefill", "1", "--decode", "1") as cluster:

        def num_pairs() -> float:
            text = httpx.get(f"{cluster.url}/metrics", headers=KEY, timeout=60).text
            return next(
                float(line.split()[1])
                for line in text.splitlines()
                if line.startswith("segue:router_pairs_total")
            )

        assert cluster.status.endswith("/v1): 1 prefill worker, 1 decode worker\n")
        assert cluster.generate().status_code == 200 and num_pairs() == 1
        for role in ("prefill", "decode"):
            victim = next(iter(cluster.children(f"--role={role}")))
            with cluster.starting_nothing():
                os.kill(victim, signal.SIGKILL)
                wait_until(lambda: cluster.serving() == 1, what="the router notices")
            wait_until(lambda: cluster.serving() == 2, timeout=60, what="the worker is back")
            before = num_pairs()
            assert cluster.generate().status_code == 200 and num_pairs() == before + 1
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(60) == 0
