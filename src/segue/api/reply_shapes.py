"""The forms of replies of the routes that generate or tokenize; see :mod:`segue.api.shapes`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

# --- OpenAI ---


class CachedTokens(Struct):
    """The part of the prompt that was in the prefix cache."""

    cached_tokens: int


class CompletionTokens(Struct):
    """The part of the output that is reasoning."""

    reasoning_tokens: int


class UsageShape(Struct):
    """The tokens of a reply."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens | None = None  # absent where reasoning is not told apart


class LikelyToken(Struct, kw_only=True):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None  # absent where tokens are ids


class ChatLogprob(LikelyToken, kw_only=True):
    """A token of a chat's reply, and the likeliest others at its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(Struct):
    """The log-probabilities of a chat's reply."""

    content: list[ChatLogprob] | None


class CompletionLogprobs(Struct):
    """The log-probabilities of a completion; one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunctionShape(Struct):
    """The function of a call; the arguments are JSON."""

    name: str
    arguments: str


class ToolCallShape(Struct):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunctionShape


class AssistantMessage(Struct):
    """What a chat is continued by. The last three are absent where there are none."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallShape] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # another name of it


class ChatChoiceShape(Struct):
    """A continuation of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class CompletionChoiceShape(Struct):
    """A continuation of a text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str


class OpenAIReplyShape(Struct):
    """What both replies have."""

    id: str
    created: int
    model: str
    usage: UsageShape


class ChatReplyShape(OpenAIReplyShape):
    """``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoiceShape]


class CompletionReplyShape(OpenAIReplyShape):
    """``POST /v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoiceShape]


class InputTokens(Struct):
    """The parts of a response's input."""

    cached_tokens: int
    cache_write_tokens: int  # always 0: nothing is charged for them


class ResponseUsageShape(Struct):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: CompletionTokens
    total_tokens: int


class OutputItemShape(Struct):
    """An item of a response's output: a message, a reasoning or a call of a function, with its own fields."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["completed", "incomplete"]


class ResponseShape(Struct):
    """``POST /v1/responses``; it also repeats the fields of the body."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "failed"]
    usage: ResponseUsageShape
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    output: list[OutputItemShape]
    instructions: str | None
    metadata: dict[str, str]
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]


class ModelCard(Struct):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Struct):
    """``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


# --- native ---


class VersionSpan(Struct):
    """The output tokens that weights of one version have generated."""

    version: str
    start: int
    end: int


class MetaInfo(Struct):
    """How a reply was generated."""

    id: str
    finish_reason: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[VersionSpan]


class GenerateReply(Struct):
    """``POST /generate``; a batch is answered by a list of these."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


# --- token ids ---


class TokenChoice(Struct):
    """A continuation by token ids."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: str


class TokenGenerateReply(Struct):
    """``POST /inference/v1/generate``."""

    request_id: str
    model: str
    created: int
    choices: list[TokenChoice]
    usage: UsageShape


class TokenizeReply(Struct):
    """``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(Struct):
    """``POST /detokenize``."""

    prompt: str


class RenderedPrompt(Struct):
    """What a prompt is generated from."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
