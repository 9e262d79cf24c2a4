"""Captured steps: one CUDA graph a bucket, replayed with new values at the same addresses.

Five kinds share one memory pool. `decode`: a step of so many decode rows, from token ids to sampled tokens.
`forward`: any step of so many tokens, up to the hidden states of the rows that sample. `prompts`: a forward
graph with no place for decode rows. `grid`: another, with each prompt padded to one length, by number and
length of the prompts. `sampling`: logits and plain sampling of so many rows, behind one of these three.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from segue.messages.requests import SamplingMode
from segue.messages.steps import EagerReason, StepPlan

# Trunks are captured up to the size at which computing takes twice as long as launching does: half a
# millisecond a layer (measured), against two operations a weight and token at a speed that devices reach.
_LAYER_S, _OPERATIONS_PER_S = 2 * 0.5e-3, 4e14
_LEAST_TRUNK_TOKENS = 1024
MOST_ROWS = 512  # larger batches run eagerly: their logits alone would take the memory that graphs may have
MOST_PADDING = 2  # a step runs eagerly rather than padded to more than so many times its tokens
_LEAST_TOKENS = 16  # any step may be padded to so many: they cost what one does
# A captured forward graph has room for so many prompts, and for one more with so many tokens.
_PROMPTS, _PER_PROMPT = 32, 16  # a group of RL samples whose prompt is cached brings many of a few tokens
# Prompts alone have graphs without a place for decode rows where that is felt: in steps of few tokens, and in
# those of many, where attention over long prompts also pays for every place that stays empty (measured with
# FlashAttention-3 at 8,192 tokens: 145 us a layer for 4 prompts, 150 with room for 257).
_SHORT, _LONG, _PER_LONG_PROMPT = 256, 2048, 128

Size = TypeVar("Size", int, tuple[int, int])


class GraphMismatchError(RuntimeError):
    """A replay gave other bits than the same step run eagerly. Fatal: nothing it made can be trusted."""


class Graphs(Generic[Size]):
    """Captured graphs of one kind, by size."""

    def __init__(self, name: str, pool: Any, run: Callable[[Size], object], checked: Tensor | None) -> None:
        """`run(size)` is what a graph repeats.

        Args:
            name: of the kind, for messages.
            pool: of `torch.cuda.graph_pool_handle`, the memory that all kinds share.
            run: computes a step of a size from the static inputs; running it twice must change nothing.
            checked: what `run` writes, one line a row, to be compared after every replay; None: no check.
        """
        self._name = name
        self._pool = pool
        self._run: Callable[[Size], object] = run
        self._checked = checked
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}

    def capture(
        self, sizes: Iterable[Size], has_room: Callable[[], bool], *, warm_ups: int = 1
    ) -> list[Size]:
        """Capture every size, each after `warm_ups` eager runs.

        The largest comes first, into whose memory the others fit; then the smallest and so on, because small
        steps lose most when they are not captured.

        Returns the sizes left out because `has_room` said no.
        """
        left = sorted(sizes)
        left = left[-1:] + left[:-1]
        while left and has_room():
            size = left.pop(0)
            for _ in range(warm_ups):
                self._run(size)
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._run(size)
            graph.capture_end()
            self._graphs[size] = graph
        return left

    @property
    def sizes(self) -> list[Size]:
        """Captured sizes, ascending."""
        return sorted(self._graphs)

    def replay(self, size: Size, rows: int) -> None:
        """Run the graph of a captured size on the current stream; its first `rows` rows are not padding.

        Raises:
            GraphMismatchError: the outputs are checked, and differ.
        """
        self._graphs[size].replay()
        if self._checked is not None:
            self._check(size, self._checked[:rows])

    def _check(self, size: Size, output: Tensor) -> None:
        replayed = output.clone()
        output.fill_(float("nan"))
        self._run(size)
        if not torch.equal(replayed.view(torch.uint8), output.view(torch.uint8)):
            apart = (replayed.float() - output.float()).abs()
            count, most = int((apart != 0).sum()), float(apart.nan_to_num(float("inf")).max())
            raise GraphMismatchError(
                f"the {self._name} graph of size {size} is wrong: {count} of {apart.numel()} values differ "
                f"from those of the same step run eagerly, by at most {most:.3g}; serve with "
                f"--disable-cuda-graph, and report this"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladders:
    """Captured sizes by kind, ascending; the same on every rank."""

    sampling_modes: Sequence[SamplingMode] = ("plain", "filtered")  # that graphs have
    decode: Sequence[int] = ()
    forward: Sequence[int] = ()
    prompts: Sequence[int] = ()
    grid: Sequence[tuple[int, int]] = ()


class Route(NamedTuple):
    """How a step runs."""

    kind: Literal["decode", "forward", "prompts", "grid", "eager"]
    tokens: int  # computed, padding included
    prompts: int = 0  # of the grid, which share the tokens evenly
    reason: EagerReason | None = None  # why not with a graph


def route(plan: StepPlan, ladders: Ladders) -> Route:
    """The smallest graph that holds a step. A function of these two alone: all ranks come to the same."""
    count, sequences = plan.num_tokens, len(plan.slots)
    if not ladders.forward and not ladders.decode:
        return Route("eager", count, reason="disabled")
    if plan.num_decode == sequences and plan.sampling_mode in ladders.sampling_modes:
        rows = pick(ladders.decode, sequences)
        if rows is not None:
            return Route("decode", rows)
    if sum(plan.num_logits) > sum(plan.samples):
        return Route("eager", count, reason="prompt_logprobs")
    if plan.num_decode == 0:
        size = pick_grid(ladders.grid, sequences, max(plan.lens), count)
        if size is not None:
            return Route("grid", size[0] * size[1], prompts=size[0])
    tokens = pick(ladders.forward, count)
    alone = pick(ladders.prompts, count) if plan.num_decode == 0 else None
    if alone is not None and sequences <= most_prompts_alone(alone) and alone <= (tokens or alone):
        return Route("prompts", alone)
    if tokens is None:
        return Route("eager", count, reason="tokens")
    if sequences - plan.num_decode > most_prompts(tokens):
        return Route("eager", count, reason="prompts")
    return Route("forward", tokens)


def pick(sizes: Sequence[int], size: int) -> int | None:
    """The smallest of `sizes`, in ascending order, that holds `size`; None: none, or mostly padding."""
    at = bisect_left(sizes, size)
    if at == len(sizes) or sizes[at] > _most_padded(size):
        return None
    return sizes[at]


def pick_grid(
    sizes: Sequence[tuple[int, int]], sequences: int, max_len: int, tokens: int
) -> tuple[int, int] | None:
    """As `pick`, of `(prompts, tokens per prompt)`, for so many sequences, of so many tokens together."""
    fitting = [size for size in sizes if size[0] >= sequences and size[1] >= max_len]
    best = min(fitting, key=lambda size: size[0] * size[1], default=None)
    if best is None or best[0] * best[1] > _most_padded(tokens):
        return None
    return best


def _most_padded(tokens: int) -> int:
    return max(MOST_PADDING * tokens, _LEAST_TOKENS)


def most_prompts(tokens: int) -> int:
    """Prompts that a forward graph of `tokens` tokens has room for."""
    return _PROMPTS + tokens // _PER_PROMPT


def most_prompts_alone(tokens: int) -> int:
    """Prompts that a graph of `tokens` tokens of prompts alone has room for."""
    return most_prompts(tokens) if tokens < _LONG else _PROMPTS + tokens // _PER_LONG_PROMPT


def prompt_sizes(sizes: Sequence[int]) -> list[int]:
    """Buckets for steps of prompts alone: those of `token_sizes` that are short or long."""
    return [size for size in sizes if size <= _SHORT or size >= _LONG]


def row_sizes(most: int, given: Sequence[int] | None = None) -> list[int]:
    """Buckets for decode rows and for sampling rows, up to `most`; those `given`, if any are."""
    if given is not None:
        return _up_to(most, given)
    most = min(most, MOST_ROWS)
    steps = [*range(1, 9), *range(12, 33, 4), *range(40, 129, 8), *range(144, most + 1, 16)]
    return sorted({min(size, most) for size in [*steps, most]})


def token_sizes(most: int, worth: int = _LEAST_TRUNK_TOKENS, given: Sequence[int] | None = None) -> list[int]:
    """Buckets for steps of up to `most` tokens, fine where chat turns lie; none larger than `worth`.

    The last is `most` itself, if that is worth it: a whole chunk beside decode rows is no rare step. If any
    are `given`, those up to `most` instead.
    """
    if given is not None:
        return _up_to(most, given)
    sizes, size, step = [], 0, 16
    while size + step <= min(most, worth):
        size += step
        sizes.append(size)
        if size >= 256 and size == 16 * step:
            step *= 2
    return [*sizes, most] if size < most <= worth else sizes


def _up_to(most: int, given: Sequence[int]) -> list[int]:
    return sorted({size for size in given if size <= most})


def max_forward_graph_tokens(num_layers: int, weights: int) -> int:
    """The largest forward graph worth capturing for layers with so many weights that a token goes through."""
    return max(_LEAST_TRUNK_TOKENS, int(num_layers * _LAYER_S * _OPERATIONS_PER_S / (2 * weights)))


def grid_sizes(
    prompts: Sequence[int], lengths: Sequence[int], *, max_len: int, rows: int, tokens: int
) -> list[tuple[int, int]]:
    """Buckets of the grid: those of at most `max_len` tokens per prompt that a step of a runner can have.

    Args:
        prompts: numbers of prompts.
        lengths: tokens of one.
        max_len: the longest length to capture.
        rows: sequences that can run.
        tokens: tokens a step can have, padding included.
    """
    return sorted(
        {
            (n, length)
            for n in prompts
            for length in lengths
            if length <= max_len and n <= rows and n * length <= tokens
        }
    )
