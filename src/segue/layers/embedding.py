"""Token embedding and output head, sharded over the ranks by vocabulary rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.distributed.collectives import Collectives
from segue.kernels.batch_invariant import Gemm
from segue.kernels.embedding import embed
from segue.kernels.linear import linear, pack
from segue.layers.base import Layer


class VocabParallelEmbedding(Layer):
    """One rank's shard of the embedding table; ids of other shards give 0."""

    def __init__(self, rows: int, size: int, *, collectives: Collectives) -> None:
        """`rows` is this rank's number of rows, padding included."""
        super().__init__()
        self.collectives = collectives
        self.rows = rows
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """`[T] -> [T, size]`; this rank's summand, which `RMSNorm.add` sums over the ranks."""
        tp = self.collectives.tp
        return F.embedding(ids, self.weight) if tp.size == 1 else embed(ids, self.weight, tp.rank * self.rows)


class ParallelHead(Layer):
    """One rank's shard of the output head; the logits are gathered on rank 0."""

    def __init__(
        self,
        rows: int,
        size: int,
        vocab_size: int,
        *,
        tied: VocabParallelEmbedding | None,
        collectives: Collectives,
        deterministic: bool = False,
    ) -> None:
        """`rows` counts this rank's, with padding; `vocab_size` is the model's; `tied` shares its weight."""
        super().__init__()
        self.collectives = collectives
        self.deterministic = deterministic
        self.vocab_size = vocab_size
        # A tuple hides the module from torch, so that the weight is not a parameter of two modules.
        self._tied = (tied,)
        self.weight = None if tied else nn.Parameter(torch.empty(rows, size), requires_grad=False)
        self.packed: Gemm | None = None

    def build_derived(self) -> int:
        """Pack the weight again; returns the bytes of the packed copy."""
        self.packed = None  # frees its memory first
        self.packed = pack(self._weight(), deterministic=self.deterministic, float32_output=True)
        return 0 if self.packed is None else self.packed.num_bytes

    def forward(self, hidden: Tensor) -> Tensor | None:
        """`[L, size] -> [L, vocab_size]` in float32 on rank 0; None elsewhere."""
        logits = self.collectives.gather(self.local(hidden))
        return None if logits is None else logits[:, : self.vocab_size]

    def local(self, hidden: Tensor) -> Tensor:
        """Returns this rank's logits, padding included, in float32: `[L, size] -> [L, rows]`."""
        return linear(hidden, self._weight(), None, self.packed, float32_output=True)

    def _weight(self) -> Tensor:
        (tied,) = self._tied
        weight = tied.weight if tied is not None else self.weight
        assert weight is not None
        return weight
