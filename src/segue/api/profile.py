"""``POST /start_profile``: the fields of SGLang's clients, and where the traces go."""

from __future__ import annotations

import os
import time
from typing import Annotated

from msgspec import Meta, Struct

from segue.errors import InvalidRequestError
from segue.messages.profile import Activity

Steps = Annotated[int, Meta(ge=1, le=1_000_000)]


class ProfileRequest(Struct, frozen=True, kw_only=True):
    """What is traced, for how many steps (None: until ``/stop_profile``), and where the traces go."""

    output_dir: str | None = None  # within --profile-dir, which is the default
    num_steps: Steps | None = None
    activities: list[Activity] | None = None  # None: both
    with_stack: bool | None = None
    record_shapes: bool | None = None
    start_step: int | None = None
    profile_by_stage: bool | None = None

    def path(self, profile_dir: str | None) -> str:
        """Returns the path of the traces, without the rank and the ending of each.

        Raises:
            InvalidRequestError: the server writes no traces, or not there, or not of such steps.
        """
        if profile_dir is None:
            raise InvalidRequestError(
                "this server writes no traces; start it with --profile-dir and a directory for them"
            )
        for name in ("start_step", "profile_by_stage"):
            if getattr(self, name):
                text = "a profile begins with the call, and is one trace of all steps; leave it out"
                raise InvalidRequestError(f"{name}={getattr(self, name)}: {text}", param=name)
        root = os.path.realpath(profile_dir)
        place = root if self.output_dir is None else os.path.realpath(self.output_dir)
        if os.path.commonpath((root, place)) != root:
            raise InvalidRequestError(
                f"output_dir={self.output_dir[:200]!r} is not within --profile-dir; leave it out"
                if self.output_dir
                else "output_dir is empty; leave it out",
                param="output_dir",
            )
        return os.path.join(place, f"segue-{time.time():.3f}-{os.getpid()}")
