"""Schemathesis, as it is published, against a live engine: all routes, as ``/openapi.json`` has them.

Only ``/watch`` is left out: its reply ends with the engine, so a call would never return;
``tests/server/test_fleet_routes.py`` reads it. What changes the engine for later calls, such as a pause
or weights that are overwritten, is taken back by the hooks, through the routes that are meant for that.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.environments import command
from tests.server.live import LiveServer
from tests.support.tiny_model import write_model

PROGRAMS = Path(__file__).with_name("programs")
MIN_CASES = 1000
GENERATES = (
    *("/generate", "/inference/v1/generate", "/v1/completions"),
    *("/v1/chat/completions", "/v1/chat/completions/tokens", "/v1/responses", "/v1/messages"),
)
MIN_SERVED = 10  # calls of each of these that were answered with tokens
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def reply(server: LiveServer) -> Any:
    """A greedy reply; it depends on every weight and on the state of the cache."""
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"text": "The capital of France", "sampling_params": params, "return_logprob": True}
    answer = server.client.post("/generate", json=body).json()
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model with weights on disk, so that weights which a call has overwritten can be loaded again."""
    directory = write_model(tmp_path / "tiny-model")
    LlamaForCausalLM(LlamaConfig.from_pretrained(directory)).save_pretrained(directory)
    return directory


def test_a_live_engine_keeps_to_its_description(checkpoint: Path, tmp_path: Path) -> None:
    st = command("schemathesis", "st")
    options: dict[str, Any] = {"max_model_len": 64, "max_running_requests": 8, "num_kv_tokens": 1024}
    options |= {"dtype": "float32", "deterministic": True, "load_format": "auto"}
    with LiveServer(checkpoint, real=True, **options) as server:
        before = reply(server)
        name = server.client.get("/v1/models").json()["data"][0]["id"]
        env = os.environ | {
            "SCHEMATHESIS_HOOKS": str(PROGRAMS / "schemathesis_hooks.py"),
            "SEGUE_URL": server.url,
            "SEGUE_MODEL": name,
            "SEGUE_CHECKPOINT": str(checkpoint),
            "SEGUE_SERVED": str(tmp_path / "served"),
        }
        run = [*st, "--config-file", str(PROGRAMS / "schemathesis.toml"), "run", f"{server.url}/openapi.json"]
        run += ["--checks", "all", "--request-timeout", "20", "--seed", "1"]
        run += ["--phases", "coverage,fuzzing", "--max-examples", "5"]
        run += ["--exclude-path", "/watch"]
        done = subprocess.run(run, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=800)
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
        found = re.search(r"(\d+) generated", done.stdout)
        assert found is not None and int(found[1]) >= MIN_CASES, done.stdout[-3000:]
        served = Counter((tmp_path / "served").read_text().splitlines())
        assert {path: served[path] for path in GENERATES if served[path] < MIN_SERVED} == {}
        server.assert_nothing_left()
        assert server.client.post("/flush_cache").status_code == 200
        state = server.client.get("/server_info").json()
        (internal,) = state["internal_states"]
        assert internal["available_kv_tokens"] == state["max_total_num_tokens"]
        assert not internal["engine_paused"]
        assert reply(server) == before
