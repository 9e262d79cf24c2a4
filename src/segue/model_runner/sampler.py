"""Samples tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.memory.backing import to_device
from segue.messages.requests import SamplingMode
from segue.model_runner.batch_state import BatchState, SamplingColumns
from segue.sampling.gumbel_max import argmax, draw, draw_candidates
from segue.sampling.logprobs import Logprobs, logprobs_of
from segue.sampling.penalties import penalise
from segue.sampling.token_mask import forbid
from segue.sampling.token_rules import RuledRow, apply_rules
from segue.sampling.top_k_top_p import candidates

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The tokens of a step, and log-probabilities for the rows that request them."""

    tokens: Tensor  # int64 [B]; NON_FINITE where the logits are not finite
    logprobs: Logprobs | None = None  # of the tokens `logprob_indices`
    logprob_indices: Sequence[int] = ()  # indices into `tokens`
    failures: dict[int, str] = field(default_factory=dict)  # index -> why its token means nothing


class Sampler:
    """Samples one token for each of B rows, with the parameters of their request slots in `state`.

    The order is: log-probabilities of the raw logits; penalties; bias; masks on stop tokens until
    min_new_tokens, on bad words, on tokens that are not allowed, and of grammars; then either argmax, or
    temperature, top-k, top-p, min-p and a draw. Randomness is a function of (seed, position), and each row is
    computed as if it were alone, so that the token does not depend on the batch, the sampling mode, the rank
    or a retraction.
    """

    def __init__(self, state: BatchState) -> None:
        self._state = state

    @staticmethod
    def num_bytes(rows: int, vocab_size: int) -> int:
        """Return the bytes of temporaries, without the logits, if every row uses every parameter.

        Measured: 23 bytes per logit on a CPU; on CUDA, where nothing is sorted, 8 bytes for penalties and 12
        for alternatives.
        """
        return 24 * rows * vocab_size

    def sample(
        self, logits: Tensor, slots: Indices, positions: Indices, sampling_mode: SamplingMode
    ) -> Sampled:
        """Choose the tokens at `positions` of `slots`.

        Args:
            logits: float32 `[B, V]`; overwritten if the mode is "guided" or "full".
            slots: `[B]`, request slots.
            positions: `[B]`, of the tokens to sample; this is also the number of known tokens of the slot.
            sampling_mode: with "plain" no slot may use more than a temperature, or request alternatives; with
                "filtered" top-k, top-p and min-p are allowed too, and with "guided" a grammar; "full" allows
                everything.
        """
        num_top = self._state.host.num_top[slots]
        requested = (num_top >= 0).nonzero()[0]  # the rows whose log-probabilities are requested
        raw = logits  # of these rows; copied where other rows exist or penalties overwrite the logits
        guides = sampling_mode in ("guided", "full")
        if 0 < len(requested) < len(slots) or (guides and len(requested)):
            raw = logits[self._index(requested)]
        failures: dict[int, str] = {}
        if sampling_mode == "full":
            self._penalise(logits, slots, positions)
            self._apply_rules(logits, slots, positions)
        if guides:
            failures = self.await_masks(slots) if logits.is_cuda else self._forbid(logits, slots)
        if logits.is_cuda:
            tokens = self._choose_on_cuda(
                logits, slots, positions, filters=sampling_mode != "plain", masks=guides
            )
        else:
            tokens = self._choose(logits, slots, positions, filters=sampling_mode != "plain")
        if not len(requested):
            return Sampled(tokens=tokens, failures=failures)
        # A row without a token gets the log-probability of token 0, which is not read.
        chosen = tokens[self._index(requested)].clamp(min=0)
        logprobs = logprobs_of(raw, chosen, num_top[requested].tolist())
        indices = requested.tolist()
        return Sampled(tokens=tokens, logprobs=logprobs, logprob_indices=indices, failures=failures)

    def _choose(self, logits: Tensor, slots: Indices, positions: Indices, *, filters: bool) -> Tensor:
        """Return one token per row, int64 `[B]`, from the final logits, on a CPU.

        The rows are split by how they choose, so that none pays for what only others need: argmax, a draw, or
        a draw among filtered candidates. Without `filters` no row has top-k, top-p or min-p.
        """
        host = self._state.host
        draws, filtered = host.inverse_temperature[slots] > 0.0, np.zeros(len(slots), dtype=np.bool_)
        if filters:
            filtered = (host.top_k[slots] > 0) | (host.top_p[slots] < 1.0) | (host.min_p[slots] > 0.0)
        tokens = torch.empty(len(slots), dtype=torch.int64)
        for kind, method in (
            (~draws, self._argmax),
            (draws & ~filtered, self._draw),
            (draws & filtered, self._draw_filtered),
        ):
            if kind.all():
                return method(logits, slots, positions)
            if kind.any():
                index = self._index(kind.nonzero()[0])
                tokens[index] = method(logits[index], slots[kind], positions[kind])
        return tokens

    def _choose_on_cuda(
        self, logits: Tensor, slots: Indices, positions: Indices, *, filters: bool, masks: bool
    ) -> Tensor:
        """Choose with the kernels of plain sampling, so that every sampling mode gives the same tokens.

        With `masks` the logits of tokens that the rows' grammars do not allow are overwritten.
        """
        from segue.kernels.triton.sampling import sample_plain

        columns, device = self._state.on_device, logits.device
        tokens = torch.empty((1, len(logits)), dtype=torch.int32, device=device)
        sample_plain(
            logits,
            self._index(slots),
            self._index(positions),
            inverse_temperatures=columns.inverse_temperature,
            seeds=columns.seed,
            ring=tokens,  # a ring of one line
            ring_index=torch.zeros(1, dtype=torch.int32, device=device),
            filters=(columns.top_k, columns.top_p, columns.min_p) if filters else None,
            masks=self.masks if masks else None,
        )
        return tokens[0].to(torch.int64)

    @property
    def masks(self) -> tuple[Tensor, Tensor] | None:
        """The masks of the request slots, and which slots have one, as `sample_plain` takes them."""
        table = self._state.masks
        return None if table is None else (table.rows, self._state.on_device.guided)

    def _argmax(self, logits: Tensor, slots: Indices, positions: Indices) -> Tensor:
        return argmax(logits)

    def _draw(self, logits: Tensor, slots: Indices, positions: Indices) -> Tensor:
        index, columns = self._index(slots), self._state.on_device
        return draw(logits, columns.inverse_temperature[index], columns.seed[index], self._index(positions))

    def _draw_filtered(self, logits: Tensor, slots: Indices, positions: Indices) -> Tensor:
        """Draw one token per row among those that its top-k, top-p and min-p leave; for a CPU."""
        index, columns = self._index(slots), self._state.on_device
        weights, tokens = candidates(
            logits,
            inverse_temperatures=columns.inverse_temperature[index],
            top_k=columns.top_k[index].clamp(max=logits.shape[1]),
            top_p=columns.top_p[index],
            min_p=columns.min_p[index],
            max_top_k=int(self._state.host.top_k[slots].max()),
        )
        return draw_candidates(weights, tokens, columns.seed[index], self._index(positions))

    def _penalise(self, logits: Tensor, slots: Indices, positions: Indices) -> None:
        """Apply the penalties in place, to the rows that have any, from their tokens in the token pool."""
        host = self._state.host
        penalised = (
            (host.repetition_penalty[slots] != 1.0)
            | (host.presence_penalty[slots] != 0.0)
            | (host.frequency_penalty[slots] != 0.0)
        ).nonzero()[0]
        if not len(penalised):
            return
        index, at = self._index(penalised), self._index(slots[penalised])  # rows; their slots
        columns: SamplingColumns[Tensor] = self._state.on_device
        max_len = int(positions[penalised].max())
        logits[index] = penalise(
            logits[index],
            self._state.token_pool[at, :max_len].to(torch.int64),
            prompt_lens=columns.prompt_len[at],
            lengths=self._index(positions[penalised]),
            repetition=columns.repetition_penalty[at],
            presence=columns.presence_penalty[at],
            frequency=columns.frequency_penalty[at],
        )

    def _apply_rules(self, logits: Tensor, slots: Indices, positions: Indices) -> None:
        """Apply each row's rules about single tokens in place: bias, masks, bad words, allowed tokens."""
        state = self._state
        num_outputs = positions - state.host.prompt_len[slots]
        too_early = positions < state.host.min_len[slots]
        rows = [
            RuledRow(
                row=row,
                slot=slot,
                position=int(positions[row]),
                num_outputs=int(num_outputs[row]),
                too_early=bool(too_early[row]),
                rules=rules,
            )
            for row, slot in enumerate(slots.tolist())
            if (rules := state.rules.get(slot)) is not None
        ]
        if rows:
            apply_rules(logits, rows, state.token_pool)

    def await_masks(self, slots: Indices) -> dict[int, str]:
        """Wait until it is known what the rows' grammars allow next, which a CUDA device then reads.

        Returns the rows whose grammars cannot be followed, with the reasons.
        """
        matchers = self._state.matchers
        found = None if matchers is None else matchers.wait(slots)
        return {} if found is None else found[1]

    def _forbid(self, logits: Tensor, slots: Indices) -> dict[int, str]:
        """Forbid in place what the rows' grammars do not allow next, once that is known; for a CPU.

        Returns the rows whose grammars cannot be followed, with the reasons.
        """
        matchers = self._state.matchers
        allowed = None if matchers is None else matchers.allowed(slots)
        if allowed is None:
            return {}
        forbid(logits, self._index(allowed.rows), to_device(allowed.masks, logits.device))
        return allowed.failures

    def _index(self, values: Sequence[int] | Indices) -> Tensor:
        """Return indices of the host as an int64 tensor on the device."""
        return to_device(np.asarray(values, dtype=np.int64), self._state.device)
