"""The embedding lookup. See `segue.kernels.ops`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait

_BLOCK = tl.constexpr(1024)


@triton.jit
def _embed(ids, weight, output, start, num_rows, size, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = columns < size
    pdl_wait(PDL)
    row = tl.load(ids + token) - start
    here = (row >= 0) & (row < num_rows)
    value = tl.load(weight + row * size + columns, mask=inside & here, other=0.0)
    pdl_launch_dependents(PDL)
    tl.store(output + token * size + columns, value, mask=inside)


def embed(ids: Tensor, weight: Tensor, start: int) -> Tensor:
    """See `segue.kernels.ops.embed`."""
    num_rows, size = weight.shape
    output = torch.empty((len(ids), size), dtype=weight.dtype, device=weight.device)
    _embed[(len(ids), triton.cdiv(size, _BLOCK.value))](
        ids=ids,
        weight=weight,
        output=output,
        start=start,
        num_rows=num_rows,
        size=size,
        **launch_options(4, len(ids)),
    )
    return output
