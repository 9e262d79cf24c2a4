"""Device writes: one kernel scatters 32-bit words to arbitrary addresses."""

import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait

_BLOCK = tl.constexpr(512)


@triton.jit(do_not_specialize=["count"])
def _scatter(addresses, values, count, PDL: tl.constexpr):
    i = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    pdl_wait(PDL)
    to = tl.load(addresses + i, mask=i < count, other=0).to(tl.pointer_type(tl.int32))
    value = tl.load(values + i, mask=i < count, other=0)
    pdl_launch_dependents(PDL)
    tl.store(to, value, mask=i < count)


def scatter(addresses: Tensor, values: Tensor, count: int) -> None:
    """Write `values[i]` (int32) to the byte address `addresses[i]` (int64), i < `count`.

    No address may occur twice.
    """
    _scatter[(triton.cdiv(count, _BLOCK.value),)](
        addresses=addresses, values=values, count=count, **launch_options(4, 1)
    )
