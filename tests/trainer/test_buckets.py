"""The tensors to send: checkpoint names, tied tensors once, buckets within their size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from segue.errors import ConfigError
from segue.messages.weight_operations import Bucket
from segue.trainer.buckets import plan, tensors
from tests.checkpoint import tiny


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3-moe"])
def test_a_model_is_sent_under_the_names_of_its_checkpoint(kind: str, tmp_path: Path) -> None:
    model = tiny.make(kind)
    model.register_buffer("noise", torch.ones(3), persistent=False)
    saved = load_file(tiny.save(model, tmp_path) / "model.safetensors")
    sent = dict(tensors(model))
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in saved.items())
    shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors(model, meta=True)]
    assert shapes == [(name, tensor.shape, tensor.dtype) for name, tensor in tensors(model)]


def test_wrappers_do_not_change_the_names() -> None:
    model = tiny.make("llama-tied")
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    assert [name for name, _ in tensors(wrapped)] == [name for name, _ in tensors(model)]


def test_a_state_dict_is_sent_as_it_is_with_tied_tensors_once() -> None:
    model = tiny.make("llama-tied")
    state = model.state_dict()
    assert "lm_head.weight" in state
    assert {name for name, _ in tensors(state)} == {name for name, _ in model.named_parameters()}


def test_equal_slices_of_one_storage_are_not_tied() -> None:
    both = torch.zeros(2, 3)
    assert len(list(tensors({"a": both[0], "b": both[1], "c": both[0]}))) == 2


def test_buckets_are_full_but_never_over_their_size() -> None:
    weights = {name: torch.zeros(size) for name, size in (("a", 3), ("b", 2), ("c", 9), ("d", 1), ("e", 4))}
    buckets = plan(weights, 20)
    assert [list(bucket.tensors) for bucket in buckets] == [["a", "b"], ["c"], ["d", "e"]]
    assert [bucket.num_bytes for bucket in buckets] == [20, 36, 20]
    announced = Bucket(names=["a", "b"], dtypes=["float32", "float32"], shapes=[[3], [2]])
    assert buckets[0].announced == announced


def test_a_sharded_tensor_is_refused() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor  # 0.5 s, of each process that collects

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ConfigError, match="'w' is sharded"):
            plan({"w": shard}, 100)
    finally:
        dist.destroy_process_group()
