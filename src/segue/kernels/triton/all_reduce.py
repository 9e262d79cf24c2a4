"""One-shot all-reduce over tensor-parallel ranks for few rows, fused with the operation that follows the sum.

Every rank writes its summand into an inbox of every other rank, in words of 64 bits: 32 bits of data and a
32-bit flag. A receiver that reads the flag of the current exchange in a word has read the word's data too, so
there is no other synchronisation, and a word crosses NVLink once. The flag is an epoch that each program
counts on the device, so that graphs replay without the host. Every inbox has two halves, used by the epoch's
parity. A rank writes epoch e + 2 after it has received all of epoch e + 1, which the other ranks sent after
their kernels of epoch e had ended; so epoch e has been read by then.

All ranks add in the order of the ranks, so all ranks get the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.distributed.groups import TPGroups
from segue.kernels.triton.gemm import load_split_k
from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait
from segue.sizes import ceil_div, next_power_of_2

MAX_BYTES = 3 << 20  # maximum of the words a rank sends; above it NCCL is faster (bench/tensor_parallel.py)
# Programs per row; 1, 4 and 8 take 4.3, 3.3 and 3.1 µs for one row of 4096 on two H200s.
_CHUNKS = tl.constexpr(8)
_WORD_BYTES = 8
_CANDIDATE_WORDS = 8  # words of a rank's candidate for a row's token; only the first five carry data
NO_RANKS = {"inboxes": None, "epochs": None, "max_rows": 0, "RANK": 0, "WORLD": 1}
"""The arguments of a kernel that may exchange data between ranks, where there is one rank."""


@triton.jit
def _flag(epoch):
    """Returns the epoch of an exchange in the upper 32 bits of a word, where receivers look for it."""
    return epoch.to(tl.uint32, bitcast=True).to(tl.uint64) << 32


@triton.jit
def _inbox(inboxes, rank, epoch, half):
    """Returns the half of the inbox of `rank` that this epoch uses."""
    inbox = tl.multiple_of(tl.load(inboxes + rank).to(tl.pointer_type(tl.uint64)), 16)
    return inbox + (epoch & 1).to(tl.int64) * half


@triton.jit
def _receive(words, inside, flag):
    """Wait until all `words` have the flag; returns their data (uint32).

    There have to be at least as many words as threads: if two threads read the same word, one may see the
    flag earlier, and their loops would diverge.
    """
    got = tl.load(words, mask=inside, other=flag, volatile=True)
    while tl.max(((got >> 32) != (flag >> 32)).to(tl.int32), 0) != 0:
        got = tl.load(words, mask=inside, other=flag, volatile=True)
    return (got & 0xFFFFFFFF).to(tl.uint32)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm(
    x,
    residual,
    weight,
    normed,
    total_out,
    inboxes,
    epochs,
    squares,
    num_rows,
    size,
    width,
    max_rows,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum `width` columns of a row over the ranks, add the residual, and normalise; see `add_rms_norm`.

    A row has _CHUNKS programs. They exchange their sums of squares through `squares`, in words with the same
    flag, because the norm needs the whole row. BLOCK is a power of two that holds `width`.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    columns = chunk * width + lane
    inside = (lane < width) & (columns < size)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    program = row * _CHUNKS + chunk
    epoch = tl.load(epochs + program) + 1
    flag = _flag(epoch)
    half = tl.full((), WORLD, tl.int64) * max_rows * size
    own = load_split_k(x + row * size, columns, num_rows.to(tl.int64) * size, inside, SPLITS)
    word = flag | own.to(tl.uint32, bitcast=True).to(tl.uint64)
    for step in tl.static_range(1, WORLD):
        inbox = _inbox(inboxes, (RANK + step) % WORLD, epoch, half)
        tl.store(inbox + (RANK * max_rows + row) * size + columns, word, mask=inside)
    total = tl.zeros((BLOCK,), tl.float32)
    inbox = _inbox(inboxes, RANK, epoch, half)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += own
        else:
            words = inbox + (rank * max_rows + row) * size + columns
            total += _receive(words, inside, flag).to(tl.float32, bitcast=True)
    if residual is not None:
        total += tl.load(residual + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    pdl_launch_dependents(PDL)
    rounded = total.to(total_out.dtype.element_ty)
    tl.store(total_out + row * size + columns, rounded, mask=inside)
    wide = tl.where(inside, rounded.to(tl.float32), 0.0)
    square = tl.sum(wide * wide, 0)
    # Sum the squares over the row's programs, which run at the same time.
    tl.store(squares + program, flag | square.to(tl.uint32, bitcast=True).to(tl.uint64))
    thread = tl.arange(0, THREADS)
    got = _receive(squares + row * _CHUNKS + thread, thread < _CHUNKS, flag)
    square = tl.sum(got.to(tl.float32, bitcast=True), 0)
    rms = tl.rsqrt(square / size + eps)
    tl.store(normed + row * size + columns, wide * rms * scale, mask=inside)
    tl.store(epochs + program, epoch)


@triton.jit
def best_of_ranks(
    score, token, logit, total, row, inboxes, epochs, max_rows, RANK: tl.constexpr, WORLD: tl.constexpr
):
    """Exchange one candidate per rank; returns the one with the highest score, for programs of one warp.

    Among equal scores the lowest token wins. Returns the candidate's score, token and logit, and the
    log-sum-exp over all ranks; `total` is this rank's log-sum-exp. No score may be NaN. A candidate takes
    five words of 32 bits: two of the score (float64), the token, the logit and the log-sum-exp.
    """
    epoch = tl.load(epochs + row) + 1
    flag = _flag(epoch)
    half = tl.full((), WORLD * 8, tl.int64) * max_rows
    lane = tl.arange(0, 32)
    used = lane < 8
    bits = score.to(tl.uint64, bitcast=True)
    data = tl.where(lane == 0, bits >> 32, bits & 0xFFFFFFFF)
    data = tl.where(lane == 2, token.to(tl.uint32, bitcast=True).to(tl.uint64), data)
    data = tl.where(lane == 3, logit.to(tl.uint32, bitcast=True).to(tl.uint64), data)
    data = tl.where(lane == 4, total.to(tl.uint32, bitcast=True).to(tl.uint64), data)
    for step in tl.static_range(1, WORLD):
        inbox = _inbox(inboxes, (RANK + step) % WORLD, epoch, half)
        tl.store(inbox + (RANK * max_rows + row) * 8 + lane, flag | data, mask=used)
    inbox = _inbox(inboxes, RANK, epoch, half)
    best = tl.full((), float("-inf"), tl.float64)
    best_token = tl.full((), 2147483647, tl.int32)
    best_logit = tl.full((), float("-inf"), tl.float32)
    high = tl.full((), float("-inf"), tl.float32)
    sum_ = tl.full((), 0.0, tl.float32)
    for rank in tl.static_range(WORLD):
        words = inbox + (rank * max_rows + row) * 8 + lane
        got = data if rank == RANK else _receive(words, used, flag).to(tl.uint64)
        got_bits = (_lane_value(got, lane, 0) << 32) | _lane_value(got, lane, 1)
        got_score = got_bits.to(tl.float64, bitcast=True)
        got_token = _lane_value(got, lane, 2).to(tl.uint32).to(tl.int32, bitcast=True)
        got_logit = _lane_value(got, lane, 3).to(tl.uint32).to(tl.float32, bitcast=True)
        got_total = _lane_value(got, lane, 4).to(tl.uint32).to(tl.float32, bitcast=True)
        better = (got_score > best) | ((got_score == best) & (got_token < best_token))
        best = tl.where(better, got_score, best)
        best_token = tl.where(better, got_token, best_token)
        best_logit = tl.where(better, got_logit, best_logit)
        top = tl.maximum(high, got_total)
        sum_ = sum_ * tl.exp(high - top) + tl.exp(got_total - top)
        high = top
    tl.store(epochs + row, epoch)
    return best, best_token, best_logit, high + tl.log(sum_)


@triton.jit
def _lane_value(values, lane, index: tl.constexpr):
    """Returns the value of lane `index` of a vector of one value per lane."""
    return tl.sum(tl.where(lane == index, values, 0), 0)


class OneShotAllReduce:
    """One rank's inboxes and epochs, and the operations on them.

    There are two exchanges: of summands (`add_rms_norm`, at most `max_rows` rows) and of candidates
    (`best_of_ranks`). Each has its own inboxes and epochs, the inboxes in one shared allocation of
    `num_bytes`.
    """

    def __init__(self, groups: TPGroups, device: torch.device, hidden_size: int, sampling_rows: int) -> None:
        """Allocate the inboxes; collective. `sampling_rows` is the maximum of rows for `best_of_ranks`."""
        tp = groups.tp
        self.max_rows = MAX_BYTES // (_WORD_BYTES * hidden_size * (tp.size - 1))
        # The bytes of the summands' inboxes, which the candidates' follow: two halves, with a part per rank.
        sums = 2 * tp.size * self.max_rows * hidden_size * _WORD_BYTES
        self.num_bytes = sums + 2 * tp.size * sampling_rows * _CANDIDATE_WORDS * _WORD_BYTES
        addresses, self._memory = groups.share(device, self.num_bytes)
        # The addresses of all ranks' inboxes, in this process.
        inboxes = torch.tensor(addresses, dtype=torch.int64, device=device)
        programs = self.max_rows * _CHUNKS.value
        self._squares = torch.zeros(programs, dtype=torch.uint64, device=device)
        # The arguments by which kernels find the inboxes: of `add_rms_norm`, and of `best_of_ranks`.
        ranks: dict[str, object] = {"RANK": tp.rank, "WORLD": tp.size}
        epochs = torch.zeros(programs, dtype=torch.int32, device=device)
        self._sums = {"inboxes": inboxes, "epochs": epochs, "max_rows": self.max_rows, **ranks}
        epochs = torch.zeros(sampling_rows, dtype=torch.int32, device=device)
        self.candidates = {"inboxes": inboxes + sums, "epochs": epochs, "max_rows": sampling_rows, **ranks}

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns `segue.kernels.ops.add_rms_norm` of the sum of all ranks' `x`, at most `max_rows` tokens.

        `x` may be split-K partials, float32 `[S, T, N]`.
        """
        num_rows, size = x.shape[-2:]
        assert num_rows <= self.max_rows, (num_rows, self.max_rows)
        normed = torch.empty((num_rows, size), dtype=weight.dtype, device=x.device)
        total = torch.empty_like(normed)
        width = ceil_div(size, _CHUNKS.value)
        block = max(32, next_power_of_2(width))
        warps = min(8, max(1, block // 256))
        _add_rms_norm[(_CHUNKS.value, num_rows)](
            x=x,
            residual=residual,
            weight=weight,
            normed=normed,
            total_out=total,
            squares=self._squares,
            num_rows=num_rows,
            size=size,
            width=width,
            eps=eps,
            SPLITS=x.shape[0] if x.dim() == 3 else 1,
            BLOCK=block,
            THREADS=32 * warps,
            **self._sums,
            **launch_options(warps, num_rows),
        )
        return normed, total
