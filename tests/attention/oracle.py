"""The reference of all attention backends: float64, one sequence at a time, the formula as written."""

import torch
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Returns bottom-right causal attention, `[q, heads, D]` float64; keys are `[kv, kv_heads, D]`."""
    q_len, heads, _ = query.shape
    kv_len, kv_heads, _ = keys.shape
    output = torch.zeros(query.shape, dtype=torch.float64)
    blind = max(0, q_len - kv_len)  # queries that attend to no key
    visible = torch.arange(kv_len) <= torch.arange(blind, q_len)[:, None] + kv_len - q_len
    for h in range(heads):
        g = h // (heads // kv_heads)
        scores = query[blind:, h].double() @ keys[:, g].double().T * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        output[blind:, h] = scores.softmax(-1) @ values[:, g].double()
    return output
