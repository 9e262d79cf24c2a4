"""The number of KV pages: the page-count formula, and the ranks' agreement on free memory.

Every pool has one page more than it is said to have: the scratch page, which padding writes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from segue.errors import MemoryImbalanceError, OutOfMemoryError
from segue.sizes import ceil_div, round_up

GIB = 1 << 30
MIB = 1 << 20

PARKED_GRANULARITY = 2 * MIB  # an engine that stands by maps its two KV pages in blocks of this size

MIN_PAGES = 2
MAX_IMBALANCE = 2 * GIB
CPU_POOL_LIMIT = 4 * GIB
GRAPH_RESERVE = 1 * GIB  # CUDA graphs and their private memory pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Bytes of one rank that are neither weights nor KV pages."""

    batch_state: int
    derived: int = 0  # copies of weights in another layout, made for speed
    activations: int = 0  # peak of one eager step of the largest chunk
    sampling: int = 0  # temporaries of the sampler, with every parameter in use and every slot running
    graphs: int = 0
    staging: int = 0  # for weight updates, --weight-staging-gb

    @property
    def total(self) -> int:
        """The sum, in bytes."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The inputs of the page count. Sizes are in bytes per rank, unless stated otherwise."""

    free_before: int  # free memory before the weights were loaded: the minimum of all ranks
    memory_ratio: float  # share of free_before that the engine may use
    arena_bytes: int
    reserve: Reserve
    page_bytes: int
    page_size: int  # tokens
    max_len: int  # tokens: the model's longest sequence, or --max-model-len if that is shorter
    max_running_requests: int
    local_ranks: int = 1  # ranks that share this memory: 1 on CUDA, all ranks of the host on CPU
    num_engines: int = 1  # with equal sizes on this device: the one that serves, and those that stand by
    is_arena_shared: bool = False  # whether these engines have one copy of the weights
    parks_kv: bool = False  # whether those that stand by have two pages of their KV cache alone
    # Largest pool in bytes, CPU only. A CPU pool is also limited to what all requests at full length need.
    pool_limit: int | None = None

    @property
    def fixed_bytes(self) -> int:
        """The bytes of one rank that are not for KV pages, of all engines on this device."""
        copies = 1 if self.is_arena_shared else self.num_engines
        parked = (self.num_engines - 1) * self.parked_bytes if self.parks_kv else 0
        return copies * self.arena_bytes + self.num_engines * self.reserve.total + parked

    @property
    def num_pools(self) -> int:
        """The KV caches of one rank that are there at the same time, of all engines on this device."""
        return 1 if self.parks_kv else self.num_engines

    @property
    def parked_bytes(self) -> int:
        """The bytes of KV cache that one rank of an engine has at most which stands by, if it parks them."""
        return 2 * round_up(self.page_bytes, PARKED_GRANULARITY) + PARKED_GRANULARITY

    def without_graphs(self) -> Demand:
        """Return the same demand without the reserve for CUDA graphs."""
        return replace(self, reserve=replace(self.reserve, graphs=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The size of the KV cache, the same on all ranks."""

    num_pages: int
    max_seq_len: int  # tokens of the longest possible request
    limited_by: str  # what limited num_pages, for the log


def formula_pages(demand: Demand) -> int:
    """Return the number of pages that fit, without the scratch page. It may be negative.

    If ranks or engines share one memory, the weights and reserves of all are subtracted, and the rest is
    split evenly. Weights that engines share are subtracted once, and engines that park their KV cache share
    the rest: only the one that serves has a whole one.
    """
    usable = int(demand.memory_ratio * demand.free_before)
    rest = usable - demand.local_ranks * demand.fixed_bytes
    return rest // (demand.local_ranks * demand.num_pools * demand.page_bytes) - 1


def plan_pages(demand: Demand, num_kv_tokens: int | None = None) -> Budget:
    """Decide the number of KV pages and the longest sequence.

    Args:
        demand: sizes and limits.
        num_kv_tokens: set by the user; it replaces the formula and its limits, but must fit in free memory.

    Raises:
        OutOfMemoryError: fewer than two pages fit, or `num_kv_tokens` needs more memory than is free.
    """
    if num_kv_tokens is None:
        num_pages, limited_by = _automatic_pages(demand)
    else:
        num_pages, limited_by = _explicit_pages(demand, num_kv_tokens), "--num-kv-tokens"
    return Budget(
        num_pages=num_pages,
        max_seq_len=min(demand.max_len, num_pages * demand.page_size),
        limited_by=limited_by,
    )


def afford_graphs(demand: Demand, num_kv_tokens: int | None = None) -> bool:
    """Whether there is memory for CUDA graphs: the KV cache must get at least as many bytes as they reserve.

    If the user has set the number of KV tokens, both must fit.
    """
    if num_kv_tokens is None:
        return formula_pages(demand) * demand.page_bytes >= demand.reserve.graphs
    return _explicit_bytes(demand, ceil_div(num_kv_tokens, demand.page_size)) <= demand.free_before


def _automatic_pages(demand: Demand) -> tuple[int, str]:
    """Return the smallest of all limits on the number of pages, and for the log what set that limit.

    Free memory always limits it. On a CPU two further limits keep the pool from taking all of the host.
    """
    limits = [(formula_pages(demand), "free memory")]
    if demand.pool_limit is not None:
        full_length = max(MIN_PAGES, demand.max_running_requests * ceil_div(demand.max_len, demand.page_size))
        limits.append((full_length, f"{demand.max_running_requests} requests of {demand.max_len} tokens"))
        limit = demand.pool_limit // demand.page_bytes - 1
        limits.append((limit, f"the limit of {gib(demand.pool_limit)} on CPU"))
    num_pages, limited_by = min(limits)
    if num_pages < MIN_PAGES:
        ranks = f" for {demand.local_ranks} ranks" if demand.local_ranks > 1 else ""
        ranks += f" of {demand.num_engines} engines" if demand.num_engines > 1 else ""
        raise OutOfMemoryError(
            f"the KV cache has room for {max(0, num_pages)} pages of {demand.page_size} tokens "
            f"({demand.page_bytes} bytes each); at least {MIN_PAGES} are needed. Before loading, "
            f"{gib(demand.free_before)} were free{ranks}, usable at memory_ratio {demand.memory_ratio}; each "
            f"rank needs {gib(demand.arena_bytes)} for weights and {gib(demand.reserve.total)} for "
            f"activations and buffers. Raise --memory-ratio; lower --chunked-prefill-size, "
            f"--max-running-requests or --page-size; use a smaller model; or free memory",
            param="memory_ratio",
        )
    return num_pages, limited_by


def _explicit_pages(demand: Demand, num_kv_tokens: int) -> int:
    """Return the pages for the number of tokens that the user has set; refuse it if it cannot work.

    Here `memory_ratio` does not apply: the user's number may use all memory that is free.
    """
    num_pages = ceil_div(num_kv_tokens, demand.page_size)
    needed = _explicit_bytes(demand, num_pages)
    if needed > demand.free_before:
        raise OutOfMemoryError(
            f"num_kv_tokens={num_kv_tokens} needs {gib(needed)}, with weights and buffers, but only "
            f"{gib(demand.free_before)} is free; lower --num-kv-tokens",
            param="num_kv_tokens",
        )
    if num_pages < MIN_PAGES:
        raise OutOfMemoryError(
            f"num_kv_tokens gives {num_pages} KV page of {demand.page_size} tokens; at least {MIN_PAGES} are "
            f"needed: raise --num-kv-tokens to {MIN_PAGES * demand.page_size} or more, or lower --page-size",
            param="num_kv_tokens",
        )
    return num_pages


def _explicit_bytes(demand: Demand, num_pages: int) -> int:
    """Return the bytes of weights, reserves and `num_pages` KV pages, for all ranks that share the memory."""
    each = demand.arena_bytes + demand.reserve.total + (num_pages + 1) * demand.page_bytes
    return demand.local_ranks * each


def standby_bytes(demand: Demand, kv_bytes: int) -> int:
    """Return the bytes that an engine still needs, with its weights loaded, beside one of its cohort.

    An engine that parks its KV cache of `kv_bytes` needs little of it: when it wakes, the one before it has
    ended, whose memory it then has.
    """
    reserve = demand.reserve.total - demand.reserve.derived  # which was made with the weights
    kv = min(kv_bytes, demand.parked_bytes) if demand.parks_kv else kv_bytes
    return demand.local_ranks * (reserve + kv)


def check_standby(demand: Demand, free: int, kv_bytes: int) -> None:
    """Check that an engine can have what the engines beside it have; `free` is measured after the load.

    Raises:
        OutOfMemoryError: the device has too little memory.
    """
    needed = standby_bytes(demand, kv_bytes)
    if needed > free:
        what = "its part of the KV cache while it stands by" if demand.parks_kv else "KV"
        raise OutOfMemoryError(
            f"an engine of this cohort needs {gib(needed)} for {what}, activations and buffers, like those "
            f"beside it, but only {gib(free)} is free: {gib(needed - free)} are missing. End other processes "
            "on the device; or end all engines of the cohort, and start them with the right --num-shadows, a "
            "lower --memory-ratio or a lower --num-kv-tokens",
            param="num_shadows",
        )


def agree_on_free(free: Sequence[int], *, separate: bool) -> int:
    """Return the minimum of all ranks' free memory.

    Args:
        free: bytes free on each rank, by rank.
        separate: whether each rank has its own memory (CUDA). Ranks on the CPU measure the same memory at
            slightly different times, so that differences between them mean nothing.

    Raises:
        MemoryImbalanceError: the memories are separate, and those of two ranks differ by more than 2 GiB.
    """
    least, most = min(free), max(free)
    if separate and most - least > MAX_IMBALANCE:
        low, high = free.index(least), free.index(most)
        raise MemoryImbalanceError(
            f"rank {low} has {least} bytes free and rank {high} has {most}: a difference of "
            f"{gib(most - least)}, more than {gib(MAX_IMBALANCE)}. All ranks get as many KV pages, so "
            f"memory would stay unused: end other processes on the device of rank {low}"
        )
    return least


def gib(num_bytes: int) -> str:
    """Return a size as text for logs and errors: `1.50 GiB`, or in MiB below one GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB else f"{num_bytes / MIB:.1f} MiB"
