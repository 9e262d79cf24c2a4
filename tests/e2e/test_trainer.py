"""A trainer and a server, as scripts/start_servers.sh starts them, and the curl commands that it shows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors import safe_open

import segue
from bench.model_dir import write_tokenizer
from tests.e2e.served import greedy
from tests.e2e.syncing import write_checkpoints
from tests.support.child import start_child
from tests.support.ports import free_port

SCRIPT = Path(__file__).parents[2] / "scripts" / "start_servers.sh"
OPTIONS = {"num_kv_tokens": 1024, "max_running_requests": 2, "log_level": "warning"}
# The documented commands, with the default ports.
REGISTER = """\
curl -X POST http://localhost:8990/add_inference_endpoint \\
    -H "Content-Type: application/json" \\
    -d '{"host": "localhost", "port": 30000, "world_size": 4}'
"""
SYNC = """\
curl -X POST http://localhost:8990/sync_inference_weights \\
    -H "Content-Type: application/json" \\
    -d '{"master_port": 29600, "buffer_size_mb": 1024}'
"""
PROMPT = "The capital of France is"


@dataclass(frozen=True)
class Started:
    process: subprocess.Popen[str]
    serve_port: int
    trainer_port: int
    shown: str
    num_bytes: int  # of the weights

    def with_ports(self, command: str) -> str:
        """Returns the command with the ports of these servers."""
        ports = {"8990": self.trainer_port, "30000": self.serve_port}  # either may be the other's default
        return re.sub("8990|30000", lambda found: str(ports[found[0]]), command)

    def run(self, command: str) -> dict[str, Any]:
        """Runs a curl command, which must succeed."""
        reply = subprocess.run(
            self.with_ports(command), shell=True, capture_output=True, text=True, timeout=60, check=True
        )
        answer: dict[str, Any] = json.loads(reply.stdout)
        assert answer["success"], answer
        return answer

    def answer(self) -> Any:
        body = {"text": PROMPT, "sampling_params": greedy(16), "return_logprob": True}
        reply = httpx.post(f"http://127.0.0.1:{self.serve_port}/generate", json=body, timeout=60)
        return reply.json()["meta_info"]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    (model,) = write_checkpoints(tmp_path, "llama", count=1, vocab_size=320)
    write_tokenizer(model)
    with safe_open(model / "model.safetensors", "pt") as file:
        num_values = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - no mapping
    ports = free_port(), free_port()
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in OPTIONS.items())
    environment = {
        "MODEL": str(model),
        "SERVE_PORT": str(ports[0]),
        "TRAINER_PORT": str(ports[1]),
        "SERVE_ARGS": options,
        "TRAINER_ARGS": "--dtype bfloat16 --learning-rate 1e-2",
        "DEADLINE_S": "60",
    }
    process = start_child([str(SCRIPT)], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stdout is not None
    with process:
        try:
            shown = ""
            while "Ctrl-C stops both." not in shown:
                line = process.stdout.readline()
                assert line, f"the script ended: {shown}"
                shown += line
            yield Started(process, *ports, shown, num_values * 2)  # bfloat16 has two bytes
        finally:
            process.terminate()


def test_the_shown_commands_send_the_trained_weights(started: Started, tmp_path: Path) -> None:
    train, register, sync = re.findall(r"curl .*?\n(?:    .*\n)*", started.shown)
    assert register == started.with_ports(REGISTER.replace('"world_size": 4', '"world_size": 1'))
    assert sync == started.with_ports(SYNC)
    before = started.answer()
    started.run(train)
    assert started.run(REGISTER)["rank_offset"] == 1
    report = started.run(SYNC)
    assert (report["num_buckets"], report["bytes"]) == (1, started.num_bytes) and report["gb_per_s"] > 0
    after = started.answer()
    assert (before["weight_version"], after["weight_version"]) == ("0", "1")
    assert after["output_token_logprobs"] != before["output_token_logprobs"]
    url = f"http://127.0.0.1:{started.trainer_port}"
    assert httpx.post(f"{url}/save_checkpoint", json={"path": str(tmp_path / "saved")}, timeout=60).json()[
        "success"
    ]
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(60) == 130
    for port in (started.serve_port, started.trainer_port):
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health")
    with segue.Engine(model=str(tmp_path / "saved"), **OPTIONS) as engine:
        fresh = engine.generate(PROMPT, greedy(16), return_logprob=True)["meta_info"]
    assert after["output_token_logprobs"] == fresh["output_token_logprobs"]
