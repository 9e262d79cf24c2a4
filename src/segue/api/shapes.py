"""The forms of errors, and of replies to control calls, for OpenAPI's description.

Nothing is encoded from them: what a reply must have is written here, and it may have more.
:mod:`segue.api.reply_shapes` has the replies of the routes that generate.
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
