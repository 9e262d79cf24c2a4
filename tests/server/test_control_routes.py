from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import segue
from tests.server.conftest import MODEL, Api
from tests.server.events import parse_events
from tests.server.live import LiveServer

# At least these, in each of internal_states.
STATE_FIELDS = {
    "engine_paused",
    "pause_mode",
    "waiting_queue_size",
    "waiting_queue_rids",
    "running_batch_size",
    "running_batch_rids",
    "cur_batch_is_none",
    "last_batch_is_none",
    "chunked_req_is_none",
    "tree_cache_size",
    "req_to_token_pool_total",
    "req_to_token_pool_used",
    "available_kv_tokens",
    "num_generated_tokens",
    "forward_ct_decode",
    "new_token_ratio",
    "init_new_token_ratio",
    "weight_version",
    "memory_usage",
    "last_gen_throughput",
    "pending_dp_reqs_size",
    "prefill_decode_size",
    "chunked_req_rids",
    "req_to_token_pool_available",
    "available_kv_tokens_per_dp",
}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(server: LiveServer, path: str) -> None:
    info = server.client.get(path).json()
    assert info["version"] == segue.__version__
    assert info["served_model_name"] == MODEL
    (state,) = info["internal_states"]
    assert set(state) >= STATE_FIELDS
    assert state["req_to_token_pool_total"] == 16


def test_server_info_has_the_names_that_clients_of_sglang_read(server: LiveServer) -> None:
    info = server.client.get("/server_info").json()
    sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1, "moe_dp_size": 1, "num_gpus": 1}
    told = {"enable_memory_saver": False, "disaggregation_mode": "null", "dtype": "float32"}
    decided = {"max_running_requests": 16, "page_size": 16, "chunked_prefill_size": 512}
    assert info.items() >= (sizes | told | decided).items()
    assert info["max_total_tokens"] == info["max_total_num_tokens"] and info["context_length"] == 512
    assert info["weight_version"] == "0" and "vllm_config" not in info


def test_server_info_has_vllms_configuration_if_that_is_asked_for(server: LiveServer) -> None:
    config = server.client.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["quantization"] is None
    assert config["model_config"]["max_model_len"] == 512
    assert config["parallel_config"]["tensor_parallel_size"] == 1
    assert config["cache_config"]["block_size"] == 16
    assert config["scheduler_config"]["max_num_seqs"] == 16
    wrong = server.client.get("/server_info?config_format=yaml")
    assert wrong.status_code == 400 and "'yaml'" in wrong.json()["message"]


def test_model_info_has_the_models_type_and_classes(server: LiveServer, tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    for path in ("/model_info", "/get_model_info"):
        info = server.client.get(path).json()
        assert (info["model_type"], info["architectures"]) == (config["model_type"], config["architectures"])
        assert (info["model_path"], info["is_generation"]) == (str(tiny_model), True)
        assert (info["tokenizer_path"], info["quantization"]) == (str(tiny_model), None)


def test_the_world_and_the_version(server: LiveServer) -> None:
    for query in ("", "?include_dp=false"):
        assert server.client.get(f"/get_world_size{query}").json() == {"world_size": 1}
    assert server.client.get("/weight_info").json() == server.client.get("/weight_version").json()


def test_errors_of_loads_have_the_native_form(server: LiveServer) -> None:
    for path in ("/v1/loads", "/loads"):
        wrong = server.client.get(f"{path}?include=cores")
        assert (wrong.status_code, wrong.json()["object"]) == (400, "error")


def test_a_profile_needs_a_directory(server: LiveServer) -> None:
    refused = server.client.post("/start_profile")
    assert refused.status_code == 400 and "--profile-dir" in refused.json()["message"]


def test_abort_of_an_unknown_rid_is_200_and_empty(server: LiveServer) -> None:
    for body in ({"rid": "unknown"}, {"rid": ""}, {}, {"rid": "x", "surprise": 1}):
        response = server.client.post("/abort_request", json=body)
        assert (response.status_code, response.content) == (200, b"")


def test_abort_with_a_wrong_body(server: LiveServer) -> None:
    response = server.client.post("/abort_request", json={"rid": 5})
    assert (response.status_code, response.json()["object"]) == (400, "error")


@pytest.fixture
def slow(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    with LiveServer(tiny_model) as server:
        yield server
        server.assert_nothing_left()


LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize(
    "abort",
    [{"rid": "one", "aborted_message": "enough"}, {"abort_all": True, "abort_message": "enough"}],
)
def test_an_aborted_stream_gets_its_last_chunk(slow: LiveServer, abort: dict[str, Any]) -> None:
    body = {"text": "abc", "rid": "one", "stream": True, "sampling_params": LONG}
    with slow.client.stream("POST", "/generate", json=body) as response:
        events = parse_events(response.iter_lines())
        next(events)
        slow.client.post("/abort_request", json=abort)
        *_, last, done = events
    assert last["meta_info"]["finish_reason"] == {"type": "abort", "message": "enough"}
    assert 0 < last["meta_info"]["completion_tokens"] < 400
    assert done == "[DONE]"


def test_a_batchs_id_means_its_children(slow: LiveServer, wait_until: Any) -> None:
    replies: list[Any] = []
    body = {"rid": "batch", "sampling_params": LONG}
    thread = threading.Thread(
        target=lambda: replies.extend(Api(slow.client).generate(["abc", "def"], **body).json())
    )
    thread.start()
    wait_until(lambda: slow.runtime.manager.num_requests == 2)
    slow.client.post("/abort_request", json={"rid": "batc"})
    assert slow.runtime.manager.num_requests == 2
    slow.client.post("/abort_request", json={"rid": "batch"})
    thread.join(60)
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies] == ["abort", "abort"]


def test_openais_finish_reason_of_an_aborted_request(slow: LiveServer, wait_until: Any) -> None:
    replies: list[Any] = []
    thread = threading.Thread(
        target=lambda: replies.append(Api(slow.client).complete("abc", max_tokens=400).json())
    )
    thread.start()
    wait_until(lambda: slow.runtime.manager.num_requests == 1)
    slow.client.post("/abort_request", json={"abort_all": True})
    thread.join(60)
    assert replies[0]["choices"][0]["finish_reason"] == "abort"


def test_a_rid_in_flight_twice_is_400(slow: LiveServer) -> None:
    body = {"text": "abc", "rid": "one", "stream": True, "sampling_params": LONG}
    with slow.client.stream("POST", "/generate", json=body) as response:
        events = parse_events(response.iter_lines())  # once it is collected, the connection is closed
        next(events)
        again = slow.client.post("/generate", json={"text": "abc", "rid": "one"})
        assert (again.status_code, "in flight" in again.text) == (400, True)
