"""The truth every attention backend is held to: float64, one request at a time, nothing clever."""

import torch
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Bottom-right causal attention, `[q, heads, D]` float64, over keys and values `[kv, kv_heads, D]`."""
    q_len, heads, _ = query.shape
    kv_len, kv_heads, _ = keys.shape
    output = torch.zeros(query.shape, dtype=torch.float64)
    for p in range(q_len):
        visible = p + kv_len - q_len + 1
        if visible <= 0:
            continue
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = keys[:visible, g].double() @ query[p, h].double() * scale
            output[p, h] = scores.softmax(0) @ values[:visible, g].double()
    return output
