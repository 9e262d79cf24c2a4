"""AReaL's own `SGLangBackend` before a live server: it builds each request, and parses each reply.

It runs with the interpreter of the environment `areal`, and prints what it found as one line of JSON. The
arguments are the server's URL, a file of `torch.save` with tensors by name, and a checkpoint directory.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import socket
import sys
import threading
import types
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

# What AReaL imports beside its backend, to schedule and to train, and what no line of the backend uses.
STUBS = {"PIL", "einops", "flask", "numba", "ray", "werkzeug"}


class _Anything(type):
    """The class of classes that have every attribute, and whose instances decorate everything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name: str) -> Any:
    methods: dict[str, Any] = {
        "__init__": lambda self, *args, **fields: None,
        "__call__": lambda self, *args, **fields: args[0] if args else self,
    }
    return _Anything(name, (), methods)


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each name in `STUBS`, and for those below it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] not in STUBS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Stubs())

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from areal.api import ModelAllocation, ModelRequest, ParamSpec, WeightUpdateMeta  # noqa: E402
from areal.api.cli_args import GenerationHyperparameters  # noqa: E402
from areal.api.io_struct import HttpRequest  # noqa: E402
from areal.engine.sglang_remote import SGLangBackend  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402
from torch.distributed.rendezvous import rendezvous  # noqa: E402

TIMEOUT = timedelta(seconds=60)
PROMPT = [5, 17, 3, 11, 2]
BACKEND = SGLangBackend()


class Server:
    """Sends requests of the backend, as `RemoteInfEngine` does."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, request: HttpRequest) -> tuple[int, Any]:
        """Returns status and body; the body is text if it is not JSON."""
        data = None if request.method == "GET" else json.dumps(request.payload).encode()
        call = urllib.request.Request(
            self._url + request.endpoint, data, {"content-type": "application/json"}, method=request.method
        )
        try:
            with urllib.request.urlopen(call, timeout=TIMEOUT.total_seconds()) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def must(self, request: HttpRequest) -> Any:
        status, body = self.ask(request)
        assert status == 200, f"{request.endpoint}: {status} {body}"
        return body


def generation(server: Server, **options: Any) -> dict[str, Any]:
    options = {"max_new_tokens": 12, "ignore_eos": True} | options
    request = ModelRequest(input_ids=PROMPT, gconfig=GenerationHyperparameters(**options))
    found = BACKEND.parse_generation_response(
        server.must(BACKEND.build_generation_request(request, False, 0))
    )
    return {
        "tokens": found.output_tokens,
        "logprobs": found.output_logprobs,
        "stop_reason": found.stop_reason,
        "routed_experts": found.routed_experts,
    }


def refusals(server: Server, checkpoint: str) -> dict[str, Any]:
    """What asks for LoRA or for routing replay, by name: status and text of the answer."""
    request = ModelRequest(input_ids=PROMPT)
    replay = ModelRequest(input_ids=PROMPT, metadata={"return_routed_experts": True})
    meta = WeightUpdateMeta(type="disk", path=checkpoint, use_lora=True, lora_name="l", version=1)
    asked = {
        "lora": BACKEND.build_generation_request(request, True, 1),
        "routed_experts": BACKEND.build_generation_request(replay, False, 0),
        "load_lora_adapter": BACKEND.build_disk_weight_update_requests(meta).requests[0],
    }
    return {name: server.ask(each) for name, each in asked.items()}


def send_by_group(server: Server, tensors: dict[str, torch.Tensor]) -> None:
    """A group with the server, and all tensors by it in one call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meta = WeightUpdateMeta(
        type="xccl",
        gen_allocation=ModelAllocation.from_str("sglang:d1"),
        nccl_master_address="127.0.0.1",
        nccl_master_port=port,
        nccl_group_name="update_weight_group",
    )
    joining = threading.Thread(
        target=server.must, args=(BACKEND.build_init_weights_group_request("", 0, meta),), daemon=True
    )
    joining.start()
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=TIMEOUT))
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend("gloo"),
        dist.PrefixStore("update_weight_group", store),
        group_name="update_weight_group",
        timeout=TIMEOUT,
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    joining.join(TIMEOUT.total_seconds())
    specs = [
        ParamSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]
    (request,) = BACKEND.build_distributed_weight_update_requests(meta, specs).requests
    answers: list[Any] = []
    updating = threading.Thread(target=lambda: answers.append(server.must(request)), daemon=True)
    updating.start()
    for tensor in tensors.values():
        dist.broadcast(tensor, 0, group=group)
    updating.join(TIMEOUT.total_seconds())
    assert answers and answers[0]["success"], answers


def main() -> None:
    url, file, checkpoint = sys.argv[1:]
    server = Server(url)
    found: dict[str, Any] = {"health": server.ask(BACKEND.get_health_check_request())[0]}
    found["greedy"] = generation(server, greedy=True)
    found["sampled"] = generation(server, temperature=0.7, top_p=0.9, stop=["no reply has this"])
    scored = server.must(BACKEND.build_score_request(PROMPT + found["greedy"]["tokens"], 12, False, 0))
    found["scores"] = BACKEND.parse_score_response(scored, 12)
    found["refused"] = refusals(server, checkpoint)
    found["pause"] = server.must(BACKEND.get_pause_request())
    send_by_group(server, torch.load(file))
    found["resume"] = server.must(BACKEND.get_resume_request())
    found["after_group"] = generation(server, greedy=True)
    (update,) = BACKEND.build_disk_weight_update_requests(
        WeightUpdateMeta(type="disk", path=checkpoint)
    ).requests
    found["disk"] = server.must(update)
    found["after_disk"] = generation(server, greedy=True)
    found["offload"] = server.must(BACKEND.get_offload_request())
    found["onload"] = server.must(BACKEND.get_onload_request())
    found["paused"] = server.must(HttpRequest(endpoint="/is_paused", payload={}, method="GET"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
