"""What the first request of an engine that wakes must give: what it gave to the engines before it.

The request is the same for all engines of a cohort. The first engine with some weights writes down what came
of it; every later engine with these weights compares. So an engine whose memory is not what it should be ends
before it serves anybody.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

NUM_PROMPT_TOKENS = 16
NUM_OUTPUT_TOKENS = 2
LOGPROB_TOLERANCE = 0.05  # between two engines that need not compute the same bits


class CanaryNote(msgspec.Struct, frozen=True):
    """The tokens of the test request, and the logprob of each."""

    tokens: list[int]
    logprobs: list[float]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(CanaryNote).decode


def prompt(vocab_size: int) -> list[int]:
    """Returns the prompt of the test request: fixed tokens from all over the vocabulary."""
    return [(7919 * index + 11) % vocab_size for index in range(NUM_PROMPT_TOKENS)]


def path_of(directory: Path, cohort: str, facts: Iterable[object]) -> Path:
    """Returns where engines of a cohort for which the same ``facts`` hold keep their note."""
    digest = hashlib.sha256(repr(list(facts)).encode()).hexdigest()
    return directory / f"canary-{cohort}-{digest[:16]}.json"


def difference(expected: CanaryNote, found: CanaryNote, *, is_exact: bool) -> str:
    """Returns how an engine's result differs from that of its predecessors; "": it does not.

    With ``is_exact``, every bit counts. Otherwise another token may be sampled if it is about as likely, and
    what follows it is not compared.
    """
    if is_exact:
        return "" if found == expected else f"expected {expected}, and every bit counts"
    rows = zip(expected.tokens, found.tokens, expected.logprobs, found.logprobs, strict=False)
    for place, (token, other, logprob, other_logprob) in enumerate(rows):
        if token != other and abs(logprob - other_logprob) > LOGPROB_TOLERANCE:
            return f"token {place} is {other}; expected {token}, with a logprob of {logprob:.3f}"
        if token != other:
            return ""
    return "" if len(found.tokens) == len(expected.tokens) else f"expected {len(expected.tokens)} tokens"


def read(path: Path) -> CanaryNote | None:
    """Returns the note at a path; None: there is none, or it cannot be read."""
    with suppress(OSError, msgspec.DecodeError):
        return _decode(path.read_bytes())
    return None


def write(path: Path, note: CanaryNote) -> None:
    """Write a note, all at once: whoever reads it meanwhile finds all of it or nothing."""
    unnamed = path.with_suffix(f".{os.getpid()}")
    unnamed.write_bytes(_encode(note))
    unnamed.rename(path)
