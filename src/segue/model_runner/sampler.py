"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from segue.sampling.top_k_top_p import candidates

Indices = NDArray[np.int64]
# A bias, and finite: a request may mask the whole vocabulary, which is no fault of the model.
_MASKED = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The tokens of a step and, where rows asked for them, log-probabilities."""

    tokens: Tensor  # int64 [B]; NON_FINITE where the logits allow none
    logprobs: Logprobs | None = None  # of the sequences below
    logprob_indices: Sequence[int] = ()  # into tokens


class Sampler:
    """Samples one token for each of B rows, with the parameters that `state` holds for them.

    In this order: log-probabilities are taken from the raw logits; penalties; bias; stop tokens masked until
    min_new_tokens; then the likeliest token, or temperature, top-k, top-p, min-p and a draw. Randomness is a
    function of (seed, position), and each row is computed as if it were alone, so that batch, sampling
    mode, rank and retraction make no difference.
    """

    def __init__(self, state: BatchState) -> None:
        self._state = state

    @staticmethod
    def num_bytes(rows: int, vocab_size: int) -> int:
        """What it takes beside the logits if every row uses every parameter.

        Measured: 23 bytes a logit on a CPU; on CUDA, where nothing is sorted, 8 for penalties and 12 for
        alternatives.
        """
        return 24 * rows * vocab_size

    def sample(
        self, logits: Tensor, rows: Indices, positions: Indices, sampling_mode: SamplingMode
    ) -> Sampled:
        """Choose the tokens at `positions` of `rows`.

        Args:
            logits: float32 `[B, V]`; overwritten in the full sampling.
            rows: `[B]`.
            positions: `[B]`: of the tokens sampled, so as many tokens of the row are known.
            sampling_mode: "plain" promises that no row has more than a temperature or wants alternatives;
                "filtered", that no row has more than filters besides.
        """
        num_top = self._state.host.num_top[rows]
        asked = (num_top >= 0).nonzero()[0]
        raw, filtered = logits, None if sampling_mode == "plain" else self._filtered(rows)
        if sampling_mode == "full":
            raw = logits[self._index(asked)] if len(asked) else logits
            self._penalise(logits, rows, positions)
            self._bias(logits, rows, positions)
        elif len(asked):
            raw = logits if len(asked) == len(rows) else logits[self._index(asked)]
        tokens = self._choose(logits, rows, positions, filtered=filtered)
        if not len(asked):
            return Sampled(tokens=tokens)
        chosen = tokens[self._index(asked)].clamp(min=0)  # those of a row without a token are not read
        logprobs = logprobs_of(raw, chosen, num_top[asked].tolist())
        return Sampled(tokens=tokens, logprobs=logprobs, logprob_indices=asked.tolist())

    def _filtered(self, rows: Indices) -> NDArray[np.bool_]:
        host = self._state.host
        return (host.top_k[rows] > 0) | (host.top_p[rows] < 1.0) | (host.min_p[rows] > 0.0)

    def _choose(
        self, logits: Tensor, rows: Indices, positions: Indices, *, filtered: NDArray[np.bool_] | None
    ) -> Tensor:
        if logits.is_cuda:
            return self._choose_on_cuda(logits, rows, positions, filters=filtered is not None)
        warm = self._state.host.temperature[rows] > 0.0
        if filtered is None:
            filtered = np.zeros(len(rows), dtype=np.bool_)
        tokens = torch.empty(len(rows), dtype=torch.int64)
        for kind, method in (
            (~warm, self._take_likeliest),
            (warm & ~filtered, self._draw),
            (warm & filtered, self._draw_filtered),
        ):
            if kind.all():
                return method(logits, rows, positions)
            if kind.any():
                index = self._index(kind.nonzero()[0])
                tokens[index] = method(logits[index], rows[kind], positions[kind])
        return tokens

    def _choose_on_cuda(self, logits: Tensor, rows: Indices, positions: Indices, *, filters: bool) -> Tensor:
        """With the plain sampling's own kernels: the same tokens in every sampling mode."""
        from segue.kernels.triton.sampling import choose

        columns = self._state.on_device
        return choose(
            logits,
            self._index(rows),
            self._index(positions),
            temperatures=columns.temperature,
            inverse_temperatures=columns.inverse_temperature,
            seeds=columns.seed,
            filters=(columns.top_k, columns.top_p, columns.min_p) if filters else None,
        )

    def _take_likeliest(self, logits: Tensor, rows: Indices, positions: Indices) -> Tensor:
        return argmax(logits)

    def _draw(self, logits: Tensor, rows: Indices, positions: Indices) -> Tensor:
        at, columns = self._index(rows), self._state.on_device
        return draw(logits, columns.inverse_temperature[at], columns.seed[at], self._index(positions))

    def _draw_filtered(self, logits: Tensor, rows: Indices, positions: Indices) -> Tensor:
        at, columns = self._index(rows), self._state.on_device
        weights, tokens = candidates(
            logits,
            inverse_temperatures=columns.inverse_temperature[at],
            top_k=columns.top_k[at].clamp(max=logits.shape[1]),
            top_p=columns.top_p[at],
            min_p=columns.min_p[at],
            max_top_k=int(self._state.host.top_k[rows].max()),
        )
        return draw_candidates(weights, tokens, columns.seed[at], self._index(positions))

    def _penalise(self, logits: Tensor, rows: Indices, positions: Indices) -> None:
        host = self._state.host
        needed = (
            (host.repetition_penalty[rows] != 1.0)
            | (host.presence_penalty[rows] != 0.0)
            | (host.frequency_penalty[rows] != 0.0)
        ).nonzero()[0]
        if not len(needed):
            return
        index, at = self._index(needed), self._index(rows[needed])
        columns: SamplingColumns[Tensor] = self._state.on_device
        max_len = int(positions[needed].max())
        logits[index] = penalise(
            logits[index],
            self._state.token_pool.data[at, :max_len].to(torch.int64),
            prompt_lens=columns.prompt_len[at],
            lengths=self._index(positions[needed]),
            repetition=columns.repetition_penalty[at],
            presence=columns.presence_penalty[at],
            frequency=columns.frequency_penalty[at],
        )

    def _bias(self, logits: Tensor, rows: Indices, positions: Indices) -> None:
        which: list[int] = []
        ids: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float32]] = []
        too_early = positions < self._state.host.min_len[rows]
        for i, row in enumerate(rows.tolist()):
            extras = self._state.extras.get(row)
            if extras is None:
                continue
            which += [i] * len(extras.bias_ids)
            ids.append(extras.bias_ids)
            values.append(extras.bias_values)
            if too_early[i]:
                which += [i] * len(extras.stop_ids)
                ids.append(extras.stop_ids)
                values.append(np.full(len(extras.stop_ids), _MASKED, dtype=np.float32))
        if which:
            where = (self._index(which), self._index(np.concatenate(ids)))
            change = to_device(np.concatenate(values), logits.device)
            logits.index_put_(where, change, accumulate=True)

    def _index(self, values: Sequence[int] | Indices) -> Tensor:
        return to_device(np.asarray(values, dtype=np.int64), self._state.device)
