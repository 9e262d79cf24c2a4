"""How much work the scheduler has, for routers that choose between engines."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from segue.laps.cost import Coefficients, StepWork, pairs_of
from segue.messages.control import EngineLoad
from segue.messages.fleet import WorkerLoad
from segue.scheduler.request import DECODE

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler


def load_of(scheduler: Scheduler, call: int, refused: dict[str, str]) -> EngineLoad:
    """Returns the answer to the call with this number: the present load, and what steps cost.

    ``refused`` has the addresses of prefill workers that no KV can come from, and why.
    """
    s, limits = scheduler, scheduler.limits
    coefficients = s.cost.coefficients
    decoding = [request for request in s.running.values() if request.phase is DECODE]
    prompts = [request for request in s.running.values() if request.phase is not DECODE]
    prompts += s.waiting
    step = StepWork(decode_rows=len(decoding), decode_kv=sum(request.launched for request in decoding))
    return EngineLoad(
        call=call,
        load=WorkerLoad(
            queued_s=queued_seconds(
                coefficients,
                sum(request.remaining for request in prompts),
                sum(pairs_of(request.remaining, request.history) for request in prompts),
                limits.chunked_prefill_size,
            ),
            step_s=s.cost.seconds(step),
            decode_rows=step.decode_rows,
            decode_kv=step.decode_kv,
            num_pages=limits.num_pages,
            taken_pages=limits.num_pages - s.resources.num_available,
        ),
        coefficients=(*coefficients,),
        identity=s.kv_identity,
        num_flushes=s.num_flushes,
        refused=refused,
    )


def queued_seconds(c: Coefficients, tokens: int, pairs: float, per_step: int) -> float:
    """Returns the seconds of prompts that share steps of at most ``per_step`` tokens; 0 without tokens.

    A thousand short prompts fill a few steps, so the least time of a step counts once per step.
    """
    steps = ceil(tokens / per_step)
    return max(steps * c.floor, steps * c.start + c.per_token * tokens) + c.per_pair * pairs
