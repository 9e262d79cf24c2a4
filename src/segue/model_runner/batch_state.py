"""The state of the running requests on the device: persistent tensors with one row per request slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.guided.matchers import Matchers
from segue.kvcache.page_table import PageTable
from segue.memory import backing
from segue.messages.requests import SamplingParams
from segue.messages.steps import NewSlot, StepPlan
from segue.model_runner.device_writer import CUDAWriter, DeviceWriter
from segue.model_runner.inputs import PlanArrays
from segue.model_runner.mask_table import MaskTable
from segue.sampling.token_rules import TokenRules

# Below the lowest temperature a draw is the argmax unless two logits are equal; above the highest all tokens
# are equally likely. In between, finite logits stay finite in float32, and masked tokens stay impossible.
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 1e-5, 1e20


class PlanError(RuntimeError):
    """A step plan does not continue the previous one. Fatal: rank 0 and this rank disagree."""


Column = TypeVar("Column", NDArray[Any], Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns(Generic[Column]):
    """The sampling parameters of all slots: one column per parameter, each `[max_running_requests + 1]`."""

    inverse_temperature: Column  # float32, 0: greedy
    top_k: Column  # int64, 0: off
    top_p: Column  # float32
    min_p: Column  # float32
    presence_penalty: Column  # float32
    frequency_penalty: Column  # float32
    repetition_penalty: Column  # float32
    seed: Column  # int64
    prompt_len: Column  # int64
    min_len: Column  # int64, tokens of prompt and output before a stop token may be sampled
    num_top: Column  # int64, alternatives reported with each log-probability; -1: no log-probabilities
    guided: Column  # int64, 1: the request has a grammar


_INTEGERS = ("top_k", "seed", "prompt_len", "min_len", "num_top", "guided")
_FLOATS = tuple(field.name for field in fields(SamplingColumns) if field.name not in _INTEGERS)
_WORDS_PER_SLOT = 2 * len(_INTEGERS) + len(_FLOATS)  # a word has 4 bytes


def _columns(words: Column, num_slots: int) -> dict[str, Column]:
    """Return views of all columns by name: first those of 8-byte integers, then those of floats."""
    as_integers, as_floats = (
        (torch.int64, torch.float32) if isinstance(words, Tensor) else (np.int64, np.float32)
    )
    end = 2 * len(_INTEGERS) * num_slots
    integers: Any = words[:end].view(as_integers).reshape(-1, num_slots)
    floats: Any = words[end:].view(as_floats).reshape(-1, num_slots)
    return {**dict(zip(_INTEGERS, integers, strict=True)), **dict(zip(_FLOATS, floats, strict=True))}


def _word_layout(num_slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the index of each word of slot 0 in the array of all columns, and its distance to slot 1's.

    Both are `[_WORDS_PER_SLOT]`.
    """
    num_integers = len(_INTEGERS)
    integers = 2 * num_slots * np.arange(num_integers)
    floats = num_slots * (2 * num_integers + np.arange(len(_FLOATS)))
    steps = np.repeat([2, 1], [2 * num_integers, len(_FLOATS)])
    return np.concatenate([integers, integers + 1, floats]), steps


class BatchState:
    """Holds tokens, pages, lengths and sampling parameters of the running requests, by slot.

    Slot `max_running_requests` is the dummy slot that pads captured graphs; no plan names it. A freed slot is
    not cleared: a slot is read up to its length only, and its next request writes that far first.
    """

    def __init__(self, page_table: PageTable, max_seq_len: int) -> None:
        """Make the state of the slots of `page_table`, on its device."""
        num_slots = len(page_table.data)
        self.device = device = page_table.data.device
        self.writer = DeviceWriter() if device.type == "cpu" else CUDAWriter(device)
        self.step = 0  # the number of the last plan applied
        self.page_table = page_table
        # The tokens of each slot: the prompt, then the sampled tokens, which the next step reads. A request
        # of full length still has room for the token that it samples last.
        self.token_pool = torch.zeros((num_slots, max_seq_len + 1), dtype=torch.int32, device=device)
        self.lengths = np.zeros(num_slots, dtype=np.int64)  # tokens whose KV is computed or being computed
        # The host reads its columns to decide what to launch, and kernels read those of the device; on a CPU
        # both are the same memory. All columns lie in one array of 4-byte words: `_WORDS_PER_SLOT` per slot.
        self._host_words = np.zeros(num_slots * _WORDS_PER_SLOT, dtype=np.int32)
        self._words_of_slot_0, self._words_to_next_slot = _word_layout(num_slots)
        self.host: SamplingColumns[NDArray[Any]] = SamplingColumns(**_columns(self._host_words, num_slots))
        self.host.num_top.fill(-1)
        # Alternatives reported with each log-probability of a prompt, by slot; only the host reads it.
        self.num_prompt_top = np.zeros(num_slots, dtype=np.int64)
        self._device_words = torch.from_numpy(self._host_words).to(device)
        self.on_device: SamplingColumns[Tensor] = SamplingColumns(**_columns(self._device_words, num_slots))
        self.rules: dict[int, TokenRules] = {}  # by slot; most slots have no entry
        # Of guided requests; only the rank that samples has them.
        self.matchers: Matchers | None = None
        self.masks: MaskTable | None = None

    @staticmethod
    def num_bytes(*, max_running_requests: int, max_seq_len: int, page_size: int) -> int:
        """Return an upper bound of the bytes on the device, at most 128 bytes per slot too large.

        It is needed before the state is made, to decide how much memory is left for KV pages.
        """
        table = 4 * (max_seq_len // page_size + 32)
        tokens = 4 * (max_seq_len + 1)
        return (max_running_requests + 1) * (table + tokens + 4 * _WORDS_PER_SLOT)

    def apply(self, plan: StepPlan) -> PlanArrays:
        """Apply the changes of a plan: new slots, page table entries, lengths after this step.

        Returns the plan's columns as arrays.

        On a CUDA device the writes are launched when `writer` is flushed.

        Raises:
            PlanError: the plan is not the next one, or a sequence does not start where its slot ends.
        """
        if plan.step != self.step + 1:
            raise PlanError(f"step {plan.step} came after step {self.step}: a plan was lost or repeated")
        self.step = plan.step
        if plan.new_slots:
            self._add_slots(plan.new_slots)
        if plan.pages:
            self._put_pages(plan.pages)
        arrays = PlanArrays(plan)
        self._advance(arrays)
        return arrays

    def write_tokens(self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: Tensor) -> None:
        """Write `tokens` (int64, on the device) at `positions` of `slots`, where the next step reads them.

        `NON_FINITE` is written as 0, because a step that was planned ahead must read a valid id.
        """
        where = backing.to_device(np.stack([slots, positions]), self.device)
        self.token_pool[where[0], where[1]] = tokens.clamp(min=0).to(torch.int32)

    def _add_slots(self, new_slots: Sequence[NewSlot]) -> None:
        """Put new requests into their slots: their known tokens and their sampling parameters.

        On CUDA the parameters are first written to the host's columns, and those of all new slots are then
        sent to the device together.
        """
        for new in new_slots:
            tokens = np.frombuffer(new.tokens, dtype=np.int32)
            pool = self.token_pool
            self.writer.write(pool, new.slot * pool.shape[1] + np.arange(len(tokens)), tokens)
            if self.device.type == "cpu":  # attention on a CPU reads whole blocks of pages
                self.page_table.data[new.slot] = self.page_table.scratch_page
            self.lengths[new.slot] = -1  # not known until the first chunk in the plan gives its start
            self._set_columns(new.slot, new.prompt_len, new.params)
            self._set_rules(new.slot, new.params)
            if self.matchers is not None:
                self.matchers.put(new.slot, new.params, tokens[new.prompt_len :].tolist())
        if self.device.type != "cpu":
            changed = np.array([new.slot for new in new_slots], dtype=np.int64)[:, None]
            words: NDArray[np.int64] = (self._words_of_slot_0 + changed * self._words_to_next_slot).ravel()
            self.writer.write(self._device_words, words, self._host_words[words])

    def _set_columns(self, slot: int, prompt_len: int, params: SamplingParams) -> None:
        """Write a request's sampling parameters to the host's columns, in the form that kernels read."""
        host = self.host
        temperature = min(max(params.temperature, _LOWEST_TEMPERATURE), _HIGHEST_TEMPERATURE)
        host.inverse_temperature[slot] = 1.0 / temperature if params.temperature > 0 else 0.0
        host.top_k[slot] = params.top_k
        host.top_p[slot] = params.top_p
        host.min_p[slot] = params.min_p
        host.presence_penalty[slot] = params.presence_penalty
        host.frequency_penalty[slot] = params.frequency_penalty
        host.repetition_penalty[slot] = params.repetition_penalty
        host.seed[slot] = (params.seed + (1 << 63)) % (1 << 64) - (1 << 63)  # wrapped into the range of int64
        host.prompt_len[slot] = prompt_len
        host.min_len[slot] = prompt_len + params.min_new_tokens
        host.num_top[slot] = params.logprobs
        host.guided[slot] = params.grammar is not None
        self.num_prompt_top[slot] = params.num_prompt_top

    def _set_rules(self, slot: int, params: SamplingParams) -> None:
        """Keep a slot's rules about single tokens, or nothing if the request has none."""
        if (rules := TokenRules.of(params)) is None:
            self.rules.pop(slot, None)
        else:
            self.rules[slot] = rules

    def _put_pages(self, pages: Sequence[tuple[int, int, list[int]]]) -> None:
        """Write page ids to the page table; each item is (slot, index of the first page, page ids)."""
        table, columns = self.page_table.data, self.page_table.data.shape[1]
        index = [slot * columns + first + i for slot, first, ids in pages for i in range(len(ids))]
        values = [page for _, _, ids in pages for page in ids]
        self.writer.write(table, np.array(index, dtype=np.int64), np.array(values, dtype=np.int32))

    def _advance(self, arrays: PlanArrays) -> None:
        """Set the lengths of the plan's slots to those after the step, and check that none was skipped.

        Raises:
            PlanError: a sequence does not start where its slot ends. A new slot may start anywhere.
        """
        slots, starts = arrays.slots, arrays.starts
        known = self.lengths[slots]
        wrong = (known != starts) & (known >= 0)
        if wrong.any():
            index = int(wrong.argmax())
            raise PlanError(
                f"step {self.step} starts slot {slots[index]} at {starts[index]}, but {known[index]} of its "
                f"tokens are computed"
            )
        self.lengths[slots] = arrays.kv_lens
