"""From a plan to its arrays, and to the context of a step on a CPU."""

import pytest
import torch

from segue.attention.base import AttentionShape, Context
from segue.attention.cpu import CPUAttention
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool, KVShape
from segue.messages.requests import SamplingParams, pack_ids
from segue.messages.steps import NewSlot, StepPlan
from segue.model_runner.batch_state import BatchState
from segue.model_runner.executor import context_of
from segue.model_runner.inputs import PlanArrays


@pytest.fixture
def build():
    """Apply plans and build their inputs; slots 0 and 1 decode, slot 2 prefills."""
    sizes = KVShape(num_pages=50, num_layers=1, page_size=4, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    kv = KVPool(sizes, torch.zeros(sizes.num_bytes, dtype=torch.uint8))
    table = PageTable(max_running=4, max_seq_len=64, page_size=4, scratch_page=kv.scratch_page, device="cpu")
    state = BatchState(table, max_seq_len=64)
    shape = AttentionShape(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
    backend = CPUAttention(shape, kv)

    def build(plan: StepPlan) -> tuple[PlanArrays, Context]:
        arrays = state.apply(plan)
        return arrays, context_of(arrays, state, kv, backend, all_hidden=bool(arrays.prompt_runs()))

    params = SamplingParams(max_new_tokens=9)
    new_slots = [NewSlot(slot, pack_ids(range(slot * 100, slot * 100 + 30)), 30, params) for slot in range(3)]
    pages = [(slot, 0, [slot * 10 + i for i in range(8)]) for slot in range(3)]
    lens = [6, 9, 5]
    plan = StepPlan(1, new_slots, pages, 0, [0, 1, 2], [0] * 3, lens, [0] * 3, [False] * 3, "plain")
    arrays, context = build(plan)
    assert arrays.last_tokens.tolist() == []
    assert context.logits_indices is None
    return build


def _mixed(num_logits: list[int], samples: list[bool]) -> StepPlan:
    return StepPlan(2, [], [], 2, [1, 0, 2], [9, 6, 5], [1, 1, 4], num_logits, samples, "plain")


def test_tokens_positions_and_slot_mapping_of_a_mixed_step(build):
    _, context = build(_mixed([1, 1, 0], [True, True, False]))
    assert context.input_ids.tolist() == [109, 6, 205, 206, 207, 208]
    assert context.positions.tolist() == [9, 6, 5, 6, 7, 8]
    # The values of a page follow its keys.
    assert context.slot_mapping.tolist() == [
        12 * 8 + 1,
        1 * 8 + 2,
        21 * 8 + 1,
        21 * 8 + 2,
        21 * 8 + 3,
        22 * 8,
    ]
    assert context.num_decode == 2


def test_the_context_is_the_same_on_the_host_and_the_device(build):
    _, context = build(_mixed([1, 1, 0], [True, True, False]))
    assert list(context.slots) == context.slots_device.tolist() == [1, 0, 2]
    assert list(context.kv_lens) == context.kv_lens_device.tolist() == [10, 7, 9]
    assert list(context.q_lens) == [1, 1, 4]
    assert context.cu_seqlens_q_device.tolist() == [0, 1, 2, 6]
    assert context.kv_lens_device.dtype == context.cu_seqlens_q_device.dtype == torch.int32
    assert context.slots_device.dtype == context.slot_mapping.dtype == torch.int64


def test_only_sampling_sequences_get_logits(build):
    arrays, context = build(_mixed([1, 0, 1], [True, False, True]))
    assert arrays.last_tokens.tolist() == [0, 5]
    assert context.logits_indices is not None and context.logits_indices.tolist() == [0, 5]
    assert arrays.sample_slots.tolist() == [1, 2]
    assert arrays.sample_positions.tolist() == [10, 9]
    assert arrays.prompt_runs() == []


def test_a_decode_step_has_one_token_per_slot(build):
    plan = StepPlan(2, [], [], 3, [2, 0, 1], [5, 6, 9], [1] * 3, [1] * 3, [True] * 3, "plain")
    arrays, context = build(plan)
    assert context.input_ids.tolist() == [205, 6, 109]
    assert context.positions.tolist() == [5, 6, 9]
    assert arrays.last_tokens.tolist() == [0, 1, 2]
    assert context.logits_indices is None


@pytest.mark.parametrize(
    ("num_logits", "samples", "run"),
    [
        (3, True, (2, 3, 7, 2)),  # two tokens of the prompt, and the one that samples
        (3, False, (2, 3, 7, 3)),
        (1, False, (2, 5, 9, 1)),
        (4, True, (2, 2, 6, 3)),
    ],
)
def test_logits_before_the_last_ones_are_for_prompt_tokens(build, num_logits, samples, run):
    arrays, context = build(_mixed([1, 1, num_logits], [True, True, samples]))
    (found,) = arrays.prompt_runs()
    assert context.logits_indices is None
    assert (found.slot, found.hidden_start, found.position, found.count) == run
