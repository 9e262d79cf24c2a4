"""Layers with given weights, as shards whose results are combined, and the comparison with their formula."""

from typing import Any

import torch
from torch import Tensor, nn

from segue.distributed.collectives import Collectives
from segue.distributed.info import TPInfo

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class OneOfSeveralRanks(Collectives):
    """The collectives of one of several ranks; they return its partial results unchanged."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(TPInfo(rank, size))


def fill(layer: Any, **weights: Tensor) -> Any:
    """Set the parameters of `layer` by dotted name (`__` for a dot), then build its derived tensors."""
    for name, weight in weights.items():
        owner, _, leaf = name.replace("__", ".").rpartition(".")
        setattr(layer.get_submodule(owner), leaf, nn.Parameter(weight.contiguous(), requires_grad=False))
    for module in layer.modules():
        if hasattr(module, "build_derived"):
            module.build_derived()
    return layer


def check_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = DTYPES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=4 * tolerance, rtol=tolerance)
