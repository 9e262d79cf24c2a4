"""The sizes of the KV cache that all engines of a cohort have, so that each can go on with any request."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Self

from segue.errors import ConfigError
from segue.sizes import ceil_div

# What an option decides, and the option. The other sizes follow from free memory.
_OPTIONS = {
    "page_size": "page_size",
    "page_bytes": "kv_cache_dtype",  # engines of a cohort have equal weights, so --dtype is equal
    "max_running_requests": "max_running_requests",
    "chunked_prefill_size": "chunked_prefill_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Sizes of the KV cache, and of the steps that use it, on each rank."""

    num_pages: int
    page_size: int  # tokens
    page_bytes: int
    max_seq_len: int  # tokens
    max_running_requests: int
    chunked_prefill_size: int

    @property
    def kv_bytes(self) -> int:
        """The bytes of the pool, with its scratch page."""
        return (self.num_pages + 1) * self.page_bytes

    @property
    def numbers(self) -> list[int]:
        """All sizes, which :meth:`of` makes the geometry of again."""
        return list(astuple(self))

    @classmethod
    def of(cls, numbers: list[int]) -> Self:
        """Return the geometry of its :attr:`numbers`."""
        return cls(**{each.name: number for each, number in zip(fields(cls), numbers, strict=True)})


def check_pinned(pinned: KVGeometry, *, own: KVGeometry, max_len: int, num_kv_tokens: int | None) -> None:
    """Check that an engine can have the sizes of the engine that was first in its cohort.

    Args:
        pinned: the sizes of the first engine.
        own: the sizes that this engine would have by itself.
        max_len: the most tokens of a request that this engine's model and options allow.
        num_kv_tokens: set by the user; None: free memory decides.

    Raises:
        ConfigError: an option has another value than on the first engine.
    """
    for name, option in _OPTIONS.items():
        have, want = getattr(pinned, name), getattr(own, name)
        if have != want:
            raise _differs(option, f"{name} is {want}", have)
    if num_kv_tokens is not None and (pages := ceil_div(num_kv_tokens, own.page_size)) != pinned.num_pages:
        raise _differs("num_kv_tokens", f"num_pages is {pages}", pinned.num_pages)
    longest = min(max_len, pinned.num_pages * pinned.page_size)
    if pinned.max_seq_len != longest:
        raise _differs("max_model_len", f"max_seq_len is {longest}", pinned.max_seq_len)


def _differs(option: str, own: str, have: int) -> ConfigError:
    flag = "--" + option.replace("_", "-")
    return ConfigError(
        f"{own} on this engine, and {have} on the other engines of its cohort; all of them must have equal "
        f"KV caches, so that each can go on with any request: give {flag} alike, or another --cohort",
        param=option,
    )
