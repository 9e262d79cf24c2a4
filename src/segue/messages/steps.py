"""The messages from rank 0 to every tensor-parallel rank (``RankMessage``), and back (``RankEvent``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.messages.kv import KVCommand, KVEvent, RankJoined
from segue.messages.kv_link import LinkEvent
from segue.messages.life import LifeMessage, RankAnswer
from segue.messages.memory import MemoryCommand, MemoryMoved
from segue.messages.profile import ProfileCommand, Traced
from segue.messages.requests import SamplingMode, SamplingParams, TokenLogprob
from segue.messages.weight_update import RankReply, Received, WeightCommand, WeightsChanged

NON_FINITE = -1  # replaces a sampled token whose logits had NaN or plus infinity, or were all minus infinity
# Why a step ran without a graph. disabled: no graphs are captured. tokens: no bucket holds the step's tokens,
# or most of the bucket would be padding. prompts: the step has more prompts than a bucket has room for.
# prompt_logprobs: they need hidden states that graphs do not keep.
EagerReason = Literal["disabled", "tokens", "prompts", "prompt_logprobs"]


class NewSlot(msgspec.Struct, frozen=True, array_like=True):
    """Puts a request into a slot of the device's batch state. The same plan assigns its pages."""

    slot: int
    tokens: bytes  # int32 ids: the prompt, then the output so far if the request was retracted or continued
    prompt_len: int
    params: SamplingParams


class StepPlan(msgspec.Struct, tag=True, array_like=True):
    """One step: changes of the batch state, then the sequences to run, those that decode first.

    ``slots``, ``starts``, ``lens``, ``num_logits`` and ``samples`` have one entry per sequence, in one order.
    """

    step: int  # 1, 2, 3, …; a rank that finds a gap fails
    new_slots: list[NewSlot] = []
    # (slot, index of the first page, page ids) to append to the page table
    pages: list[tuple[int, int, list[int]]] = []
    num_decode: int = 0  # so many sequences come first; each runs the token that its slot sampled last
    slots: list[int] = []
    starts: list[int] = []  # first position computed
    lens: list[int] = []  # positions computed
    num_logits: list[int] = []  # last positions whose logits are needed: 0, 1, or more for prompt logprobs
    samples: list[bool] = []  # whether a token is sampled at the last position
    sampling_mode: SamplingMode = "plain"

    @property
    def num_tokens(self) -> int:
        """Positions that the step computes."""
        return sum(self.lens)


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for :class:`Drained` once every step sent before has ended."""


class Drained(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The reply to :class:`Drain`: this rank runs nothing."""


RankMessage = StepPlan | Drain | LifeMessage | WeightCommand | MemoryCommand | ProfileCommand | KVCommand


class KernelsCompiled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reports that a rank has compiled a kernel since it was ready, or loaded one from the cache on disk."""

    rank: int
    compiled: int  # since then
    loaded: int


WeightEvent = RankReply | Received | WeightsChanged
RankEvent = (
    Drained
    | KernelsCompiled
    | RankAnswer
    | MemoryMoved
    | Traced
    | WeightEvent
    | RankJoined
    | KVEvent
    | LinkEvent
)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a step: one token, or ``NON_FINITE``, per sampling sequence, in the order of the plan."""

    step: int
    tokens: list[int]
    seconds: float  # from the launch until the tokens are on the host
    logprobs: list[TokenLogprob | None] | None = None  # parallel to tokens
    # slot -> logprobs of the prompt tokens that follow the chunk's logits
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}
    graph: str | None = None  # the kind of the graph that was replayed; None: the step ran without one
    eager: EagerReason | None = "disabled"  # why; None: a graph was replayed
    padded_tokens: int = 0
    # index into tokens -> why the request's grammar cannot be followed any further; its token means nothing
    failures: dict[int, str] = {}
    complete: list[int] = []  # indices into tokens that complete their grammars: only EOS may follow
