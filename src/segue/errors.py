"""The errors that users see. Each message names the value, the rule and the remedy."""

from __future__ import annotations

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def short_repr(value: Any) -> str:
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

    def __init_subclass__(
        cls, *, status: int | None = None, type: str | None = None, code: str | None = None
    ) -> None:
        """Set the class's HTTP status, type and code; what is not given stays as in the base class."""
        cls.status = status or cls.status
        cls.type = type or cls.type
        cls.code = code or cls.code

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


class ClusterSizeError(ConfigError):
    """Workers in these numbers, per role, cannot serve requests."""


class DeviceCountError(ConfigError):
    """The machine has fewer GPUs than the workers of a cluster need."""


class ChildStartError(SegueError, status=503):
    """A process of a cluster, or of its router, ended before it was ready for the first time."""


class ManifestError(ConfigError):
    """A Kubernetes manifest has something that a machine without Kubernetes cannot do."""


class ModelFileError(ConfigError):
    """A model file is missing, truncated or corrupt, or does not fit its config."""


class CacheDirectoryError(ConfigError):
    """The cache directory (``--cache-dir``) cannot be read or written."""


class OutOfMemoryError(ConfigError):
    """The memory budget leaves too little for the KV cache."""


class MemoryImbalanceError(ConfigError):
    """The free memory of two ranks differs by more than is allowed."""


class EngineStartError(SegueError, status=503, code="engine_not_ready"):
    """A worker process ended before the engine was ready."""


class BenchmarkError(SegueError):
    """A benchmark cannot be run: the server cannot be reached, or does not serve what is asked of it."""


class InvalidRequestError(SegueError, status=400, type="invalid_request_error", code="invalid_value"):
    """A field of the request is wrong in type or range, or does not go with another field."""


class UnsupportedFieldError(InvalidRequestError, code="unsupported_parameter"):
    """The request has a field that Segue does not know or does not support."""


class ContextLengthError(InvalidRequestError, code="context_length_exceeded"):
    """The prompt, or the prompt with its ``max_tokens``, does not fit the context."""


class ModelNotFoundError(SegueError, status=404, type="invalid_request_error", code="model_not_found"):
    """The request names a model that this server does not serve."""


def invalid_value(param: str, value: Any, rule: str) -> InvalidRequestError:
    """Return the error for a request's field or option ``param``, whose ``value`` breaks ``rule``.

    ``rule`` ends the sentence and says what is allowed, as "must be at least 0".
    """
    return InvalidRequestError(f"{param}={short_repr(value)}: {rule}", param=param)


class WrongRoleError(InvalidRequestError, code="wrong_role"):
    """The request, or the part of it, is for an engine with another ``--role``."""


class StaleEpochError(SegueError, status=503, code="stale_epoch"):
    """An engine's epoch is not the newest of its cohort, or a leg names another epoch than its engine has."""


class LockHeldError(SegueError, status=423, type="invalid_request_error", code="lock_held"):
    """Another engine of the cohort has its lock, so this one cannot wake."""


class NoStandbyError(SegueError, status=409, type="invalid_request_error", code="no_standby"):
    """No engine waits to take over, so this one cannot hand its place over."""


class WakeError(SegueError, status=503, code="engine_cannot_wake"):
    """An engine that stood by could not begin to serve. It ends."""


class FailoverDirectoryError(ConfigError):
    """The failover directory cannot be used: others may write to it, or its file system has no locks."""


class DiscoveryError(SegueError, status=503, code="discovery_unavailable"):
    """The place where engines are found cannot be reached, or does not do what it was asked for."""


class LockLostError(SegueError, status=503, code="lock_lost"):
    """The file of a cohort's lock was deleted or made anew while an engine held the lock: it was replaced."""


class RequestTooLargeError(SegueError, status=413, type="invalid_request_error", code="request_too_large"):
    """The request body is larger than the server allows."""


class RequestTimeoutError(SegueError, status=408, type="invalid_request_error", code="request_timeout"):
    """The request did not arrive completely in time."""


class AuthenticationError(SegueError, status=401, type="invalid_request_error", code="invalid_api_key"):
    """The request has no API key, or a wrong one."""


class ForbiddenError(SegueError, status=403, type="invalid_request_error", code="forbidden"):
    """The request comes from a web page of another origin, or is for a host that is not this server."""


class MediaTypeError(SegueError, status=415, type="invalid_request_error", code="unsupported_media_type"):
    """The request body is not declared as JSON."""


class OverloadedError(SegueError, status=503, type="overloaded_error", code="overloaded"):
    """The waiting queue is full; the client should retry later."""


class NoWorkerError(SegueError, status=503, type="overloaded_error", code="no_worker"):
    """A router has no worker, or no pair of workers, that can take the request; the message says why."""


class UnservedRouteError(SegueError, status=501, type="invalid_request_error", code="route_not_served"):
    """All workers of a router are servers that do not have the route; the message says what to add."""


class UnknownWorkerError(SegueError, status=404, type="invalid_request_error", code="worker_not_found"):
    """The request names a worker that the router does not have."""


class RoleChangedError(SegueError, status=503, type="overloaded_error", code="wrong_role"):
    """The engine's role changes or has changed, and it does not take this request any more."""


class RoleChangeError(SegueError, status=409, type="invalid_request_error", code="role_not_changed"):
    """The engine's role could not be changed, and is what it was."""


class WorkersFailedError(SegueError, status=502, code="workers_failed"):
    """An operation that a router sends to all workers failed at one or more of them."""


class FailedOverError(SegueError, status=503, type="overloaded_error", code="failed_over"):
    """The engine of an operation was lost, and another one of its cohort takes its place."""


class SeveralWorkersError(SegueError, status=400, type="invalid_request_error", code="several_workers"):
    """A router of several workers does not take this request; each worker has to get it from the client."""


class WeightSyncError(SegueError, status=400, type="invalid_request_error", code="weight_sync_failed"):
    """A step of a weight update cannot be done. The served weights did not change."""


class PausedError(SegueError, status=503, type="overloaded_error", code="paused"):
    """Generation is paused, and the server refuses new requests meanwhile (``--paused-policy reject``)."""


class PoisonedError(SegueError, status=503, code="weights_poisoned"):
    """A commit of new weights failed half-way. Nothing is generated until all weights have been replaced."""


class NewWeightsError(SegueError, status=503, code="new_weights_not_served"):
    """The memory service has new weights that this engine cannot serve, so it ends, and others go on."""


class WeightsReleasedError(SegueError, status=503, code="weights_released"):
    """The memory of the weights was released, and they have not all been sent or loaded since."""


class MemorySaverError(SegueError, status=400, type="invalid_request_error", code="memory_saver"):
    """Memory cannot be released or resumed: the engine was started without it, or weights are updated now."""


class MemoryResumeError(SegueError, status=503, code="memory_not_moved"):
    """Memory could not be taken again, or not be backed up. What was released is still released."""


class SharedMemoryError(SegueError):
    """Shared memory of another process cannot be mapped, or that process cannot be watched."""


class SlabInUseError(SharedMemoryError, code="slab_in_use"):
    """A slab cannot be sealed, because a process can still write to it."""


class SlabMemoryError(SharedMemoryError, status=503, code="slab_memory"):
    """There is too little memory for a slab."""


class CUDADriverError(SegueError):
    """A call of the CUDA driver has failed."""


class TransportError(SegueError, code="kv_transport_failed"):
    """KV pages cannot be moved to another process."""


class PeerLostError(TransportError):
    """The process that KV pages were pushed to has ended, or has closed the connection."""


class PageRangeError(TransportError):
    """A push names a page that the source's or the target's KV pool does not have. Nothing was written."""


class NonFiniteLogitsError(SegueError, type="non_finite_logits", code="non_finite_logits"):
    """No token can be sampled: the logits have NaN or plus infinity, or are all minus infinity."""


class GuidedOutputError(SegueError, status=400, type="invalid_request_error", code="grammar_failed"):
    """A request's grammar turned out to be too complex, or its output does not belong to it."""


class GuideLostError(SegueError, status=503, code="guide_lost"):
    """A process that follows grammars has ended, or cannot be started; the request can be sent again."""


class HandoverError(SegueError, status=503, code="kv_peer_lost"):
    """The KV of a request did not come from the prefill worker; the request can be sent again."""


class KVCapacityLostError(SegueError, status=503, code="kv_capacity_lost"):
    """A request cannot go on, because a lost prefill worker may still write to the pages that it needs."""


class DrainingError(SegueError, status=503, code="draining"):
    """The server is shutting down. Running requests may end; new ones are refused."""


class EngineHungError(SegueError, status=503, code="engine_hung"):
    """A worker does not answer. Requests in flight go on if it recovers."""


class EngineDeadError(SegueError, status=503, code="engine_dead"):
    """A worker has ended. Requests in flight are lost."""


class KVLinkError(SegueError, status=503, code="kv_link"):
    """A connection between a prefill worker and a decode worker could not be opened, or has ended.

    ``code`` is the one that ``LinkClosed`` carries, which lists all of them.
    """


class KVMismatchError(KVLinkError, code="kv_mismatch"):
    """The two workers differ in what must be equal. They can connect once an option has changed."""


class KVKeyError(KVLinkError, code="kv_key"):
    """The workers do not have the same ``--pd-key``, or have none where one is required."""


class KVRefusedError(KVLinkError, code="kv_refused"):
    """The other worker refused the connection; the text has its reason."""


class KVProtocolError(KVLinkError, code="kv_protocol"):
    """A frame or message that breaks the protocol of the connection, or is over its limit."""


class KVLinkLostError(KVLinkError, code="kv_link_lost"):
    """The other worker cannot be reached, closed the connection, or is silent for too long."""


class MemoryServiceLostError(SegueError, status=503, code="owner_lost"):
    """The memory service has ended, and ``--on-gms-loss exit`` has the engine end with it."""


class MemoryServiceError(SegueError, status=503, code="memory_service"):
    """The memory service (``segue gms``) cannot be started, cannot be reached, or refuses a call.

    ``code`` is the one of the refusal, where it is one.
    """


class WeightsMismatchError(MemoryServiceError, code="mismatch"):
    """The memory service has other weights for the cohort than the engine wants."""


def error_of(kind: str, message: str) -> SegueError:
    """Return the error whose class another process has named."""
    cls = globals().get(kind)
    if isinstance(cls, type) and issubclass(cls, SegueError):
        return cls(message)
    return EngineDeadError(f"{kind}: {message}")
