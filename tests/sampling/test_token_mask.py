from __future__ import annotations

import numpy as np
import pytest
import torch

from segue.sampling.token_mask import forbid


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 2], [1]])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_what_is_not_allowed_becomes_impossible_and_all_else_stays(rows: list[int], vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.normal(size=(3, vocab_size)).astype(np.float32))
    allowed = rng.random((len(rows), vocab_size)) < 0.5
    bits = np.zeros((len(rows), 32 * -(-vocab_size // 32)), dtype=np.uint8)
    bits[:, :vocab_size] = allowed
    masks = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    expected = logits.clone()
    for index, row in enumerate(rows):
        expected[row, torch.from_numpy(~allowed[index])] = -torch.inf
    forbid(logits, torch.tensor(rows), masks)
    assert torch.equal(logits, expected)
