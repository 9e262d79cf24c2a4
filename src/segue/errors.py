"""The errors that users see. Each message names the value, the rule and the remedy."""

from __future__ import annotations

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def shown(value: Any) -> str:
    """Return the value's ``repr``, shortened for an error message."""
    return _SHORT.repr(value)


class SegueError(Exception):
    """The base class of all errors that are meant for users.

    ``status`` is the HTTP status of the server's answer. ``type``, ``code`` and ``param`` are the fields of
    OpenAI's errors; ``param`` names the option or request field that is wrong, where there is one.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(SegueError):
    """An option, or a combination of options, cannot work."""


class UnsupportedModelError(ConfigError):
    """The model has an architecture, activation, RoPE kind or tokenizer that Segue does not implement."""


class TensorParallelError(ConfigError):
    """The tensor-parallel size does not fit the model, the devices or another option."""


class ModelFileError(ConfigError):
    """A model file is missing, truncated or corrupt, or does not fit its config."""


class CacheDirectoryError(ConfigError):
    """The cache directory (``--cache-dir``) cannot be read or written."""


class OutOfMemoryError(ConfigError):
    """The memory budget leaves too little for the KV cache."""


class MemoryImbalanceError(ConfigError):
    """The free memory of two ranks differs by more than is allowed."""


class EngineStartError(SegueError):
    """A worker process ended before the engine was ready."""

    status = 503
    code = "engine_not_ready"


class InvalidRequestError(SegueError):
    """A field of the request is wrong in type or range, or does not go with another field."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedFieldError(InvalidRequestError):
    """The request has a field that Segue does not know or does not support."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt with its ``max_tokens``, does not fit the context."""

    code = "context_length_exceeded"


class ModelNotFoundError(SegueError):
    """The request names a model that this server does not serve."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class RequestTooLargeError(SegueError):
    """The request body is larger than the server allows."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class RequestTimeoutError(SegueError):
    """The request did not arrive completely in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class AuthenticationError(SegueError):
    """The request has no API key, or a wrong one."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class ForbiddenError(SegueError):
    """The request comes from a web page of another origin, or is for a host that is not this server."""

    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class MediaTypeError(SegueError):
    """The request body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class OverloadedError(SegueError):
    """The waiting queue is full; the client should retry later."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"


class WeightSyncError(SegueError):
    """A step of a weight update cannot be done. The served weights did not change."""

    status = 400
    type = "invalid_request_error"
    code = "weight_sync_failed"


class PausedError(SegueError):
    """Generation is paused, and the server refuses new requests meanwhile (``--paused-policy reject``)."""

    status = 503
    type = "overloaded_error"
    code = "paused"


class PoisonedError(SegueError):
    """A commit of new weights failed half-way. Nothing is generated until all weights have been replaced."""

    status = 503
    code = "weights_poisoned"


class NonFiniteLogitsError(SegueError):
    """No token can be sampled: the logits have NaN or plus infinity, or are all minus infinity."""

    type = "non_finite_logits"
    code = "non_finite_logits"


class DrainingError(SegueError):
    """The server is shutting down. Running requests may end; new ones are refused."""

    status = 503
    code = "draining"


class EngineHungError(SegueError):
    """A worker does not answer. Requests in flight go on if it recovers."""

    status = 503
    code = "engine_hung"


class EngineDeadError(SegueError):
    """A worker has ended. Requests in flight are lost."""

    status = 503
    code = "engine_dead"
