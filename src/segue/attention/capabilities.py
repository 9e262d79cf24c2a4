"""Capabilities of backends whose modules cannot be imported everywhere."""

import torch

from segue.attention.base import Capabilities

TRITON = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    page_sizes=None,
    decode_graph=True,
    prefill_graph=True,
    deterministic=False,
    indexes_by_row=True,
)
