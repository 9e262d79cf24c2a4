"""The training server's routes, with a real model, a real socket and fake engines."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from segue.errors import ConfigError
from segue.http_guard import HttpGuard
from segue.listener import bind
from segue.trainer.model import TrainedModel
from segue.trainer.server import EndpointBody, Trainer, make_server, run
from tests.conftest import WaitUntil
from tests.support.ports import free_port
from tests.support.shared_client import shared_client
from tests.support.tiny_model import CONFIG, write_model
from tests.trainer.conftest import FakeEngine
from tests.trainer.fake_engine import describe


class Client:
    def __init__(self, url: str, trainer: Trainer) -> None:
        self.model, self.trainer = trainer.model, trainer
        self.http = shared_client(base_url=url, timeout=30)

    def post(self, path: str, status: int = 200, /, **body: Any) -> dict[str, Any]:
        reply = self.http.post(path, json=body)
        content: dict[str, Any] = reply.json()
        assert (reply.status_code, content["success"]) == (status, status == 200), content
        return content

    def get(self, path: str) -> dict[str, Any]:
        reply = self.http.get(path)
        assert reply.status_code == 200
        content: dict[str, Any] = reply.json()
        return content

    def raw(self, path: str, content: bytes) -> httpx.Response:
        return self.http.post(path, content=content)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights and a tokenizer."""
    path = write_model(tmp_path_factory.mktemp("model"))
    torch.manual_seed(0)
    vocab = transformers.AutoConfig.from_pretrained(path).vocab_size
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**CONFIG, "vocab_size": vocab})
    ).save_pretrained(path)
    return path


@pytest.fixture
def client(directory: Path, tmp_path: Path, wait_until: WaitUntil) -> Iterator[Client]:
    options: Any = {"device": "cpu", "dtype": "float32", "learning_rate": 1e-2, "cache_dir": str(tmp_path)}
    model = TrainedModel(str(directory), **options)
    listener = bind("127.0.0.1", 0)
    listener.listen()  # clients may connect before the server runs
    trainer = Trainer(model)
    server = make_server(trainer, HttpGuard("127.0.0.1"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", trainer)
    try:
        yield client
    finally:
        client.http.close()
        server.should_exit = True
        thread.join(60)
        trainer.close()
        listener.close()


def address(engine: FakeEngine) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": int(engine.url.rpartition(":")[2])}


def test_every_engine_gets_the_trained_weights(client: Client, engines: list[FakeEngine]) -> None:
    offsets = [client.post("/add_inference_endpoint", **address(e))["rank_offset"] for e in engines]
    assert offsets == [1, 2]
    texts = ["The capital of France is Paris.", "Hello world"]
    losses = [client.post("/train_step", texts=texts)["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    port = free_port()
    report = client.post("/sync_inference_weights", master_port=port, buffer_size_mb=1024)
    weights = {name: parameter.detach() for name, parameter in client.model.module.named_parameters()}
    for engine in engines:
        seen = engine.seen()
        assert seen["weights"] == {name: describe(tensor) for name, tensor in weights.items()}
        assert seen["joined"]["master_port"] == port
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    assert (report["num_buckets"], report["bytes"]) == (1, num_bytes)
    assert report["seconds"] > 0 and report["gb_per_s"] > 0
    assert [each["url"] for each in report["endpoints"]] == [engine.url for engine in engines]
    assert all(each["success"] for each in report["endpoints"])
    status = client.get("/sync_status")
    assert (status["syncing"], status["progress"], status["last"]) == (False, None, report)
    assert client.get("/health")["num_steps"] == 3


def test_an_engine_that_refuses_is_reported(client: Client, engines: list[FakeEngine]) -> None:
    for engine in engines:
        client.post("/add_inference_endpoint", **address(engine))
    engines[1].fault(prepare_weights_update="no room")
    before = engines[0].seen()["version"]
    report = client.post("/sync_inference_weights", 400)
    assert "no room" in report["message"]
    assert [each["success"] for each in report["endpoints"]] == [True, False]
    assert engines[0].seen()["version"] == before


def test_a_sync_reports_its_progress(
    client: Client, engines: list[FakeEngine], wait_until: WaitUntil
) -> None:
    client.post("/add_inference_endpoint", **address(engines[0]))
    engines[0].fault(complete_weights_update="hang")
    syncing = threading.Thread(target=client.post, args=("/sync_inference_weights", 400))
    syncing.start()
    wait_until(lambda: client.get("/sync_status")["progress"] is not None)
    status = client.get("/sync_status")
    assert status["syncing"] and status["progress"]["num_bytes"] == status["progress"]["total_bytes"] > 0
    assert client.get("/health")["status"] == "ok"
    engines[0].fault()
    syncing.join(60)


def test_closing_ends_a_running_sync(
    client: Client, engines: list[FakeEngine], wait_until: WaitUntil
) -> None:
    client.post("/add_inference_endpoint", **address(engines[0]))
    engines[0].fault(receive="hang")
    syncs = [threading.Thread(target=client.post, args=("/sync_inference_weights", 400)) for _ in range(2)]
    for sync in syncs:  # the second one waits for its turn
        sync.start()
    wait_until(lambda: "weights_update_status" in engines[0].seen()["log"])
    began = time.monotonic()
    client.trainer.close()
    for sync in syncs:
        sync.join(60)
    assert time.monotonic() - began < 30
    assert engines[0].seen()["log"].count("prepare_weights_update") == 1


def test_a_second_interrupt_ends_the_process(wait_until: WaitUntil) -> None:
    listener = bind("127.0.0.1", 0)
    listener.listen()  # clients may connect before the server runs
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/inference_endpoints"

    def interrupt() -> None:
        wait_until(lambda: httpx.get(url).status_code == 200)
        os.kill(os.getpid(), signal.SIGINT)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        run(Trainer(None), listener, HttpGuard("127.0.0.1"))  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        interrupting.join(60)
        listener.close()


def test_the_engines_own_number_of_ranks_is_used(client: Client, engines: list[FakeEngine]) -> None:
    message = client.post("/add_inference_endpoint", **address(engines[0]), world_size=4)["message"]
    assert "its world_size is 1, as it reports, and not 4" in message
    url, size = engines[0].url, 1
    assert client.get("/inference_endpoints")["endpoints"] == [
        {"url": url, "world_size": size, "rank_offset": 1}
    ]


def test_endpoints_can_be_added_and_removed(client: Client, engines: list[FakeEngine]) -> None:
    for engine in engines:
        client.post("/add_inference_endpoint", **address(engine))
    client.post("/sync_inference_weights")
    client.post("/remove_inference_endpoint", **address(engines[0]))
    before = [engine.seen()["version"] for engine in engines]
    client.post("/sync_inference_weights")
    assert [engine.seen()["version"] for engine in engines] == [before[0], before[1] + 1]
    assert engines[1].seen()["joined"]["rank_offset"] == 1
    message = client.post("/remove_inference_endpoint", 400, **address(engines[0]))["message"]
    assert engines[0].url in message and engines[1].url in message


def test_invalid_requests_are_refused_with_a_message(client: Client, tmp_path: Path) -> None:
    unreachable = {"host": "127.0.0.1", "port": free_port()}
    for path, body, message in (
        ("/sync_inference_weights", {}, "add one"),
        ("/sync_inference_weights", {"master_port": 0}, "master_port=0"),
        ("/add_inference_endpoint", {"host": "localhost"}, "port: this field is required"),
        ("/add_inference_endpoint", unreachable, "cannot reach the engine"),
        ("/train_step", {"texts": []}, "texts=[]"),
        ("/train_step", {"texts": [""]}, "no text has two tokens"),
        ("/save_checkpoint", {"path": "/proc/no"}, "cannot be written"),
    ):
        assert message in client.post(path, 400, **body)["message"]
    assert client.raw("/train_step", b"{").json()["message"].startswith("the body is not valid JSON")
    assert client.raw("/no_such_route", b"").status_code == 404


def test_torchs_errors_are_reported(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(client.model._optimizer, "step", fail)
        message = client.post("/train_step", 400, texts=["Hello world"])["message"]
    assert message == "OutOfMemoryError: tried to allocate 80 GiB"
    assert all(parameter.grad is None for parameter in client.model.module.parameters())
    assert client.post("/train_step", texts=["Hello world"])["num_steps"] == 1


def test_endpoints_may_change_while_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.trainer.server.world_sizes", lambda endpoints: [1])
    trainer = Trainer(None)  # type: ignore[arg-type]
    for port in range(1, 200):
        trainer.add(EndpointBody(host="a", port=port))
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            trainer.add(EndpointBody(host="b", port=1))
            trainer.remove(EndpointBody(host="b", port=1))

    changing = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    changing.start()
    try:
        for _ in range(100):
            assert len(trainer.endpoints()) >= 199
    finally:
        ended.set()
        changing.join(60)
        sys.setswitchinterval(interval)


def test_a_saved_checkpoint_has_the_models_weights(client: Client, tmp_path: Path) -> None:
    client.post("/train_step", texts=["Hello world"])
    client.post("/save_checkpoint", path=str(tmp_path / "saved"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    expected = client.model.module.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.state_dict().items())
    assert (tmp_path / "saved" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("headers", "status", "word"),
    [
        ({"content-type": "text/plain"}, 415, "application/json"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "application/json"),
        ({"origin": "https://evil.example"}, 403, "--cors-origin"),
        ({"origin": "null"}, 403, "--cors-origin"),
        ({"sec-fetch-site": "cross-site"}, 403, "--cors-origin"),
        ({"host": "evil.example"}, 403, "--allowed-hosts"),
    ],
    ids=lambda part: str(part),
)
def test_requests_of_web_pages_are_refused(
    client: Client, headers: dict[str, str], status: int, word: str
) -> None:
    body = b'{"texts": ["Hello world"]}'
    for path in ("/train_step", "/save_checkpoint", "/add_inference_endpoint", "/sync_inference_weights"):
        answer = client.http.post(path, content=body, headers=headers)
        assert (answer.status_code, answer.json()["success"]) == (status, False)
        assert word in answer.json()["message"]
    assert client.get("/health")["num_steps"] == 0


def test_a_model_in_fp8_is_not_trained(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="model model is in FP8, and training needs more precise weights"):
        TrainedModel(str(model), device="cpu", dtype="float32", learning_rate=1e-5)


def test_a_path_with_a_newline_is_refused(client: Client) -> None:
    answer = client.http.post("/train_step%0A", json={"texts": ["Hello world"]})
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert client.get("/health")["num_steps"] == 0


def test_requests_of_ordinary_clients_are_accepted(client: Client) -> None:
    own = {"origin": str(client.http.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
    for headers in ({}, {"content-type": "application/json; charset=utf-8"}, own):
        answer = client.http.post("/train_step", content=b'{"texts": ["Hello world"]}', headers=headers)
        assert answer.status_code == 200
    assert client.http.get("/health", headers={"origin": "https://evil.example"}).status_code == 200


def test_a_body_without_end_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.trainer.server.MAX_BODY_MIB", 1)
    reply = client.raw("/train_step", b'{"texts": ["' + b"a" * (2 << 20) + b'"]}')
    assert reply.status_code == 400 and "more than 1 MiB" in reply.json()["message"]
