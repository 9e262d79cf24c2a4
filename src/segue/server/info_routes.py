"""What clients ask about the server: its options and state, its model, its load, its weights' version."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from segue.api import info
from segue.api.info import LoadsQuery, ServerInfoQuery, WorldSizeQuery
from segue.api.schema import query_schema, reply_schema
from segue.api.shapes import (
    LoadsReply,
    ModelInfo,
    NativeError,
    ServerInfo,
    WeightError,
    WeightVersionReply,
    WorldSizeReply,
)
from segue.api.validation import parse
from segue.launch import engine_info
from segue.launch.runtime import Runtime
from segue.server.access import Access, Routes
from segue.server.responses import json_response, native_error_response, weight_error_response
from segue.server.running import runtime_of

routes = Routes(Access.ADMIN, "Information", native_error_response, NativeError)
weights = Routes(Access.ADMIN, "Information", weight_error_response, WeightError)
_INFO = query_schema(ServerInfoQuery) | reply_schema(ServerInfo)
_VERSION = reply_schema(WeightVersionReply)
_LOADS = query_schema(LoadsQuery) | reply_schema(LoadsReply)


@routes.get("/server_info", schema=_INFO)
@routes.get("/get_server_info", schema=_INFO)
async def server_info(request: Request) -> Response:
    """Options, version, what was decided at start, and the scheduler's state."""
    query = parse(ServerInfoQuery, dict(request.query_params), coerces=True)
    found = await engine_info.server_info(runtime_of(request))
    return json_response(with_config(found, query))


def with_config(found: dict[str, Any], query: ServerInfoQuery) -> dict[str, Any]:
    """Returns an answer of ``/server_info``, with vLLM's part if the query asks for it."""
    return found if query.config_format == "text" else found | {"vllm_config": info.vllm_config(found)}


@weights.get("/model_info", schema=reply_schema(ModelInfo))
@weights.get("/get_model_info", schema=reply_schema(ModelInfo))
async def model_info(request: Request) -> Response:
    """What is served, and the name of the served weights."""
    return json_response(engine_info.model_info(runtime_of(request)))


@weights.get("/get_weight_version", schema=_VERSION)
@weights.get("/weight_version", schema=_VERSION)
@weights.get("/weight_info", schema=_VERSION)
async def weight_version(request: Request) -> Response:
    """The name of the served weights."""
    return json_response({"weight_version": runtime_of(request).manager.weights.version})


@routes.get("/v1/loads", schema=_LOADS)
@routes.get("/loads", schema=_LOADS)
async def loads(request: Request) -> Response:
    """What runs, waits and is in the KV cache, in SGLang's shape."""
    runtime, query = runtime_of(request), parse(LoadsQuery, dict(request.query_params), coerces=True)
    return json_response(info.loads([await _load(runtime)], query, runtime.config.tp))


@routes.get("/get_load", schema=reply_schema(list[dict[str, Any]]))
async def get_load(request: Request) -> Response:
    """Requests and tokens, in SGLang's older shape."""
    return json_response(info.get_load([await _load(runtime_of(request))]))


async def _load(runtime: Runtime) -> dict[str, Any]:
    """Returns the load with all sections; raises what asking the scheduler does."""
    manager = runtime.manager
    state = await manager.calls.get_state()
    return info.load_of(
        state.state,
        manager.ready,
        manager.stats.counters,
        in_flight=manager.num_requests,
        now=time.time(),
    )


@routes.get("/get_world_size", schema=query_schema(WorldSizeQuery) | reply_schema(WorldSizeReply))
async def get_world_size(request: Request) -> Response:
    """The number of ranks that take new weights, as vLLM counts them."""
    parse(WorldSizeQuery, dict(request.query_params), coerces=True)
    return json_response({"world_size": runtime_of(request).config.tp})


routes += weights
