"""Sequences with which tests compare an attention backend with the oracle."""

from collections.abc import Callable

import torch
from torch import Tensor

from segue.attention import cpu
from segue.attention.base import AttentionBackend, AttentionShape, Context
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool, KVShape
from segue.memory import backing
from tests.attention.oracle import attend

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Case:
    """Sequences with known keys and values, scattered over a pool that is NaN everywhere else.

    With `scales` the pool is in FP8, with these scales of keys and values. Then `exact` is what it holds, and
    `keys` and `values` are that, rounded to `dtype`.
    """

    def __init__(
        self,
        q_lens: list[int],
        kv_lens: list[int],
        num_decode: int,
        *,
        page_size: int = 16,
        kv_heads: int = 2,
        group: int = 3,
        head_dim: int = 8,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        scales: tuple[float, float] | None = None,
        make: Callable[[AttentionShape, KVPool], AttentionBackend] = cpu.CPUAttention,
    ) -> None:
        generator = torch.Generator().manual_seed(len(q_lens) * 1000 + sum(kv_lens))
        pages_each = [-(-kv // page_size) for kv in kv_lens]
        num_pages = sum(pages_each) + 2
        sizes = KVShape(
            num_pages=num_pages,
            num_layers=3,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            fp8=scales is not None,
        )
        each_layer = None if scales is None else [scales] * 3
        pool = KVPool(sizes, backing.zeros(sizes.num_bytes, torch.device(device)), each_layer)
        pool.data.fill_(float("nan"))
        table = PageTable(
            max_running=len(q_lens),
            max_seq_len=max(*kv_lens, 1) + 3,
            page_size=page_size,
            scratch_page=pool.scratch_page,
            device=device,
        )
        free = torch.randperm(num_pages, generator=generator).tolist()
        for row, count in enumerate(pages_each):
            table.assign(row, 0, [free.pop() for _ in range(count)])

        def normal(length: int, heads: int) -> Tensor:
            return torch.randn(length, heads, head_dim, generator=generator).to(device, dtype)

        self.keys = [normal(kv, kv_heads) for kv in kv_lens]
        self.values = [normal(kv, kv_heads) for kv in kv_lens]
        self.queries = [normal(q, kv_heads * group) for q in q_lens]
        self.exact: list[tuple[Tensor, Tensor]] = []  # keys and values of a pool in FP8, for the oracle
        self.shape = AttentionShape(
            num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim, scale=0.4
        )
        self.layer = 1
        for row, kv in enumerate(kv_lens):
            slots = table.kv_slots(torch.full((kv,), row, device=device), torch.arange(kv, device=device))
            rows = pool.token_rows(slots)
            self.keys[row], self.values[row] = pool.write(self.layer, rows, self.keys[row], self.values[row])
            if scales is not None:
                self.exact.append(self._stored(pool, rows))
        self.ctx = Context.build(
            input_ids=torch.zeros(sum(q_lens), dtype=torch.int64, device=device),
            slots=list(range(len(q_lens))),
            q_lens=q_lens,
            kv_lens=kv_lens,
            num_decode=num_decode,
            page_table=table,
            kv=pool,
            backend=make(self.shape, pool),
        )

    def _stored(self, pool: KVPool, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of some rows, without the rounding to the model's dtype of those in FP8."""
        sizes = (-1, *self.keys[0].shape[1:])
        parts = zip((pool.key_rows, pool.value_rows), pool.scales[self.layer], strict=True)
        key, value = (part[self.layer][rows].cpu().double().view(sizes) * scale for part, scale in parts)
        return key, value

    def run(self) -> Tensor:
        new = [
            (keys[-len(q) :], values[-len(q) :])
            for keys, values, q in zip(self.keys, self.values, self.queries, strict=True)
        ]
        # A query before the first key has no key of its own; the NaN passed for it must not matter.
        missing = [len(q) - len(k) for q, (k, _) in zip(self.queries, new, strict=True)]
        key, value = (
            torch.cat(
                [
                    torch.cat([part.new_full((gap, *part.shape[1:]), float("nan")), part])
                    for gap, part in zip(missing, parts, strict=True)
                ]
            )
            for parts in zip(*new, strict=True)
        )
        self.ctx.backend.prepare(self.ctx)
        return self.ctx.backend.forward(torch.cat(self.queries), key, value, self.layer, self.ctx)

    def check(self) -> None:
        pairs = self.exact or [(k.cpu(), v.cpu()) for k, v in zip(self.keys, self.values, strict=True)]
        expected = torch.cat(
            [
                attend(q.cpu(), keys, values, self.shape.scale)
                for q, (keys, values) in zip(self.queries, pairs, strict=True)
            ]
        )
        tolerance = TOLERANCE[self.queries[0].dtype]
        torch.testing.assert_close(self.run().double().cpu(), expected, atol=tolerance, rtol=tolerance)
