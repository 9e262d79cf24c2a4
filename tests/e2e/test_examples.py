"""The training examples run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.model_dir import write_tokenizer
from tests.checkpoint import tiny
from tests.e2e.served import serve

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, timeout: float) -> str:
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def rl_loop(output: Path, *options: str, timeout: float, module: str = "examples.rl_loop") -> dict[str, Any]:
    run("-m", module, "--output", str(output), *options, timeout=timeout)
    ElementTree.parse(output.with_suffix(".svg"))
    record: dict[str, Any] = json.loads(output.with_suffix(".json").read_text())
    steps = record["steps"]
    assert [step["weight_version"] for step in steps] == [str(index) for index in range(len(steps))]
    return record


@pytest.mark.slow  # tests/e2e/test_trainer.py and test_clients.py test its parts
def test_the_rl_loop_rolls_out_with_the_weights_that_it_sent(tmp_path: Path) -> None:
    small = {"num-prompts": 1, "group-size": 8, "max-tokens": 16, "num-steps": 2, "learning-rate": 1e-3}
    options = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    record = rl_loop(tmp_path / "rl", *options, timeout=100)
    # A step this large changes logprobs by nats: with the old weights in the engine, the gap was 3.
    assert all(step["logprob_gap"] < 0.5 for step in record["steps"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["rollout", "send"])
def test_the_rl_loop_goes_on_while_its_engine_is_killed(tmp_path: Path, moment: str) -> None:
    model = tiny.save(tiny.make("llama-tied"), tmp_path / "model")
    write_tokenizer(model)
    options = [f"--model={model}", "--kill-engine-at=1", f"--kill-during={moment}", "--num-steps=4"]
    options += ["--num-prompts=1", "--max-tokens=100", "--learning-rate=1e-3"]
    # The example itself ends if a token was made by other weights than those of its step.
    record = rl_loop(tmp_path / "rl", *options, timeout=250)
    assert len(record["steps"]) == 4
    assert record["weights served at the end"] == record["weights of the memory service"] == "4"
    assert all(step["logprob_gap"] < 0.1 for step in record["steps"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_client_of_one_system_sees_that_its_decode_engine_is_killed(tmp_path: Path) -> None:
    model = tiny.save(tiny.make("llama-tied"), tmp_path / "model")
    write_tokenizer(model)
    options = [f"--model={model}", "--kill-engine-at=1", "--num-steps=3", "--num-prompts=2", "--group-size=4"]
    options += ["--max-tokens=100", "--learning-rate=1e-3"]
    record = rl_loop(tmp_path / "rl", *options, timeout=250, module="examples.rl_cluster")
    assert (record["client errors"], record["samples"]) == ([], 3 * 8)
    assert record["weights of the memory service"] == {"prefill-0": "3", "decode-0": "3"}
    assert record["weights served at the end"] == "3"
    # Tokens behind the kill are of the weights that the trainer sent last, not of those of the checkpoint.
    assert all(step["logprob_gap"] < 0.1 for step in record["steps"])
    kill = record["kill"]
    assert {kill["victim"], kill["successor"]} == {"decode-0-a", "decode-0-b"}
    assert kill["streams that it cut"] > 0 and record["requests sent elsewhere"]["resumes"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("module", ["examples.rl_loop", "examples.rl_cluster"])
def test_the_reward_rises(module: str, seed: int, tmp_path: Path) -> None:
    record = rl_loop(tmp_path / "rl", "--seed", str(seed), timeout=1400, module=module)
    assert record["reward of the last steps"] >= record["reward of the first steps"] + record["margin"]


@pytest.mark.slow
def test_the_minimal_trainer_updates_a_server(tmp_path: Path) -> None:
    directory = tiny.save(tiny.make("llama-tied"), tmp_path / "model")
    write_tokenizer(directory)
    with serve("--model", str(directory)) as served:
        output = run("examples/minimal_trainer.py", str(directory), served.url, timeout=100)
        assert output.count("\n") == 3
        assert served.get("/weight_version").json() == {"weight_version": "step-2"}
