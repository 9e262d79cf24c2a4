"""Which prefill rank sends which KV heads to which decode rank, for any two tensor-parallel sizes.

A page is ``[num_layers, 2, page_size, num_heads, head_dim]`` on each rank (``kvcache/pool.py``), where the
heads are a contiguous range of the model's. A row is the heads of one token, key or value, in one layer. So
what one rank sends to another is one range of heads in every row.

A transport either writes these ranges where they belong, row by row, or it sends them as *pieces*. A piece is
the range of all rows of a page, one row behind the other. The pieces of a page lie behind each other in the
order of their heads, and fill it, because the ranges do. The reader then puts the heads in order in the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from segue.errors import TransportError


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """What one page of a rank's KV pool holds."""

    num_layers: int
    page_size: int  # tokens
    num_heads: int  # KV heads of this rank
    head_bytes: int  # of one head of one token, key or value

    @property
    def num_rows(self) -> int:
        """The rows of a page: one per layer, key or value, and token."""
        return self.num_layers * 2 * self.page_size

    @property
    def page_bytes(self) -> int:
        """The bytes of a page."""
        return self.num_rows * self.num_heads * self.head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRoute:
    """The heads that one prefill rank sends to one decode rank. Heads are counted from a rank's first."""

    source_rank: int  # of the prefill worker
    target_rank: int  # of the decode worker
    source_head: int  # the first one to send
    target_head: int  # where it goes
    num_heads: int

    def has_whole_source(self, source: PageShape) -> bool:
        """Whether the heads are all of the source's, so that its page is the piece."""
        return self.num_heads == source.num_heads

    def covers(self, source: PageShape, target: PageShape) -> bool:
        """Whether the heads are all heads of both ranks, so that whole pages are sent."""
        return self.num_heads == source.num_heads == target.num_heads

    def check(self, source: PageShape, target: PageShape) -> None:
        """Raise TransportError if pages of the two shapes cannot be sent on this route."""
        for name in ("num_layers", "page_size", "head_bytes"):
            ours, theirs = getattr(source, name), getattr(target, name)
            if ours != theirs:
                raise TransportError(
                    f"pages cannot be sent from a KV pool with {name}={ours} to one with {name}={theirs}; "
                    "they must be equal. Start both workers with the same model, page size and dtype"
                )
        for first, shape, rank in (
            (self.source_head, source, f"prefill rank {self.source_rank}"),
            (self.target_head, target, f"decode rank {self.target_rank}"),
        ):
            if not 0 <= first < first + self.num_heads <= shape.num_heads:
                raise TransportError(
                    f"the route needs the KV heads {first} to {first + self.num_heads - 1} of {rank}, which "
                    f"has {shape.num_heads}. Plan routes with the tensor-parallel sizes of the two workers"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSpan:
    """Where the piece of a route lies within a page of the target, in bytes."""

    start: int
    num_bytes: int


def piece_span(route: HeadRoute, target: PageShape) -> PieceSpan:
    """Return where a route's piece goes, behind those of the heads before it."""
    per_head = target.num_rows * target.head_bytes
    return PieceSpan(start=route.target_head * per_head, num_bytes=route.num_heads * per_head)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRuns:
    """What a route copies of each page, in bytes: one run per row, with gaps in the source or the target."""

    num_rows: int  # of a page
    source_start: int  # of the first row's run, from the beginning of the page
    target_start: int
    source_row: int  # from one row to the next; pages follow each other without a gap
    target_row: int
    run: int


def row_runs(route: HeadRoute, source: PageShape, target: PageShape) -> RowRuns:
    """Return what a route copies between pages of two shapes, which `HeadRoute.check` has accepted."""
    head = source.head_bytes
    return RowRuns(
        num_rows=source.num_rows,
        source_start=route.source_head * head,
        target_start=route.target_head * head,
        source_row=source.num_heads * head,
        target_row=target.num_heads * head,
        run=route.num_heads * head,
    )


def heads_of(rank: int, tp: int, kv_heads: int) -> range:
    """Return the model's KV heads that a rank holds, as ``models/sharding.py`` gives them out.

    With more ranks than heads, ``tp / kv_heads`` neighbouring ranks hold the same head.
    """
    first = rank * kv_heads // tp
    return range(first, first + max(1, kv_heads // tp))


def fits(tp: int, kv_heads: int) -> bool:
    """Whether so many ranks can share so many KV heads: one number divides the other one."""
    return tp > 0 and kv_heads > 0 and not (kv_heads % tp and tp % kv_heads)


def plan(p_tp: int, d_tp: int, kv_heads: int) -> tuple[HeadRoute, ...]:
    """Return the routes from ``p_tp`` prefill ranks to ``d_tp`` decode ranks, by target and head.

    Each head of each decode rank comes on exactly one route, from the lowest prefill rank that has it.
    ``kv_heads`` is the number of the model. Two ranks have at most one route.

    Raises:
        TransportError: a tensor-parallel size is neither a divisor nor a multiple of ``kv_heads``.
    """
    for tp in (p_tp, d_tp):
        if not fits(tp, kv_heads):
            raise TransportError(
                f"tensor-parallel size {tp} does not fit {kv_heads} KV heads: it must be a divisor or a "
                "multiple of their number. Start the worker with another --tp"
            )
    copies = max(1, p_tp // kv_heads)  # prefill ranks that hold the same head
    routes = []
    for target_rank in range(d_tp):
        target = heads_of(target_rank, d_tp, kv_heads)
        for source_rank in range(0, p_tp, copies):
            source = heads_of(source_rank, p_tp, kv_heads)
            first, stop = max(source.start, target.start), min(source.stop, target.stop)
            if first < stop:
                route = HeadRoute(
                    source_rank=source_rank,
                    target_rank=target_rank,
                    source_head=first - source.start,
                    target_head=first - target.start,
                    num_heads=stop - first,
                )
                routes.append(route)
    return tuple(routes)


@lru_cache(maxsize=64)
def split_routes(p_tp: int, d_tp: int, kv_heads: int) -> tuple[HeadRoute, ...]:
    """Return the routes to decode ranks whose heads come from several prefill ranks, in the order of `plan`.

    Raises:
        TransportError: as `plan`.
    """
    routes = plan(p_tp, d_tp, kv_heads)
    counts = [0] * d_tp
    for route in routes:
        counts[route.target_rank] += 1
    return tuple(route for route in routes if counts[route.target_rank] > 1)
