"""What the weight routes are given: seed names, SGLang's names. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from segue.api.validation import TAKES_DECODED, FastList
from segue.messages.weight_update import Backend, StagingPlace

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Version = Annotated[str, Field(min_length=1, max_length=256)]
Port = Annotated[int, Field(ge=1, le=65535)]
Size = Annotated[int, Field(ge=0, lt=1 << 48)]
Checksum = Annotated[int, Field(ge=0, lt=1 << 64)]
MAX_TENSORS = 1 << 17  # named in one call; the largest mixtures of experts have some 100,000
MAX_PAYLOADS = 1024  # one for each rank
MAX_WORLD = 1 << 14  # ranks of a group; gloo makes a connection's data for each before it meets any
# Lists with an item for each tensor, or each bucket of tensors.
Names = Annotated[FastList[str], Field(max_length=MAX_TENSORS), TAKES_DECODED]
Shapes = Annotated[FastList[list[Size]], Field(max_length=MAX_TENSORS), TAKES_DECODED]
LoadFormat = Annotated[
    Literal["flattened_bucket"] | None,
    BeforeValidator(lambda name: None if name in ("", "auto", "direct") else name),
]


class _WeightBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


class InitWeightsUpdateGroupRequest(_WeightBody):
    """``POST /init_weights_update_group``: the trainer is rank 0, this engine begins at ``rank_offset``."""

    master_address: Annotated[str, Field(min_length=1)]
    master_port: Annotated[Port, BeforeValidator(_number)]
    rank_offset: Count
    world_size: Annotated[int, Field(ge=0, le=MAX_WORLD)]
    group_name: str = "weight_update_group"
    backend: Backend = "nccl"
    timeout_s: Seconds = 300.0


class DestroyWeightsUpdateGroupRequest(_WeightBody):
    """``POST /destroy_weights_update_group``."""

    group_name: str = "weight_update_group"


class BucketMetadata(_WeightBody):
    """Tensors sent together: three lists of one length."""

    names: Names
    dtypes: Names
    shapes: Shapes


class PrepareWeightsUpdateRequest(_WeightBody):
    """``POST /prepare_weights_update``: everything that is going to be broadcast, in order."""

    num_buckets: Count
    buckets: Annotated[FastList[BucketMetadata], Field(max_length=MAX_TENSORS), TAKES_DECODED]
    group_name: str
    session_id: str | None = None
    weight_version: Version | None = None
    load_format: LoadFormat = None
    checksums: Annotated[
        Annotated[dict[str, Checksum], Field(max_length=MAX_TENSORS)] | None, TAKES_DECODED
    ] = None
    timeout_s: Seconds = 300.0
    arm_timeout_s: Seconds = 3600.0
    partial: bool = False
    staging: StagingPlace = "auto"


class CompleteWeightsUpdateRequest(_WeightBody):
    """``POST /complete_weights_update``."""

    group_name: str | None = None
    flush_cache: bool = False
    session_id: str | None = None
    commit: bool = True


class CommitWeightsUpdateRequest(_WeightBody):
    """``POST /commit_weights_update``."""

    session_id: str | None = None
    flush_cache: bool = False


class AbortWeightsUpdateRequest(_WeightBody):
    """``POST /abort_weights_update``."""

    session_id: str | None = None


class _Update(_WeightBody):
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Version | None = None


class UpdateWeightsFromDistributedRequest(_Update):
    """``POST /update_weights_from_distributed``: one bucket, in one call."""

    names: Names
    dtypes: Names
    shapes: Shapes
    group_name: str = "weight_update_group"
    load_format: LoadFormat = None


class UpdateWeightsFromDiskRequest(_Update):
    """``POST /update_weights_from_disk``."""

    model_path: Annotated[str, Field(min_length=1)]
    load_format: str | None = None


class UpdateWeightsFromTensorRequest(_Update):
    """``POST /update_weights_from_tensor``: base64, one entry a rank, or one for all."""

    serialized_named_tensors: Annotated[FastList[str], Field(min_length=1, max_length=MAX_PAYLOADS)]
    load_format: str | None = None


class UpdateWeightVersionRequest(_WeightBody):
    """``POST /update_weight_version``."""

    new_version: Version
    abort_all_requests: bool = False


class GetWeightsByNameRequest(BaseModel):
    """``GET|POST /get_weights_by_name``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    truncate_size: Annotated[int, Field(ge=1, lt=1 << 31)] = 100


class WeightsCheckerRequest(BaseModel):
    """``GET|POST /weights_checker``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    action: Literal["checksum", "snapshot", "compare"] = "checksum"


class NoFields(_WeightBody):
    """A call that takes nothing."""
