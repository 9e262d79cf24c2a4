"""The truth every attention backend is held to: float64, one request at a time, nothing clever."""

import torch
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Bottom-right causal attention, `[q, heads, D]` float64, over keys and values `[kv, kv_heads, D]`."""
    q_len, heads, _ = query.shape
    kv_len, kv_heads, _ = keys.shape
    output = torch.zeros(query.shape, dtype=torch.float64)
    blind = max(0, q_len - kv_len)  # queries that see no key
    visible = torch.arange(kv_len) <= torch.arange(blind, q_len)[:, None] + kv_len - q_len
    for h in range(heads):
        g = h // (heads // kv_heads)
        scores = query[blind:, h].double() @ keys[:, g].double().T * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        output[blind:, h] = scores.softmax(-1) @ values[:, g].double()
    return output
