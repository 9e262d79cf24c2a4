"""The GEMMs and experts of a model by their weights, as the search for their plans needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.kernels.fp8 import ExpertWeights, block_of
from segue.kernels.fp8_plan import FP8Shape
from segue.kernels.gemm_plan import GemmShape, Kind, row_buckets
from segue.kernels.moe_plan import MoEShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGemm:
    """One GEMM of a model, which several layers have: their weights are timed in turns."""

    weights: Sequence[Tensor]  # [N, K] each
    bias: Tensor | None  # [N], of the first of them
    kind: Kind
    dtype: torch.dtype  # of a whole result
    first_rows: int  # the least number of rows for which the model asks for this kind
    last_rows: int  # the greatest

    def shapes(self) -> list[GemmShape]:
        """Returns its shapes: one per number of rows up to which a plan serves."""
        size, depth = self.weights[0].shape
        buckets = row_buckets(self.first_rows, self.last_rows)
        return [GemmShape(rows, size, depth, self.kind) for rows in buckets]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFP8Gemm:
    """One GEMM of a model by weights in FP8, which several layers have."""

    weights: Sequence[tuple[Tensor, Tensor]]  # [N, K] in FP8, and scales, float32 [N, blocks], of each layer
    block: int  # see `kernels.fp8`
    bias: Tensor | None
    kind: Kind
    first_rows: int
    last_rows: int

    def shapes(self) -> list[FP8Shape]:
        """Returns its shapes, as `ModelGemm` does."""
        size, depth = self.weights[0][0].shape
        buckets = row_buckets(self.first_rows, self.last_rows)
        return [FP8Shape(rows, size, depth, self.block, self.kind) for rows in buckets]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExperts:
    """The experts of a model's layers: their weights are timed in turns."""

    # Gate and up [E, 2 * I, H], and down [E, H, I], of each layer.
    weights: Sequence[tuple[ExpertWeights, ExpertWeights]]
    per_token: int

    @property
    def shape(self) -> MoEShape:
        """Their shape."""
        down = self.weights[0][1]
        num_experts, hidden, size = down.shape
        return MoEShape(num_experts, self.per_token, size, hidden, block_of(down))


Planned = ModelGemm | ModelFP8Gemm | ModelExperts
"""What may have plans."""
