"""What a rank's weights are: the model, its files, and where each tensor is in the slabs.

Engines share weights only if their manifests agree in everything that decides the bytes. An importer makes
its own manifest from its own model, and compares: equal names of a model prove nothing.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

FORMAT = 1


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor is."""

    name: str
    slab: int
    offset: int  # bytes from the slab's start
    shape: tuple[int, ...]
    dtype: str


class SourceFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that the weights were loaded from."""

    name: str
    size: int
    stamp: str  # the SHA-256 of its bytes, or "mtime:inode", which says that nobody has replaced it


class WeightsIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the bytes of a rank's slabs; engines with equal ones can share them."""

    format: int = FORMAT
    model: str  # the path or name that the engine was given
    config_sha256: str
    dtype: str
    tp_rank: int
    tp_size: int
    slab_sizes: list[int]
    tensors: list[TensorPlace]
    source: list[SourceFile]


class WeightsManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The identity, and what only the loader knows."""

    identity: WeightsIdentity
    digests: list[int] = []  # of each slab, once it is complete
    segue: str = ""  # the version that wrote it


encode_manifest = msgspec.msgpack.Encoder().encode
decode_manifest = msgspec.msgpack.Decoder(WeightsManifest).decode


def key_of(identity: WeightsIdentity) -> str:
    """Return a text that is equal for equal identities alone."""
    return hashlib.sha256(encode_manifest(identity)).hexdigest()


class Difference(msgspec.Struct, frozen=True):
    """The first field in which two identities differ."""

    field: str
    have: str  # the service's
    want: str  # the engine's


def difference(have: WeightsIdentity, want: WeightsIdentity) -> Difference | None:
    """Return the first difference of the service's identity from the engine's, with both values."""
    for field in WeightsIdentity.__struct_fields__:
        one, other = getattr(have, field), getattr(want, field)
        if one == other:
            continue
        if isinstance(one, list) and isinstance(other, list):
            return _list_difference(field, one, other)
        return Difference(field, _text(one), _text(other))
    return None


def _list_difference(field: str, have: list[Any], want: list[Any]) -> Difference:
    """Return the first difference of two lists, of sizes or of structs that have a name."""
    for number, (one, other) in enumerate(zip(have, want, strict=False)):
        if one == other:
            continue
        if not isinstance(one, msgspec.Struct):
            return Difference(f"{field}[{number}]", _text(one), _text(other))
        for name in one.__struct_fields__:
            if getattr(one, name) != getattr(other, name):
                label = f"{field}[{number}].{name}" if name == "name" else f"{field}[{one.name}].{name}"  # type: ignore[attr-defined]
                return Difference(label, _text(getattr(one, name)), _text(getattr(other, name)))
    return Difference(f"the number of {field}", str(len(have)), str(len(want)))


def _text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
