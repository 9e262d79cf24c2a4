"""The table of query blocks of ragged prefill."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def block_table(q_lens: Sequence[int], first: int, per_block: int) -> NDArray[np.int32]:
    """Returns each block's sequence and first query, int32 `[blocks, 2]`, for sequences from `first` on."""
    lens = np.asarray(q_lens[first:], dtype=np.int64)
    counts = -(-lens // per_block)
    sequences = np.repeat(np.arange(first, first + len(lens)), counts)
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return np.stack([sequences, within * per_block], axis=1).astype(np.int32)
