"""Shows where the time of one request goes that a prefill engine hands over to a decode engine.

The times are those that both engines report in `handover.recent` of `/server_info`, and those at which the
client got its tokens. `time.monotonic` of the engines and `time.perf_counter` of the client are the same
clock on Linux.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from bench.plot import Lane, LaneSpan

Events = Mapping[str, Sequence[tuple[float, int]]]  # name -> (time, count) of each

WIDTH = 56  # characters of a line in the terminal
SHADES = "█▓░"  # of `LaneSpan.shade`
PREFILL, TRANSFER, DECODE = "#1b6ca8", "#c8553d", "#4c956c"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """The times of one request, in milliseconds since the client sent it, and what belongs to them."""

    num_tokens: int  # of the prompt
    prefill: Events  # on the prefill engine
    decode: Events  # on the decode engine
    tokens: Sequence[float]  # when the client of the decode engine got its tokens

    def at(self, part: Literal["prefill", "decode"], event: str) -> float:
        """Return the time of the last event of this name; raise KeyError if there was none."""
        return {"prefill": self.prefill, "decode": self.decode}[part][event][-1][0]


def times_of(
    prefill: Mapping[str, Any], decode: Mapping[str, Any], begin: float, tokens: Sequence[float]
) -> RequestTimes:
    """Return the times of one request.

    Args:
        prefill: the prefill engine's entry in `recent`.
        decode: that of the decode engine.
        begin: when the client sent the request, by its clock.
        tokens: when it got each token, by the same clock.
    """

    def events(entry: Mapping[str, Any]) -> dict[str, list[tuple[float, int]]]:
        found: dict[str, list[tuple[float, int]]] = {}
        for event in entry["events"]:
            when = 1e3 * (event["at"] - begin)
            found.setdefault(event["event"], []).append((when, event.get("count", 0)))
        return found

    return RequestTimes(
        num_tokens=prefill["num_tokens"],
        prefill=events(prefill),
        decode=events(decode),
        tokens=[1e3 * (token - begin) for token in tokens],
    )


def lanes(times: RequestTimes) -> list[Lane]:
    """Return the lanes of the picture, from top to bottom."""
    prefill = times.prefill
    begin, first = times.at("prefill", "begin"), times.at("prefill", "first")
    launched, computed = [at for at, _ in prefill["launched"]], [at for at, _ in prefill["computed"]]
    # A chunk that was launched while the one before it ran begins when that one ends.
    starts = [max(pair) for pair in zip(launched, [begin, *computed], strict=False)]
    chunks = [
        LaneSpan(start, end, index % 2)
        for index, (start, end) in enumerate(zip(starts, computed, strict=True))
    ]
    pushes: list[LaneSpan] = []
    for (posted, _), (pushed, _) in zip(prefill["posted"], prefill["pushed"], strict=True):
        # It has the pages of all chunks that were launched before, and begins when the last one is computed.
        ready = computed[sum(at <= posted for at in launched) - 1]
        earlier = pushes[-1].end if pushes else 0.0
        pushes.append(LaneSpan(min(pushed, max(posted, ready, earlier)), pushed, 0))
    claim, room = times.at("decode", "claim"), times.at("decode", "room")
    # Pages whose checksums are compared, or whose heads are put in order, are sent and then prepared.
    sent = times.at("decode", "prepared" if "prepared" in times.decode else "sent")
    adopted = times.at("decode", "adopted")
    steps = [LaneSpan(*pair, index % 2) for index, pair in enumerate(pairwise([adopted, *times.tokens[1:]]))]
    pages = prefill["posted"][-1][1]
    return [
        Lane("prefill engine: queued", PREFILL, [LaneSpan(begin, starts[0], 2)], _ms(starts[0] - begin)),
        Lane(
            "prefill engine: prompt",
            PREFILL,
            chunks,
            f"{times.num_tokens:,} tokens in {len(chunks)} chunks, {_ms(computed[-1] - starts[0])}",
        ),
        Lane("token 1", PREFILL, [LaneSpan(first, first, 0)], f"after {_ms(first)}"),
        Lane("pages pushed", TRANSFER, pushes, f"{pages} pages, {_ms(sum(p.end - p.begin for p in pushes))}"),
        Lane(
            "decode engine: waits",
            DECODE,
            [LaneSpan(claim, room, 2), LaneSpan(room, sent, 1), LaneSpan(sent, adopted, 0)],
            f"adopted {_ms(adopted - first)} after token 1",
        ),
        Lane(
            "decode engine: tokens",
            DECODE,
            steps,
            f"2 to {len(times.tokens)}, the first of them {_ms(times.tokens[1] - first)} after token 1",
        ),
    ]


def text(lanes: Sequence[Lane]) -> str:
    """Return the picture for a terminal, one line per lane."""
    last = max(span.end for lane in lanes for span in lane.spans)
    longest = max(len(lane.label) for lane in lanes)
    found = []
    for lane in lanes:
        cells = [" "] * WIDTH
        for span in lane.spans:
            begin, end = (min(WIDTH - 1, int(WIDTH * max(0.0, at) / last)) for at in (span.begin, span.end))
            cells[begin : end + 1] = SHADES[span.shade] * (end + 1 - begin)
        found.append(f"{lane.label:<{longest}} |{''.join(cells)}| {lane.text}")
    return "\n".join(found)


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"
