"""Builds the inputs of the model and of the sampler from a step plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from segue.attention.base import AttentionBackend
from segue.attention.context import Context
from segue.kvcache.pool import KVPool
from segue.memory.backing import to_device
from segue.messages.steps import StepPlan
from segue.model_runner.batch_state import BatchState

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """Consecutive tokens of one prompt whose log-probabilities are requested."""

    slot: int
    hidden_start: int  # index in the step of the token whose logits predict the run's first token
    position: int  # position of the run's first token
    count: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs of one step."""

    context: Context
    sampling: Tensor  # int64, the last token of each sampling sequence, as an index in the step
    slots: Indices  # the request slots of the sampling sequences
    positions: Indices  # the positions of the tokens to sample
    prompt_runs: list[PromptRun]


class InputBuilder:
    """Builds the context of each step from the batch state, in a fixed number of vectorised operations."""

    def __init__(self, state: BatchState, kv: KVPool, backend: AttentionBackend) -> None:
        self._state = state
        self._kv = kv
        self._backend = backend

    def build(self, plan: StepPlan) -> StepInputs:
        """Return the inputs of `plan`, which the batch state has already applied."""
        state, device = self._state, self._state.device
        slots = np.array(plan.slots, dtype=np.int64)
        starts = np.array(plan.starts, dtype=np.int64)
        lens = np.array(plan.lens, dtype=np.int64)
        kv_lens = starts + lens
        ends = lens.cumsum()
        if plan.num_decode == len(slots):
            token_slots, positions = slots, starts
        else:
            token_slots = slots.repeat(lens)
            positions = np.arange(ends[-1]) + (kv_lens - ends).repeat(lens)
        samples = np.array(plan.samples, dtype=np.bool_)
        slots_of_tokens = to_device(token_slots, device)
        positions_device = to_device(positions, device)
        sampling, runs = to_device((ends - 1)[samples], device), prompt_runs(plan)
        context = Context(
            input_ids=state.token_pool.tokens(slots_of_tokens, positions_device),
            positions=positions_device,
            slot_mapping=self._kv.token_rows(state.page_table.kv_slots(slots_of_tokens, positions_device)),
            logits_indices=sampling if 0 < len(sampling) < ends[-1] and not runs else None,
            slots=plan.slots,
            q_lens=plan.lens,
            kv_lens=kv_lens.tolist(),
            slots_device=to_device(slots, device),
            kv_lens_device=to_device(kv_lens.astype(np.int32), device),
            cu_seqlens_q_device=to_device(np.concatenate(([0], ends)).astype(np.int32), device),
            num_decode=plan.num_decode,
            page_table=state.page_table,
            kv=self._kv,
            backend=self._backend,
        )
        return StepInputs(
            context=context,
            sampling=sampling,
            slots=slots[samples],
            positions=kv_lens[samples],
            prompt_runs=runs,
        )


def prompt_runs(plan: StepPlan) -> list[PromptRun]:
    """Return the runs of prompt tokens whose log-probabilities a plan requests."""
    # The last logits of a sampling sequence are for the token to sample.
    counts = np.array(plan.num_logits, dtype=np.int64) - np.array(plan.samples, dtype=np.bool_)
    requested = counts.nonzero()[0].tolist()
    ends = np.cumsum(plan.lens) if requested else ()
    return [
        PromptRun(
            slot=plan.slots[i],
            hidden_start=int(ends[i]) - plan.num_logits[i],
            position=plan.starts[i] + plan.lens[i] - plan.num_logits[i] + 1,
            count=int(counts[i]),
        )
        for i in requested
    ]
