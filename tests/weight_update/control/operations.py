"""Operations made from the groups and manifests that they are about."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from segue.messages.weight_operations import (
    Group,
    JoinGroup,
    Manifest,
    Prepare,
    UpdateFromDistributed,
)


def join(group: Group, **fields: Any) -> JoinGroup:
    described = structs.asdict(group)
    return JoinGroup(group_name=described.pop("name"), **described, **fields)


def prepared(manifest: Manifest, **fields: Any) -> Prepare:
    return Prepare(
        buckets=manifest.buckets,
        group_name=manifest.group_name,
        load_format="flattened_bucket" if manifest.flattened else None,
        checksums=manifest.checksums,
        partial=manifest.partial,
        staging=manifest.staging,
        **fields,
    )


def single(manifest: Manifest, **fields: Any) -> UpdateFromDistributed:
    (bucket,) = manifest.buckets
    return UpdateFromDistributed(group_name=manifest.group_name, **structs.asdict(bucket), **fields)
