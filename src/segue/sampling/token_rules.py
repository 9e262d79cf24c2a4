"""Rules about single tokens: the logit bias, stop tokens that come too early, bad words, allowed tokens.

They are added to the logits behind the penalties and before the temperature. All of it is torch without a
wait for the device: the tokens that a bad word depends on may be known to the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.memory.backing import to_device
from segue.messages.requests import SamplingParams

# Finite values: a request may rule the whole vocabulary out, and that must not look like a fault of the
# model. Where its rules leave no token, one of the allowed ones is drawn.
MASKED = -1e30
NOT_ALLOWED = -1e32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """The rules of one request; few requests have any. W bad words of at most L + 1 tokens."""

    ids: NDArray[np.int64]
    values: NDArray[np.float32]  # added to the logits of `ids`
    num_always: int  # the first ones are the bias; the others mask stop tokens until min_new_tokens
    bad_last: NDArray[np.int64]  # [W], the token that a bad word ends with
    bad_first: NDArray[np.int64]  # [W, L], the tokens before it, aligned right; -1 in front of them
    allowed: NDArray[np.int64] | None  # None: every token is

    @classmethod
    def of(cls, params: SamplingParams) -> TokenRules | None:
        """Return the rules that sampling parameters have; None: they have none."""
        stops = params.stop_token_ids if params.min_new_tokens > 0 else ()
        words, allowed = params.bad_words, params.allowed_token_ids
        if not (stops or params.logit_bias or words or allowed):
            return None
        bad_first = np.full((len(words), max(map(len, words), default=1) - 1), -1, dtype=np.int64)
        for row, (*first, _) in enumerate(words):
            bad_first[row, bad_first.shape[1] - len(first) :] = first
        return cls(
            ids=np.array([*params.logit_bias, *stops], dtype=np.int64),
            values=np.array([*params.logit_bias.values(), *[MASKED] * len(stops)], dtype=np.float32),
            num_always=len(params.logit_bias),
            bad_last=np.array([word[-1] for word in words], dtype=np.int64),
            bad_first=bad_first,
            allowed=np.frombuffer(allowed, dtype=np.int32).astype(np.int64) if allowed else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledRow:
    """A row of logits with rules, and where its request is."""

    row: int
    slot: int
    position: int  # of the token to sample, and so the number of known tokens
    num_outputs: int  # of the known tokens, so many are the output
    too_early: bool  # whether stop tokens are masked
    rules: TokenRules


def apply_rules(logits: Tensor, rows: Sequence[RuledRow], token_pool: Tensor) -> None:
    """Apply the rules of some rows in place.

    Args:
        logits: float32 `[B, V]`.
        rows: those that have rules; a row has one entry.
        token_pool: int32 `[slots, positions]`, the known tokens of each slot; on the device of the logits.
    """
    _add(logits, rows)
    _mask_bad_words(logits, rows, token_pool)
    _mask_all_but_allowed(logits, rows)


def _add(logits: Tensor, rows: Sequence[RuledRow]) -> None:
    """Add the bias, and the masks of stop tokens."""
    counts = [len(each.rules.ids) if each.too_early else each.rules.num_always for each in rows]
    if not any(counts):
        return
    ids = np.concatenate([each.rules.ids[:count] for each, count in zip(rows, counts, strict=True)])
    values = np.concatenate([each.rules.values[:count] for each, count in zip(rows, counts, strict=True)])
    device = logits.device
    where = (to_device(np.repeat(_column(rows, "row"), counts), device), to_device(ids, device))
    logits.index_put_(where, to_device(values, device), accumulate=True)


def _mask_bad_words(logits: Tensor, rows: Sequence[RuledRow], token_pool: Tensor) -> None:
    """Mask the last token of each bad word whose other tokens are the end of the output."""
    rows = [each for each in rows if len(each.rules.bad_last)]
    if not rows:
        return
    width = max(1, *(each.rules.bad_first.shape[1] for each in rows))  # no tensor is empty
    # One entry per word from here on: `first` is [W, L].
    first = np.concatenate(
        [
            np.pad(rules.bad_first, ((0, 0), (width - rules.bad_first.shape[1], 0)), constant_values=-1)
            for rules in (each.rules for each in rows)
        ]
    )
    last = np.concatenate([each.rules.bad_last for each in rows])
    counts = [len(each.rules.bad_last) for each in rows]
    row, slot, position, num_outputs = (
        np.repeat(_column(rows, name), counts) for name in ("row", "slot", "position", "num_outputs")
    )
    fits = (first >= 0).sum(axis=1) <= num_outputs  # a word does not begin in the prompt
    if not fits.any():
        return
    first, last, row, slot, position = (each[fits] for each in (first, last, row, slot, position))
    device = logits.device
    places = np.clip(position[:, None] - width + np.arange(width), 0, None)
    known = token_pool[to_device(np.repeat(slot[:, None], width, axis=1), device), to_device(places, device)]
    word = to_device(first, device)
    matches = ((known == word) | (word < 0)).all(dim=1)
    change = torch.where(matches, MASKED, 0.0).to(logits.dtype)
    logits.index_put_((to_device(row, device), to_device(last, device)), change, accumulate=True)


def _mask_all_but_allowed(logits: Tensor, rows: Sequence[RuledRow]) -> None:
    """Mask the tokens that are not allowed, in the rows where not all are."""
    allowed = [(each.row, each.rules.allowed) for each in rows if each.rules.allowed is not None]
    if not allowed:
        return
    device = logits.device
    counts = [len(ids) for _, ids in allowed]
    of = to_device(np.repeat(np.arange(len(allowed)), counts), device)
    ids = to_device(np.concatenate([ids for _, ids in allowed]), device)
    mask = logits.new_full((len(allowed), logits.shape[1]), NOT_ALLOWED)
    mask[of, ids] = 0.0
    index = to_device(np.array([row for row, _ in allowed], dtype=np.int64), device)
    logits[index] += mask


def _column(rows: Sequence[RuledRow], name: str) -> NDArray[np.int64]:
    """Return one field of the rows."""
    return np.array([getattr(each, name) for each in rows], dtype=np.int64)
