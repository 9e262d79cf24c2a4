"""The operations of the layers in plain torch, each with the choice of its fused kernel on CUDA."""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.kernels import batch_invariant
from segue.kernels.activations import Activations, Unnormed
from segue.kernels.batch_invariant import BatchInvariantGemm, Gemm
from segue.kernels.cpu import ops as cpu
from segue.kernels.fp8 import FP8Tokens, dequantize
from segue.kernels.gemv_plan import fits_gemv


def embed(ids: Tensor, weight: Tensor, start: int) -> Tensor:
    """Returns the embeddings of `ids` (int64 `[T]`), `[T, N]`: 0 for ids of other ranks' shards.

    `weight` `[rows, N]` is this rank's shard: the ids from `start` to `start + rows - 1`. The sum of the
    results over the ranks is the embedding of every token.
    """
    local = ids - start
    elsewhere = (local < 0) | (local >= len(weight))
    return F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere[:, None], 0)


def list_pages(page_table: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
    """Returns the pages of S sequences, one after the other: int32 `[S * columns]`; the rest is undefined.

    Args:
        page_table: int32 `[*, columns]`, the pages of each request slot.
        slots: the sequences' request slots, `[S]`.
        starts: int32 `[S + 1]`, the index of each sequence's first page in the result, and their total.
    """
    pages = torch.empty(len(slots) * page_table.shape[1], dtype=torch.int32, device=page_table.device)
    if pages.is_cuda:
        from segue.kernels.triton.step_inputs import list_pages as fused

        fused(page_table, slots, starts, pages)
        return pages
    bounds = starts.tolist()
    for slot, start, end in zip(slots.tolist(), bounds, bounds[1:], strict=False):
        pages[start:end] = page_table[slot, : end - start]
    return pages


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `x / rms(x) * weight` over the last dimension, computed in float32, in the dtype of `x`.

    `weight` is `[..., x.shape[-1]]` and broadcasts against `x`. For CPUs: it takes a third fewer passes and
    calls than F.rms_norm takes there.
    """
    size = x.shape[-1]
    wide = x.float()  # `x` itself if it is float32; then it may not be overwritten
    # The square root of (sum of squares + eps * size) / size.
    rms = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(_sqrt(eps * size)).mul_(size**-0.5)
    scaled = wide / rms if wide is x else wide.div_(rms)
    return scaled.mul_(weight).to(x.dtype)


@cache
def _sqrt(square: float) -> Tensor:
    """Returns the square root as a tensor, which `hypot_` needs; it is made once per value."""
    return torch.tensor(square**0.5)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, fp8_block: int | None = None
) -> tuple[Tensor | FP8Tokens, Tensor]:
    """Returns the normalised sum `x + residual`, and the sum itself as the next residual.

    May overwrite both inputs. `x` is `[T, N]`, or on CUDA split-K partials, float32 `[S, T, N]`, which are
    added up here. `residual` is `[T, N]`; None: `x` is the sum already, as before the first layer. On CUDA
    the normalised sum may be quantized: with a scale per token (0), or for each `fp8_block` columns.
    """
    if x.is_cuda:
        from segue.kernels.triton.norm import add_rms_norm as fused

        return fused(x, residual, weight, eps, fp8_block=fp8_block)
    if cpu.usable(x):
        return cpu.add_rms_norm(x, residual, weight, eps)
    total = x if residual is None else residual.add_(x)
    return rms_norm(total, weight, eps), total


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + D/2])` of `x` `[T, heads, D]` by each token's angles (RoPE), on a CPU.

    `cos` and `sin` are `[T, 1, D]`: `cos` has the D/2 cosines twice, `sin` the negated sines, then the sines.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


Derived = Gemm | Tensor
"""What a CPU keeps beside a weight: a GEMM by a copy of it, or the values of experts in FP8."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A GEMM by a copy of a weight in oneDNN's blocked layout, which `_pack_cpu` makes."""

    weight: Tensor  # opaque

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[M, in] -> [M, out]`."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, bias, "none", [], "")
        return result

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return int(torch.ops.mkldnn._nbytes(self.weight))


@dataclass(frozen=True, slots=True)
class Plain:
    """A weight in its plain layout, multiplied by `F.linear`."""

    weight: Tensor  # [out, in]
    num_bytes: int = 0

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[M, in] -> [M, out]`."""
        return F.linear(x, self.weight, bias)


def pack(weight: Tensor, *, deterministic: bool = False, float32_output: bool = False) -> Gemm | None:
    """Returns a GEMM by `weight` `[out, in]`, for `linear`; None: `linear` chooses one in each call.

    Where a CPU `may_copy`, the GEMM holds a copy in oneDNN's blocked layout: without it, each GEMM of a few
    rows first reorders the weight. With `deterministic` the GEMM is batch-invariant. `float32_output` has to
    be the same as in the later calls of `linear`.

    Raises:
        ConfigError: this device has no batch-invariant GEMM for the weight.
    """
    if weight.is_cuda and deterministic:
        from segue.kernels.triton.gemm import TritonBatchInvariantGemm

        return TritonBatchInvariantGemm(weight, torch.float32 if float32_output else weight.dtype)
    if weight.device.type != "cpu":
        return None
    if not may_copy(weight):
        dtype = torch.float32 if float32_output else weight.dtype
        return cpu.CPUBatchInvariantGemm(weight, dtype) if deterministic else None
    return BatchInvariantGemm.from_weight(weight, _pack_cpu) if deterministic else _pack_cpu(weight)


def may_copy(weight: Tensor) -> bool:
    """Returns whether `pack` may copy `weight`, which is on a CPU: our own kernel needs no copy."""
    return not cpu.usable(weight)


@dataclass(frozen=True, slots=True)
class FP8Gemm:
    """A GEMM by a weight in FP8, on CUDA."""

    weight: Tensor  # [out, in]
    scales: Tensor  # float32 [out, blocks]
    block: int  # see `kernels.fp8`
    num_bytes: int = 0

    def __call__(self, x: Tensor, bias: Tensor | None, *, may_split: bool = False) -> Tensor:
        """`[M, in] -> [M, out]`, or split-K partials as for `linear`."""
        from segue.kernels.triton.fp8_gemm import fp8_linear

        return fp8_linear(x, self.weight, self.scales, self.block, bias, may_split=may_split)

    def fp8_block(self, num_rows: int, dtype: torch.dtype) -> int | None:
        """The columns per scale (0: all) if so many tokens in `dtype` are to be `FP8Tokens`, else None."""
        from segue.kernels.triton.fp8_tokens import takes_fp8

        return self.block if takes_fp8(num_rows, self.weight, self.block, dtype) else None

    def multiply(self, x: FP8Tokens, bias: Tensor | None) -> Tensor:
        """`[M, in] -> [M, out]`."""
        from segue.kernels.triton.fp8_tokens import multiply_in_fp8

        return multiply_in_fp8(x, self.weight, self.scales, bias)

    def gate_up_silu(self, x: Tensor) -> Tensor | None:
        """`[M, in] -> [M, out / 2]`, as for `gate_up_silu` without a bias; None: one kernel is not faster."""
        from segue.kernels.triton.fp8_gemm import fp8_gate_up_silu

        return fp8_gate_up_silu(x, self.weight, self.scales, self.block)


@dataclass(frozen=True, slots=True)
class DequantizingGemm:
    """A GEMM by a weight in FP8 that turns it to the dtype of the activations in each call: slow, no copy."""

    weight: Tensor  # [out, in]
    scales: Tensor  # float32 [out, blocks]
    block: int  # see `kernels.fp8`
    num_bytes: int = 0

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[M, in] -> [M, out]`."""
        return F.linear(x, dequantize(self.weight, self.scales, self.block).to(x.dtype), bias)


def pack_fp8(
    weight: Tensor, scales: Tensor, block: int, dtype: torch.dtype, *, deterministic: bool = False
) -> Gemm:
    """Returns a GEMM by `weight` `[out, in]` in FP8, for `linear`, of activations in `dtype`.

    For `scales` and `block` see `kernels.fp8`. On CPUs the GEMM holds a copy of the weight's values in
    `dtype`. With `deterministic` it is batch-invariant, on CPUs only.
    """
    if weight.is_cuda:
        assert not deterministic, "the start refuses it"
        return FP8Gemm(weight, scales, block)
    values = dequantize(weight, scales, block).to(dtype)
    return BatchInvariantGemm.from_weight(values, _pack_copy) if deterministic else _pack_copy(values)


def _pack_copy(values: Tensor) -> Gemm:
    """Returns what `_pack_cpu` does for values that nothing else holds: they count as bytes of the GEMM."""
    gemm = _pack_cpu(values)
    return Plain(values, values.nbytes) if isinstance(gemm, Plain) else gemm


def _pack_cpu(weight: Tensor) -> Gemm:
    """Returns a GEMM by a copy in oneDNN's layout, or by the weight itself where oneDNN lacks its dtype."""
    supported = torch._C._has_mkldnn and weight.dtype in (torch.float32, torch.bfloat16)
    if supported and weight.dtype == torch.bfloat16:
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not supported:
        return Plain(weight)
    rows_hint = 16  # oneDNN chose the same layout for 1 to 1024 rows on the machine measured
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows_hint))


def linear(
    x: Activations,
    weight: Tensor,
    bias: Tensor | None,
    packed: Gemm | None = None,
    *,
    may_split: bool = False,
    float32_output: bool = False,
) -> Tensor:
    """Returns `x @ weight.T + bias`, `[M, out]`.

    Without `packed`, CUDA uses the plan that was measured for the shape, and cuBLAS where that is faster.

    Args:
        x: `[M, in]`.
        weight: `[out, in]`.
        bias: `[out]`.
        packed: the result of `pack(weight)` or `pack_fp8`.
        may_split: on CUDA the result may be split-K partials, float32 `[S, M, out]`, which the caller's
            kernel adds up as it reads them.
        float32_output: the result is float32, with the precision of the device's accumulation.
    """
    if isinstance(x, FP8Tokens):
        assert isinstance(packed, FP8Gemm), "its `fp8_block` is asked first"
        return packed.multiply(x, bias)
    if can_stream(x, weight, packed):
        return _stream(x, weight, bias, packed, torch.float32 if float32_output else x.dtype)
    assert not isinstance(x, Unnormed), "`can_stream` is asked first"
    if x.is_cuda and packed is None:
        from segue.kernels.triton.gemm import choose, run

        plan = choose(*x.shape, weight.shape[0], x.dtype, "split" if may_split else "whole")
        if plan is not None:
            return run(plan, x, weight, bias, torch.float32 if float32_output else x.dtype)
        if float32_output and x.dtype != torch.float32:
            product = torch.mm(x, weight.T, out_dtype=torch.float32)
            return product if bias is None else product.add_(bias)
    if _uses_cpu_kernel(x, weight, packed):
        dtype = torch.float32 if float32_output else x.dtype
        return cpu.gemm(x, weight, bias, dtype, invariant=isinstance(packed, cpu.CPUBatchInvariantGemm))
    if packed is None:
        result = F.linear(x, weight, bias)
    elif isinstance(packed, FP8Gemm):
        result = packed(x, bias, may_split=may_split)
    else:
        result = packed(x, bias)
    return result.float() if float32_output else result


def can_stream(x: Activations, weight: Tensor, packed: Gemm | None) -> bool:
    """Returns whether the kernel for one token multiplies `x` by `weight` `[N, K]`.

    It does not where the weight is `packed` in another layout, as for `--deterministic`.
    """
    if isinstance(x, FP8Tokens) or not x.is_cuda or len(x) != 1 or x.dtype == torch.float32:
        return False
    return fits_gemv(weight.shape[1]) and (packed is None or isinstance(packed, FP8Gemm))


def _stream(
    x: Tensor | Unnormed,
    weight: Tensor,
    bias: Tensor | None,
    packed: Gemm | None,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> Tensor:
    from segue.kernels.triton.gemv import gemv

    scales, block = (packed.scales, packed.block) if isinstance(packed, FP8Gemm) else (None, 0)
    return gemv(x, weight, scales, block, bias, dtype, gated=gated)


def _uses_cpu_kernel(x: Tensor, weight: Tensor, packed: Gemm | None) -> bool:
    """Whether the CPU's own kernel multiplies `x` by the weight itself."""
    if isinstance(packed, cpu.CPUBatchInvariantGemm):
        return True
    return packed is None and weight.dtype == x.dtype and cpu.usable(x)


def gate_up_silu(
    x: Activations, weight: Tensor, bias: Tensor | None, packed: Gemm | None, *, fp8_block: int | None = None
) -> Tensor | FP8Tokens:
    """Returns `silu_mul(linear(x, weight, bias, packed))`, `[T, K] -> [T, I]`.

    `weight` is `[2 * I, K]`, gate rows first. On CUDA one kernel does both where that is faster. `packed`
    is the result of `pack(weight)` or `pack_fp8`. With `fp8_block`, see `add_rms_norm`, the result of
    many tokens is quantized, where one kernel can do both.
    """
    if isinstance(x, FP8Tokens):
        from segue.kernels.triton.gate_up_silu import MAX_FP8_COLUMNS, silu_mul_fp8

        gate_up = linear(x, weight, bias, packed)
        if fp8_block is not None and gate_up.shape[1] <= 2 * MAX_FP8_COLUMNS:
            return silu_mul_fp8(gate_up, fp8_block)
        return silu_mul(gate_up, x.dtype)
    if bias is None and can_stream(x, weight, packed):
        return _stream(x, weight, None, packed, x.dtype, gated=True)
    if isinstance(x, Tensor) and bias is None:
        if x.is_cuda and (packed is None or isinstance(packed, FP8Gemm)):
            from segue.kernels.triton.gate_up_silu import gate_up_silu as fused

            gated = fused(x, weight) if packed is None else packed.gate_up_silu(x)
            if gated is not None:
                return gated
        if _uses_cpu_kernel(x, weight, packed):
            return cpu.gate_up_silu(x, weight, invariant=isinstance(packed, cpu.CPUBatchInvariantGemm))
    gate_up = linear(x, weight, bias, packed, may_split=True)
    if isinstance(packed, BatchInvariantGemm):  # on CUDA the ordinary kernel is batch-invariant
        return batch_invariant.silu_mul(gate_up, x.dtype)
    return silu_mul(gate_up, x.dtype)


def silu_mul(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `silu(gate) * up` of `gate_up` `[T, 2 * I]`, gate first: `[T, I]` in `dtype`.

    May overwrite `gate_up`. On CUDA `gate_up` may be split-K partials, float32 `[S, T, 2 * I]`; on CPUs it is
    in `dtype` already.
    """
    if gate_up.is_cuda:
        from segue.kernels.triton.gate_up_silu import silu_mul as fused

        return fused(gate_up, dtype)
    if cpu.usable(gate_up):
        return cpu.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def route(
    logits: Tensor, per_token: int, *, renormalise: bool, num_unpadded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the most probable experts of each token, and the weights of their outputs.

    Args:
        logits: `[T, E]`, the router's output.
        per_token: k, the number of experts per token.
        renormalise: whether the weights of a token are scaled to sum to 1; otherwise they are the softmax
            over all experts.
        num_unpadded: int32 `[1]`, on CUDA only: the tokens after this many are padding. They are routed to
            expert E, which does not exist, whatever their logits are.

    Returns:
        The weights, float32, and the experts, of an integer dtype, both `[T, k]`.
    """
    if logits.is_cuda:
        from segue.kernels.triton.moe_routing import route as fused

        return fused(logits, per_token, renormalise=renormalise, num_unpadded=num_unpadded)
    assert num_unpadded is None, "steps are padded on CUDA only"
    weights, experts = F.softmax(logits, dim=-1, dtype=torch.float32).topk(per_token, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights), experts


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns the log-probabilities, float32 `[n, k]`, of `ids` (int64 `[n, k]`) under `logits`.

    `logits` are float32 `[n, V]`. The k ids of a row are alternatives for the same position.
    """
    if logits.is_cuda:
        from segue.kernels.triton.sampling import log_sum_exp

        return logits.gather(-1, ids) - log_sum_exp(logits)[:, None]
    # torch.log_softmax computes each row in one thread, unlike torch.logsumexp, and takes half as long.
    return torch.log_softmax(logits, dim=-1).gather(-1, ids)
