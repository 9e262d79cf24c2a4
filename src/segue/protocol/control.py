"""Bodies of the control routes. Unknown fields are ignored: clients send extras."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class AbortRequest(BaseModel):
    """``POST /abort_request``."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    rid: str | None = ""
    abort_all: bool = False
    aborted_message: str | None = None
