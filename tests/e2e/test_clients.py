"""Real servers of a mixture of experts are updated by trainers of other projects and by Segue's own sender.

A process that uses torch, and nothing of Segue, repeats the calls of the other projects.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file

from segue.trainer import Progress, WeightSender, WeightSendError
from tests.conftest import WaitUntil
from tests.e2e.served import Client, greedy, serve
from tests.e2e.syncing import PROMPTS, write_checkpoints
from tests.support.child import start_child
from tests.support.held_steps import StepGate

TRAINER = Path(__file__).with_name("torch_trainer.py")
OPTIONS = ("--dtype", "float32", "--num-kv-tokens", "4096", "--max-running-requests", "4", "--deterministic")
KIND = {"kind": "qwen3-moe", "max_position_embeddings": 2048}


def answers(client: Client) -> list[Any]:
    """Returns greedy tokens and their logprobs."""
    replies = client.generate(None, greedy(8), input_ids=PROMPTS, return_logprob=True)
    return [reply["meta_info"]["output_token_logprobs"] for reply in replies]


def post(client: Client, path: str, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = client.http.post(path, json=body).json()
    return answer


def load(client: Client, checkpoint: Path) -> None:
    assert post(client, "/update_weights_from_disk", model_path=str(checkpoint))["success"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = write_checkpoints(tmp_path_factory.mktemp("checkpoints"), **KIND)
    for path in paths:
        torch.save(load_file(path / "model.safetensors"), path / "sent")
    return paths


@dataclass(frozen=True)
class Servers:
    """Two servers, and the answers of each checkpoint."""

    clients: list[Client]
    expected: list[list[Any]]


@pytest.fixture(scope="module")
def running(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        model = ("--model", str(checkpoints[0]))
        clients = []
        for number in range(2):
            gate = StepGate(tmp_path_factory.mktemp("gate") / str(number))
            served = stack.enter_context(serve(*model, *OPTIONS, "--exit-grace", "0.1", gate=gate))
            clients.append(Client(served, gate))
            stack.callback(clients[-1].close)
        expected = [answers(clients[0])]
        load(clients[0], checkpoints[1])
        expected.append(answers(clients[0]))
        assert expected[0] != expected[1]
        yield Servers(clients, expected)


@pytest.fixture
def servers(running: Servers, checkpoints: list[Path]) -> Servers:
    """Returns the servers with the first weights."""
    for client in running.clients:
        gate_of(client).open()
        load(client, checkpoints[0])
        assert answers(client) == running.expected[0]
    return running


def gate_of(client: Client) -> StepGate:
    """The gate of the server's steps: while it is closed, no request can end before it is aborted."""
    assert client.gate is not None
    return client.gate


def let_some_more_pass(client: Client) -> None:
    """Wait until a request of 2,000 tokens has some more, but not many."""
    made = client.state()["num_generated_tokens"]
    gate_of(client).close_after(300)
    client.until_more(made)


class Trainer:
    """A trainer process that reads one command per line."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = start_child([sys.executable, str(TRAINER)], stdin=pipe, stdout=pipe, text=True)

    def send(self, line: str, answer: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{answer}\n"


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    with trainer.process:
        yield trainer
        trainer.process.kill()


@pytest.mark.parametrize("name", ["slime", "areal", "prepared", "vllm"])
def test_a_trainer_that_knows_no_segue_sends_its_weights(
    trainer: Trainer, servers: Servers, checkpoints: list[Path], name: str
) -> None:
    client = servers.clients[0]
    trainer.send(json.dumps([name, client.served.url, str(checkpoints[1] / "sent")]), "connected")
    gate_of(client).close_after(1000)
    running = client.start(None, greedy(2000), rid="running", input_ids=PROMPTS[0])
    client.until(running_batch_rids=["running"])
    let_some_more_pass(client)  # it has tokens of the old weights
    trainer.send("go", "done")
    keeps = name in ("prepared", "vllm")  # the others abort the running request
    if keeps:
        let_some_more_pass(client)
        client.abort("running")
    gate_of(client).open()
    meta = running.result(30)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert len(meta["weight_versions"]) == (2 if keeps else 1)
    assert answers(client) == servers.expected[1]
    assert not client.state()["engine_paused"]


def test_slime_starts_checks_and_rolls_out_with_an_engine_that_it_has_not_started(
    trainer: Trainer, servers: Servers, checkpoints: list[Path], wait_until: WaitUntil
) -> None:
    client = servers.clients[0]
    # It resets the weights, sends what the engine had before, and compares.
    trainer.send(json.dumps(["external", client.served.url, str(checkpoints[0] / "sent")]), "connected")
    assert answers(client) == servers.expected[0]
    assert client.http.get("/weight_version").json() == {"weight_version": "1"}
    # rollout/sglang_rollout.py:95, but for ignore_eos; sglang_streaming_rollout.py:71
    params = {
        **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 2000, "ignore_eos": True},
        **{"stop": None, "stop_token_ids": None, "skip_special_tokens": False},
        **{"no_stop_trim": True, "spaces_between_special_tokens": False},
    }
    gate_of(client).close_after(1900)
    rollout = client.stream(None, params, input_ids=PROMPTS[0], return_logprob=True)
    rollout.wait(5)
    waiting = [client.start(None, params, input_ids=PROMPTS[1], return_logprob=True) for _ in range(8)]
    # A request on its way would come after the aborts.
    wait_until(lambda: client.state()["running_batch_size"] + client.state()["waiting_queue_size"] >= 9)
    trainer.send("go", "done")
    gate_of(client).open()
    for reply in [rollout.result(), *(each.result(30) for each in waiting)]:
        meta = reply["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        # sglang_streaming_rollout.py:134
        assert [item[1] for item in meta["output_token_logprobs"]] == reply["output_ids"]
        assert {each["version"] for each in meta["weight_versions"]} <= {"1"}
    assert answers(client) == servers.expected[0]


def test_prime_rls_order_of_calls_changes_the_weights_under_running_requests(
    servers: Servers, checkpoints: list[Path], tmp_path: Path
) -> None:
    client = servers.clients[0]
    # Its trainer saves the tensors alone, without a config.json: transports/weights/filesystem.py:66.
    (tmp_path / "model.safetensors").write_bytes((checkpoints[1] / "model.safetensors").read_bytes())
    gate_of(client).close_after(600)
    running = client.start(None, greedy(2000), rid="running", input_ids=PROMPTS[0])
    client.until(running_batch_rids=["running"])
    let_some_more_pass(client)
    # utils/client.py:258, :312 and :270
    paused = client.http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    assert (paused.status_code, paused.json()) == (200, {"status": "paused"})
    assert client.state()["running_batch_rids"] == ["running"]
    updated = client.http.post("/update_weights", json={"weight_dir": tmp_path.as_posix()})
    assert (updated.status_code, updated.json()["status"]) == (200, "ok"), updated.text
    assert client.http.post("/resume").json() == {"status": "resumed"}
    let_some_more_pass(client)
    client.abort("running")
    gate_of(client).open()
    assert len(running.result(30)["meta_info"]["weight_versions"]) == 2
    assert answers(client) == servers.expected[1]


@pytest.mark.slow
def test_slime_profiles_some_steps_of_every_rank(checkpoints: list[Path], tmp_path: Path) -> None:
    options = ("--model", str(checkpoints[0]), "--tp", "2", "--profile-dir", str(tmp_path))
    with serve(*options, *OPTIONS[:-1]) as served:
        client = Client(served)
        # backends/sglang_utils/sglang_engine.py:456 (start_profile) and :487 (stop_profile)
        unset = {"output_dir": None, "start_step": None, "profile_by_stage": False, "with_stack": None}
        asked = unset | {"num_steps": 3, "activities": ["CPU", "GPU"], "record_shapes": None}
        assert client.http.post("/start_profile", json=asked).status_code == 200
        assert client.http.post("/start_profile", json=asked).status_code == 400
        assert answers(client)
        files = post(client, "/stop_profile")["files"]
        assert len(files) == 2 and all(
            b"aten::" in gzip.decompress(Path(each).read_bytes()) for each in files
        )
        client.close()


def trained(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("flattened", [False, True])
def test_either_both_servers_take_an_update_or_neither(
    servers: Servers, checkpoints: list[Path], flattened: bool
) -> None:
    one, other = servers.clients
    urls = [client.served.url for client in servers.clients]
    options: dict[str, Any] = {"flattened": flattened, "checksums": True, "buffer_size_mb": 0.01}
    with WeightSender(urls, trained(checkpoints[1]), **options) as sender:
        assert post(other, "/begin_weight_update")["success"]
        with pytest.raises(WeightSendError, match=f"{urls[1]}: session .* is open"):
            sender.send()
        assert post(other, "/end_weight_update")["success"]
        assert answers(one) == answers(other) == servers.expected[0]
        assert sender.send("mine").num_buckets > 5
    assert answers(one) == answers(other) == servers.expected[1]
    assert one.served.get("/weight_version").json() == {"weight_version": "mine"}


def test_a_killed_server_leaves_the_other_unchanged(servers: Servers, checkpoints: list[Path]) -> None:
    one, other = servers.clients

    def kill(progress: Progress) -> None:
        if progress.num_buckets == 1:
            for pid in [*other.served.workers(), other.served.process.pid]:
                os.kill(pid, signal.SIGKILL)

    model, urls = trained(checkpoints[1]), [one.served.url, other.served.url]
    with (
        WeightSender(urls, model, buffer_size_mb=0.01, on_progress=kill) as sender,
        pytest.raises(WeightSendError, match=urls[1]),
    ):
        sender.send()
    assert answers(one) == servers.expected[0]
    with WeightSender(urls[:1], model) as sender:
        sender.send()
    assert answers(one) == servers.expected[1]
    with pytest.raises(httpx.ConnectError):
        other.state()
