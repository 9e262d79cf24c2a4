"""AReaL's own backend for SGLang, from its wheel, before a server of Segue: every call that it knows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.clients.environments import interpreter
from tests.e2e.served import Client, serve
from tests.e2e.syncing import write_checkpoints

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("programs") / "areal_backend.py"
PROMPT = [5, 17, 3, 11, 2]
OPTIONS = ("--dtype", "float32", "--num-kv-tokens", "4096", "--deterministic", "--enable-memory-saver")
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def greedy(client: Client) -> dict[str, Any]:
    reply = client.generate(None, GREEDY, input_ids=PROMPT, return_logprob=True)
    entries = reply["meta_info"]["output_token_logprobs"]
    return {
        "tokens": [token for _, token, _ in entries],
        "logprobs": [logprob for logprob, _, _ in entries],
        "stop_reason": "length",
        "routed_experts": None,
    }


@pytest.mark.timeout(300)
def test_every_call_of_its_backend_is_answered_as_sglang_answers(tmp_path: Path) -> None:
    python = interpreter("areal")
    checkpoints = write_checkpoints(tmp_path, kind="qwen3", count=3)
    torch.save(load_file(checkpoints[1] / "model.safetensors"), tmp_path / "sent")
    expected = []
    with serve("--model", str(checkpoints[0]), *OPTIONS) as served:
        client = Client(served)
        for checkpoint in checkpoints:
            served.post("/update_weights_from_disk", {"model_path": str(checkpoint)})
            expected.append(greedy(client))
        served.post("/update_weights_from_disk", {"model_path": str(checkpoints[0])})
        scores = client.generate(
            None,
            GREEDY | {"max_new_tokens": 1},
            input_ids=PROMPT + expected[0]["tokens"],
            return_logprob=True,
            logprob_start_len=0,
        )
        command = [python, PROGRAM, served.url, tmp_path / "sent", checkpoints[2]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(done.stdout.splitlines()[-1])
        client.close()

    assert found["health"] == 200
    assert found["greedy"] == expected[0]
    sampled = found["sampled"]
    assert (len(sampled["tokens"]), len(sampled["logprobs"]), sampled["stop_reason"]) == (12, 12, "length")
    assert found["scores"] == [entry[0] for entry in scores["meta_info"]["input_token_logprobs"][-12:]]
    for name, names in (
        ("lora", "lora_path"),
        ("routed_experts", "return_routed_experts"),
        ("load_lora_adapter", "load_lora_adapter"),
    ):
        status, answer = found["refused"][name]
        assert 400 <= status < 500 and names in json.dumps(answer), (name, status, answer)
    assert found["pause"]["status"] == found["resume"]["status"] == "ok"
    assert found["after_group"] == expected[1]
    assert found["disk"]["success"] is True
    assert found["after_disk"] == expected[2]
    assert found["offload"]["success"] is found["onload"]["success"] is True
