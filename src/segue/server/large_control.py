"""How large bodies of control calls are decoded; see :mod:`segue.server.large_body`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Raw

from segue.api.validation import Decoded
from segue.api.vllm import MAX_ABORTED, UpdateInfo
from segue.frontend.tokenizer import ServedModel
from segue.messages.weight_operations import MAX_PAYLOADS, MAX_TENSORS, Bucket
from segue.server import json_pieces
from segue.server.json_pieces import MisfitError
from segue.server.large_body import (
    Decode,
    Shape,
    check_count,
    decode_fields,
    strings_of,
    structs_of,
    too_many,
)

MAX_BUCKETS = 1 << 15
_checksums = msgspec.json.Decoder(dict[str, int])
_sizes = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]])


class _Bucket(msgspec.Struct):
    names: Raw
    dtypes: Raw
    shapes: Raw


_buckets = msgspec.json.Decoder(list[_Bucket])


def control(kind: type[msgspec.Struct], _: ServedModel) -> Shape:
    """A control call, of the weights or of the engine; unknown fields are ignored."""
    return Shape(model=kind, large=_CONTROL)


def _all_buckets(data: bytes) -> Decoded:
    """Decode ``buckets``: in a bucket, names, types and shapes are lists with an item per tensor.

    A bucket has three field names, and each tensor has a name and a type: that bounds the strings.
    """
    most = 2 * MAX_TENSORS + 3 * MAX_BUCKETS
    if (count := json_pieces.count(data, b'"') // 2) > most:
        raise too_many("buckets", count, most, "strings, the names of fields included")
    found = structs_of("buckets", _buckets, MAX_BUCKETS, data)
    if len(found) > MAX_BUCKETS:
        raise too_many("buckets", len(found), MAX_BUCKETS, "buckets")
    return Decoded([_bucket(each) for each in found])


def _bucket(bucket: _Bucket) -> Bucket:
    """Decode the three lists of a bucket, which were left as JSON because each may be large."""
    names, dtypes, shapes = _names(bytes(bucket.names)), _names(bytes(bucket.dtypes)), bytes(bucket.shapes)
    return Bucket(names=names.value, dtypes=dtypes.value, shapes=_shapes(shapes).value)


def _names(data: bytes) -> Decoded:
    """Decode the names, or the types, of at most ``MAX_TENSORS`` tensors."""
    check = partial(check_count, "a list of names", MAX_TENSORS)
    found = json_pieces.strings(data, check)
    check(len(found))  # before it was decoded, an escape could hide strings from the count
    return Decoded(found)


def _shapes(data: bytes) -> Decoded:
    check = partial(check_count, "a list of shapes", MAX_TENSORS)
    return Decoded(json_pieces.arrays(data, _shape, check))


def _shape(data: bytes) -> list[int]:
    """Decode one tensor's shape; the size bound keeps the call short."""
    if len(data) > json_pieces.PIECE:
        raise MisfitError
    return _sizes.decode(data)


def _all_checksums(data: bytes) -> Decoded:
    """Decode ``checksums``, from names of tensors to unsigned integers of 64 bits."""
    found = json_pieces.members(data, _checksums, partial(check_count, "checksums", MAX_TENSORS))
    if any(not 0 <= checksum < 1 << 64 for checksum in found.values()):
        raise MisfitError
    return Decoded(found)


_UPDATE_INFO = Shape(
    model=UpdateInfo,
    large={"names": _names, "dtype_names": _names, "shapes": _shapes},
    refused=frozenset(("ipc_handles", "ipc_handles_pickled")),
)
_CONTROL: dict[str, Decode] = {
    "request_ids": partial(strings_of, "request_ids", MAX_ABORTED),
    "update_info": lambda data: Decoded(decode_fields(data, _UPDATE_INFO)),
    "buckets": _all_buckets,
    "names": _names,
    "dtypes": _names,
    "shapes": _shapes,
    "checksums": _all_checksums,
    "serialized_named_tensors": partial(strings_of, "serialized_named_tensors", MAX_PAYLOADS),
}
