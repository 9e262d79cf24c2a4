"""vLLM's fields that ask a reply for its tokens: their ids, and log-probabilities of the prompt.

They are the same on chat completions and completions, and stand where vLLM has them: what belongs to the
prompt is part of each choice of a completion, and of the whole reply of a chat, which has one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Raw, json

from segue.api.request_fields import RequestFields
from segue.errors import InvalidRequestError
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import LOWEST_LOGPROB, RequestState

_encode = json.Encoder().encode


class TokenFields(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a body; None is the default."""

    return_token_ids: bool | None = None  # the ids of prompt and output
    return_tokens_as_token_ids: bool | None = None  # in logprobs, tokens are written token_id:123
    add_special_tokens: bool | None = None  # as the tokenizer does; None: to a prompt, but not to a chat
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None  # likeliest tokens per prompt token; None: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a reply shows beside texts and the logprobs of the output."""

    token_ids: bool = False
    as_ids: bool = False  # tokens in logprobs are written by their ids
    num_prompt_top: int = -1  # likeliest tokens in the logprobs of the prompt; -1: these are not shown
    echo: bool = False  # the text, and the logprobs if there are any, begin with the prompt


NOTHING = Shown()


def shown(body: TokenFields, *, stream: bool, echo: bool = False) -> Shown:
    """Return what a body asks to be shown; raises InvalidRequestError for prompt_logprobs of a stream."""
    num_prompt_top = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    if stream and num_prompt_top >= 0:
        text = "prompt_logprobs are part of whole replies only; leave it out, or ask without stream"
        raise InvalidRequestError(text, param="prompt_logprobs")
    return Shown(
        token_ids=bool(body.return_token_ids),
        as_ids=bool(body.return_tokens_as_token_ids),
        num_prompt_top=num_prompt_top,
        echo=echo,
    )


def prompt_options(shown: Shown, logprobs: int) -> dict[str, Any]:
    """Return the sampling options by which the engine gives what is shown of the prompt's logprobs.

    ``logprobs`` is the option for the output, which an echo shows for the prompt too; -1: none.
    """
    num_top = max(shown.num_prompt_top, logprobs if shown.echo else -1)
    return {} if num_top < 0 else {"prompt_logprobs_start": 0, "num_prompt_top": num_top}


def token_name(table: TokenTable, as_ids: bool) -> Callable[[int], str]:
    """Return what writes a token in logprobs: as its text, or as its id."""
    return "token_id:{}".format if as_ids else table.text


def ids_of(state: RequestState) -> list[int]:
    """Return the token ids of a request's prompt, as JSON can be made of them."""
    return list(state.prompt_ids)


def prompt_logprobs(state: RequestState, table: TokenTable, num_top: int) -> list[Raw | None]:
    """Return the logprobs of a prompt in vLLM's form, each entry as JSON.

    There is one object per token, by token id: the prompt's own token first, then the ``num_top`` likeliest
    ones. Nothing predicts the first token: its entry is None. As objects, the entries of a long prompt would
    keep the garbage collector busy for a second, in which nobody else is served.
    """
    found: list[Raw | None] = [None]
    for entry in state.prompt_logprobs:
        others = [(token, p, rank) for rank, (token, p) in enumerate(entry.top[:num_top], 1)]
        entries = {
            token: {"logprob": max(p, LOWEST_LOGPROB), "rank": rank, "decoded_token": table.text(token)}
            for token, p, rank in ((entry.token, entry.logprob, entry.rank), *others)
        }
        found.append(Raw(_encode(entries)))
    return found


class PromptParts:
    """What the replies to one call show of its prompts and of the output's ids, as fields of JSON."""

    def __init__(self, shown: Shown, table: TokenTable, states: Sequence[RequestState]) -> None:
        self._shown = shown
        self._table = table
        self._states = states

    @property
    def shows_ids(self) -> bool:
        """Whether token ids are shown."""
        return self._shown.token_ids

    def num_entries(self, index: int) -> int:
        """Return how many entries the whole reply has for a prompt, and for the output's ids."""
        state, shown = self._states[index], self._shown
        num_logprobs = len(state.prompt_logprobs) * (2 + max(0, shown.num_prompt_top))
        ids = (len(state.prompt_ids) + len(state.ids)) * shown.token_ids
        return ids + num_logprobs * (shown.num_prompt_top >= 0)

    def ids_of_prompt(self, index: int) -> dict[str, Any]:
        """Return the field with the ids of a prompt; empty if they are not shown."""
        return {"prompt_token_ids": ids_of(self._states[index])} if self._shown.token_ids else {}

    def of_prompt(self, index: int) -> dict[str, Any]:
        """Return all fields that a whole reply has for a prompt."""
        fields = self.ids_of_prompt(index)
        if self._shown.num_prompt_top >= 0:
            state = self._states[index]
            fields["prompt_logprobs"] = prompt_logprobs(state, self._table, self._shown.num_prompt_top)
        return fields

    def of_output(self, token_ids: list[int]) -> dict[str, Any]:
        """Return the field with the ids of output tokens; empty if they are not shown."""
        return {"token_ids": token_ids} if self._shown.token_ids else {}
