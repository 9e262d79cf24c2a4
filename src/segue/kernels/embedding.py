"""The embedding lookup in one rank's shard of the vocabulary."""

import torch.nn.functional as F
from torch import Tensor


def embed_reference(ids: Tensor, weight: Tensor, start: int) -> Tensor:
    """Returns the embeddings of `ids` (int64 `[T]`), `[T, N]`: 0 for ids of other ranks' shards.

    `weight` `[rows, N]` holds the ids from `start` to `start + rows - 1`.
    """
    local = ids - start
    elsewhere = (local < 0) | (local >= len(weight))
    return F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere[:, None], 0)


def embed(ids: Tensor, weight: Tensor, start: int) -> Tensor:
    """See `embed_reference`."""
    if ids.is_cuda:
        from segue.kernels.triton.embedding import embed as fused

        return fused(ids, weight, start)
    return embed_reference(ids, weight, start)
