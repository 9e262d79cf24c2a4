"""The weight calls of the Python engine, over a worker whose ranks do at once what they are told."""

from __future__ import annotations

import asyncio
import base64
import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from segue.api import weights
from segue.errors import InvalidRequestError
from segue.messages.weight_operations import OPERATIONS, UpdateFromTensor
from tests.support.fake_engine import FakeEngine

BUCKET = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}
GROUP = {
    "master_address": "localhost",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
    "backend": "gloo",
}


def test_every_call_has_a_method_and_a_twin(engine: FakeEngine) -> None:
    for name in OPERATIONS:
        method, twin = getattr(engine, name), getattr(engine, f"async_{name}")
        assert inspect.signature(method) == inspect.signature(twin)
        assert inspect.iscoroutinefunction(twin)
        assert method.__doc__


def test_a_session(engine: FakeEngine) -> None:
    assert engine.init_weights_update_group(**GROUP)["success"]
    ready = engine.prepare_weights_update([BUCKET], "weight_update_group")
    assert ready["status"] == "ready"
    done = engine.complete_weights_update("weight_update_group")
    assert (done["success"], done["num_buckets_received"], done["weight_version"]) == (True, 1, "1")
    assert engine.get_weight_version() == "1"
    assert engine.destroy_weights_update_group()["success"]


def test_a_session_on_another_loop(engine: FakeEngine) -> None:
    async def session() -> str:
        await engine.async_begin_weight_update()
        await engine.async_update_weights_from_tensor(b"x", weight_version="7")
        await engine.async_end_weight_update()
        return await engine.async_get_weight_version()

    assert asyncio.run(session()) == "7"
    assert not engine.end_weight_update()["success"]


def test_tensors_are_packed(engine: FakeEngine) -> None:
    assert engine.update_weights_from_tensor([("a", torch.ones(2))])["success"]
    assert engine.update_weights_from_tensor([])["success"], "an empty bucket"
    tied = torch.ones(2)
    assert engine.update_weights_from_tensor([("a", tied), ("b", tied)])["success"]


def test_wrong_arguments(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="master_port"):
        engine.init_weights_update_group(**{**GROUP, "master_port": 0})
    with pytest.raises(InvalidRequestError, match="model_path"):
        engine.update_weights_from_disk("")


def test_arguments_are_in_the_order_that_clients_write_them(engine: FakeEngine) -> None:
    parameters = {name: list(inspect.signature(getattr(engine, name)).parameters) for name in OPERATIONS}
    assert parameters["prepare_weights_update"][:2] == ["buckets", "group_name"]
    assert parameters["update_weights_from_disk"][:2] == ["model_path", "load_format"]
    assert parameters["update_weights_from_tensor"][:2] == ["named_tensors", "load_format"]
    distributed = ["names", "dtypes", "shapes", "group_name", "flush_cache"]
    assert parameters["update_weights_from_distributed"][:5] == distributed
    assert parameters["get_weights_by_name"] == ["name", "truncate_size"]
    with pytest.raises(TypeError, match="colour"):
        engine.begin_weight_update(colour="red")
    with pytest.raises(TypeError, match="group_name"):
        engine.prepare_weights_update([BUCKET])


def test_values_of_numpy_and_others_are_taken(engine: FakeEngine, tmp_path: Path) -> None:
    assert engine.init_weights_update_group(**{**GROUP, "master_port": "1", "world_size": np.int64(2)})[
        "success"
    ]
    assert engine.update_weights_from_distributed(
        dict.fromkeys(["a"]).keys(), iter(["float32"]), np.array([[2]])
    )
    assert engine.update_weight_version(np.str_("7"))["new_version"] == "7"
    with pytest.raises(InvalidRequestError, match=r"names=.*a set has no order"):
        engine.update_weights_from_distributed({"a"}, ["float32"], [[2]])


def test_tensors_may_come_from_a_generator_that_uses_the_engine(engine: FakeEngine) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        assert engine.generate("Hello", {"max_new_tokens": 1})
        yield "b", torch.ones(2)

    assert engine.update_weights_from_tensor(tensors())["success"]


def test_a_rid_that_cannot_be_sent_is_free_again(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = engine._runtime.manager
    with monkeypatch.context() as broken:
        broken.setattr(manager, "_send", lambda message: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate("Hello", {"max_new_tokens": 1}, rid=np.str_("r"))
    assert engine.generate("Hello", {"max_new_tokens": 1}, rid="r")


@pytest.mark.parametrize(
    "text",
    ["%", "abc", "A" * 37 + "A==" + "A" * 40, "A" * 40 + "=", "A" * 40 + "%AAA" + "A" * 40, "\xe9" * 4],
)
def test_what_is_not_base64_is_refused_in_any_piece(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PIECE", 40)
    operation = UpdateFromTensor(serialized_named_tensors=["AAAA", text])
    with pytest.raises(InvalidRequestError, match="base64"):
        asyncio.run(weights.check_base64(operation))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 29, 30, 31, 61])
def test_base64_of_any_length_is_accepted(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PIECE", 40)
    text = base64.b64encode(bytes(range(size))).decode()
    asyncio.run(weights.check_base64(UpdateFromTensor(serialized_named_tensors=[text])))
