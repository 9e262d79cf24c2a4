"""What control calls are given and give. Unknown fields are ignored: clients send extras."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from segue.messages.control import PauseMode
from segue.messages.memory import MemoryAnswer, MemoryTag

MAX_S = 1e300  # seconds: any finite number
_VLLM_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "in_place"}


class AbortRequest(Struct, frozen=True, kw_only=True):
    """``POST /abort_request``."""

    rid: str | None = ""
    abort_all: bool = False
    aborted_message: str | None = None
    abort_message: str | None = None  # SGLang's name of it

    @property
    def message(self) -> str | None:
        """What the reply says of the end; None: the engine's own words."""
        return self.aborted_message if self.abort_message is None else self.abort_message


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
    """``POST /pause``, vLLM's; ``keep`` leaves requests and all KV in place, whatever ``clear_cache``."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True
    wait_for_inflight_requests: bool = False  # vLLM's older name of the mode ``wait``

    @property
    def pause_mode(self) -> PauseMode:
        """The mode by the engine's own name."""
        return "wait" if self.wait_for_inflight_requests else _VLLM_MODES[self.mode]

    @property
    def clears_cache(self) -> bool:
        """Whether the prefix cache is emptied once nothing runs."""
        return self.clear_cache and self.pause_mode != "in_place"


ALL_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)


class MemoryRequest(Struct, frozen=True, kw_only=True):
    """``POST /release_memory_occupation`` and ``/resume_memory_occupation``, SGLang's; no tags: all memory.

    CUDA graphs stay valid and are never released: SGLang's tag ``cuda_graph`` is taken, and does nothing.
    """

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None

    @property
    def memory(self) -> list[MemoryTag]:
        """The memory that is meant."""
        return [tag for tag in ALL_TAGS if not self.tags or tag in self.tags]


class SleepQuery(Struct, frozen=True, kw_only=True):
    """``POST /sleep``, vLLM's. Level 1 keeps the weights in the host's memory, level 2 drops them."""

    level: Literal[1, 2] = 1


def memory_of_level(level: int, device: str) -> tuple[list[MemoryTag], bool]:
    """Return the memory that a sleep of this level releases, and whether the weights get a backup.

    On a CPU the weights of level 1 stay where they are: they are in the host's memory already.
    """
    if level == 1 and device.startswith("cpu"):
        return ["kv_cache"], False
    return list(ALL_TAGS), level == 1


def memory_reply(answer: MemoryAnswer) -> dict[str, Any]:
    """Return the reply to a call that has released or resumed memory."""
    message = answer.message or "Done."
    return {"success": True, "message": message, "tags": answer.tags, "num_bytes": answer.num_bytes}
