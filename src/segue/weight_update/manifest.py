"""Checks of a trainer's manifest against this rank's model, before anything is sent.

A model may know a tensor under further names, and `WeightMap` holds both kinds. An *alias* is the name of a
tied tensor (a head that equals the embedding). A *stacked* name stands for one tensor that holds the matrices
of all experts; each expert's matrix also has a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from segue.dtypes import FLOATS
from segue.kernels.fp8 import scale_shapes
from segue.messages.weight_operations import Manifest
from segue.models.weight_map import WeightMap

DTYPES = {  # a client's dtype name, without "torch." -> torch's name
    "float64": "float64", "double": "float64", "fp64": "float64", "f64": "float64",
    "float32": "float32", "float": "float32", "fp32": "float32", "f32": "float32",
    "float16": "float16", "half": "float16", "fp16": "float16", "f16": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "int64": "int64", "long": "int64", "int32": "int32", "int": "int32", "int16": "int16", "short": "int16",
    "int8": "int8", "uint8": "uint8", "bool": "bool",
    "float8_e4m3fn": "float8_e4m3fn",
}  # fmt: skip

FP8 = "float8_e4m3fn"

_SHOWN = 20  # problems listed in a message


def dtype_name(text: str) -> str | None:
    """Returns torch's name, without "torch.", of the dtype that a client calls `text`; None if unknown."""
    return DTYPES.get(text.strip().removeprefix("torch.").lower())


def tensors(manifest: Manifest) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yields name, torch's dtype name and shape of each tensor, in order; `manifest` must be valid."""
    for bucket in manifest.buckets:
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            yield name, dtype_name(dtype) or dtype, tuple(shape)


def check(manifest: Manifest, table: WeightMap) -> list[str]:
    """Returns the problems of `manifest`, each with the tensor's name; at most 21 lines.

    If the tensors are to be discarded, they only have to be receivable, and the model does not matter.
    """
    problems = _wire_problems(manifest)
    if not problems and not manifest.discard:
        problems = _weight_problems(manifest, table)
    return first(problems)


def first(problems: list[str]) -> list[str]:
    """Returns the first problems, as many as a message may list, and the number of the others."""
    hidden = len(problems) - _SHOWN
    return [*problems[:_SHOWN], f"and {hidden} more"] if hidden > 0 else problems


def _wire_problems(manifest: Manifest) -> list[str]:
    """Returns what would make the broadcasts impossible to receive: uneven lists and unknown dtypes."""
    problems = []
    for index, bucket in enumerate(manifest.buckets):
        counts = (len(bucket.names), len(bucket.dtypes), len(bucket.shapes))
        if len(set(counts)) > 1:
            problems.append(
                f"bucket {index} has {counts[0]} names, {counts[1]} dtypes and {counts[2]} shapes; give one "
                "dtype and one shape per name"
            )
            continue
        for name, dtype in zip(bucket.names, bucket.dtypes, strict=True):
            if dtype_name(dtype) is None:
                problems.append(
                    f"{name!r} has dtype {dtype!r}; use one of {', '.join(dict.fromkeys(DTYPES.values()))}"
                )
    return problems


def _weight_problems(manifest: Manifest, table: WeightMap) -> list[str]:
    """Returns where `manifest` contradicts the model: in names, shapes, dtypes, or by what is missing.

    A tensor may come by its own name or inside a stacked one, but only once. A tied tensor and the tensor
    that it is tied to may both come; whether they are equal is checked once they are here.
    """
    problems = []
    sent = {name: dtype for name, dtype, _ in tensors(manifest)}
    scaled = {table.weight_of_scale(name) for name in sent}
    names: set[str] = set()
    sent_as: dict[str, str] = {}  # tensor name, never a stacked one -> the manifest's name that contains it
    for name, dtype, shape in tensors(manifest):
        expected = table.shapes.get(table.aliases.get(name, name))
        if name in names:
            problems.append(f"{name!r} is in the manifest more than once")
            continue
        names.add(name)
        if weight := table.weight_of_scale(name):
            problems += _scale_problems(name, dtype, shape, weight, sent.get(weight), table)
            continue
        if expected is None:
            problems.append(f"{name!r} is not a tensor of this model")
            continue
        if shape != expected:
            problems.append(f"{name!r} has shape {list(shape)}; this model's has {list(expected)}")
        if dtype == FP8 and table.is_fp8(name):
            if name not in scaled:
                problems.append(
                    f"{name!r} has dtype {dtype}, and its scale is missing: send it in the same manifest, as "
                    f"{name + '_scale'!r}, or send the tensor in bfloat16"
                )
        elif dtype not in FLOATS:
            problems.append(f"{name!r} has dtype {dtype}; weights must have one of {', '.join(FLOATS)}")
        twice = [each for each in table.stacked.get(name, (name,)) if sent_as.setdefault(each, name) != name]
        if twice:
            problems.append(
                f"{name!r} sends {twice[0]!r} a second time, after {sent_as[twice[0]]!r}: send it once"
            )
    if not manifest.partial:
        missing = table.missing(sent_as)
        problems += [f"{name!r} is missing; send it, or set partial: true" for name in missing]
    unknown = [name for name in manifest.checksums or () if name not in names]
    return problems + [f"{name!r} has a checksum but is in no bucket" for name in unknown]


def _scale_problems(
    name: str, dtype: str, shape: tuple[int, ...], weight: str, sent: str | None, table: WeightMap
) -> list[str]:
    """Returns the problems of `name`, the scales of `weight`, which came in dtype `sent` (None: not)."""
    if sent != FP8:
        return [f"{name!r} is the scale of {weight!r}, which is not sent in {FP8}: send both, or neither"]
    block = table.scales[table.slices[weight][0].parameter].block
    shapes = scale_shapes(table.shapes[weight], block)
    problems = []
    if shape not in shapes:
        allowed = ", ".join(str(list(each)) for each in shapes)
        problems.append(f"{name!r} has shape {list(shape)}; in this engine a scale may have {allowed}")
    if dtype not in FLOATS:
        problems.append(f"{name!r} has dtype {dtype}; scales must have one of {', '.join(FLOATS)}")
    return problems
