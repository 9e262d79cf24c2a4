import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from segue.distributed.info import TPInfo
from segue.messages.weight_operations import Bucket, Manifest
from segue.models import weight_map
from segue.models.config import MoEConfig
from segue.models.weight_map import WeightMap
from segue.weight_update.manifest import check, dtype_name
from tests.checkpoint import tiny
from tests.weight_update.updating import State, manifest_of

RANKS = [TPInfo(), TPInfo(0, 2), TPInfo(1, 2)]
Columns = tuple[list[str], list[str], list[list[int]]]


@cache
def state_of(kind: str) -> State:
    """The whole state dict, a tied head included."""
    with torch.device("meta"):
        return dict(tiny.make(kind).state_dict())


@cache
def table_of(kind: str, tp: TPInfo | None = None) -> WeightMap:
    with torch.device("meta"):
        return weight_map.build(tiny.config_of(tiny.make(kind)), tp or TPInfo())


def problems(kind: str, change: Callable[[Columns], object], **options: Any) -> str:
    """Returns the problems of a manifest with all tensors in one bucket, after `change` was applied to it."""
    (bucket,) = manifest_of(state_of(kind), num_buckets=1).buckets
    columns = (list(bucket.names), list(bucket.dtypes), [list(shape) for shape in bucket.shapes])
    change(columns)
    names, dtypes, shapes = columns
    changed = Manifest(group_name="g", buckets=[Bucket(names=names, dtypes=dtypes, shapes=shapes)], **options)
    return "; ".join(check(changed, table_of(kind)))


def add(name: str, shape: list[int], dtype: str = "float32") -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        for column, value in zip(columns, (name, dtype, shape), strict=True):
            column.append(value)  # type: ignore[arg-type]

    return change


def drop(name: str) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        index = columns[0].index(name)
        for column in columns:
            del column[index]

    return change


def put(which: int, name: str, value: Any) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[which][columns[0].index(name)] = value

    return change


@pytest.mark.parametrize("kind", tiny.MODELS)
@pytest.mark.parametrize("tp", RANKS, ids=str)
def test_a_whole_state_dict_is_accepted(kind: str, tp: TPInfo) -> None:
    assert check(manifest_of(state_of(kind)), table_of(kind, tp)) == []


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3", "qwen3-moe"])
def test_every_missing_name_is_reported(kind: str) -> None:
    table = table_of(kind)
    for name in state_of(kind):
        if name in table.aliases:
            assert problems(kind, drop(name)) == ""
        else:
            expected = table.stacked.get(name, (name,))
            message = problems(kind, drop(name))
            assert all(f"{each!r} is missing" in message for each in expected)
            assert problems(kind, drop(name), partial=True) == ""


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3", "qwen3-moe"])
def test_every_name_with_a_wrong_shape_or_dtype_is_reported(kind: str) -> None:
    for name, tensor in state_of(kind).items():
        shape = [*tensor.shape[:-1], tensor.shape[-1] + 1]
        assert problems(kind, put(2, name, shape)).startswith(f"{name!r} has shape {shape}; this model's")
        assert problems(kind, put(1, name, "int64")).startswith(f"{name!r} has dtype int64")
        assert problems(kind, put(1, name, "float12")).startswith(f"{name!r} has dtype 'float12'; use one of")
        assert problems(kind, add(name, list(tensor.shape))) == f"{name!r} is in the manifest more than once"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add("model.nothing", [2]), "'model.nothing' is not a tensor of this model"),
        (lambda columns: columns[1].pop(), "names, 11 dtypes and"),
    ],
)
def test_invalid_manifests_are_reported(change: Callable[[Columns], object], message: str) -> None:
    assert message.replace("11", str(len(state_of("llama")) - 1)) in problems("llama", change)


def test_experts_may_be_sent_one_by_one_or_stacked_but_not_both() -> None:
    table = table_of("qwen3-moe")
    stacked = next(name for name in table.stacked if name.endswith("gate_up_proj"))
    single = table.stacked[stacked][0]
    names = {name: torch.empty(table.shapes[name], device="meta") for name in table.names}
    assert check(manifest_of(names), table) == []
    both = {**names, stacked: torch.empty(table.shapes[stacked], device="meta")}
    assert check(manifest_of(both), table) == [
        f"{stacked!r} sends {single!r} a second time, after {single!r}: send it once"
    ]


def test_a_checksum_without_a_tensor_is_reported() -> None:
    message = problems("llama", lambda _: None, checksums={"model.norm.weight": 1, "other": 2})
    assert message == "'other' has a checksum but is in no bucket"


@pytest.mark.parametrize("buckets", [[], [Bucket(names=[], dtypes=[], shapes=[])]])
def test_no_buckets_and_empty_ones_are_legal(buckets: list[Bucket]) -> None:
    assert check(Manifest(group_name="g", buckets=buckets, partial=True), table_of("llama")) == []


def test_only_the_first_of_many_problems_are_listed() -> None:
    manifest = Manifest(group_name="g", buckets=[])
    found = check(manifest, table_of("qwen3-moe"))
    assert len(found) == 21 and found[-1] == f"and {len(table_of('qwen3-moe').names) - 20} more"


def test_a_discarded_manifest_may_have_unknown_names_but_no_unknown_dtypes() -> None:
    assert problems("llama", add("model.nothing", [2]), discard=True) == ""
    assert "'float12'" in problems("llama", add("model.nothing", [2], "float12"), discard=True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bfloat16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("half", "float16"),
        ("torch.float", "float32"),
        ("fp8", None),
        ("", None),
    ],
)
def test_dtypes_have_many_names(text: str, name: str | None) -> None:
    assert dtype_name(text) == name


def test_twenty_thousand_names_take_a_moment() -> None:
    with torch.device("meta"):
        small = tiny.config_of(tiny.make("qwen3-moe"))
    moe = MoEConfig(num_experts=128, num_experts_per_tok=2, expert_intermediate_size=24, norm_topk_prob=True)
    table = weight_map.build(replace(small, moe=moe, num_layers=48), TPInfo())
    names = table.names
    assert len(names) > 18_000
    shapes = [list(table.shapes[name]) for name in names]
    bucket = Bucket(names=names, dtypes=["bfloat16"] * len(names), shapes=shapes)
    started = time.thread_time()
    assert check(Manifest(group_name="g", buckets=[bucket]), table) == []
    assert time.thread_time() - started < 1.0
