"""The reasons why a request is refused before it is queued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segue import errors
from segue.messages.requests import AddRequest

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler


def check_request(
    s: Scheduler, message: AddRequest, prompt_len: int, num_outputs: int, most_outputs: int
) -> None:
    """Raise the reason why a request cannot be queued, if there is one.

    Args:
        s: the scheduler that is to queue the request.
        message: the request.
        prompt_len: its prompt's length in tokens.
        num_outputs: the number of output tokens that it begins with.
        most_outputs: the number of output tokens that it may have.

    Raises:
        SegueError: of the class whose name the rejection gets.
    """
    if message.rid in s.requests:
        raise errors.InvalidRequestError(f"rid {message.rid!r} is in flight; use another")
    if (why := s.weights.poisoned) is not None:
        raise errors.PoisonedError(f"the weights are poisoned ({why}); update all of them, or start again")
    if not 1 <= prompt_len < s.limits.max_seq_len:
        rule = f"must have 1 to {s.limits.max_seq_len - 1}, so that one more token fits the context"
        raise errors.ContextLengthError(f"the prompt has {prompt_len} tokens, but {rule}")
    if num_outputs > most_outputs:
        raise errors.InvalidRequestError(
            f"the request begins with {num_outputs} output tokens, but may have {most_outputs}; raise "
            "max_new_tokens, or send fewer"
        )
    s.roles.check(message.handoff, most_outputs)
    if s.config.paused_policy == "reject" and (mode := s.control.client_mode) is not None:
        raise errors.PausedError(f"generation is paused ({mode}), and --paused-policy is reject; retry later")
    if message.handoff is not None:
        if not most_outputs:
            raise errors.InvalidRequestError(
                f"request {message.rid!r} asks for no token, so nothing goes on elsewhere; send it without a "
                "handoff"
            )
        s.handover.check(message.handoff)
    if (num_waiting := s.num_waiting) >= s.config.max_queued_requests:
        raise errors.OverloadedError(
            f"{num_waiting} requests wait, the limit set by --max-queued-requests; retry later"
        )
