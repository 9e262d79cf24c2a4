"""vLLM's updates of weights become the engine's operations."""

from __future__ import annotations

from typing import Any

import pytest

from segue.api.validation import parse
from segue.api.vllm import UpdateWeights
from segue.errors import InvalidRequestError
from segue.messages.weight_operations import UpdateFromDisk, UpdateFromDistributed

INFO = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}


def test_tensors_are_received_by_a_group() -> None:
    operation = parse(UpdateWeights, {"update_info": INFO | {"group_name": "g"}}).operation()
    assert operation == UpdateFromDistributed(
        names=["a"], dtypes=["bfloat16"], shapes=[[2, 3]], group_name="g", flush_cache=False
    )


def test_a_directory_is_loaded() -> None:
    operation = parse(UpdateWeights, {"weight_dir": "/w", "weight_version": "7"}).operation()
    assert operation == UpdateFromDisk(model_path="/w", weight_version="7", flush_cache=False)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "give either update_info"),
        ({"weight_dir": None}, "give either update_info"),
        ({"update_info": INFO, "weight_dir": "/w"}, "give either update_info"),
        ({"update_info": INFO | {"packed": True}}, "packed=false"),
        ({"update_info": INFO | {"ipc_handles": [1]}}, "/update_weights_from_tensor"),
        ({"update_info": {"names": ["a"]}}, "dtype_names"),
    ],
)
def test_what_is_not_there_is_named(body: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        parse(UpdateWeights, body).operation()
