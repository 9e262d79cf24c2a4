"""Captured steps: one CUDA graph per bucket, replayed with new values at the same addresses.

The kinds of graphs share one memory pool:

- `decode`: a step of decode rows only, from token ids to sampled tokens; one graph per number of rows.
- `guided`: a step of decode rows only, some of them with a grammar, up to the hidden states: their masks come
  while it runs. One graph per power of two.
- `forward`: a step of any kind, up to the hidden states of the tokens that sample; one graph per number of
  tokens.
- `prefill`: a forward graph without room for decode rows.
- `sampling`: logits and plain sampling, replayed after any kind but `decode`; one graph per number of rows.
- `masked`: `sampling` for steps with a grammar.

Further kinds, for steps of prompts alone, register themselves, as the grid does (`grid.py`). A row is a
sequence that decodes or samples. A bucket is a size that is captured: a step is padded up to it.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from segue.kernels.launching import lean_launches
from segue.messages.control import GraphCost
from segue.messages.requests import SamplingMode
from segue.messages.steps import EagerReason, StepPlan

# Forward graphs are captured up to the size at which computing takes twice as long as launching the kernels:
# launching takes 0.5 ms per layer (measured); computing takes two operations per weight and token, at a speed
# that devices reach.
_LAYER_S, _OPERATIONS_PER_S = 2 * 0.5e-3, 4e14
_MIN_FORWARD_GRAPH_TOKENS = 1024
_MOST_OF_DRIVER = 160 << 10  # bytes per layer that the driver takes for one graph; measured: 110 KiB
MAX_ROWS = 512  # larger batches run eagerly: their logits alone would take the memory reserved for graphs
MAX_PADDING = 2  # a step runs eagerly if padding would make it more than twice as large
_MIN_BUCKET = 16  # tokens that any step may be padded to: 16 tokens cost as much as one
# A forward graph has room for 32 prompts, and for one more per 16 tokens: a group of RL samples whose prompt
# is cached brings many prompts of a few tokens each.
_PROMPTS, _PER_PROMPT = 32, 16
# Prefill graphs are captured where they are faster than forward graphs: for few tokens, and for many tokens,
# because attention over long prompts also pays for every sequence that stays empty (measured with
# FlashAttention-3 at 8,192 tokens: 145 us per layer for 4 prompts, 150 with room for 257).
_SHORT, _LONG, _PER_LONG_PROMPT = 256, 2048, 128

Size = TypeVar("Size", int, tuple[int, int])


class GraphMismatchError(RuntimeError):
    """A replay gave other bits than the same step run eagerly. Fatal: its results cannot be trusted."""


@dataclass(eq=False)
class Graphs(Generic[Size]):
    """Captured graphs of one kind, by size; `capture` makes them."""

    name: str  # of the kind, for messages
    to_capture: Sequence[Size]
    run: Callable[[Size], object]  # computes a step of one size; running it twice must change nothing
    pool: Any  # a `torch.cuda.graph_pool_handle`, the memory pool that all kinds share
    # What `run` writes, with one line per row, to be compared after every replay; None: nothing is compared.
    checked: Tensor | None
    # A block in which `run` does each different thing once, and so is short: see `Decoder.distinct_layers`.
    shortened: Callable[[], AbstractContextManager[None]] = nullcontext
    warm_ups: int = 1  # such eager runs before each capture
    _graphs: dict[Size, torch.cuda.CUDAGraph] = field(default_factory=dict, init=False)

    def capture(self, has_room: Callable[[], bool]) -> list[Size]:
        """Capture every size, and replay each graph once: its first replay uploads it to the device.

        So no request pays for that, above all not the first one of an engine that takes over.

        An eager run before each capture loads what CUDA's libraries load when they first see a size, which a
        capture forbids. Equal layers need the same, so one of them is enough, and costs a tenth of a step.
        The device replays a graph while this thread captures the next one.

        The largest size is captured first, because the others fit into its memory. The others follow in
        ascending order, because small steps lose most when they run eagerly.

        Returns the sizes that are not captured because `has_room` returned False.
        """
        left = sorted(self.to_capture)
        left = left[-1:] + left[:-1]
        while left and has_room():
            size = left.pop(0)
            with self.shortened():
                for _ in range(self.warm_ups):
                    self.run(size)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            self.run(size)
            graph.capture_end()
            graph.replay()
            self._graphs[size] = graph
        torch.cuda.current_stream().synchronize()
        return left

    @property
    def sizes(self) -> list[Size]:
        """Captured sizes, ascending."""
        return sorted(self._graphs)

    def replay(self, size: Size, rows: int) -> None:
        """Run the graph of a captured size on the current stream; the rows from `rows` on are padding.

        Raises:
            GraphMismatchError: replays are checked, and the outputs differ from those of an eager run.
        """
        self._graphs[size].replay()
        if self.checked is not None:
            self._check(size, self.checked[:rows])

    def _check(self, size: Size, output: Tensor) -> None:
        """Run the step again, eagerly on the same inputs, and compare its `output` with that of the replay.

        The output is NaN in between, so that a row that the eager run does not write is noticed too.
        """
        replayed = output.clone()
        output.fill_(float("nan"))
        self.run(size)
        if not torch.equal(replayed.view(torch.uint8), output.view(torch.uint8)):
            errors = (replayed.float() - output.float()).abs()
            count, max_error = int((errors != 0).sum()), float(errors.nan_to_num(float("inf")).max())
            raise GraphMismatchError(
                f"the {self.name} graph of size {size} is wrong: {count} of {errors.numel()} values differ "
                f"from those of the same step run eagerly, by at most {max_error:.3g}; serve with "
                f"--disable-cuda-graph, and report this"
            )


class GraphMeter:
    """Measures the bytes of a device that graphs take: those of torch's pools, and those of the driver.

    The driver tells only how much is free. What other processes of the device take or give back meanwhile, a
    KV cache or their own graphs, would count too. So unless this process is alone there, the driver's part
    counts at most `_MOST_OF_DRIVER` per layer and reading, and one reading comes before each graph.
    """

    def __init__(self, device: torch.device, *, num_layers: int, is_alone: bool) -> None:
        self._device = device
        self._most = None if is_alone else num_layers * _MOST_OF_DRIVER
        self._by_driver = 0
        self._reserved_before = self._reserved = torch.cuda.memory_reserved(device)
        self._free = torch.cuda.mem_get_info(device)[0]

    def read(self) -> int:
        """Return the bytes taken since this meter was made; call it before each graph."""
        free, reserved = torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)
        step = (self._free - free) - (reserved - self._reserved)
        self._free, self._reserved = free, reserved
        self._by_driver += step if self._most is None else min(max(0, step), self._most)
        return reserved - self._reserved_before + self._by_driver


def capture_kinds(
    kinds: Mapping[str, Graphs[Any]], taken: Callable[[], int], reserve: int
) -> tuple[dict[str, GraphCost], dict[str, list[Any]]]:
    """Capture the graphs of each kind, in order, as long as all of them together take less than a reserve.

    Args:
        kinds: the graphs to capture, by kind.
        taken: returns the bytes that all graphs so far take; it must return the same on every rank.
        reserve: bytes of device memory.

    Returns:
        What each kind has cost, and the sizes of each kind that are not captured because there is no room.
    """
    costs: dict[str, GraphCost] = {}
    left_out: dict[str, list[Any]] = {}
    before = 0
    with without_collections(), lean_launches():
        for name, graphs in kinds.items():
            started = time.monotonic()
            left = graphs.capture(lambda: taken() < reserve)
            seconds, after = time.monotonic() - started, taken()
            if graphs.sizes:
                costs[name] = GraphCost(
                    num_graphs=len(graphs.sizes), seconds=seconds, num_bytes=max(0, after - before)
                )
            if left:
                left_out[name] = left
            before = after
    return costs, left_out


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in the block: that takes as long as a capture, and may free memory of CUDA."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def describe_costs(costs: Mapping[str, GraphCost]) -> str:
    """Return what the graphs have cost, in words for the log of the start."""
    parts = [
        f"{kind} {cost.num_graphs} in {cost.seconds:.2f} s, {cost.num_bytes / 2**20:.0f} MiB"
        for kind, cost in costs.items()
    ]
    return f"{sum(cost.num_graphs for cost in costs.values())} graphs: {'; '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSizes:
    """The captured sizes of each kind, ascending; the same on every rank."""

    sampling_modes: Sequence[SamplingMode] = ("plain", "filtered")  # the modes that graphs can sample in
    decode: Sequence[int] = ()  # rows
    guided: Sequence[int] = ()  # rows
    sampling: Sequence[int] = ()  # rows
    masked: Sequence[int] = ()  # rows
    forward: Sequence[int] = ()  # tokens
    prefill: Sequence[int] = ()  # tokens
    # Of the kinds that have registered themselves: chooses a graph for a step of prompts alone, if one fits.
    registered: Sequence[Callable[[StepPlan], Route | None]] = ()


class Route(NamedTuple):
    """How a step runs: the kind and the bucket of its graph, or eagerly."""

    kind: str
    tokens: int  # tokens computed, padding included
    prompts: int = 0  # kind "grid": the number of prompts, each padded to `tokens // prompts`
    reason: EagerReason | None = None  # kind "eager": why no graph is used

    @property
    def size(self) -> int | tuple[int, int]:
        """The size of the graph."""
        return (self.prompts, self.tokens // self.prompts) if self.prompts else self.tokens


def choose_route(plan: StepPlan, capture_sizes: CaptureSizes) -> Route:
    """Choose the smallest graph that holds a step.

    The kinds are tried in this order: decode, the registered kinds, prefill, forward. The route depends on
    the arguments only, so all ranks choose the same one.
    """
    count, sequences = plan.num_tokens, len(plan.slots)
    # A decode graph also samples, so it serves only the modes that it was captured with.
    kind, sizes = "decode", capture_sizes.decode
    if plan.sampling_mode == "guided":
        kind, sizes = "guided", capture_sizes.guided
    if not capture_sizes.forward and not capture_sizes.decode:
        return Route("eager", count, reason="disabled")
    if plan.num_decode == sequences and plan.sampling_mode in capture_sizes.sampling_modes:
        rows = find_bucket(sizes, sequences)
        if rows is not None:
            return Route(kind, rows)
    if sum(plan.num_logits) > sum(plan.samples):
        return Route("eager", count, reason="prompt_logprobs")
    for choose in capture_sizes.registered if plan.num_decode == 0 else ():
        route = choose(plan)
        if route is not None:
            return route
    # A prefill graph is taken unless the forward graph pads less.
    tokens = find_bucket(capture_sizes.forward, count)
    prefill = find_bucket(capture_sizes.prefill, count) if plan.num_decode == 0 else None
    if prefill is not None and sequences <= max_prefill_prompts(prefill) and prefill <= (tokens or prefill):
        return Route("prefill", prefill)
    if tokens is None:
        return Route("eager", count, reason="tokens")
    if sequences - plan.num_decode > max_prompts(tokens):
        return Route("eager", count, reason="prompts")
    return Route("forward", tokens)


def find_bucket(sizes: Sequence[int], size: int) -> int | None:
    """Find the smallest of the ascending `sizes` that holds `size`.

    Returns None if no bucket is large enough, or if the step would be mostly padding.
    """
    index = bisect_left(sizes, size)
    if index == len(sizes) or sizes[index] > max_padded_tokens(size):
        return None
    return sizes[index]


def max_padded_tokens(tokens: int) -> int:
    """Return the tokens that a step of `tokens` tokens may be padded to."""
    return max(MAX_PADDING * tokens, _MIN_BUCKET)


def max_prompts(tokens: int) -> int:
    """Return how many prompts a forward graph of `tokens` tokens has room for."""
    return _PROMPTS + tokens // _PER_PROMPT


def max_prefill_prompts(tokens: int) -> int:
    """Return how many prompts a prefill graph of `tokens` tokens has room for."""
    return max_prompts(tokens) if tokens < _LONG else _PROMPTS + tokens // _PER_LONG_PROMPT


def prefill_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the buckets of prefill graphs: the short and the long ones of `sizes`, see `token_sizes`."""
    return [size for size in sizes if size <= _SHORT or size >= _LONG]


def row_sizes(max_rows: int, given: Sequence[int] | None = None) -> list[int]:
    """Return the buckets for decode rows and for sampling rows, up to `max_rows`.

    Sizes that are `given` replace the default ones.
    """
    if given is not None:
        return _up_to(max_rows, given)
    max_rows = min(max_rows, MAX_ROWS)
    steps = [*range(1, 9), *range(12, 33, 4), *range(40, 129, 8), *range(144, max_rows + 1, 16)]
    return sorted({min(size, max_rows) for size in [*steps, max_rows]})


def guided_sizes(rows: Sequence[int]) -> list[int]:
    """Return the buckets of guided decode steps: the powers of two of `row_sizes`, and the last one.

    They are few, because most engines never need them.
    """
    return [size for size in rows if size & (size - 1) == 0 or size == rows[-1]]


def token_sizes(
    max_tokens: int, max_captured: int = _MIN_FORWARD_GRAPH_TOKENS, given: Sequence[int] | None = None
) -> list[int]:
    """Return the buckets for steps of up to `max_tokens` tokens; no bucket is larger than `max_captured`.

    Buckets are close together at the sizes of chat turns. The last one is `max_tokens` itself if it may be
    captured, because a whole chunk beside decode rows is a common step. Sizes that are `given` replace the
    default ones and are limited by `max_tokens` only.
    """
    if given is not None:
        return _up_to(max_tokens, given)
    sizes, size, step = [], 0, 16
    while size + step <= min(max_tokens, max_captured):
        size += step
        sizes.append(size)
        if size >= 256 and size == 16 * step:  # beyond 256 tokens padding stays below an eighth
            step *= 2
    return [*sizes, max_tokens] if size < max_tokens <= max_captured else sizes


def _up_to(max_size: int, given: Sequence[int]) -> list[int]:
    return sorted({size for size in given if size <= max_size})


def max_forward_graph_tokens(num_layers: int, weights: int) -> int:
    """Return the tokens of the largest forward graph to capture.

    `weights` counts the weights of all layers that one token goes through.
    """
    return max(_MIN_FORWARD_GRAPH_TOKENS, int(num_layers * _LAYER_S * _OPERATIONS_PER_S / (2 * weights)))
