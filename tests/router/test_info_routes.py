"""What clients ask a router: its workers look like one engine's data-parallel ranks."""

from __future__ import annotations

import pytest

from tests.router.fake_engine_routes import INFO, LOAD, ControlledWorker
from tests.router.fake_servers import routed, run


def test_server_info_looks_like_one_engine_with_data_parallelism() -> None:
    async def test() -> None:
        async with routed(ControlledWorker(), ControlledWorker()) as router:
            info = (await router.http.get("/server_info?config_format=json")).json()
            assert (info["tp_size"], info["dp_size"], info["num_gpus"]) == (2, 2, 4)
            assert (info["max_running_requests"], info["max_total_num_tokens"]) == (32, 200)
            assert (info["disaggregation_mode"], info["enable_memory_saver"]) == ("null", True)
            parallel = info["vllm_config"]["parallel_config"]
            assert (parallel["data_parallel_size"], parallel["world_size_across_dp"]) == (2, 4)
            assert info["internal_states"] == [{"waiting": 1}] * 2
            assert len(info["workers"]) == 2

    run(test())


@pytest.mark.parametrize(("second", "told"), [("1", "1"), ("2", "mixed")])
def test_the_version_of_the_weights_is_mixed_where_it_differs(second: str, told: str) -> None:
    async def test() -> None:
        other = {
            "/model_info": (200, {"model_path": "model", "weight_version": second}),
            "/weight_version": (200, {"weight_version": second}),
        }
        async with routed(ControlledWorker(), ControlledWorker(other)) as router:
            for path in ("/model_info", "/weight_version"):
                assert (await router.http.get(path)).json()["weight_version"] == told

    run(test())


def test_the_fleet_can_release_memory_only_if_every_worker_can() -> None:
    async def test() -> None:
        other = {"/server_info": (200, INFO | {"enable_memory_saver": False, "weight_version": "2"})}
        async with routed(ControlledWorker(), ControlledWorker(other)) as router:
            info = (await router.http.get("/server_info")).json()
            assert (info["enable_memory_saver"], info["weight_version"]) == (False, "mixed")
            assert "vllm_config" not in info

    run(test())


def test_loads_are_those_of_all_workers_one_rank_each() -> None:
    async def test() -> None:
        idle = LOAD | {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_total_reqs": 0}
        first, second = ControlledWorker(), ControlledWorker({"/v1/loads": (200, {"loads": [idle]})})
        first.answers["/v1/loads"][1]["loads"] = [LOAD]
        async with routed(first, second) as router:
            answer = (await router.http.get("/v1/loads?include=core,queues")).json()
            assert [(load["dp_rank"], load["worker"]) for load in answer["loads"]] == [
                (0, first.id),
                (1, second.id),
            ]
            assert answer["dp_rank_count"] == 2 and answer["aggregate"]["total_reqs"] == 3
            assert all("queues" in load and "memory" not in load for load in answer["loads"])
            assert first.seen == [("GET", "/v1/loads", b"")], "sections and ranks are chosen by the router"
            one = (await router.http.get("/loads?dp_rank=1")).json()
            assert [load["worker"] for load in one["loads"]] == [second.id]
            old = (await router.http.get("/get_load")).json()
            assert [(load["dp_rank"], load["num_reqs"]) for load in old] == [(0, 3), (1, 3)]
            wrong = await router.http.get("/v1/loads?include=cores")
            assert wrong.status_code == 400 and wrong.json()["object"] == "error"

    run(test())


@pytest.mark.parametrize(("query", "size"), [("", 4), ("?include_dp=false", 2)])
def test_the_world_is_the_ranks_of_all_workers(query: str, size: int) -> None:
    async def test() -> None:
        async with routed(ControlledWorker(), ControlledWorker()) as router:
            assert (await router.http.get(f"/get_world_size{query}")).json()["world_size"] == size

    run(test())
