"""How an engine answers control and weight routes, for fake workers."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from tests.router.fake_servers import Exchange, FakeWorker

PAUSED = {
    "message": "Generation paused successfully.",
    "status": "ok",
    "mode": "retract",
    "num_running": 2,
    "num_waiting": 1,
    "num_retracted": 2,
    "num_aborted": 0,
    "num_pages_leaving": 0,
    "drained_ms": 3.5,
}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}
INFO = {
    "model_path": "model",
    "tokenizer_path": "model",
    "served_model_name": "model",
    "weight_version": "1",
    "dtype": "bfloat16",
    "seed": 0,
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "num_gpus": 2,
    "context_length": 64,
    "page_size": 10,
    "memory_ratio": 0.9,
    "disable_prefix_cache": False,
    "disable_cuda_graph": False,
    "chunked_prefill_size": 32,
    "enable_memory_saver": True,
    "max_running_requests": 16,
    "max_total_num_tokens": 100,
    "internal_states": [{"waiting": 1}],
}
LOAD = {
    "dp_rank": 0,
    "num_running_reqs": 2,
    "num_waiting_reqs": 1,
    "num_total_reqs": 3,
    "num_total_tokens": 40,
    "token_usage": 0.5,
    "gen_throughput": 8.0,
    "utilization": 0.25,
    "memory": {"token_capacity": 100},
    "queues": {"waiting": 1},
}


class ControlledWorker(FakeWorker):
    """A worker that answers control routes; ``answers`` has another answer by path, as status and body."""

    def __init__(self, answers: dict[str, tuple[int, Any]] | None = None, **of_record: Any) -> None:
        super().__init__(self._control, **of_record)
        self.answers: dict[str, tuple[int, Any]] = {
            "/pause_generation": (200, PAUSED),
            "/continue_generation": (200, CONTINUED),
            "/pause": (200, {"status": "paused"}),
            "/resume": (200, {"status": "resumed"}),
            "/is_paused": (200, {"is_paused": True}),
            "/abort_request": (200, None),
            "/flush_cache": (200, "Cache flushed.\nFlushed items: 3\n"),
            "/server_info": (
                200,
                INFO,
            ),
            "/v1/loads": (200, {"num_accelerators": 2, "loads": [LOAD]}),
            "/get_load": (200, [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 40}]),
            "/get_world_size": (200, {"world_size": 2}),
            "/abort_requests": (200, {"status": "aborted", "aborted": 2}),
            "/reset_prefix_cache": (200, {"success": True, "message": "5 tokens were forgotten."}),
            "/start_profile": (200, {"success": True, "message": "Steps are traced."}),
            "/stop_profile": (200, {"success": True, "message": "", "files": ["trace"]}),
            "/model_info": (200, {"model_path": "model", "weight_version": "1"}),
            "/weight_version": (200, {"weight_version": "1"}),
            "/health_generate": (200, {"status": "ok"}),
            **(answers or {}),
        }

    @property
    def seen(self) -> list[tuple[str, str, bytes]]:
        """Method, path with query, and body of each request."""
        return [(each.method, each.path, each.body) for each in self.exchanges]

    async def _control(self, exchange: Exchange) -> None:
        status, content = self.answers[urlsplit(exchange.path).path]
        if content is None or isinstance(content, str):
            await exchange.whole((content or "").encode(), status, "text/plain")
        else:
            await exchange.whole(json.dumps(content).encode(), status)


def refusal(status: int, message: str) -> tuple[int, Any]:
    return status, {"object": "error", "message": message, "type": "server_error", "code": status}
