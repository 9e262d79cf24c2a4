"""Identities of weights."""

from __future__ import annotations

import msgspec
import pytest

from segue.gms.manifest import (
    Difference,
    SourceFile,
    TensorPlace,
    decode_manifest,
    difference,
    encode_manifest,
    key_of,
)
from tests.gms.running import manifest

HAVE = manifest(2).identity


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "float32"}, Difference("dtype", "'bfloat16'", "'float32'")),
        ({"tp_rank": 1}, Difference("tp_rank", "0", "1")),
        ({"slab_sizes": [2 << 20, 4 << 20]}, Difference("slab_sizes[1]", "2097152", "4194304")),
        ({"tensors": HAVE.tensors[:1]}, Difference("the number of tensors", "2", "1")),
        (
            {"tensors": [HAVE.tensors[0], TensorPlace("t1", 1, 256, (1 << 20,), "bfloat16")]},
            Difference("tensors[t1].offset", "0", "256"),
        ),
        (
            {"tensors": [TensorPlace("other", 0, 0, (1 << 20,), "bfloat16"), HAVE.tensors[1]]},
            Difference("tensors[0].name", "'t0'", "'other'"),
        ),
        (
            {"source": [SourceFile("model.safetensors", 4 << 20, "9:2")]},  # the same name, other bytes
            Difference("source[model.safetensors].stamp", "'1:2'", "'9:2'"),
        ),
    ],
)
def test_the_first_difference_is_named_with_both_values(changes: object, expected: Difference) -> None:
    assert isinstance(changes, dict)
    want = msgspec.structs.replace(HAVE, **changes)
    assert difference(HAVE, want) == expected
    assert key_of(HAVE) != key_of(want)


def test_equal_identities_have_one_key_and_no_difference() -> None:
    again = decode_manifest(encode_manifest(manifest(2, digests=(1, 2)))).identity
    assert difference(HAVE, again) is None and key_of(HAVE) == key_of(again)
