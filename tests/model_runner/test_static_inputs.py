"""The layout of the static inputs of a CUDA step, checked on CPU tensors."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from segue.attention.base import Context, GridMetadata, StepLengths, query_blocks
from segue.messages.steps import StepPlan
from segue.model_runner.inputs import PlanArrays
from segue.model_runner.static_inputs import RING, DeviceInputs, StepShape


def per_block(tokens: int) -> int:
    return 8 if tokens < 100 else 16


class GridBackend:
    """The methods of a backend that the inputs use."""

    def __init__(self) -> None:
        self.replayed: list[tuple[int, int, list[int], list[int]]] = []
        self.planned: StepLengths | None = None

    def plan(self, lengths: StepLengths) -> None:
        self.planned = lengths

    def queries_per_block(self, tokens: int) -> int:
        return per_block(tokens)

    def init_forward_metadata_capture_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: torch.Tensor, kv_lens: torch.Tensor
    ) -> GridMetadata:
        return GridMetadata(cu_seqlens_q=torch.arange(bs + 1) * seq_len, blocks=torch.zeros(bs, 2))

    def init_forward_metadata_replay_batch_prefill_cuda_graph(
        self, bs: int, seq_len: int, slots: torch.Tensor, kv_lens: torch.Tensor
    ) -> None:
        self.replayed.append((bs, seq_len, slots.tolist(), kv_lens.tolist()))


def make_inputs(max_rows: int, chunk: int) -> DeviceInputs:
    table = SimpleNamespace(dummy_slot=max_rows, data=None)
    state: Any = SimpleNamespace(device=torch.device("cpu"), page_table=table)
    backend: Any = GridBackend()
    sizes = {"max_tokens": chunk + max_rows, "max_slots": max_rows}
    inputs = DeviceInputs(state, None, backend, None, vocab_start=0, **sizes)  # type: ignore[arg-type]
    # The slots stand for the embeddings.
    inputs._embed_inputs = lambda token_slots, positions: (token_slots, positions)  # type: ignore[method-assign]
    return inputs


def check_plan(inputs: DeviceInputs, context: Context, num_decode: int) -> None:
    """The backend must have been told, on the host, what the context has on the device."""
    backend: Any = inputs._backend
    planned = backend.planned
    assert planned.kv_lens.tolist() == context.kv_lens_device.tolist()
    starts = context.cu_seqlens_q_device.tolist() or [*range(planned.tokens + 1)]
    assert planned.cu_seqlens_q.tolist() == starts
    assert planned.kv_lens.dtype == planned.cu_seqlens_q.dtype == np.int32
    assert (planned.tokens, planned.num_decode) == (len(context.positions), num_decode)
    assert (planned.max_decode, planned.has_prefill) == (context.num_decode, context.has_prefill)


def random_plan(rng: random.Random, max_rows: int, chunk: int, num_decode: int) -> StepPlan:
    lens, left = [1] * num_decode, chunk
    while len(lens) < max_rows and left and (not lens or rng.random() < 0.6):
        lens.append(rng.randint(1, left))
        left -= lens[-1]
    slots = rng.sample(range(max_rows), len(lens))
    starts = [rng.randint(0, 500) for _ in lens]
    samples = [i < num_decode or rng.random() < 0.5 for i in range(len(lens))]
    return StepPlan(1, [], [], num_decode, slots, starts, lens, [int(s) for s in samples], samples, "plain")


@pytest.mark.parametrize(("max_rows", "chunk"), [(1, 1), (1, 1024), (3, 7), (12, 48), (256, 512), (300, 64)])
def test_any_step_is_laid_out_with_its_padding_after_any_other_step(max_rows: int, chunk: int) -> None:
    inputs, rng = make_inputs(max_rows, chunk), random.Random(chunk)
    for _ in range(60):
        plan = random_plan(rng, max_rows, chunk, rng.randint(0, max_rows))
        count, padding = plan.num_tokens, 0
        if rng.random() < 0.6:
            padding = rng.randint(0, chunk + max_rows - count)
        tokens = count + padding
        blocks = query_blocks([*plan.lens, padding], plan.num_decode, per_block(tokens)).tolist()
        shape = StepShape(
            tokens=tokens,
            decode=max_rows,
            sequences=max_rows,
            blocks=inputs.max_blocks(tokens, max_rows),
            logits=rng.choice([sum(plan.samples), max_rows]),
        )
        assert len(blocks) <= shape.blocks
        ring_index = rng.randrange(RING)
        inputs.load(PlanArrays(plan), shape, ring_index)
        context = inputs.context(shape)
        ends = [sum(plan.lens[: i + 1]) for i in range(len(plan.lens))]
        kv_lens = [start + length for start, length in zip(plan.starts, plan.lens, strict=True)]
        sampling = [i for i, samples in enumerate(plan.samples) if samples]
        missing = max_rows - len(sampling)
        token_slots = [
            slot for slot, length in zip(plan.slots, plan.lens, strict=True) for _ in range(length)
        ]
        positions = [start + i for start, n in zip(plan.starts, plan.lens, strict=True) for i in range(n)]
        known = len(plan.slots)
        assert (
            context.input_embeds is not None
            and context.input_embeds.tolist() == token_slots + [max_rows] * padding
        )
        assert context.positions.tolist() == positions + [0] * padding
        assert context.slots_device.tolist() == plan.slots + [max_rows] * (max_rows + 1 - known)
        assert context.kv_lens_device.tolist() == kv_lens + [1] * (max_rows + 1 - known)
        check_plan(inputs, context, plan.num_decode)
        assert context.cu_seqlens_q_device.tolist()[: known + 2] == [0, *ends, tokens]
        assert context.num_decode_device is not None and context.blocks is not None
        assert context.num_decode_device.tolist() == [plan.num_decode]
        assert context.blocks.tolist() == blocks + [[-1, -1]] * (shape.blocks - len(blocks))
        assert inputs.ring_index.tolist() == [ring_index]
        assert context.num_tokens is not None and context.num_logits_indices is not None
        assert (context.num_tokens.tolist(), context.num_logits_indices.tolist()) == (
            [count],
            [len(sampling)],
        )
        # The sampling graph may be padded to more rows: entries of an earlier step must not sample again.
        assert inputs.sample_slots.tolist() == [plan.slots[i] for i in sampling] + [max_rows] * missing
        assert inputs.sample_positions.tolist() == [kv_lens[i] for i in sampling] + [1] * missing
        assert inputs.logits_indices.tolist() == [ends[i] - 1 for i in sampling] + [0] * missing


@pytest.mark.parametrize("max_rows", [1, 12, 300])
def test_decode_steps_are_padded_with_the_dummy_slot(max_rows: int) -> None:
    inputs, rng = make_inputs(max_rows, 16), random.Random(max_rows)
    for _ in range(30):
        plan = random_plan(rng, max_rows, 0, rng.randint(1, max_rows))
        size = rng.randint(len(plan.slots), max_rows)
        inputs.load_decode(PlanArrays(plan), size, 2)
        slots, positions = inputs.decode_slots(size)
        padding = size - len(plan.slots)
        assert slots.tolist() == plan.slots + [max_rows] * padding
        assert positions.tolist() == [start + 1 for start in plan.starts] + [1] * padding
        context = inputs.decode_context(size)
        assert context.positions.tolist() == plan.starts + [0] * padding
        assert context.kv_lens_device.tolist() == positions.tolist()
        check_plan(inputs, context, size)
        assert context.num_tokens is not None and context.num_tokens.tolist() == [len(plan.slots)]
        assert inputs.ring_index.tolist() == [2]


@pytest.mark.parametrize(("num_prompts", "length"), [(1, 1), (1, 64), (4, 16), (8, 32)])
def test_prompts_in_the_grid_are_padded_at_the_front_after_any_other_step(
    num_prompts: int, length: int
) -> None:
    inputs, rng = make_inputs(8, 256), random.Random(length)
    shape = StepShape(
        tokens=num_prompts * length,
        decode=0,
        sequences=num_prompts,
        blocks=0,
        logits=num_prompts,
        prompt_len=length,
    )
    first = inputs.context(shape)
    for index in range(40):
        lens = [rng.randint(1, length) for _ in range(rng.randint(1, num_prompts))]
        count, slots = len(lens), rng.sample(range(8), len(lens))
        starts, samples = [rng.randint(0, 500) for _ in lens], [rng.random() < 0.5 for _ in lens]
        plan = StepPlan(1, [], [], 0, slots, starts, lens, [int(s) for s in samples], samples, "plain")
        kv_lens = [start + n for start, n in zip(starts, lens, strict=True)]
        inputs.load(PlanArrays(plan), shape, index % RING)
        context = inputs.context(shape)
        token_slots, positions = [], []
        for slot, start, n in zip(slots, starts, lens, strict=True):
            token_slots += [8] * (length - n) + [slot] * n
            positions += [0] * (length - n) + list(range(start, start + n))
        missing = num_prompts - count
        assert context.input_embeds is not None and context.input_embeds.tolist() == token_slots + [8] * (
            missing * length
        )
        assert context.positions.tolist() == positions + [0] * (missing * length)
        assert context.slots_device.tolist() == slots + [8] * missing
        assert context.kv_lens_device.tolist() == kv_lens + [1] * missing
        assert context.num_decode == 0
        check_plan(inputs, context, 0)
        sampling = [i for i in range(count) if samples[i]]
        ends = [(i + 1) * length - 1 for i in sampling]
        assert inputs.logits_indices.tolist() == ends + [0] * (8 - len(ends))
        assert inputs.sample_slots.tolist() == [slots[i] for i in sampling] + [8] * (8 - len(sampling))
        backend: Any = inputs._backend
        assert backend.replayed[-1] == (num_prompts, length, slots + [8] * missing, kv_lens + [1] * missing)
        # A graph reads the addresses of its capture.
        for name in ("positions", "slots_device", "kv_lens_device", "cu_seqlens_q_device", "blocks"):
            assert getattr(context, name).data_ptr() == getattr(first, name).data_ptr()


def test_the_views_of_a_context_do_not_overlap() -> None:
    inputs = make_inputs(8, 64)
    for shape in (
        StepShape(tokens=32, decode=8, sequences=8, blocks=20, logits=8),
        StepShape(tokens=32, decode=0, sequences=2, blocks=0, logits=2, prompt_len=16),
    ):
        context = inputs.context(shape)
        spans = sorted(
            (t.data_ptr(), t.data_ptr() + t.nbytes)
            for t in (
                context.cu_seqlens_q_device,
                context.kv_lens_device,
                context.slots_device,
                context.positions,
            )
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
