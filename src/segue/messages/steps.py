"""What rank 0 tells every tensor-parallel rank (``RankMessage``), and what a rank answers (``RankEvent``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.messages.requests import SamplingMode, SamplingParams, TokenLogprob
from segue.messages.weight_update import RankReply, Received, WeightCommand

NON_FINITE = -1  # in place of a sampled token: its logits were NaN, plus infinity, or only minus infinity
# Why a step ran without a graph: there are none; no bucket holds its tokens, or it would be mostly padding;
# more prompts than a bucket has room for; hidden states are wanted that graphs do not keep.
EagerReason = Literal["disabled", "tokens", "prompts", "prompt_logprobs"]


class NewSlot(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot of the device's batch state; its pages come in the same plan."""

    slot: int
    tokens: bytes  # all tokens known so far: the prompt, and after a retraction the output too
    prompt_len: int
    params: SamplingParams


class StepPlan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One step: deltas to the batch state, then the sequences to run, decode rows first.

    ``slots``, ``starts``, ``lens``, ``num_logits`` and ``samples`` are parallel, one entry a sequence.
    """

    step: int  # 1, 2, 3, …; a gap is fatal
    new_slots: list[NewSlot]
    pages: list[
        tuple[int, int, list[int]]
    ]  # (slot, index of the first, page ids): appended to the page table
    num_decode: int  # the first so many sequences run one token each, the one their slot sampled last
    slots: list[int]
    starts: list[int]  # first position computed
    lens: list[int]  # positions computed
    num_logits: list[int]  # trailing positions whose logits are needed: 0, 1, or more for prompt logprobs
    samples: list[bool]  # whether the last position samples a token
    sampling_mode: SamplingMode

    @property
    def num_tokens(self) -> int:
        """Positions computed by the step."""
        return sum(self.lens)


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Finish every step sent before, then answer with :class:`Drained`."""


class Drained(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`Drain`: this rank runs nothing."""


RankMessage = StepPlan | Drain | WeightCommand
RankEvent = Drained | RankReply | Received


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step made: one token, or ``NON_FINITE``, for each sampling sequence, in plan order."""

    step: int
    tokens: list[int]
    seconds: float  # from launch to the tokens on the host
    logprobs: list[TokenLogprob | None] | None = None  # parallel to tokens
    prompt_logprobs: dict[
        int, list[TokenLogprob]
    ] = {}  # slot -> of the prompt tokens behind the chunk's logits
    eager: EagerReason | None = "disabled"  # None: a graph was replayed
    padded_tokens: int = 0
