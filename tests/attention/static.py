"""A step in the form of captured steps: padded, without host lists."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segue.attention.base import StepLengths, query_blocks
from tests.attention.case import TOLERANCE, Case
from tests.attention.oracle import attend


class Static:
    """A step of some sequences of a case, padded to a fixed shape, at addresses that never change."""

    def __init__(self, case: Case, *, slots: int, tokens: int) -> None:
        self.case, self.slots, self.tokens = case, slots, tokens
        self.backend: Any = case.ctx.backend
        self.dummy = case.ctx.page_table.dummy_slot
        self.query = case.queries[0].new_zeros((tokens, *case.queries[0].shape[1:]))
        self.per_block = self.backend.queries_per_block(tokens)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": case.ctx.kv.data.device}
        self.ctx = replace(
            case.ctx,
            slots=(),
            q_lens=(),
            kv_lens=(),
            positions=torch.zeros(tokens, **int32),
            slots_device=torch.zeros(slots + 1, **int32),
            kv_lens_device=torch.zeros(slots + 1, **int32),
            cu_seqlens_q_device=torch.zeros(slots + 2, **int32),
            num_decode=slots,
            num_decode_device=torch.zeros(1, **int32),
            blocks=torch.zeros((tokens // self.per_block + slots + 2, 2), **int32),
        )

    def load(self, members: list[int], num_decode: int) -> None:
        """Load the case's sequences `members`; the remaining slots and tokens belong to the dummy request."""
        case, ctx = self.case, self.ctx
        q_lens = [len(case.queries[i]) for i in members]
        left, idle = self.tokens - sum(q_lens), self.slots + 1 - len(members)
        self.query.fill_(float("nan"))[: sum(q_lens)] = torch.cat([case.queries[i] for i in members])
        table = query_blocks([*q_lens, left], num_decode, self.per_block)
        ends = torch.tensor(q_lens).cumsum(0).tolist()

        def put(target: Tensor, values: list[int]) -> None:
            target.copy_(torch.tensor(values, dtype=torch.int32))

        kv_lens = [*(len(case.keys[i]) for i in members), *[1] * idle]
        cu_seqlens_q = [0, *ends, *[self.tokens] * idle]
        put(ctx.slots_device, [*members, *[self.dummy] * idle])
        put(ctx.kv_lens_device, kv_lens)
        put(ctx.cu_seqlens_q_device, cu_seqlens_q)
        put(ctx.num_decode_device, [num_decode])
        ctx.blocks.fill_(-1)[: len(table)] = torch.from_numpy(table)
        self.backend.plan(
            StepLengths(
                kv_lens=np.array(kv_lens, dtype=np.int32),
                cu_seqlens_q=np.array(cu_seqlens_q, dtype=np.int32),
                tokens=self.tokens,
                num_decode=num_decode,
                max_decode=self.slots,
                has_prefill=True,
            )
        )

    def run(self) -> Tensor:
        self.backend.prepare(self.ctx)
        return self.backend.forward(self.query, None, None, self.case.layer, self.ctx)

    def check(self, members: list[int]) -> None:
        """Run the step that is loaded, and compare it with the oracle."""
        case, output, at = self.case, self.run().double(), 0
        tolerance = TOLERANCE[self.query.dtype]
        for i in members:
            expected = attend(case.queries[i], case.keys[i], case.values[i], case.shape.scale)
            found = output[at : at + len(expected)]
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
            at += len(expected)
