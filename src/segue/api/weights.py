"""The weight calls, for HTTP and for :class:`segue.Engine` alike: a checked body in, a reply out."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from segue.api.validation import parse
from segue.api.weight_bodies import (
    AbortWeightsUpdateRequest,
    BucketMetadata,
    CommitWeightsUpdateRequest,
    CompleteWeightsUpdateRequest,
    DestroyWeightsUpdateGroupRequest,
    GetWeightsByNameRequest,
    InitWeightsUpdateGroupRequest,
    NoFields,
    PrepareWeightsUpdateRequest,
    UpdateWeightsFromDiskRequest,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
    UpdateWeightVersionRequest,
    WeightsCheckerRequest,
)
from segue.errors import InvalidRequestError
from segue.messages.weight_update import (
    AbortSession,
    BeginUpdate,
    Bucket,
    CheckWeights,
    CommitSession,
    Complete,
    EndUpdate,
    GetUpdateStatus,
    GetWeights,
    Group,
    JoinGroup,
    LeaveGroup,
    Manifest,
    Prepare,
    SetVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensor,
    WeightAnswer,
    WeightRequest,
)

Ask = Callable[[WeightRequest], Awaitable[WeightAnswer]]
MOST_INLINE = 1 << 20  # characters of base64 decoded on the event loop
BASE64_PIECE = 1 << 20  # characters, a multiple of four


@dataclass(frozen=True, slots=True)
class Call:
    """One call: what it takes, what it asks, what it replies."""

    body: type[BaseModel]
    request: Callable[[Any], WeightRequest]
    reply: Callable[[WeightAnswer], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class WeightReply:
    """The content, and whether the call did what it should."""

    success: bool
    content: dict[str, Any]


async def perform(
    name: str,
    body: Mapping[str, Any] | BaseModel,
    ask: Ask,
    admit: Callable[[WeightRequest], WeightRequest] = lambda request: request,
) -> WeightReply:
    """Check the body of a call, unless it is the checked one, and carry it out.

    ``admit``: gives the request as the caller may make it, or raises.

    Raises:
        InvalidRequestError: a field of a wrong type or range.
        EngineDeadError: there is no engine any more.
    """
    call = CALLS[name]
    checked = body if isinstance(body, BaseModel) else parse(call.body, body)
    request: WeightRequest
    if isinstance(checked, UpdateWeightsFromTensorRequest):
        size = sum(map(len, checked.serialized_named_tensors))
        request = (
            _from_tensor(checked) if size <= MOST_INLINE else await asyncio.to_thread(_from_tensor, checked)
        )
    else:
        request = call.request(checked)
    answer = await ask(admit(request))
    return WeightReply(answer.success, call.reply(answer))


def _bucket(bucket: BucketMetadata | UpdateWeightsFromDistributedRequest) -> Bucket:
    return Bucket(names=bucket.names, dtypes=bucket.dtypes, shapes=bucket.shapes)


def _join(body: InitWeightsUpdateGroupRequest) -> JoinGroup:
    address = body.master_address
    if address.startswith("[") and address.endswith("]"):  # IPv6, as it stands in a URL
        address = address[1:-1]
    group = Group(
        name=body.group_name,
        master_address=address,
        master_port=body.master_port,
        rank_offset=body.rank_offset,
        world_size=body.world_size,
        backend=body.backend,
    )
    return JoinGroup(group=group, timeout_s=body.timeout_s)


def _prepare(body: PrepareWeightsUpdateRequest) -> Prepare:
    manifest = Manifest(
        group_name=body.group_name,
        buckets=[_bucket(bucket) for bucket in body.buckets],
        flattened=body.load_format is not None,
        checksums=body.checksums,
        partial=body.partial,
        staging=body.staging,
    )
    return Prepare(
        manifest=manifest,
        session_id=body.session_id,
        weight_version=body.weight_version,
        num_buckets=body.num_buckets,
        timeout_s=body.timeout_s,
        arm_timeout_s=body.arm_timeout_s,
    )


def _complete(body: CompleteWeightsUpdateRequest) -> Complete:
    return Complete(
        group_name=body.group_name,
        session_id=body.session_id,
        flush_cache=body.flush_cache,
        commit=body.commit,
    )


def _from_distributed(body: UpdateWeightsFromDistributedRequest) -> UpdateFromDistributed:
    manifest = Manifest(
        group_name=body.group_name,
        buckets=[_bucket(body)],
        flattened=body.load_format is not None,
        partial=True,
    )
    return UpdateFromDistributed(
        manifest=manifest,
        weight_version=body.weight_version,
        flush_cache=body.flush_cache,
        abort_all=body.abort_all_requests,
    )


def _from_disk(body: UpdateWeightsFromDiskRequest) -> UpdateFromDisk:
    return UpdateFromDisk(
        model_path=body.model_path,
        load_format=body.load_format,
        weight_version=body.weight_version,
        flush_cache=body.flush_cache,
        abort_all=body.abort_all_requests,
    )


def _from_tensor(body: UpdateWeightsFromTensorRequest) -> UpdateFromTensor:
    try:
        payloads = [_decoded(text) for text in body.serialized_named_tensors]
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(
            f"serialized_named_tensors: every entry must be base64 ({error})",
            param="serialized_named_tensors",
        ) from None
    return UpdateFromTensor(
        payloads=payloads,
        load_format=body.load_format,
        weight_version=body.weight_version,
        flush_cache=body.flush_cache,
        abort_all=body.abort_all_requests,
    )


def _decoded(text: str) -> bytes:
    """Base64, a piece at a time: one call into C would hold up everything else for as long as it takes."""
    payload = bytearray()
    for start in range(0, len(text), BASE64_PIECE):
        piece = base64.b64decode(text[start : start + BASE64_PIECE], validate=True)
        if len(piece) < BASE64_PIECE // 4 * 3 and start + BASE64_PIECE < len(text):
            raise ValueError("padding before the end")
        payload += piece
    return bytes(payload)


def _plain(answer: WeightAnswer) -> dict[str, Any]:
    return {"success": answer.success, "message": answer.message, **answer.fields}


def _prepared(answer: WeightAnswer) -> dict[str, Any]:
    return {
        "status": "ready" if answer.success else "error",
        "success": answer.success,
        "message": answer.message,
        **answer.fields,
    }


def _completed(answer: WeightAnswer) -> dict[str, Any]:
    return {"num_buckets_received": 0} | _plain(answer)


def _paused(answer: WeightAnswer) -> dict[str, Any]:
    return {"num_paused_requests": 0} | _plain(answer)


CALLS: dict[str, Call] = {
    "init_weights_update_group": Call(InitWeightsUpdateGroupRequest, _join, _plain),
    "destroy_weights_update_group": Call(
        DestroyWeightsUpdateGroupRequest, lambda body: LeaveGroup(name=body.group_name), _plain
    ),
    "prepare_weights_update": Call(PrepareWeightsUpdateRequest, _prepare, _prepared),
    "complete_weights_update": Call(CompleteWeightsUpdateRequest, _complete, _completed),
    "commit_weights_update": Call(
        CommitWeightsUpdateRequest,
        lambda body: CommitSession(session_id=body.session_id, flush_cache=body.flush_cache),
        _completed,
    ),
    "abort_weights_update": Call(
        AbortWeightsUpdateRequest, lambda body: AbortSession(session_id=body.session_id), _plain
    ),
    "weights_update_status": Call(NoFields, lambda _: GetUpdateStatus(), _plain),
    "update_weights_from_distributed": Call(UpdateWeightsFromDistributedRequest, _from_distributed, _plain),
    "update_weights_from_disk": Call(UpdateWeightsFromDiskRequest, _from_disk, _paused),
    "update_weights_from_tensor": Call(UpdateWeightsFromTensorRequest, _from_tensor, _plain),
    "begin_weight_update": Call(NoFields, lambda _: BeginUpdate(), _plain),
    "end_weight_update": Call(NoFields, lambda _: EndUpdate(), _plain),
    "update_weight_version": Call(
        UpdateWeightVersionRequest,
        lambda body: SetVersion(version=body.new_version, abort_all=body.abort_all_requests),
        _plain,
    ),
    "get_weights_by_name": Call(
        GetWeightsByNameRequest,
        lambda body: GetWeights(name=body.name, truncate_size=body.truncate_size),
        _plain,
    ),
    "weights_checker": Call(WeightsCheckerRequest, lambda body: CheckWeights(action=body.action), _plain),
}
