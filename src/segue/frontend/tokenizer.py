"""Tokenizes, detokenizes and renders chat templates as transformers does, without its import of torch.

:class:`PromptEncoder` does so for arriving requests: long prompts in pieces, in threads.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer as Backend

from segue.checkpoint.model_files import CONVERTED_KEY
from segue.checkpoint.source import eos_token_ids, read_json
from segue.errors import ContextLengthError, InvalidRequestError, ModelFileError, short_repr
from segue.frontend.bad_words import Words, token_sequences
from segue.frontend.chat_template import NO_FORM, NO_TEMPLATE, ChatForm, ChatTemplate, ToolFormat
from segue.frontend.grammars import GrammarChecks
from segue.frontend.request import GenerateRequest, Generation
from segue.frontend.sampling_options import RequestLimits, SamplingOptions, num_entries
from segue.frontend.thread_pool import ThreadPool
from segue.frontend.tokenizer_class import GENERIC, tokenizer_class
from segue.messages.requests import SamplingParams
from segue.sizes import ceil_div

INLINE_REQUESTS = 64  # most requests of a call that are handled on the event loop
INLINE_COST = 4096  # most characters of a call's prompts that are tokenized on the event loop
IDS_PER_CHAR = 8  # token ids that are checked in the time that tokenizing one character takes
CHARS_PER_ENTRY = 4  # characters that are tokenized in the time of checking one entry of the options
PIECE_REQUESTS = 256  # most requests in one piece of work
PIECE_COST = 1 << 16  # characters that a thread tokenizes in one piece of work: about 20 ms
PROBE_CHARS_PER_TOKEN = 16  # texts longer than this times the context are first checked in parts
PROBE_SLACK = 256  # tokens by which a part alone may exceed its share of the whole text
# The largest conversation that is rendered on the event loop. Larger ones are rendered in a thread.
INLINE_MESSAGES = 64
INLINE_CHARS = 1 << 16

_QWEN = "Qwen2Tokenizer"
_QWEN_MODEL_TYPES = frozenset({"qwen2", "qwen3", "qwen3_moe"})

EncodedPrompt = tuple[Sequence[int], SamplingParams]  # its token ids, and how it is continued


class Tokenizer:
    """The tokenizer of one model. Several threads may use it; `encode` and `decode` release the GIL."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int] = ()) -> None:
        """Wrap a transformers tokenizer that is built on a `tokenizers.Tokenizer`; see `load`."""
        self._chat = tokenizer
        self.backend: Backend = tokenizer.backend_tokenizer
        # A tokenizer.json may enable both; transformers ignores that by default.
        self.backend.no_truncation()
        self.backend.no_padding()
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_ids, *own]))  # each ends a generation
        self.bos_id: int | None = tokenizer.bos_token_id
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        self.has_chat_template = bool(tokenizer.chat_template)
        self.template = ChatTemplate.of(tokenizer.chat_template)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load the tokenizer of `directory`, and the EOS ids from the configs there.

        Raises:
            ModelFileError: there are no tokenizer files, or they cannot be read.
        """
        settings, config, generation = (
            read_json(path) if (path := directory / f"{name}.json").exists() else {}
            for name in ("tokenizer_config", "config", "generation_config")
        )
        try:
            name = _class_name(directory, settings, config)
            tokenizer = tokenizer_class(name).from_pretrained(directory)
        except Exception as error:  # the Rust and Python parsers raise many types for a broken file
            why = f"cannot be loaded ({_first_line(error)})"
            remedy = (
                "its files are tokenizer.json, tokenizer_config.json and, for older models, tokenizer.model"
            )
            if _lacks_sentencepiece(directory):  # then the error is about a fallback that was tried last
                why = "cannot be loaded: there is no tokenizer.json"
                remedy = (
                    "install sentencepiece and protobuf to read its tokenizer.model, or save the tokenizer "
                    "as a tokenizer.json"
                )
            raise ModelFileError(f"the tokenizer in {directory} {why}; {remedy}") from error
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelFileError(
                f"the tokenizer in {directory} is a {type(tokenizer).__name__}, which has no fast "
                "implementation; save it as a tokenizer.json"
            )
        return cls(tokenizer, eos_token_ids(config, generation))

    def use_template(self, template: str) -> None:
        """Render conversations with another template; raises ValueError if its syntax is wrong."""
        self._chat.chat_template = template
        try:
            self._chat.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        except Exception:
            pass
        self.has_chat_template = True
        self.template = ChatTemplate.of(template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Use `add_special_tokens` for plain prompts, not for rendered chats.

        Raises:
            InvalidRequestError: `text` has a lone surrogate, which is not a character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has a lone surrogate, {text[error.start]!a}, at character {error.start}; it must "
                "be valid Unicode"
            ) from error
        # Only the batch call releases the GIL. Without it, a long prompt would block every stream.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`: U+FFFD for bytes that are not UTF-8, "" for ids beyond the vocabulary."""
        (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Return the prompt for `messages`. `kwargs`, such as `tools`, are passed to the template.

        Raises:
            InvalidRequestError: the model has no chat template, or its template rejects the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template, so it cannot answer messages; send a prompt to "
                "/v1/completions",
                param="messages",
            )
        try:
            text = self._chat.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:  # whatever the template's expressions raise, or what is nested too deeply
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {_first_line(error)}",
                param="messages",
            ) from error
        return str(text)


@dataclass(slots=True)
class PromptEncoder:
    """Turns prompts into token ids, and refuses prompts that do not fit the context as early as possible."""

    tokenizer: Tokenizer | None
    limits: RequestLimits
    chars_per_token: int | None  # the most characters that become one token; None: there is no bound
    thread_pool: ThreadPool
    grammars: GrammarChecks

    async def encode_call(self, requests: Sequence[GenerateRequest], call: Generation) -> list[EncodedPrompt]:
        """Encode the prompts of one call, and check their options; options that they share are checked once.

        If all its requests are aborted meanwhile, the prompts are empty, at once.

        Raises:
            InvalidRequestError: an option breaks its rule, a token id is outside the vocabulary, a text has
                no tokenizer, or a grammar is wrong.
            ContextLengthError: a prompt, or a prompt with its ``max_tokens``, does not fit the context.
        """
        all_options = {id(request.options): request.options for request in requests}.values()
        is_accepted = any(request.is_accepted for request in requests)
        await self.grammars.check(all_options, is_accepted=is_accepted)
        num = sum(num_entries(options) + len(options.stop) for options in all_options)
        cost = sum(map(_cost, requests)) + CHARS_PER_ENTRY * num
        if cost <= INLINE_COST and len(requests) <= INLINE_REQUESTS:
            return self._encode_all(requests, self._shared_params(requests), [])
        work = asyncio.ensure_future(self._encode_in_pieces(requests))
        call.encoding = work  # so that the abort of all requests can cancel it
        try:
            await asyncio.wait([work])
            if work.cancelled():  # by the abort of all requests
                return [((), SamplingParams(max_new_tokens=0))] * len(requests)
            return work.result()
        finally:
            work.cancel()

    async def render(
        self, messages: list[dict[str, Any]], /, *, other_chars: int = 0, **template: Any
    ) -> str:
        """Return the prompt that the model's chat template makes of messages.

        ``template`` are arguments of :meth:`Tokenizer.apply_chat_template`, and ``other_chars`` is how much
        there is to render beside the contents.

        Raises:
            InvalidRequestError: the model has no chat template, or the template rejects the messages.
            ContextLengthError: the messages cannot fit the context, whatever the template makes of them.
        """
        tokenizer, max_len = self.tokenizer_for("messages"), self.limits.max_seq_len
        if len(messages) >= max_len:
            text = f"messages has {len(messages)} messages, but this model's context has {max_len} tokens"
            raise ContextLengthError(
                f"{text}; each message takes at least one token: send fewer messages", param="messages"
            )
        num_chars = sum(len(message["content"]) for message in messages)
        self.check_num_chars(num_chars, "messages")
        if len(messages) <= INLINE_MESSAGES and num_chars + other_chars <= INLINE_CHARS:
            return tokenizer.apply_chat_template(messages, **template)
        return await self.thread_pool.run(lambda: tokenizer.apply_chat_template(messages, **template))

    def encode(self, request: GenerateRequest) -> Sequence[int]:
        """Return the token ids of one prompt: a text is tokenized, and ids are checked.

        Raises what :meth:`encode_call` does for a prompt that is empty, too long or of unknown ids.
        """
        prompt = request.prompt
        if isinstance(prompt, str):
            tokenizer = self.tokenizer_for(request.param)
            prompt = tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
        check_prompt_len(len(prompt), self.limits, request.param)
        try:
            ids = prompt if isinstance(prompt, array) else array("i", prompt)
        except OverflowError:  # an id of more than 32 bits, which the next check reports
            check_token_ids(prompt, self.limits, request.param)
            raise
        check_token_ids(ids, self.limits, request.param)
        return ids

    def _encode_all(
        self,
        requests: Sequence[GenerateRequest],
        shared: dict[int, SamplingParams],
        encoded: list[EncodedPrompt],
    ) -> list[EncodedPrompt]:
        """Encode prompts, and return them behind those of the call that are ``encoded`` already.

        A choice behind the first one of its prompt has the token ids of the choice before it. ``shared``: see
        :meth:`_shared_params`.
        """
        encoded = list(encoded)
        for request in requests:
            ids = encoded[-1][0] if request.choice else self.encode(request)
            check_token_ids(request.outputs, self.limits, "outputs")
            options = request.options
            params = options.prompt_params(
                shared[id(options)], len(ids), self.limits, request.seed, request.choice
            )
            encoded.append((ids, params))
        return encoded

    def _shared_params(self, requests: Sequence[GenerateRequest]) -> dict[int, SamplingParams]:
        """Check the options of a call, and return the parameters of each, by the identity of the options.

        Prompts that share their options share the parameters, too. It comes before any prompt is tokenized.
        """
        all_options = {id(request.options): request.options for request in requests}
        return {
            key: options.shared_params(self.limits, self._bad_words(options))
            for key, options in all_options.items()
        }

    def _bad_words(self, options: SamplingOptions) -> Words:
        """Return the bad words of options as tokens."""
        if not options.bad_words:
            return ()
        options.check(self.limits)  # before it takes time
        encode = partial(self.tokenizer_for("bad_words").encode, add_special_tokens=False)
        return token_sequences(options.bad_words, encode, self.limits.vocab_size)

    def check_num_chars(self, count: int, param: str) -> None:
        """Raise ContextLengthError if any text of ``count`` characters is too long for the context."""
        if self.chars_per_token is None:
            return
        least = ceil_div(count, self.chars_per_token)
        if least >= self.limits.max_seq_len:
            check_prompt_len(least, self.limits, param, at_least=True)

    async def check_parts(self, request: GenerateRequest) -> None:
        """Raise ContextLengthError if the parts of a long text already exceed the context.

        The whole text is tokenized in one call, which cannot be interrupted. A part takes little time. Tokens
        at the cuts may differ from those of the whole text, so ``PROBE_SLACK`` is subtracted for each part.
        """
        text = request.prompt
        if not isinstance(text, str) or len(text) <= PROBE_CHARS_PER_TOKEN * self.limits.max_seq_len:
            return
        self.check_num_chars(len(text), request.param)
        encode, count = partial(self.tokenizer_for(request.param).encode, add_special_tokens=False), 0
        for start in range(0, len(text), PIECE_COST):
            part = text[start : start + PIECE_COST]
            count += len(await self.thread_pool.run(partial(encode, part))) - PROBE_SLACK
            if count >= self.limits.max_seq_len:
                check_prompt_len(count, self.limits, request.param, at_least=True)

    async def _encode_in_pieces(self, requests: Sequence[GenerateRequest]) -> list[EncodedPrompt]:
        """Do as :meth:`_encode_all` in threads, a piece at a time, so that other calls get their turns.

        A prompt that is a piece alone may be long, so its parts are checked first.
        """
        encoded: list[EncodedPrompt] = []
        shared = await self.thread_pool.run(partial(self._shared_params, requests))
        for part in _split(requests):
            if len(part) == 1:
                await self.check_parts(part[0])
            encoded = await self.thread_pool.run(partial(self._encode_all, part, shared, encoded))
        return encoded

    def tokenizer_for(self, param: str) -> Tokenizer:
        """Return the tokenizer; raises InvalidRequestError for the field ``param`` if the model has none."""
        if self.tokenizer is None:
            remedy = "leave it out" if param == "bad_words" else "give the prompt as token ids"
            raise InvalidRequestError(f"this model has no tokenizer; {remedy}", param=param)
        return self.tokenizer


def check_token_ids(ids: Sequence[int], limits: RequestLimits, param: str) -> None:
    """Raise InvalidRequestError for a token id that the model does not have."""
    if ids and ((of_array := np.asarray(ids)).min() < 0 or of_array.max() >= limits.vocab_size):
        wrong = next(token for token in ids if not 0 <= token < limits.vocab_size)
        raise InvalidRequestError(
            f"{param} contains token id {short_repr(wrong)}; ids of this model are 0 to "
            f"{limits.vocab_size - 1}",
            param=param,
        )


def check_prompt_len(prompt_len: int, limits: RequestLimits, param: str, *, at_least: bool = False) -> None:
    """Raise if a prompt of ``prompt_len`` tokens is empty, or leaves no room for one output token."""
    if prompt_len == 0:
        raise InvalidRequestError(f"{param} is empty; it must have at least one token", param=param)
    if prompt_len >= limits.max_seq_len:
        count = f"at least {prompt_len}" if at_least else prompt_len
        raise ContextLengthError(
            f"The prompt has {count} tokens, but this model's maximum context length is {limits.max_seq_len} "
            f"tokens, the output included; shorten the prompt to at most {limits.max_seq_len - 1} tokens.",
            param=param,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is needed to make requests of a client's body, without the engine that serves them."""

    names: Sequence[str]  # by which clients may call the model; errors show the first one
    max_prompts: int  # of one call
    encoder: PromptEncoder
    chat: ChatForm = NO_FORM
    # Of requests that do not name these options, where they are not those of `SamplingOptions`.
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


def chat_form(
    tokenizer: Tokenizer | None,
    tools: Literal["auto", "none"] | ToolFormat,
    reasoning: Literal["auto", "none", "think"],
) -> ChatForm:
    """Return how a model's chats are understood; ``auto`` is what its template and vocabulary say."""
    template = NO_TEMPLATE if tokenizer is None else tokenizer.template
    thinks = reasoning == "think"
    if reasoning == "auto" and tokenizer is not None:
        thinks = template.has_think or tokenizer.backend.token_to_id("<think>") is not None
    found = template.tool_format if tools == "auto" else tools
    return ChatForm(template=template, tools=None if found == "none" else found, thinks=thinks)


def _split(requests: Sequence[GenerateRequest]) -> Iterator[list[GenerateRequest]]:
    """Split the requests into runs of neighbours that are one piece of work each; a longer one is alone."""
    part: list[GenerateRequest] = []
    cost = 0
    for request in requests:
        if part and (cost + _cost(request) > PIECE_COST or len(part) == PIECE_REQUESTS):
            yield part
            part, cost = [], 0
        part.append(request)
        cost += _cost(request)
    yield part


def _cost(request: GenerateRequest) -> int:
    """Return the cost of a prompt, as a number of characters to tokenize; only its first choice has any."""
    if request.choice:
        return 0
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, str) else len(prompt) // IDS_PER_CHAR


def _class_name(directory: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the name of the class of transformers that loads a tokenizer.

    ``AutoTokenizer`` would find it, but imports torch. So it is named only where the choice is hard.
    ``settings`` is the tokenizer_config.json, and ``config`` the model's config.json.
    """
    declared = settings.get("tokenizer_class")
    if CONVERTED_KEY in settings:
        return GENERIC
    if "auto_map" in settings or not (directory / "tokenizer.json").exists():
        return "AutoTokenizer"
    is_qwen = config.get("model_type") in _QWEN_MODEL_TYPES
    if declared in (GENERIC, "TokenizersBackend"):
        # The class that Qwen2 checkpoints declare is known to be wrong.
        return _QWEN if config.get("model_type") == "qwen2" else GENERIC
    if is_qwen and declared in (None, _QWEN, f"{_QWEN}Fast"):
        return _QWEN
    return "AutoTokenizer"


def _lacks_sentencepiece(directory: Path) -> bool:
    """Whether there is only a tokenizer.model, and a package that is needed to read it is missing."""
    from transformers.utils.import_utils import is_protobuf_available, is_sentencepiece_available

    alone = (directory / "tokenizer.model").exists() and not (directory / "tokenizer.json").exists()
    return alone and not (is_sentencepiece_available() and is_protobuf_available())


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
