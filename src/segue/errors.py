"""Errors a user can act on. Each message names the value, the rule and the remedy."""

from __future__ import annotations

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def shown(value: Any) -> str:
    """A value for an error message, shortened."""
    return _SHORT.repr(value)


class SegueError(Exception):
    """Base of all errors meant for users: message first, then what the server answers.

    ``status`` is the HTTP status, ``type`` and ``code`` are the OpenAI error fields, ``param`` names the
    offending request field where there is one.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(SegueError):
    """An option, or a combination of options, that cannot work."""


class UnsupportedModelError(ConfigError):
    """A model architecture, activation or RoPE kind that Segue does not implement."""


class TensorParallelError(ConfigError):
    """A tensor-parallel size that does not divide the model."""


class ModelFileError(ConfigError):
    """A model file that is missing, truncated, corrupt or does not fit its config."""


class CacheDirectoryError(ConfigError):
    """The user's cache directory cannot be written, or read."""


class OutOfMemoryError(ConfigError):
    """The memory budget leaves too little for the KV cache."""


class MemoryImbalanceError(ConfigError):
    """Ranks see free memory that differs by more than the allowed amount."""


class EngineStartError(SegueError):
    """A worker process ended before the engine was ready."""

    status = 503
    code = "engine_not_ready"


class InvalidRequestError(SegueError):
    """A request whose fields are wrong in type, range or combination."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedFieldError(InvalidRequestError):
    """A request field that Segue does not know or does not support."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """A prompt, or a prompt and its ``max_tokens``, that does not fit the context."""

    code = "context_length_exceeded"


class ModelNotFoundError(SegueError):
    """A model name this server does not serve."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class RequestTooLargeError(SegueError):
    """A request body above the server's limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class RequestTimeoutError(SegueError):
    """A request that did not come whole in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class AuthenticationError(SegueError):
    """A missing or wrong API key."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class ForbiddenError(SegueError):
    """A request that a web page of another origin sent, or for a host that is not this server."""

    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class MediaTypeError(SegueError):
    """A request body that is not declared as JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class OverloadedError(SegueError):
    """The waiting queue is full; the client should retry later."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"


class WeightSyncError(SegueError):
    """A step of a weight update that cannot be done; the weights are as they were."""

    status = 400
    type = "invalid_request_error"
    code = "weight_sync_failed"


class PausedError(SegueError):
    """Generation is paused, and what comes meanwhile is refused (``--paused-policy reject``)."""

    status = 503
    type = "overloaded_error"
    code = "paused"


class PoisonedError(SegueError):
    """A commit of new weights failed half-way: nothing is generated until all weights have been replaced."""

    status = 503
    code = "weights_poisoned"


class NonFiniteLogitsError(SegueError):
    """The model gave logits from which no token can be drawn: NaN, plus infinity, or only minus infinity."""

    type = "non_finite_logits"
    code = "non_finite_logits"


class DrainingError(SegueError):
    """The server is about to end: what runs ends, and nothing new begins."""

    status = 503
    code = "draining"


class EngineHungError(SegueError):
    """The engine's worker does not answer; requests in flight go on if it recovers."""

    status = 503
    code = "engine_hung"


class EngineDeadError(SegueError):
    """The engine's worker died; requests in flight are lost."""

    status = 503
    code = "engine_dead"
