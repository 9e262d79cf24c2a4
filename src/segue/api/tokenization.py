"""Text to token ids and back, by vLLM's names: ``/tokenize``, ``/detokenize``, and the routes that render.

To render a body of OpenAI's API is to make of it what is generated from: token ids and sampling parameters,
as ``/inference/v1/generate`` takes them. Nothing is generated. Unknown fields of the first two routes are
ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from segue.api.guided import as_structured
from segue.api.openai.chat_fields import History, Tools, check_template_arguments, rendered_tools
from segue.api.openai.requests import RULES, ChatMessage, Wanted, check_given_model, messages_of
from segue.api.validation import TokenId, parse
from segue.errors import InvalidRequestError, UnsupportedFieldError
from segue.frontend.request import GenerateRequest, Generation
from segue.frontend.sampling_options import SamplingOptions
from segue.frontend.thread_pool import ThreadPool
from segue.frontend.tokenizer import INLINE_COST, PIECE_COST, ServedModel, check_token_ids

T = TypeVar("T")
MAX_CHARS = 1 << 20  # of a text, or 16 for each token of the context: that takes about 0.3 s
CHARS_PER_TOKEN = 16
MAX_IDS = 1 << 18  # in one call or reply, or as many as the context has


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # None: to a prompt, but not to messages
    return_token_strs: bool | None = None  # also each token as the vocabulary writes it
    add_generation_prompt: bool | None = None  # of messages, as the next fields; None: as if true
    continue_final_message: bool | None = None  # leave the last message open
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None  # refused


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[TokenId]
    model: str | None = None


def parse_tokenize(body: Any) -> TokenizeBody:
    """Check the body of ``/tokenize``. Raises as :func:`segue.api.validation.parse` does."""
    found = parse(TokenizeBody, body, rules={**RULES, "prompt": "a string"})
    if (found.prompt is None) == (found.messages is None):
        raise InvalidRequestError("give either prompt or messages, and not both", param="prompt")
    if found.chat_template:
        text = "chat_template is not supported: the model's own template is used; leave it out"
        raise UnsupportedFieldError(text, param="chat_template")
    if found.add_generation_prompt and found.continue_final_message:
        text = "add_generation_prompt and continue_final_message exclude each other; give one"
        raise InvalidRequestError(text, param="continue_final_message")
    check_template_arguments(found.chat_template_kwargs)
    return found


def parse_detokenize(body: Any) -> DetokenizeBody:
    """Check the body of ``/detokenize``. Raises as :func:`segue.api.validation.parse` does."""
    return parse(DetokenizeBody, body, rules={"tokens": "a list of token ids"})


async def tokenize(body: TokenizeBody, model: ServedModel) -> dict[str, Any]:
    """Return the reply to ``/tokenize``. A text may have more tokens than fit the context.

    Raises:
        InvalidRequestError: the model has no tokenizer or no template, or the text is longer than allowed.
        ContextLengthError: there are more messages than fit the context.
    """
    check_given_model(body.model, model)
    encoder = model.encoder
    if body.messages is None:
        text, param = body.prompt or "", "prompt"
        has_special = body.add_special_tokens is not False
    else:
        text, param = await _rendered_text(body, body.messages, model), "messages"
        has_special = bool(body.add_special_tokens)
    tokenizer = encoder.tokenizer_for(param)
    await _check_size(text, param, model)

    def work() -> tuple[list[int], list[str | None] | None]:
        ids = tokenizer.encode(text, add_special_tokens=has_special)
        names = [tokenizer.backend.id_to_token(token) for token in ids] if body.return_token_strs else None
        return ids, names

    ids, names = await _run(encoder.thread_pool, work, len(text))
    return {
        "count": len(ids),
        "max_model_len": encoder.limits.max_seq_len,
        "tokens": ids,
        "token_strs": names,
    }


async def num_tokens(request: GenerateRequest, model: ServedModel) -> int:
    """Return how many tokens the prompt of a request has, which may be more than fit the context.

    Raises:
        InvalidRequestError: the text is longer than what :func:`tokenize` takes.
    """
    if not isinstance(text := request.prompt, str):
        return len(text)
    await _check_size(text, request.param, model)
    tokenizer = model.encoder.tokenizer_for(request.param)
    encode = partial(tokenizer.encode, text, add_special_tokens=request.add_special_tokens)
    return len(await _run(model.encoder.thread_pool, encode, len(text)))


async def _check_size(text: str, param: str, model: ServedModel) -> None:
    """Raise InvalidRequestError for a text that is too long to be tokenized in one call."""
    most = max(MAX_CHARS, CHARS_PER_TOKEN * model.encoder.limits.max_seq_len)
    if len(text) > most:
        reason = f"{param}: the text has {len(text)} characters; at most {most} are tokenized in one call"
        raise InvalidRequestError(reason, param=param)
    await _check_num_tokens(text, param, model)


async def _check_num_tokens(text: str, param: str, model: ServedModel) -> None:
    """Raise InvalidRequestError for a text of more tokens than one reply has, counted part by part.

    Each part is short work, and the tokens of the whole text are not many more or fewer than theirs.
    """
    encoder, count = model.encoder, 0
    encode = partial(encoder.tokenizer_for(param).encode, add_special_tokens=False)
    for start in range(0, len(text) if len(text) > PIECE_COST else 0, PIECE_COST):
        part = text[start : start + PIECE_COST]
        count += len(await encoder.thread_pool.run(partial(encode, part)))
        if count > (most := _most_ids(model)):
            reason = f"{param}: the text has more than {most} tokens, the most that one reply has"
            raise InvalidRequestError(f"{reason}; send it in parts", param=param)


async def _rendered_text(body: TokenizeBody, messages: list[ChatMessage], model: ServedModel) -> str:
    """Return what the chat template makes of messages."""
    if not messages:
        raise InvalidRequestError("messages: must have at least one message", param="messages")
    continues = bool(body.continue_final_message)
    template: dict[str, Any] = dict(body.chat_template_kwargs or {})
    template["add_generation_prompt"] = not continues and body.add_generation_prompt is not False
    if continues:
        template["continue_final_message"] = True
    if body.tools:
        template |= rendered_tools(body.tools)
    history = History()
    rendered = await messages_of(messages, history)
    template["other_chars"] = template.get("other_chars", 0) + history.num_chars
    return await model.encoder.render(rendered, **template)


async def detokenize(body: DetokenizeBody, model: ServedModel) -> dict[str, Any]:
    """Return the reply to ``/detokenize``: the text, special tokens included.

    Raises:
        InvalidRequestError: the model has no tokenizer, or a token id is outside its vocabulary.
    """
    check_given_model(body.model, model)
    encoder = model.encoder
    tokenizer = encoder.tokenizer_for("tokens")
    check_num_ids(model, len(body.tokens))

    def work() -> str:
        check_token_ids(body.tokens, encoder.limits, "tokens")
        return tokenizer.decode(list(body.tokens), skip_special_tokens=False)

    return {"prompt": await _run(encoder.thread_pool, work, len(body.tokens))}


def check_num_ids(model: ServedModel, count: int) -> None:
    """Raise InvalidRequestError for more token ids than are turned into text in one call."""
    if count > (most := _most_ids(model)):
        text = f"tokens has {count} token ids; at most {most} are turned into text in one call"
        raise InvalidRequestError(text, param="tokens")


def _most_ids(model: ServedModel) -> int:
    return max(MAX_IDS, model.encoder.limits.max_seq_len)


async def render(call: Wanted, model: ServedModel) -> list[dict[str, Any]]:
    """Return a body for ``/inference/v1/generate`` for each prompt of a call.

    ``prompt``, which vLLM does not have, is the text that became the token ids; None: there is none.

    Raises:
        InvalidRequestError: an option breaks its rule, or a token id is outside the vocabulary.
        ContextLengthError: a prompt, or a prompt with its ``max_tokens``, does not fit the context.
    """
    generation = Generation(len(call.requests), abort=lambda rid: None)
    encoded = await model.encoder.encode_call(call.requests, generation)
    return [
        {
            "request_id": request.group or request.rid,
            "token_ids": _ids(ids),
            "prompt": request.prompt if isinstance(request.prompt, str) else None,
            "features": None,
            "sampling_params": _sampling(
                request.options, model.sampling_defaults, params.max_new_tokens, call.n
            ),
            "model": call.model,
            "stream": call.stream,
            "stream_options": {"include_usage": True} if call.usage_in_stream else None,
            "cache_salt": request.cache_salt or None,
            "priority": -request.priority,
            "kv_transfer_params": None,
        }
        for request, (ids, params) in zip(call.requests, encoded, strict=True)
        if request.choice == 0  # the reply to a body has all of them
    ]


def _ids(ids: Sequence[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, array) else list(ids)


def _sampling(
    options: SamplingOptions, defaults: Mapping[str, float], max_tokens: int, n: int
) -> dict[str, Any]:
    """Return sampling options by vLLM's names: the limit of tokens, and what differs from the defaults.

    ``defaults`` are the server's own ones; these options are there in any case.
    """
    found: dict[str, Any] = {"max_tokens": max_tokens} | ({"n": n} if n > 1 else {})
    default = SamplingOptions()
    for name in (
        *("min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos"),
        *("allowed_token_ids", "bad_words", "skip_special_tokens", "logprobs"),
    ):
        if (value := getattr(options, name)) != getattr(default, name) or name in defaults:
            found[name] = value
    if options.prompt_logprobs_start >= 0:
        found["prompt_logprobs"] = options.num_prompt_top
    if options.grammar is not None:
        found["structured_outputs"] = as_structured(options.grammar)
    if options.keep_stop:
        found["include_stop_str_in_output"] = True
    return found


async def _run(pool: ThreadPool, work: Callable[[], T], cost: int) -> T:
    """Return the result of work on so many characters or tokens: at once, or in a thread."""
    return work() if cost <= INLINE_COST else await pool.run(work)
