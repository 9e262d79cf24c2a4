"""What clients ask a router about the server: its workers are to them one engine's data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from segue.api import info
from segue.api.info import LoadsQuery, ServerInfoQuery, WorldSizeQuery
from segue.api.schema import query_schema
from segue.api.shapes import NativeError, WeightError
from segue.api.validation import parse
from segue.router.control_routes import READ_S, Answer, combined, made_of, replies_of
from segue.server.access import Access, Routes
from segue.server.responses import native_error_response, weight_error_response

routes = Routes(Access.ADMIN, "Information", native_error_response, NativeError)
weights = Routes(Access.ADMIN, "Information", weight_error_response, WeightError)


@routes.get("/server_info", schema=query_schema(ServerInfoQuery))
@routes.get("/get_server_info", schema=query_schema(ServerInfoQuery))
async def server_info(request: Request) -> Response:
    """Options and state of the workers: those of the first one, with the scheduler's state of each."""
    query = parse(ServerInfoQuery, dict(request.query_params), coerces=True)
    replies = await replies_of(request, READ_S)
    return combined(request.scope["path"], replies, partial(_server_info, query))


def _server_info(query: ServerInfoQuery, answers: list[Answer]) -> Answer:
    """Returns what several engines are together, as clients read it of one engine with data parallelism.

    Together they serve whole requests, also where some compute prompts and others generate.
    """
    tokens = sum(answer["max_total_num_tokens"] for answer in answers)
    together = one_version(answers) | {
        "dp_size": len(answers),
        "num_gpus": sum(answer["num_gpus"] for answer in answers),
        "disaggregation_mode": "null",
        "load_balance_method": "round_robin",
        "prefill_round_robin_balance": False,
        "enable_memory_saver": all(answer["enable_memory_saver"] for answer in answers),
        "max_running_requests": sum(answer["max_running_requests"] for answer in answers),
        "max_total_num_tokens": tokens,
        "max_total_tokens": tokens,
        "internal_states": [state for answer in answers for state in answer["internal_states"]],
    }
    return together | ({} if query.config_format == "text" else {"vllm_config": info.vllm_config(together)})


@weights.get("/model_info")
@weights.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """What is served; the version of the weights is ``mixed`` where the workers' differ."""
    return combined(request.scope["path"], await replies_of(request, READ_S), one_version)


@weights.get("/get_weight_version")
@weights.get("/weight_version")
@weights.get("/weight_info")
async def weight_version(request: Request) -> Response:
    """The name of the served weights; ``mixed`` where the workers' differ."""
    return combined(request.scope["path"], await replies_of(request, READ_S), one_version)


def one_version(answers: list[Answer]) -> Answer:
    """Returns the first answer, with a version of the weights that stands for all."""
    versions = {answer["weight_version"] for answer in answers}
    return answers[0] | {"weight_version": versions.pop() if len(versions) == 1 else "mixed"}


@routes.get("/v1/loads", schema=query_schema(LoadsQuery))
@routes.get("/loads", schema=query_schema(LoadsQuery))
async def loads(request: Request) -> Response:
    """What runs, waits and is in the KV cache of each worker, in SGLang's shape."""
    query = parse(LoadsQuery, dict(request.query_params), coerces=True)
    replies = await replies_of(request, READ_S, b"/v1/loads")  # the query is about this router's ranks

    def make(answers: list[Answer]) -> Answer:
        ranks = [
            load | {"dp_rank": rank, "worker": worker}
            for rank, (worker, load) in enumerate(_loads(replies, answers))
        ]
        return info.loads(ranks, query, answers[0]["num_accelerators"])

    return made_of(request.scope["path"], replies, make)


def _loads(workers: Iterable[str], answers: list[Answer]) -> Iterable[tuple[str, Answer]]:
    """Yields each worker's loads, in the workers' order."""
    for worker, answer in zip(workers, answers, strict=True):
        for load in answer["loads"]:
            yield worker, load


@routes.get("/get_load")
async def get_load(request: Request) -> Response:
    """Requests and tokens of each worker, in SGLang's older shape."""

    def make(answers: list[Any]) -> list[Any]:
        every = [load for answer in answers for load in answer]
        return [load | {"dp_rank": rank} for rank, load in enumerate(every)]

    return made_of(request.scope["path"], await replies_of(request, READ_S), make)


@routes.get("/get_world_size", schema=query_schema(WorldSizeQuery))
async def get_world_size(request: Request) -> Response:
    """The number of ranks of all workers, or of the first one, as vLLM counts them."""
    query = parse(WorldSizeQuery, dict(request.query_params), coerces=True)

    def combine(answers: list[Answer]) -> Answer:
        sizes = [answer["world_size"] for answer in answers]
        return {"world_size": sum(sizes) if query.include_dp else sizes[0]}

    return combined(request.scope["path"], await replies_of(request, READ_S), combine)


routes += weights
