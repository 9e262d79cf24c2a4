"""The forms of replies and errors, for OpenAPI's description.

Nothing is encoded from them: what a reply must have is written here, and it may have more.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from segue.messages.control import PauseResult
from segue.messages.memory import MemoryTag

# --- errors ---


class OpenAIErrorFields(Struct):
    """The error of :class:`OpenAIError`."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Struct):
    """An error of OpenAI's routes."""

    error: OpenAIErrorFields


class NativeError(Struct):
    """An error of native and control routes."""

    object: Literal["error"]
    message: str
    type: str
    code: int  # the status
    error_code: str | None


class WeightError(Struct):
    """An operation on weights that was not done."""

    success: bool
    message: str


class HealthError(NativeError):
    """Why the engine cannot serve."""

    status: str


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


# --- control ---


class StatusReply(Struct):
    """What has become of the engine."""

    status: str


class MessageReply(StatusReply):
    """The same, and a sentence."""

    message: str


class PauseReply(PauseResult, frozen=True, kw_only=True):
    """``POST /pause_generation``."""

    message: str
    status: str


class PausedReply(Struct):
    """``GET /is_paused``."""

    is_paused: bool


class SleepingReply(Struct):
    """``GET /is_sleeping``."""

    is_sleeping: bool


class MemoryReply(Struct):
    """What memory is released or taken again by a call."""

    success: bool
    message: str
    tags: list[MemoryTag]
    num_bytes: int


class DrainReply(Struct):
    """``POST /drain``."""

    drain: bool
    num_requests: int


class VersionReply(Struct):
    """``GET /version``."""

    version: str


class WeightVersionReply(Struct):
    """``GET /weight_version``."""

    weight_version: str


class ModelInfo(WeightVersionReply):
    """``GET /model_info``."""

    model_path: str
    served_model_name: str
    model_type: str
    is_generation: bool
    tp_size: int


class ServerInfo(Struct):
    """``GET /server_info``; it has the options, too."""

    version: str
    model_path: str
    served_model_name: str
    status: str
    max_total_num_tokens: int
    decided: dict[str, Any]
    internal_states: list[dict[str, Any]]


class SuccessReply(Struct):
    """Whether something was done, and a sentence."""

    success: bool
    message: str


class UpdateReply(SuccessReply):
    """A call of a weight update by vLLM's name."""

    status: str


class TracesReply(SuccessReply):
    """``POST /stop_profile``: the traces' paths."""

    files: list[str]


class AbortedReply(StatusReply):
    """``POST /abort_requests``."""

    aborted: int


class LoadsReply(Struct):
    """``GET /v1/loads``."""

    timestamp: str
    version: str
    dp_rank_count: int
    num_accelerators: int
    loads: list[dict[str, Any]]
    aggregate: dict[str, float]


class WorldSizeReply(Struct):
    """``GET /get_world_size``."""

    world_size: int


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
