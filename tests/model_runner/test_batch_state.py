"""Plans change the persistent tensors of the batch state."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from segue.kvcache.page_table import PageTable
from segue.messages.requests import SamplingParams, pack_ids
from segue.messages.steps import NON_FINITE, NewSlot, StepPlan
from segue.model_runner.batch_state import BatchState, PlanError

SCRATCH = 99


def _state() -> BatchState:
    table = PageTable(max_running=3, max_seq_len=64, page_size=4, scratch_page=SCRATCH, device="cpu")
    return BatchState(table, max_seq_len=64)


def _new_slot(slot: int, tokens: list[int], prompt_len: int | None = None, **params: Any) -> NewSlot:
    options = {"max_new_tokens": 5, **params}
    length = len(tokens) if prompt_len is None else prompt_len
    return NewSlot(slot, pack_ids(tokens), length, SamplingParams(**options))


def _plan(step: int, *sequences: tuple[int, int, int], new=(), pages=()) -> StepPlan:
    slots, starts, lens = (
        ([list(column) for column in zip(*sequences, strict=True)]) if sequences else ([], [], [])
    )
    return StepPlan(
        step=step,
        new_slots=list(new),
        pages=list(pages),
        num_decode=0,
        slots=slots,
        starts=starts,
        lens=lens,
        num_logits=[1] * len(slots),
        samples=[True] * len(slots),
        sampling_mode="plain",
    )


def test_a_new_slot_has_tokens_pages_and_parameters():
    state = _state()
    new = _new_slot(
        1, [7, 8, 9, 10, 11], temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=5, min_new_tokens=3
    )
    state.apply(_plan(1, (1, 0, 5), new=[new], pages=[(1, 0, [40, 41])]))
    assert state.token_pool[1, :5].tolist() == [7, 8, 9, 10, 11]
    assert state.page_table.data[1, :3].tolist() == [40, 41, SCRATCH]
    host = state.host
    assert host.inverse_temperature[1] == 2.0
    assert host.top_k[1] == 7 and host.top_p[1] == np.float32(0.9) and host.min_p[1] == np.float32(0.1)
    assert host.seed[1] == 5 and host.prompt_len[1] == 5 and host.min_len[1] == 8
    assert state.lengths[1] == 5


def test_the_columns_on_the_device_equal_those_on_the_host():
    state = _state()
    state.apply(_plan(1, (2, 0, 1), new=[_new_slot(2, [1], temperature=0.25, seed=77)], pages=[(2, 0, [0])]))
    assert state.on_device.inverse_temperature.tolist() == [0, 0, 4.0, 0]
    assert state.on_device.seed.tolist() == [0, 0, 77, 0]


@pytest.mark.parametrize("max_running", [1, 2, 5, 256])
def test_a_slot_s_words_are_those_of_its_columns(max_running):
    """On CUDA these words are sent to the device, where the columns lie as on the host."""
    table = PageTable(
        max_running=max_running, max_seq_len=64, page_size=4, scratch_page=SCRATCH, device="cpu"
    )
    state = BatchState(table, max_seq_len=64)
    columns = [getattr(state.host, field.name) for field in fields(state.host)]
    for slot in range(max_running + 1):
        state._host_words.fill(0)
        for column in columns:
            column[slot] = -1 if column.dtype == np.int64 else np.float32(-1.0)
        words = state._words_of_slot_0 + slot * state._words_to_next_slot
        assert sorted(words) == state._host_words.nonzero()[0].tolist()


def test_pages_are_appended_to_many_slots_at_once():
    state = _state()
    slots = [_new_slot(0, [1] * 4), _new_slot(2, [2] * 4)]
    state.apply(_plan(1, (0, 0, 4), (2, 0, 4), new=slots, pages=[(0, 0, [5]), (2, 0, [6])]))
    state.apply(_plan(2, (0, 4, 1), (2, 4, 1), pages=[(0, 1, [7]), (2, 1, [8])]))
    assert state.page_table.data[[0, 2], :3].tolist() == [[5, 7, SCRATCH], [6, 8, SCRATCH]]


def test_a_slot_that_is_used_again_keeps_nothing_of_the_previous_request():
    state = _state()
    first = _new_slot(0, [1] * 12, temperature=0.7, logit_bias={3: 1.0}, logprobs=2)
    state.apply(_plan(1, (0, 0, 12), new=[first], pages=[(0, 0, [5, 6, 7])]))
    state.apply(_plan(2, (0, 0, 2), new=[_new_slot(0, [4, 4], temperature=0.0)], pages=[(0, 0, [9])]))
    assert state.page_table.data[0, :3].tolist() == [9, SCRATCH, SCRATCH]
    assert state.host.inverse_temperature[0] == 0.0
    assert state.rules == {}
    assert state.lengths[0] == 2


def test_rules_about_tokens_are_kept_per_slot():
    state = _state()
    new = _new_slot(
        1, [1], logit_bias={4: -1.5, 9: 100.0}, min_new_tokens=2, stop_token_ids=(2, 3), logprobs=4
    )
    state.apply(_plan(1, (1, 0, 1), new=[new], pages=[(1, 0, [0])]))
    rules = state.rules[1]
    assert rules.ids.tolist() == [4, 9, 2, 3] and rules.num_always == 2
    assert rules.values.tolist() == [-1.5, 100.0, *[np.float32(-1e30)] * 2]
    assert state.host.num_top.tolist() == [-1, 4, -1, -1]


def test_stop_tokens_need_no_mask_without_min_new_tokens():
    state = _state()
    state.apply(_plan(1, (1, 0, 1), new=[_new_slot(1, [1], stop_token_ids=(2,))], pages=[(1, 0, [0])]))
    assert state.rules == {}


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_any_64_bit_seed_fits(seed):
    state = _state()
    state.apply(_plan(1, (1, 0, 1), new=[_new_slot(1, [1], seed=seed)], pages=[(1, 0, [0])]))
    assert int(state.host.seed[1]) % 2**64 == seed


def test_sampled_tokens_are_written_where_the_next_step_reads_them():
    state = _state()
    state.write_tokens(np.array([0, 2]), np.array([3, 64]), torch.tensor([70, 71]))
    assert state.token_pool[0, 3] == 70 and state.token_pool[2, 64] == 71


@pytest.mark.parametrize("step", [1, 3])
def test_a_lost_or_repeated_plan_is_fatal(step):
    state = _state()
    state.apply(_plan(1))
    with pytest.raises(PlanError, match=f"step {step} came after step 1"):
        state.apply(_plan(step))


def test_a_sequence_that_does_not_start_where_its_slot_ends_is_fatal():
    state = _state()
    state.apply(_plan(1, (0, 0, 4), new=[_new_slot(0, [1] * 4)], pages=[(0, 0, [5])]))
    with pytest.raises(PlanError, match="starts slot 0 at 5, but 4 of its tokens are computed"):
        state.apply(_plan(2, (0, 5, 1)))


def test_a_new_slot_may_start_after_a_cached_prefix():
    state = _state()
    state.apply(_plan(1, (0, 8, 4), new=[_new_slot(0, [1] * 12)], pages=[(0, 0, [5, 6, 7])]))
    assert state.lengths[0] == 12


def test_num_bytes_is_an_upper_bound_of_the_tensors():
    state = _state()
    used = state.page_table.data.nbytes + state.token_pool.nbytes
    used += sum(getattr(state.on_device, name).nbytes for name in state.on_device.__dataclass_fields__)
    bound = BatchState.num_bytes(max_running_requests=3, max_seq_len=64, page_size=4)
    assert used <= bound <= 2 * used


def test_a_step_planned_ahead_reads_a_valid_id_where_no_token_was_sampled():
    state = _state()
    state.write_tokens(np.array([0, 1]), np.array([3, 3]), torch.tensor([NON_FINITE, 8]))
    assert state.token_pool[:2, 3].tolist() == [0, 8]


def test_the_token_pool_has_room_for_the_token_sampled_last():
    state = _state()
    assert state.token_pool.shape == (4, 65) and state.token_pool.dtype == torch.int32
    state.write_tokens(np.array([1]), np.array([64]), torch.tensor([42]))
    assert state.token_pool[[1, 0], [64, 0]].tolist() == [42, 0]
