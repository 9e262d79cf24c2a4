"""``POST /inference/v1/generate``, vLLM's route with token ids in and token ids out: its body and replies.

Names and places are vLLM's. Fields that would change the reply and do not exist here are errors; unknown ones
are ignored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from segue.api.native import check_rid
from segue.api.openai.replies import usage
from segue.api.openai.requests import StreamOptions, Wanted, check_model
from segue.api.openai.token_fields import Shown, ids_of, prompt_logprobs, prompt_options
from segue.api.validation import TokenId, parse
from segue.errors import InvalidRequestError, UnsupportedFieldError, invalid_value, short_repr
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import LOWEST_LOGPROB, MAX_PRIORITY, GenerateRequest, Generation, Output
from segue.frontend.sampling_options import SamplingOptions, check_num_entries, num_entries
from segue.frontend.tokenizer import ServedModel
from segue.messages.requests import Finished, TokenLogprob

ID_PREFIX = "generate-tokens-"  # of the ids of replies whose clients named none
RULES = {
    "token_ids": "a list of token ids",
    "sampling_params": "an object",
    "stop": "a string or a list of strings",
}
# Known fields that would change the reply and are not implemented, with the values that ask for nothing
# besides null, false, 0, "", [] and {}.
UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("features", "content_parts", "kv_transfer_params", "ec_transfer_params"), ()),
    "output_mode": ("tokens",),
}
UNSUPPORTED_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("structured_outputs", "guided_decoding", "allowed_token_ids", "bad_words"), ()),
    **dict.fromkeys(("logits_processors", "logprob_token_ids", "prompt_logprob_token_ids"), ()),
    **dict.fromkeys(("prompt_logprob_start", "repetition_detection", "trace_decode_token_ids"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "use_beam_search", "watermarking"), ()),
    **dict.fromkeys(("routed_experts_prompt_start", "thinking_token_budget"), ()),
    "best_of": (1,),
    "length_penalty": (1.0,),
}
_NAMES = {"num_prompt_top": "prompt_logprobs"}


class TokenSampling(Struct, frozen=True, kw_only=True):
    """``sampling_params``; None is the default. Without ``max_tokens`` the output fills the context."""

    n: int | None = None
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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None  # in the text in which stop strings are looked for
    logprobs: Annotated[int, Meta(ge=0)] | None = None  # at most --max-logprobs
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None  # the same
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None


class TokenGenerate(Struct, frozen=True, kw_only=True):
    """``POST /inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None  # vLLM's: requests with a lower one run first
    cache_salt: str | None = None  # accepted, and without effect: see docs/tokens.md
    return_token_ids: bool | None = None  # those of the prompt


def parse_token_call(body: Any, model: ServedModel, reply_id: str | None = None) -> Wanted:
    """Check a body, and return its call, which has one request.

    ``reply_id`` takes the place of a random id, where the client gave none.

    Raises:
        InvalidRequestError: a wrong or missing field.
        UnsupportedFieldError: a known field that is not implemented.
        ModelNotFoundError: another model's name.
    """
    call = parse(TokenGenerate, body, rules=RULES)
    refuse(body, UNSUPPORTED_FIELDS)
    if call.model is not None:
        check_model(call.model, model)
    if call.stream_options is not None and not call.stream:
        raise InvalidRequestError("stream_options needs stream=true", param="stream_options")
    rid = call.request_id or reply_id or f"{ID_PREFIX}{uuid.uuid4().hex}"
    check_rid(rid, "request_id")
    priority = -(call.priority or 0)
    if abs(priority) > MAX_PRIORITY:
        rule = f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}"
        raise invalid_value("priority", call.priority, rule)
    sampling, wishes = _sampling(call)
    logprobs = -1 if sampling.logprobs is None else sampling.logprobs
    options = SamplingOptions.of(
        sampling, logprobs=logprobs, must_fit=False, names=_NAMES, **prompt_options(wishes, logprobs)
    )
    check_num_entries(num_entries(options))
    request = GenerateRequest(
        rid=rid,
        prompt=call.token_ids,
        options=options,
        priority=priority,
        param="token_ids",
        shares_kv=not sampling.skip_reading_prefix_cache,
    )
    return Wanted(
        id=rid,
        created=int(time.time()),
        model=model.names[0],
        requests=[request],
        batch_id=None,
        stream=bool(call.stream),
        usage_in_stream=call.stream_options is not None and bool(call.stream_options.include_usage),
        shown=wishes,
    )


def refuse(fields: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedFieldError for a field that is not implemented and asks for something."""
    for name, values in unsupported.items():
        value = fields.get(name)
        if value and value not in values:
            only = f"; only {values[0]!r} is" if values else ""
            raise UnsupportedFieldError(f"{name} is not supported{only}; leave it out", param=name)


def _sampling(call: TokenGenerate) -> tuple[TokenSampling, Shown]:
    """Check the sampling parameters; returns them, and what the reply shows."""
    params = call.sampling_params or {}
    refuse(params, UNSUPPORTED_SAMPLING)
    sampling = parse(TokenSampling, params, rules=RULES)
    refuse(sampling.extra_args or {}, {"kv_transfer_params": (), "ec_transfer_params": ()})
    if sampling.n not in (None, 1):
        text = f"n={short_repr(sampling.n)}: only 1 is supported; for more send the prompt several times"
        raise UnsupportedFieldError(text, param="n")
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
        return {"request_id": self._wanted.id, "choices": [], "usage": usage(self._generation.ends)}

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
            "usage": usage(self._generation.ends),
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
