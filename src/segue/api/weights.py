"""The operations on weights: their replies, and the methods of :class:`segue.Engine` that perform them."""

from __future__ import annotations

import asyncio
import base64
import inspect
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from msgspec import structs

from segue.api.validation import parse, plain
from segue.errors import InvalidRequestError, short_repr
from segue.messages.weight_operations import OPERATIONS, Operation, WeightOperation
from segue.messages.weight_update import WeightAnswer

Class = TypeVar("Class", bound=type)
_BASE64 = re.compile(r"[A-Za-z0-9+/]*")
_PIECE = 1 << 20  # characters that are checked at once


def reply_of(kind: type[Operation], answer: WeightAnswer) -> dict[str, Any]:
    """The reply to an operation, as JSON: the fields that its kind always has, then those of the answer."""
    reply = {**kind.reply, "success": answer.success, "message": answer.message, **answer.fields}
    return reply if answer.success or "status" not in reply else reply | {"status": "error"}


async def check_base64(operation: WeightOperation) -> None:
    """Refuse payloads that are not base64 before the update begins, a piece at a time; ranks decode them.

    Raises:
        InvalidRequestError: one is not.
    """
    for text in getattr(operation, "serialized_named_tensors", ()):
        content = text.rstrip("=")
        whole = len(text) % 4 == 0 and len(text) - len(content) <= 2
        for start in range(0, len(content), _PIECE):
            whole = whole and _BASE64.fullmatch(content, start, start + _PIECE) is not None
            await asyncio.sleep(0)
        if not whole:
            name = "serialized_named_tensors"
            raise InvalidRequestError(
                f"{name}: every entry must be base64, got {short_repr(text)}", param=name
            )


def with_weight_operations(engine: Class) -> Class:
    """Give a class of engines a method per operation, and one with ``async_`` before its name.

    Each returns the reply of the HTTP route of its name. It raises InvalidRequestError for an argument of a
    wrong type or range, and EngineDeadError if the engine's worker died or the engine was shut down.
    """
    for name, kind in OPERATIONS.items():
        for prefix, method in _methods(kind).items():
            method.__name__ = f"{prefix}{name}"
            method.__qualname__ = f"{engine.__qualname__}.{method.__name__}"
            method.__module__ = engine.__module__
            method.__doc__ = kind.__doc__
            method.__signature__ = _signature(kind)  # type: ignore[attr-defined]
            setattr(engine, method.__name__, method)
    return engine


def _methods(kind: type[WeightOperation]) -> dict[str, Callable[..., Any]]:
    """The blocking and the awaited method of an operation, by what stands before its name."""
    signature = _signature(kind)

    def begin(engine: Any, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, dict[str, Any]]:
        """Check the arguments now, on the caller's thread, and return the coroutine for the engine's loop."""
        return _perform(engine, kind, _fields(signature.bind(engine, *args, **kwargs)))

    def blocking(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._running.call(begin(self, *args, **kwargs))

    async def awaited(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return await self._running.call_async(begin(self, *args, **kwargs))

    return {"": blocking, "async_": awaited}


def _fields(given: inspect.BoundArguments) -> dict[str, Any]:
    """The body of the call. Made on the caller's thread: the engine's own has requests to serve meanwhile.

    Tensors on a GPU are read on the caller's current stream.
    """
    arguments = {name: value for name, value in given.arguments.items() if name != "self"}
    tensors = {}
    if "named_tensors" in arguments:
        tensors["serialized_named_tensors"] = _payloads(arguments.pop("named_tensors"))
    return {name: plain(value, name) for name, value in arguments.items()} | tensors


async def _perform(engine: Any, kind: type[WeightOperation], fields: dict[str, Any]) -> dict[str, Any]:
    """Check an operation, send it to the workers, and return the reply."""
    operation = parse(kind, fields, coerces="GET" in kind.methods)
    await check_base64(operation)
    return reply_of(kind, await engine._runtime.manager.calls.ask_weights(operation))


def _signature(kind: type[Operation]) -> inspect.Signature:
    """The signature of the method for an operation, whose parameters are the operation's fields.

    Required fields come first, then the operation's own, then those that it shares with others. Where the
    route takes payloads, the method takes ``named_tensors``, of which it makes payloads.
    """
    own = list(kind.__annotations__)
    fields = sorted(
        structs.fields(kind),
        key=lambda field: (not field.required, own.index(field.name) if field.name in own else len(own)),
    )
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for field in fields:
        is_payload = field.name == "serialized_named_tensors"
        name, annotation = ("named_tensors", Any) if is_payload else (field.name, field.type)
        default = inspect.Parameter.empty if field.required else field.default
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(name, either, default=default, annotation=annotation))
    return inspect.Signature(parameters)


def _payloads(named_tensors: Any) -> list[str]:
    """Base64 of what `update_weights_from_tensor` is given: (name, tensor) pairs, or serialised payloads."""
    payloads: list[Any] = [named_tensors] if isinstance(named_tensors, bytes) else list(named_tensors)
    if not payloads or not all(isinstance(each, bytes) for each in payloads):
        from segue.weight_update.payload.decode import encode  # imports torch

        payloads = [encode(payloads)]
    return [base64.b64encode(payload).decode() for payload in payloads]
