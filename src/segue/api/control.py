"""What control calls are given and give. Unknown fields are ignored: clients send extras."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from segue.messages.control import PauseMode


class _ControlBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Query(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class AbortRequest(_ControlBody):
    """``POST /abort_request``."""

    rid: str | None = ""
    abort_all: bool = False
    aborted_message: str | None = None


class PauseRequest(_ControlBody):
    """``POST /pause_generation``."""

    mode: Annotated[PauseMode, BeforeValidator(lambda mode: "in_place" if mode == "in-place" else mode)] = (
        "abort"
    )
    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class FlushQuery(_Query):
    """``GET|POST /flush_cache``: seconds to wait until no live request owns KV."""

    timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class PauseQuery(_Query):
    """``POST /pause``, vLLM's; ``keep`` leaves requests in place."""

    mode: Literal["abort", "wait", "keep"] = "abort"
