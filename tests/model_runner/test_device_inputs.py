"""The layout of a CUDA step's static inputs, checked on a CPU tensor."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.attention.blocks import block_table
from segue.model_runner.device_inputs import RING, DeviceInputs, StepShape
from segue.protocol.messages import StepPlan


def per_block(tokens: int) -> int:
    return 8 if tokens < 100 else 16


def make_inputs(max_rows: int, chunk: int) -> DeviceInputs:
    table = SimpleNamespace(dummy_row=max_rows, data=None)
    state: Any = SimpleNamespace(device=torch.device("cpu"), page_table=table)
    backend: Any = SimpleNamespace(queries_per_block=per_block)
    inputs = DeviceInputs(state, None, backend, max_tokens=chunk + max_rows, max_rows=max_rows)  # type: ignore[arg-type]
    inputs._look_up = lambda rows, positions: (rows, positions)  # type: ignore[method-assign]
    return inputs


def random_plan(rng: random.Random, max_rows: int, chunk: int, num_decode: int) -> StepPlan:
    lens, left = [1] * num_decode, chunk
    while len(lens) < max_rows and left and (not lens or rng.random() < 0.6):
        lens.append(rng.randint(1, left))
        left -= lens[-1]
    rows = rng.sample(range(max_rows), len(lens))
    starts = [rng.randint(0, 500) for _ in lens]
    samples = [i < num_decode or rng.random() < 0.5 for i in range(len(lens))]
    return StepPlan(1, [], [], num_decode, rows, starts, lens, [int(s) for s in samples], samples, "plain")


@pytest.mark.parametrize(("max_rows", "chunk"), [(1, 1), (1, 1024), (3, 7), (12, 48), (256, 512), (300, 64)])
def test_any_step_is_laid_out_with_its_padding_whatever_lay_there_before(max_rows: int, chunk: int) -> None:
    inputs, rng = make_inputs(max_rows, chunk), random.Random(chunk)
    for _ in range(60):
        plan = random_plan(rng, max_rows, chunk, rng.randint(0, max_rows))
        count, padding = plan.num_tokens, 0
        if rng.random() < 0.6:
            padding = rng.randint(0, chunk + max_rows - count)
        tokens = count + padding
        blocks = block_table([*plan.lens, padding], plan.num_decode, per_block(tokens)).tolist()
        shape = StepShape(
            tokens=tokens,
            decode=max_rows,
            sequences=max_rows,
            blocks=inputs.most_blocks(tokens, max_rows),
            logits=rng.choice([sum(plan.samples), max_rows]),
        )
        assert len(blocks) <= shape.blocks
        slot = rng.randrange(RING)
        inputs.load(plan, shape, slot)
        context = inputs.context(shape)
        ends = [sum(plan.lens[: i + 1]) for i in range(len(plan.lens))]
        kv_lens = [start + length for start, length in zip(plan.starts, plan.lens, strict=True)]
        sampling = [i for i, samples in enumerate(plan.samples) if samples]
        missing = max_rows - len(sampling)
        token_rows = [row for row, length in zip(plan.rows, plan.lens, strict=True) for _ in range(length)]
        positions = [start + i for start, n in zip(plan.starts, plan.lens, strict=True) for i in range(n)]
        known = len(plan.rows)
        assert context.input_ids.tolist() == token_rows + [max_rows] * padding
        assert context.positions.tolist() == positions + [0] * padding
        assert context.rows_device.tolist() == plan.rows + [max_rows] * (max_rows + 1 - known)
        assert context.kv_lens_device.tolist() == kv_lens + [1] * (max_rows + 1 - known)
        assert context.q_starts_device.tolist()[: known + 2] == [0, *ends, tokens]
        assert context.num_decode_device is not None and context.blocks is not None
        assert context.num_decode_device.tolist() == [plan.num_decode]
        assert context.blocks.tolist() == blocks + [[-1, -1]] * (shape.blocks - len(blocks))
        assert inputs.slot.tolist() == [slot]
        # The tail may be padded further than the trunk: what an earlier step left must not sample again.
        assert inputs.sample_rows.tolist() == [plan.rows[i] for i in sampling] + [max_rows] * missing
        assert inputs.sample_positions.tolist() == [kv_lens[i] for i in sampling] + [1] * missing
        assert inputs.logit_indices.tolist() == [ends[i] - 1 for i in sampling] + [0] * missing


@pytest.mark.parametrize("max_rows", [1, 12, 300])
def test_decode_steps_are_padded_with_the_dummy_row(max_rows: int) -> None:
    inputs, rng = make_inputs(max_rows, 16), random.Random(max_rows)
    for _ in range(30):
        plan = random_plan(rng, max_rows, 0, rng.randint(1, max_rows))
        size = rng.randint(len(plan.rows), max_rows)
        inputs.load_decode(plan, size, 2)
        rows, positions = inputs.decode_rows(size)
        padding = size - len(plan.rows)
        assert rows.tolist() == plan.rows + [max_rows] * padding
        assert positions.tolist() == [start + 1 for start in plan.starts] + [1] * padding
        context = inputs.decode_context(size)
        assert context.positions.tolist() == plan.starts + [0] * padding
        assert context.kv_lens_device.tolist() == positions.tolist()
        assert inputs.slot.tolist() == [2]
