"""The columns of a step plan as arrays: what every device makes its inputs from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from segue.messages.steps import StepPlan

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """Consecutive tokens of one prompt whose log-probabilities are requested."""

    slot: int
    hidden_start: int  # index in the step of the token whose logits predict the run's first token
    position: int  # position of the run's first token
    count: int  # tokens


class PlanArrays:
    """A plan of S sequences and T tokens. Each column is converted once, when it is first needed."""

    def __init__(self, plan: StepPlan) -> None:
        """Convert the columns that every step needs, each `[S]`."""
        self.plan = plan
        self.slots: Indices = np.array(plan.slots, dtype=np.int64)
        self.starts: Indices = np.array(plan.starts, dtype=np.int64)
        self.kv_lens: Indices = self.starts + self.lens

    @cached_property
    def lens(self) -> Indices:
        """The tokens of each sequence, `[S]`."""
        return np.array(self.plan.lens, dtype=np.int64)

    @cached_property
    def ends(self) -> Indices:
        """The index behind each sequence's last token, `[S]`."""
        ends: Indices = self.lens.cumsum()
        return ends

    @cached_property
    def token_slots(self) -> Indices:
        """The request slot of each token, `[T]`."""
        return self.slots if self._decodes_only else self.slots.repeat(self.lens)

    @cached_property
    def positions(self) -> Indices:
        """The position of each token in its sequence, `[T]`."""
        if self._decodes_only:
            return self.starts
        positions: Indices = np.arange(self.ends[-1]) + (self.kv_lens - self.ends).repeat(self.lens)
        return positions

    @cached_property
    def samples(self) -> NDArray[np.bool_]:
        """Whether each sequence samples, `[S]`."""
        return np.array(self.plan.samples, dtype=np.bool_)

    @cached_property
    def sample_slots(self) -> Indices:
        """The request slots of the sequences that sample."""
        return self.slots[self.samples]

    @cached_property
    def sample_positions(self) -> Indices:
        """The positions of the tokens to sample."""
        return self.kv_lens[self.samples]

    @cached_property
    def last_tokens(self) -> Indices:
        """The last token of each sequence that samples, as an index in the step."""
        return self.ends[self.samples] - 1

    def prompt_runs(self) -> list[PromptRun]:
        """Return the runs of prompt tokens whose log-probabilities the plan requests.

        A sequence has a run if it needs more logits than the one that samples. The logits at one position
        score the token at the next, so the run begins one position after its first logits.
        """
        plan = self.plan
        # The last logits of a sampling sequence are for the token to sample.
        counts = np.array(plan.num_logits, dtype=np.int64) - self.samples
        return [
            PromptRun(
                slot=plan.slots[i],
                hidden_start=int(self.ends[i]) - plan.num_logits[i],
                position=int(self.kv_lens[i]) - plan.num_logits[i] + 1,
                count=int(counts[i]),
            )
            for i in counts.nonzero()[0].tolist()
        ]

    @property
    def _decodes_only(self) -> bool:
        return self.plan.num_decode == len(self.slots)
