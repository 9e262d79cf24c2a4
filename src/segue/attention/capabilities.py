"""Capabilities of the backends whose own modules can be imported only where CUDA is."""

import torch

from segue.attention.base import Capabilities

TRITON = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    max_group_size=64,  # a prefill block holds at least one query of all heads of a group
    graphs=True,
)

TRITON_INVARIANT = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    max_group_size=64,
    graphs=True,
    deterministic=True,
)

FA3 = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=tuple(range(8, 257, 8)),
    architectures=((9, 0),),
    package=("flash_attn_3._C", "fa3"),
    graphs=True,
)
