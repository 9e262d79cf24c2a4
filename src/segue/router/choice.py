"""The input and the outcome of a router's choice of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from segue.errors import NoWorkerError, UnservedRouteError
from segue.router.fleet import Assignment

# cost: the fewest predicted seconds. power_of_two: of two workers drawn at random, the one with fewer
# predicted seconds. round_robin: one after the other.
RoutingPolicy = Literal["cost", "power_of_two", "round_robin"]
MOST_NAMED = 8  # workers in an error message


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules:
    """The options of a router that its decisions depend on."""

    prefill_policy: RoutingPolicy = "cost"
    decode_policy: RoutingPolicy = "cost"
    local_prefill_tokens: int = 256  # --local-prefill-tokens: most tokens that a decode worker computes
    local_growth_s: float = 0.01  # how much longer they may make a step of the decode worker
    laps_threshold: int = 256  # --laps-alloc-threshold: tokens of the longest short prompt
    laps_overflow_s: float = 0.05  # --laps-overflow-ms: how much faster the other group must be at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request that needs workers."""

    number: int  # the router's requests are numbered; round_robin counts by it
    num_tokens: int  # of the prompt, and of the output that another worker has made before
    max_new_tokens: int
    hits: Mapping[str, int] = field(default_factory=dict)  # worker -> tokens in its prefix cache, predicted
    tried: frozenset[str] = frozenset()  # workers that have failed at it
    is_native: bool = False  # not every worker has its route
    is_resumed: bool = False  # the client has a part of the reply: a decode worker may do the rest alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One worker computes the prompt and its first token, and hands over to another one."""

    seconds: float  # predicted, as are those of the other choices
    prefill: Assignment
    decode: Assignment
    recompute: bool  # the weights differ: the decode worker takes only the token, and computes the KV again


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A decode worker computes the prompt itself: it has most of the KV, or a request goes on there alone."""

    seconds: float
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One worker does all of it: one that serves whole requests, or prefill alone if one token is wanted."""

    seconds: float
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Nobody can take the request now."""

    problem: str
    reasons: Sequence[tuple[str, str]]  # a worker, or "one -> another", and why it cannot
    no_wait: str = ""  # why the request waits no longer, or not at all; "": nobody is about to come
    unserved: str = ""  # the route of the request, if none of the workers has it: it is of no use to retry

    def error(self) -> NoWorkerError | UnservedRouteError:
        """Returns the error for the client, which names the first workers and what is wrong with each."""
        if self.unserved and not self.no_wait:
            return UnservedRouteError(
                f"no worker of this router has {self.unserved}: none of them is an engine of Segue, and "
                "other servers get only /v1/chat/completions, /v1/completions and /v1/models. Add an engine "
                "of Segue, by --worker or POST /workers, or use one of these routes"
            )
        named = [f"{worker}: {reason}" for worker, reason in self.reasons[:MOST_NAMED]]
        if len(self.reasons) > MOST_NAMED:
            named.append(f"and {len(self.reasons) - MOST_NAMED} more")
        why = f" ({'; '.join(named)})" if named else ""
        no_wait = f"{self.no_wait}: " if self.no_wait else ""
        return NoWorkerError(
            f"{no_wait}{self.problem}{why}; retry later, and see /workers for the state of each"
        )


Decision = Pair | Local | Whole | Refuse
