"""The native API, SGLang's ``/generate``, for HTTP and for :class:`segue.Engine`: its bodies and replies.

Unknown fields are ignored: clients send extras.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any

from msgspec import Raw, json

from segue.api.asks_nothing import Place, without_nothing
from segue.api.bootstrap import BOOTSTRAP_RULES, bootstraps
from segue.api.choices import NumChoices, in_choices, num_choices
from segue.api.growing_json import GrowingList, GrowingText
from segue.api.guided import RULES as GUIDED_RULES
from segue.api.guided import SGLangFields, guided_options
from segue.api.request_fields import RequestFields, check_fields, check_rid, given_rid
from segue.api.validation import NOT_EMPTY, TokenId, parse, prompts_of
from segue.errors import InvalidRequestError, invalid_value
from segue.frontend.request import LOWEST_LOGPROB, GenerateRequest, Generation, Output, RequestState
from segue.frontend.sampling_options import SamplingOptions, check_num_entries, num_entries
from segue.frontend.thread_pool import turn
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.messages.requests import Finished, TokenLogprob

RULES = {
    "text": "a string or a list of strings",
    "input_ids": "a list of token ids or a list of such lists",
    **dict.fromkeys(("rid", "request_id"), "a string or a list of strings"),
    "stop": "a string or a list of strings",
    "sampling_params": "an object or a list of objects",
    **GUIDED_RULES,
    **BOOTSTRAP_RULES,
}
# OpenAI's field names, which are those of SamplingOptions, to those of this API.
NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "logprobs": "top_logprobs_num",
    "keep_stop": "no_stop_trim",
}
encode = json.Encoder().encode


NO_DEFAULTS: Mapping[str, float] = {}


class NativeSampling(SGLangFields, frozen=True, kw_only=True, rename=NAMES):
    """``sampling_params``; a field has the name of its option, and the API's in JSON."""

    max_tokens: int | None = 128  # null: the rest of the context
    min_tokens: int = 0
    temperature: float | None = None  # 1, or the model's: --sampling-defaults
    top_p: float | None = None  # the same
    top_k: int | None = None  # off, or the model's
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    keep_stop: bool = False
    n: NumChoices = 1  # choices per prompt
    best_of: int | None = None  # as many


class NativeGenerate(RequestFields, frozen=True, kw_only=True):
    """``POST /generate``; lists are batches."""

    text: str | Annotated[list[str], NOT_EMPTY] | None = None
    # All items of one type.
    input_ids: Annotated[list[int | Annotated[list[int], NOT_EMPTY]], NOT_EMPTY] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    rid: str | list[str] | None = None
    request_id: str | list[str] | None = None  # another name of ``rid``


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCall:
    """One call: a single request or a batch."""

    requests: list[GenerateRequest]  # the choices of one prompt are neighbours
    batch_id: str | None  # None: a single request
    stream: bool
    text_in_logprobs: bool


def parse_call(
    body: Any, max_prompts: int, reply_id: str | None = None, *, defaults: Mapping[str, float] = NO_DEFAULTS
) -> NativeCall:
    """Check a body and split it into requests, one per choice, at most ``max_prompts``.

    ``reply_id`` takes the place of random ids, where the client gave none. ``defaults`` are sampling options
    of requests that do not name them, where they are not those of :class:`SamplingOptions`.

    Raises:
        InvalidRequestError: a wrong or missing field.
        UnsupportedFieldError: a known field that is not implemented.
    """
    call = parse(NativeGenerate, _given(body, "native"), rules=RULES)
    if (call.text is None) == (call.input_ids is None):
        raise InvalidRequestError("give either text or input_ids, and not both", param="text")
    param, value = ("text", call.text) if call.input_ids is None else ("input_ids", call.input_ids)
    prompts, batched = prompts_of(value, param, RULES, max_prompts)
    given = given_rid(call.rid, call.request_id)
    rids, batch_id = _rids(given, len(prompts), batched, reply_id or uuid.uuid4().hex)
    options, n = _all_options(call, len(prompts), defaults)
    for rid in rids:
        check_rid(rid)
    priority, salt = check_fields(call)
    requests = [
        GenerateRequest(
            rid=rid,
            prompt=prompt,
            options=option,
            priority=priority,
            cache_salt=salt,
            param=param,
            bootstrap=bootstrap,
        )
        for rid, prompt, option, bootstrap in zip(
            rids, prompts, options, bootstraps(call, len(prompts)), strict=True
        )
    ]
    return NativeCall(
        requests=in_choices(requests, n, max_prompts, separator="_"),
        batch_id=rids[0] if batch_id is None and n > 1 else batch_id,
        stream=call.stream,
        text_in_logprobs=call.return_text_in_logprobs,
    )


def _given(body: Any, place: Place) -> Any:
    """Return what a body asks for: its fields that are not null, without those that are not implemented.

    ``max_new_tokens`` alone may be null, which is not its default, as in SGLang.

    Raises:
        UnsupportedFieldError: a field that is not implemented asks for something.
    """
    if not isinstance(body, Mapping):
        return body
    given = without_nothing(body, place)
    return {k: value for k, value in given.items() if value is not None or k == "max_new_tokens"}


def _rids(
    rid: str | list[str] | None, count: int, batched: bool, default: str
) -> tuple[list[str], str | None]:
    """Return the id of each of ``count`` requests, and the id of the batch, or None if there is none.

    One ``rid`` for a batch names the batch, and its requests are ``rid_0``, ``rid_1``, …; a list names each
    request. Ids that the client did not give are made from ``default`` in the same way.
    """
    if isinstance(rid, list):
        if len(rid) != count:
            raise InvalidRequestError(
                f"rid has {len(rid)} ids for {count} prompts; give one each", param="rid"
            )
        return [each or f"{default}_{index}" for index, each in enumerate(rid)], default if batched else None
    base = rid or default
    return ([f"{base}_{index}" for index in range(count)], base) if batched else ([base], None)


def _all_options(
    call: NativeGenerate, count: int, defaults: Mapping[str, float]
) -> tuple[list[SamplingOptions], int]:
    """Return the options of each of ``count`` prompts, and the number of choices of each.

    They are those of one object for all, or of one object each, which have the same number of choices.

    Options that are shared are one object, so that they are checked only once. Raises InvalidRequestError for
    another number of objects, for several numbers of choices, or if all options together have too many
    entries.
    """
    params = call.sampling_params
    if not isinstance(params, list):
        options, n = _options(params or {}, call, defaults)
        check_num_entries(num_entries(options), count * n)
        return [options] * count, n
    if len(params) != count:
        text = f"sampling_params has {len(params)} objects for {count} prompts; give one, or one each"
        raise InvalidRequestError(text, param="sampling_params")
    of_all = _options({}, call, defaults)
    each_options, all_n, entries = [], set(), 0
    for each in params:
        options, n = _options(each, call, defaults) if each else of_all
        entries += num_entries(options) * n
        check_num_entries(entries)
        each_options.append(options)
        all_n.add(n)
    if len(all_n) > 1:
        text = f"n differs between the prompts of a call ({', '.join(map(str, sorted(all_n)))})"
        raise InvalidRequestError(f"{text}; give the same n to each, or send several calls", param="n")
    return each_options, all_n.pop()


def _options(
    params: dict[str, Any], call: NativeGenerate, defaults: Mapping[str, float]
) -> tuple[SamplingOptions, int]:
    """Check one ``sampling_params`` object, and return its options, and its number of choices.

    The call, and not the object, says whether log-probabilities are returned. A ``max_new_tokens`` that does
    not fit the context is clamped.
    """
    sampling = parse(NativeSampling, _given(params, "sampling"), rules=RULES)
    if call.top_logprobs_num < 0:
        raise invalid_value("top_logprobs_num", call.top_logprobs_num, "must be at least 0")
    options = SamplingOptions.of(
        sampling,
        defaults,
        logprobs=call.top_logprobs_num if call.return_logprob else -1,
        prompt_logprobs_start=max(-1, call.logprob_start_len) if call.return_logprob else -1,
        num_prompt_top=call.top_logprobs_num if call.return_logprob else 0,
        must_fit=False,
        **guided_options(sampling, NAMES),
    )
    return options, num_choices(sampling.n, sampling.best_of)


@dataclass(slots=True)
class _Grown:
    """What a stream's events have said so far of one request, as JSON."""

    text: GrowingText = field(default_factory=GrowingText)
    ids: GrowingList = field(default_factory=GrowingList)
    logprobs: dict[str, GrowingList] = field(default_factory=dict)  # by field
    num_prompt_logprobs: int = 0  # that are part of them
    version: str | None = None  # of the weights, for which the next two were made; None: for none
    before_count: bytes = b""  # ``meta_info`` up to the number of tokens
    after_count: bytes = b""  # and behind it


class NativeReplies:
    """The replies to the requests of one call; texts and ids are cumulative, as SGLang's are."""

    def __init__(self, manager: TokenizerManager, call: NativeCall, generation: Generation) -> None:
        self._manager = manager
        self._call = call
        self._generation = generation
        self._grown: dict[int, _Grown] = {}  # of the requests that are streamed as JSON, and have not ended

    async def result(self) -> tuple[Any, int]:
        """The finished reply, a list for a batch; and its number of entries: replies, tokens and logprobs."""
        num_entries = 0
        outputs = await self._generation.outputs()
        for index, output in enumerate(outputs):
            logprobs = (*output.logprobs, *self._generation.states[index].prompt_logprobs)
            num_entries += 1 + len(output.token_ids) + sum(1 + len(entry.top) for entry in logprobs)
            await turn(index)
        pool = self._manager.thread_pool
        replies = await pool.build(lambda: list(map(self._reply, count(), outputs)), num_entries)
        return replies if self._call.batch_id is not None else replies[0], num_entries

    async def updates(self) -> AsyncIterator[dict[str, Any]]:
        """The reply as it grows; in a batch each update has its prompt's ``index``."""
        async for index, _ in self._generation.updates():
            reply = self._reply(index, self._generation.states[index].whole())
            yield reply | {"index": index} if self._call.batch_id is not None else reply

    def event(self, index: int, output: Output) -> bytes:
        """Return one of :meth:`updates` as a server-sent event.

        ``output`` is what is new of request ``index`` since the last call with it; the first call finds by
        itself what came before, which another engine may have sent to the client.
        """
        state, grown = self._generation.states[index], self._grown.get(index)
        begins = grown is None
        if grown is None:
            grown, output = _Grown(), state.whole()
            self._grown[index] = grown
        grown.text.extend(output.text)
        grown.ids.extend(output.token_ids)
        logprobs: dict[str, Any] = {}
        if state.wants_logprobs:
            prompt = state.prompt_logprobs[grown.num_prompt_logprobs :]
            grown.num_prompt_logprobs += len(prompt)
            for name, entries in self._logprobs(state, prompt, output.logprobs, begins=begins).items():
                grown_field = grown.logprobs.setdefault(name, GrowingList())
                grown_field.extend(entries)
                logprobs[name] = Raw(grown_field.json)
        if output.end is not None:
            del self._grown[index]
        if output.end is None and not state.wants_logprobs:
            meta = self._short_meta(state, grown)
        else:
            meta = encode(self._meta(state, output.end, grown.ids.num_items, logprobs))
        return b"".join(
            (
                b'data: {"text":',
                grown.text.unclosed,
                b'","output_ids":',
                grown.ids.unclosed,
                b'],"meta_info":',
                meta,
                b"}\n\n" if self._call.batch_id is None else b',"index":%d}\n\n' % index,
            )
        )

    def _short_meta(self, state: RequestState, grown: _Grown) -> bytes:
        """Return the JSON of ``meta_info`` of a reply that goes on, without log-probabilities.

        Only two facts of it change: the number of tokens, and the version of the weights.
        """
        version = self._manager.weights.version
        if grown.version != version:
            name = b'"completion_tokens":'  # which is in no string of the JSON: there, quotes are escaped
            before, _, after = encode(self._meta(state, None, 0, {})).partition(name + b"0")
            grown.version, grown.before_count, grown.after_count = version, before + name, after
        return b"%b%d%b" % (grown.before_count, grown.ids.num_items, grown.after_count)

    def _reply(self, index: int, output: Output) -> dict[str, Any]:
        """Return the reply to request ``index`` from its whole output so far; it may not have ended."""
        state = self._generation.states[index]
        logprobs: dict[str, Any] = {}
        if state.wants_logprobs:
            logprobs = self._logprobs(state, state.prompt_logprobs, output.logprobs, begins=True)
        meta = self._meta(state, output.end, len(output.token_ids), logprobs)
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}

    def _meta(
        self, state: RequestState, end: Finished | None, num_tokens: int, logprobs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return ``meta_info`` of a reply with ``num_tokens`` tokens of output; it includes ``logprobs``."""
        versions = end.versions if end is not None else []
        meta = {
            "id": state.rid,
            "finish_reason": None if end is None else finish_reason(end),
            "prompt_tokens": len(state.prompt_ids),
            "completion_tokens": num_tokens,
            "cached_tokens": 0 if end is None else end.cached_tokens,
            "weight_version": versions[-1][0] if versions else self._manager.weights.version,
            "weight_versions": [{"version": v, "start": start, "end": stop} for v, start, stop in versions],
            **logprobs,
        }
        if end is not None:
            meta["e2e_latency"] = time.monotonic() - state.created
        return meta

    def _logprobs(
        self,
        state: RequestState,
        prompt: Sequence[TokenLogprob],
        output: Sequence[TokenLogprob],
        *,
        begins: bool,
    ) -> dict[str, list[Any]]:
        """Return the fields with log-probabilities, for some tokens of the prompt and of the output.

        ``begins`` says whether those of the prompt are the first ones.
        """
        fields: dict[str, list[Any]] = {}
        # Nothing predicts the first token of the prompt.
        has_first = begins and state.params.prompt_logprobs_start == 0
        if state.params.num_prompt_top and state.params.prompt_logprobs_start >= 0:
            unknown: list[Any] = [None] * has_first
            fields["input_top_logprobs"] = [*unknown, *(self._top(entry.top) for entry in prompt)]
        fields["output_token_logprobs"] = [self._entry(entry.token, entry.logprob) for entry in output]
        fields["output_top_logprobs"] = [self._top(entry.top) for entry in output]
        first = [self._entry(state.prompt_ids[0], None)] if has_first else []
        fields["input_token_logprobs"] = [
            *first,
            *(self._entry(entry.token, entry.logprob) for entry in prompt),
        ]
        return fields

    def _top(self, top: Sequence[tuple[int, float]]) -> list[Any]:
        """Return the likeliest tokens at one position."""
        return [self._entry(token, logprob) for token, logprob in top]

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        """Return log-probability, token and text, as SGLang does; None for what is unknown or not wanted."""
        text = self._manager.table.text(token) if self._call.text_in_logprobs else None
        return [None if logprob is None else max(logprob, LOWEST_LOGPROB), token, text]


def finish_reason(end: Finished) -> dict[str, Any]:
    """SGLang's ``finish_reason``."""
    match end.client_reason:
        case "stop":
            return {"type": "stop", "matched": end.matched}
        case "length":
            return {"type": "length", "length": end.num_tokens}
        case reason:
            return {"type": reason, "message": end.message or "Aborted"}
