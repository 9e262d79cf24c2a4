"""What control calls are given and give. Unknown fields are ignored: clients send extras."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from segue.messages.control import PauseMode

MAX_S = 1e300  # seconds: any finite number


class AbortRequest(Struct, frozen=True, kw_only=True):
    """``POST /abort_request``."""

    rid: str | None = ""
    abort_all: bool = False
    aborted_message: str | None = None


class PauseRequest(Struct, frozen=True, kw_only=True):
    """``POST /pause_generation``."""

    mode: Literal["wait", "in_place", "in-place", "retract", "abort"] = "abort"
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_S)] | None = None

    @property
    def pause_mode(self) -> PauseMode:
        """The mode by its one name."""
        return "in_place" if self.mode == "in-place" else self.mode


class FlushQuery(Struct, frozen=True, kw_only=True):
    """``GET|POST /flush_cache``: seconds to wait until no live request owns KV."""

    timeout: Annotated[float, Meta(ge=0, le=MAX_S)] = 0.0


class PauseQuery(Struct, frozen=True, kw_only=True):
    """``POST /pause``, vLLM's; ``keep`` leaves requests in place."""

    mode: Literal["abort", "wait", "keep"] = "abort"
