"""vLLM's control calls: what they are given, and which of the engine's own operations they are."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from segue.api.validation import parse
from segue.errors import InvalidRequestError
from segue.messages.weight_operations import (
    DEFAULT_GROUP,
    EndUpdate,
    Names,
    Shapes,
    UpdateFromDisk,
    UpdateFromDistributed,
    Version,
)

MAX_ABORTED = 1 << 14  # ids in one call; none at all means every request


class AbortRequests(Struct, frozen=True, kw_only=True):
    """``POST /abort_requests``: the ids as replies have them; none: all requests."""

    request_ids: Annotated[list[str], Meta(max_length=MAX_ABORTED)] | None = None


class ResetPrefixCache(Struct, frozen=True, kw_only=True):
    """``POST /reset_prefix_cache``; there is no external cache, so nothing is to be done for it."""

    reset_running_requests: bool = False  # whether requests that run give their KV back, and compute it anew
    reset_external: bool = False


class UpdateInfo(Struct, frozen=True, kw_only=True):
    """``update_info`` of ``POST /update_weights``: tensors that a trainer broadcasts, one after the other."""

    names: Names
    dtype_names: Names
    shapes: Shapes
    group_name: str = DEFAULT_GROUP  # of `/init_weights_update_group`; vLLM has but one group
    packed: bool = False
    ipc_handles: Any = None
    ipc_handles_pickled: Any = None


class UpdateWeights(Struct, frozen=True, kw_only=True):
    """``POST /update_weights``: vLLM's ``update_info``, or prime-rl's ``weight_dir``."""

    update_info: dict[str, Any] | None = None
    weight_dir: Annotated[str, Meta(min_length=1)] | None = None
    weight_version: Version | None = None

    def operation(self) -> UpdateFromDisk | UpdateFromDistributed:
        """Returns the operation that is meant; as in vLLM, it leaves the prefix cache alone.

        Raises:
            InvalidRequestError: neither field is given, or both, or a way to send weights that is not there.
        """
        if (self.update_info is None) == (self.weight_dir is None):
            raise InvalidRequestError(
                "/update_weights: give either update_info (tensors that are broadcast) or weight_dir (a "
                "directory of safetensors files)",
                param="update_info",
            )
        if self.weight_dir is not None:
            return UpdateFromDisk(
                model_path=self.weight_dir, weight_version=self.weight_version, flush_cache=False
            )
        info = parse(UpdateInfo, self.update_info)
        if info.ipc_handles is not None or info.ipc_handles_pickled is not None:
            raise InvalidRequestError(
                "update_info.ipc_handles: vLLM's CUDA IPC is not there; send the tensors by "
                "/update_weights_from_tensor, which takes those of SGLang's clients",
                param="update_info",
            )
        if info.packed:
            raise InvalidRequestError(
                "update_info.packed=true: tensors are broadcast one by one here; send packed=false, or use "
                "/prepare_weights_update with load_format 'flattened_bucket'",
                param="update_info",
            )
        return UpdateFromDistributed(
            names=info.names,
            dtypes=info.dtype_names,
            shapes=info.shapes,
            group_name=info.group_name,
            weight_version=self.weight_version,
            flush_cache=False,
        )


class FinishUpdate(Struct, frozen=True, kw_only=True):
    """``POST /finish_weight_update``: what the new weights are called; None: the next number."""

    weight_version: Version | None = None

    def operation(self) -> EndUpdate:
        """Returns the operation that is meant."""
        return EndUpdate(weight_version=self.weight_version)
