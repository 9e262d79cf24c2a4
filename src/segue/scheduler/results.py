"""Applying a step's result: what its tokens and log-probabilities make of the requests."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

from segue import errors
from segue.messages.control import SchedulerOutput
from segue.messages.guided import LostGuide
from segue.messages.requests import Finished, TokenLogprob
from segue.messages.steps import NON_FINITE, StepResult
from segue.scheduler.request import FINISHED, Request, Step

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler


def take_result(s: Scheduler, step: Step, result: StepResult, now: float) -> SchedulerOutput:
    """Turn a step's result into tokens and ends; the tokens of ended requests are dropped.

    The step is not in flight any more, and its time is known already.
    """
    assert step.plan.step == result.step and len(step.sampling) == len(result.tokens)
    page_size = s.limits.page_size
    rids: list[str] = []
    tokens: list[int] = []
    finished: list[Finished] = []
    logprobs: dict[str, TokenLogprob] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    for request, count in step.prompt_logprobs:
        if request.phase is FINISHED:
            continue
        entries = result.prompt_logprobs[request.slot][:count]
        if any(isnan(entry.logprob) for entry in entries):
            finished.append(_end_non_finite(s, request, "a prompt token"))
        else:
            prompt_logprobs[request.rid] = entries
            s.handover.prompt_logprobs(request, entries)
    for index, (request, token) in enumerate(zip(step.sampling, result.tokens, strict=True)):
        if request.phase is FINISHED:
            continue
        if token == NON_FINITE:
            finished.append(_end_non_finite(s, request, f"output token {request.num_outputs + 1}"))
            continue
        if (why := result.failures.get(index)) is not None:
            finished.append(_end_unguided(s, request, why))
            continue
        if not request.most_outputs:  # only the prompt was to be computed
            request.versions = [(step.version, 0, 0)]
            request.first_at = now
            finished.append(s.end(request, "length"))
            continue
        request.add_token(token, step.version)
        if not request.first_at:
            request.first_at = now
        rids.append(request.rid)
        tokens.append(token)
        if result.logprobs is not None and (entry := result.logprobs[index]) is not None:
            logprobs[request.rid] = entry
        reason = "stop" if index in result.complete else request.end_by_output()
        if reason is not None:
            s.handover.first(request, logprobs.get(request.rid), reason, now)
            finished.append(s.end(request, reason))
        # The newest token has no KV yet, so a page is full once there is one token more than it holds.
        elif len(request.tokens) > (request.num_inserted + 1) * page_size:
            s.insert_pages(request, len(request.tokens) - 1)
    s.settle()
    long = [request.rid for request in step.came_long if request.rid in rids] if step.came_long else []
    _count(s, result, len(tokens))
    return s.output(
        rids=rids,
        tokens=tokens,
        finished=finished,
        step_seconds=result.seconds,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        long=long,
    )


def _count(s: Scheduler, result: StepResult, num_tokens: int) -> None:
    """Count the tokens of a step, and how it was run."""
    totals = s.totals
    totals.output_tokens += num_tokens
    totals.padded_tokens += result.padded_tokens
    if result.graph is not None:
        totals.graph_hits[result.graph] = totals.graph_hits.get(result.graph, 0) + 1
    if result.eager is not None:
        totals.eager_steps[result.eager] = totals.eager_steps.get(result.eager, 0) + 1


def _end_unguided(s: Scheduler, request: Request, why: str) -> Finished:
    """End a request whose grammar cannot be followed any further."""
    error: type[errors.SegueError] = errors.GuidedOutputError
    remedy = "Give a simpler grammar"
    if isinstance(why, LostGuide):
        error, remedy = errors.GuideLostError, "Send the request again"
    text = (
        f"the grammar of request {request.rid} cannot be followed behind output token {request.num_outputs}: "
        f"{why}. {remedy}"
    )
    return s.end(request, "error", message=text, error=error)


def _end_non_finite(s: Scheduler, request: Request, where: str) -> Finished:
    """End a request whose logits for an output token or a prompt token were not finite.

    The KV that such a request computed is not shared any further, nor is the KV that it found in the prefix
    cache: the request that computed that KV may have ended before it sampled.
    """
    assert request.node is not None
    hidden = s.resources.prefix.hide(request.node)
    if (publisher := s.resources.publisher) is not None:
        publisher.forget(hidden)
    s.totals.non_finite_logits += 1
    text = (
        f"the model's logits for {where} of request {request.rid} are not finite (NaN or infinite), "
        "so there is no token to give. The weights, or the dtype they run in, do not suit this "
        "prompt: see the server's log"
    )
    return s.end(request, "error", message=text, error=errors.NonFiniteLogitsError)
