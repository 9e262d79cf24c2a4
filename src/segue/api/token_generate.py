"""``POST /inference/v1/generate``, vLLM's route with token ids in and token ids out: its body and replies.

Names and places are vLLM's. Fields that would change the reply and do not exist here are errors
(:mod:`segue.api.asks_nothing`); unknown ones are ignored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from segue.api.asks_nothing import without_nothing
from segue.api.bootstrap import BOOTSTRAP_RULES, bootstraps
from segue.api.choices import NumChoices, in_choices, num_choices
from segue.api.guided import structured_options
from segue.api.openai.replies import usage
from segue.api.openai.requests import StreamOptions, Wanted, check_given_model
from segue.api.openai.token_fields import Shown, ids_of, prompt_logprobs, prompt_options
from segue.api.request_fields import RequestFields, check_fields, check_rid
from segue.api.validation import NOT_EMPTY, TokenId, parse
from segue.errors import InvalidRequestError, UnsupportedFieldError
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import LOWEST_LOGPROB, GenerateRequest, Generation, Output
from segue.frontend.sampling_options import SamplingOptions, check_num_entries, num_entries
from segue.frontend.tokenizer import ServedModel
from segue.messages.requests import Finished, TokenLogprob

ID_PREFIX = "generate-tokens-"  # of the ids of replies whose clients named none
RULES = {
    "token_ids": "a list of token ids",
    "sampling_params": "an object",
    **BOOTSTRAP_RULES,
    "stop": "a string or a list of strings",
}
_NAMES = {"num_prompt_top": "prompt_logprobs"}


class TokenSampling(Struct, frozen=True, kw_only=True):
    """``sampling_params``; None is the default. Without ``max_tokens`` the output fills the context."""

    n: NumChoices | None = None
    best_of: int | None = None  # as many
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None  # in the text in which stop strings are looked for
    logprobs: Annotated[int, Meta(ge=0)] | None = None  # at most --max-logprobs
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None  # the same
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None


class TokenGenerate(RequestFields, frozen=True, kw_only=True):
    """``POST /inference/v1/generate``. Of ``priority``, as in vLLM, requests with a lower one run first."""

    token_ids: Annotated[list[int], NOT_EMPTY]
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # those of the prompt


def parse_token_call(body: Any, model: ServedModel, reply_id: str | None = None) -> Wanted:
    """Check a body, and return its call, which has one request per choice.

    ``reply_id`` takes the place of a random id, where the client gave none.

    Raises:
        InvalidRequestError: a wrong or missing field.
        UnsupportedFieldError: a known field that is not implemented.
        ModelNotFoundError: another model's name.
    """
    given = without_nothing(body, "tokens") if isinstance(body, Mapping) else body
    call = parse(TokenGenerate, given, rules=RULES)
    check_given_model(call.model, model)
    has_usage = _has_usage(call)
    rid = call.request_id or reply_id or f"{ID_PREFIX}{uuid.uuid4().hex}"
    check_rid(rid, "request_id")
    priority, salt = check_fields(call)
    sampling, wishes = _sampling(call)
    logprobs = -1 if sampling.logprobs is None else sampling.logprobs
    options = SamplingOptions.of(
        sampling,
        model.sampling_defaults,
        logprobs=logprobs,
        must_fit=False,
        **structured_options(sampling.structured_outputs, _NAMES),
        **prompt_options(wishes, logprobs),
    )
    n = num_choices(sampling.n, sampling.best_of)
    check_num_entries(num_entries(options), n)
    request = GenerateRequest(
        rid=rid,
        prompt=call.token_ids,
        options=options,
        priority=-priority,
        cache_salt=salt,
        param="token_ids",
        bootstrap=bootstraps(call, 1)[0],
        shares_kv=not sampling.skip_reading_prefix_cache,
    )
    return Wanted(
        id=rid,
        created=int(time.time()),
        model=model.names[0],
        requests=in_choices([request], n, model.max_prompts),
        batch_id=rid if n > 1 else None,
        stream=bool(call.stream),
        usage_in_stream=has_usage,
        shown=wishes,
        n=n,
    )


def _has_usage(call: TokenGenerate) -> bool:
    """Check the options of streams; return whether a stream ends with its usage."""
    if call.stream_options is None:
        return False
    if not call.stream:
        raise InvalidRequestError("stream_options needs stream=true", param="stream_options")
    if call.stream_options.continuous_usage_stats:
        name = "stream_options.continuous_usage_stats"
        raise UnsupportedFieldError(f"{name} is not supported; leave it out, or send false", param=name)
    return bool(call.stream_options.include_usage)


def _sampling(call: TokenGenerate) -> tuple[TokenSampling, Shown]:
    """Check the sampling parameters; returns them, and what the reply shows."""
    params = without_nothing(call.sampling_params or {}, "token_sampling")
    sampling = parse(TokenSampling, params, rules=RULES)
    without_nothing(sampling.extra_args or {}, "tokens")  # vLLM's plug-ins read the same fields there
    num_prompt_top = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
    if call.stream and num_prompt_top >= 0:
        text = "prompt_logprobs are part of whole replies only; leave it out, or ask without stream"
        raise InvalidRequestError(text, param="prompt_logprobs")
    return sampling, Shown(token_ids=bool(call.return_token_ids), as_ids=True, num_prompt_top=num_prompt_top)


class TokenReplies:
    """The replies to one call, as fields of JSON."""

    def __init__(self, table: TokenTable, wanted: Wanted, generation: Generation) -> None:
        """Take the call, and its requests in flight."""
        self._table = table
        self._wanted = wanted
        self._generation = generation
        # The client has the first chunk already where a request begins with outputs.
        self._begun = {
            index
            for index, request in enumerate(wanted.requests)
            if request.outputs or request.output_end is not None
        }

    def chunk(self, index: int, output: Output) -> dict[str, Any]:
        """Return what a stream adds for new output of a choice."""
        chunk = {"request_id": self._wanted.id, "choices": [self._choice(index, output)]}
        if index not in self._begun:
            self._begun.add(index)
            chunk |= self._prompt_ids(index)
        return chunk | ({"usage": None} if self._wanted.usage_in_stream else {})

    def last_chunk(self) -> dict[str, Any] | None:
        """Return the last part of a stream, which has the usage and no choice; None if not asked for."""
        if not self._wanted.usage_in_stream:
            return None
        of_all = usage(self._generation.ends, self._wanted.n)
        return {"request_id": self._wanted.id, "choices": [], "usage": of_all}

    async def outputs(self) -> tuple[list[Output], int]:
        """Wait for the ends; returns the whole outputs, and how many entries the reply has."""
        outputs = await self._generation.outputs()
        num_top = self._wanted.shown.num_prompt_top
        count = 0
        for state, output in zip(self._generation.states, outputs, strict=True):
            count += 1 + len(output.token_ids) + sum(1 + len(entry.top) for entry in output.logprobs)
            count += len(state.prompt_ids) if self._wanted.shown.token_ids else 0
            count += len(state.prompt_logprobs) * (2 + num_top) if num_top >= 0 else 0
        return outputs, count

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """Return the whole reply from the finished outputs."""
        wanted, num_top = self._wanted, self._wanted.shown.num_prompt_top
        of_prompt = None
        if num_top >= 0:
            of_prompt = prompt_logprobs(self._generation.states[0], self._table, num_top)
        return {
            "request_id": wanted.id,
            "model": wanted.model,
            "created": wanted.created,
            "choices": [self._choice(index, output) for index, output in enumerate(outputs)],
            "usage": usage(self._generation.ends, wanted.n),
            "prompt_logprobs": of_prompt,
            **self._prompt_ids(0),
            "kv_transfer_params": None,
        }

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self._wanted.shown.token_ids:
            return {}
        return {"prompt_token_ids": ids_of(self._generation.states[index])}

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        """Return a choice with a part of its output, or all of it."""
        options, end = self._wanted.requests[index].options, output.end
        logprobs = None
        if options.logprobs >= 0:
            count = max(1, options.logprobs)
            logprobs = {"content": [_entry(entry, count) for entry in output.logprobs]}
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": output.token_ids,
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if end is not None:
            choice |= {
                "finish_reason": end.client_reason,
                "stop_reason": _stop_reason(end, options),
                "weight_versions": [
                    {"version": version, "start": start, "end": stop}
                    for version, start, stop in end.versions
                    if start < stop
                ],
            }
        return choice


def _entry(entry: TokenLogprob, count: int) -> dict[str, Any]:
    """Return the logprobs at one position: of the chosen token, then of the likeliest others, as vLLM does.

    All together are ``count`` tokens. Each is named twice, because vLLM's releases differ in it: as ``token``
    in a string, and as ``token_id``.
    """
    others = [_token(token, logprob) for token, logprob in entry.top if token != entry.token]
    chosen = _token(entry.token, entry.logprob)
    return chosen | {"top_logprobs": [chosen, *others][:count]}


def _token(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": max(logprob, LOWEST_LOGPROB)}


def _stop_reason(end: Finished, options: SamplingOptions) -> int | str | None:
    """Return the client's stop string or stop token that ended the output; None for anything else."""
    if end.client_reason != "stop" or (
        isinstance(end.matched, int) and end.matched not in options.stop_token_ids
    ):
        return None
    return end.matched
