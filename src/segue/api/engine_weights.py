"""The weight calls of :class:`segue.Engine`: every route of the HTTP surface, with the same names."""

from __future__ import annotations

import base64
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol

from segue.api.loop_thread import LoopThread
from segue.api.weights import perform
from segue.launch.runtime import Runtime

P = ParamSpec("P")
Body = tuple[str, dict[str, Any]]  # a call's name and what it is given


class _Engine(Protocol):
    _runtime: Runtime

    @property
    def _running(self) -> LoopThread: ...


def _blocking(
    build: Callable[Concatenate[Any, P], Body],
) -> Callable[Concatenate[_Engine, P], dict[str, Any]]:
    @wraps(build)
    def call(self: _Engine, /, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        return self._running.call(_perform(self._runtime, *build(self, *args, **kwargs)))

    return call


def _awaited(
    build: Callable[Concatenate[Any, P], Body],
) -> Callable[Concatenate[_Engine, P], Coroutine[Any, Any, dict[str, Any]]]:
    @wraps(build)
    async def call(self: _Engine, /, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        return await self._running.call_async(_perform(self._runtime, *build(self, *args, **kwargs)))

    return call


async def _perform(runtime: Runtime, name: str, body: dict[str, Any]) -> dict[str, Any]:
    return (await perform(name, body, runtime.manager.ask_weights)).content


class WeightCalls:
    """Each returns the reply of the HTTP route of its name, with ``success`` and ``message``.

    Raises:
        InvalidRequestError: an argument of a wrong type or range.
        EngineDeadError: the engine's worker died, or it was shut down.
    """

    def _init_group(
        self,
        /,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
        timeout_s: float = 300.0,
    ) -> Body:
        """Meet a trainer, rank 0 and host of the group; this engine's first rank is ``rank_offset``."""
        return "init_weights_update_group", {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
            "timeout_s": timeout_s,
        }

    def _destroy_group(self, /, group_name: str = "weight_update_group") -> Body:
        """Leave a group; an open session of it is aborted."""
        return "destroy_weights_update_group", {"group_name": group_name}

    def _prepare(self, /, buckets: Sequence[Mapping[str, Any]], group_name: str, **options: Any) -> Body:
        """Announce all that is going to be broadcast; returns once every rank receives.

        Args:
            buckets: ``{"names", "dtypes", "shapes"}`` each, parallel lists, in the order of the broadcasts.
            group_name: the group they come through.
            options: ``session_id``, ``weight_version``, ``load_format``, ``checksums``, ``timeout_s``,
                ``arm_timeout_s``, ``partial``, ``staging``.
        """
        body = {"buckets": [dict(bucket) for bucket in buckets], "group_name": group_name}
        return "prepare_weights_update", {"num_buckets": len(buckets), **body, **options}

    def _complete(
        self,
        /,
        group_name: str | None = None,
        flush_cache: bool = False,
        session_id: str | None = None,
        commit: bool = True,
    ) -> Body:
        """Wait until all was received, then make it live, or with ``commit=False`` leave that to a call."""
        return "complete_weights_update", {
            "group_name": group_name,
            "flush_cache": flush_cache,
            "session_id": session_id,
            "commit": commit,
        }

    def _commit(self, /, session_id: str | None = None, flush_cache: bool = False) -> Body:
        """Make live what was completed with ``commit=False``."""
        return "commit_weights_update", {"session_id": session_id, "flush_cache": flush_cache}

    def _abort_update(self, /, session_id: str | None = None) -> Body:
        """End the open session; the weights stay as they are."""
        return "abort_weights_update", {"session_id": session_id}

    def _status(self, /) -> Body:
        """The open session, the groups, and the figures of the last update."""
        return "weights_update_status", {}

    def _from_distributed(
        self,
        /,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        **options: Any,
    ) -> Body:
        """Receive one bucket and make it live.

        ``options``: ``abort_all_requests``, ``weight_version``, ``load_format``.
        """
        return "update_weights_from_distributed", {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
            **options,
        }

    def _from_disk(self, /, model_path: str, load_format: str | None = None, **options: Any) -> Body:
        """Load a checkpoint beside the served weights and make it live.

        ``options``: ``flush_cache`` (True), ``abort_all_requests``, ``weight_version``.
        """
        return "update_weights_from_disk", {
            "model_path": str(model_path),
            "load_format": load_format,
            **options,
        }

    def _from_tensor(self, /, named_tensors: Any, load_format: str | None = None, **options: Any) -> Body:
        """Make tensors live.

        Args:
            named_tensors: (name, tensor) pairs; or what a client has serialised: bytes, or a list of them,
                one for each rank.
            load_format: that of serialised tensors.
            options: ``flush_cache`` (True), ``abort_all_requests``, ``weight_version``.
        """
        payloads = _payloads(named_tensors)
        return "update_weights_from_tensor", {
            "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
            "load_format": load_format,
            **options,
        }

    def _begin(self, /) -> Body:
        """Make the single calls that follow live together, at :meth:`end_weight_update`."""
        return "begin_weight_update", {}

    def _end(self, /) -> Body:
        """Make live what came since :meth:`begin_weight_update`."""
        return "end_weight_update", {}

    def _version(self, /, new_version: str, abort_all_requests: bool = False) -> Body:
        """Give the served weights another name."""
        body = {"new_version": new_version, "abort_all_requests": abort_all_requests}
        return "update_weight_version", body

    def _by_name(self, /, name: str, truncate_size: int = 100) -> Body:
        """The first values of a tensor, ``values``, by its Hugging Face name."""
        return "get_weights_by_name", {"name": name, "truncate_size": truncate_size}

    def _check(self, /, action: str = "checksum") -> Body:
        """``checksum`` the weights, take a ``snapshot``, or ``compare`` them with it."""
        return "weights_checker", {"action": action}

    init_weights_update_group = _blocking(_init_group)
    async_init_weights_update_group = _awaited(_init_group)
    destroy_weights_update_group = _blocking(_destroy_group)
    async_destroy_weights_update_group = _awaited(_destroy_group)
    prepare_weights_update = _blocking(_prepare)
    async_prepare_weights_update = _awaited(_prepare)
    complete_weights_update = _blocking(_complete)
    async_complete_weights_update = _awaited(_complete)
    commit_weights_update = _blocking(_commit)
    async_commit_weights_update = _awaited(_commit)
    abort_weights_update = _blocking(_abort_update)
    async_abort_weights_update = _awaited(_abort_update)
    weights_update_status = _blocking(_status)
    async_weights_update_status = _awaited(_status)
    update_weights_from_distributed = _blocking(_from_distributed)
    async_update_weights_from_distributed = _awaited(_from_distributed)
    update_weights_from_disk = _blocking(_from_disk)
    async_update_weights_from_disk = _awaited(_from_disk)
    update_weights_from_tensor = _blocking(_from_tensor)
    async_update_weights_from_tensor = _awaited(_from_tensor)
    begin_weight_update = _blocking(_begin)
    async_begin_weight_update = _awaited(_begin)
    end_weight_update = _blocking(_end)
    async_end_weight_update = _awaited(_end)
    update_weight_version = _blocking(_version)
    async_update_weight_version = _awaited(_version)
    get_weights_by_name = _blocking(_by_name)
    async_get_weights_by_name = _awaited(_by_name)
    weights_checker = _blocking(_check)
    async_weights_checker = _awaited(_check)


def _payloads(named_tensors: Any) -> list[bytes]:
    if isinstance(named_tensors, bytes):
        return [named_tensors]
    pairs = list(named_tensors)
    if all(isinstance(each, bytes) for each in pairs) and pairs:
        return pairs
    from segue.weight_update.payload.decode import encode  # torch

    return [encode(pairs)]
