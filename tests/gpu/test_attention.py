"""The Triton backend against the oracle, and captured against eager."""

import pytest
import torch

from tests.attention.case import TOLERANCE, Case

pytestmark = pytest.mark.gpu


def make_case(q_lens, kv_lens, num_decode, **options) -> Case:
    from segue.attention.triton import TritonAttention

    return Case(q_lens, kv_lens, num_decode, device="cuda", make=TritonAttention, **options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_decode(page_size, dtype) -> None:
    make_case([1] * 5, [1, 7, 33, 700, 64], 5, page_size=page_size, dtype=dtype, head_dim=64).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 1), (8, 2), (3, 3), (2, 4), (4, 7), (1, 8)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_mixed_steps(kv_heads, group, head_dim, dtype) -> None:
    case = make_case(
        [1, 1, 20, 130, 3],
        [9, 300, 150, 130, 500],
        2,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
    )
    case.check()


@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_every_number_of_splits(count) -> None:
    lens = [1 + 37 * i % 900 for i in range(count)]
    make_case([1] * count, lens, count, kv_heads=8, group=2, head_dim=128, dtype=torch.bfloat16).check()


def test_small_odd_heads() -> None:
    make_case([1, 20], [9, 150], 1, group=3, head_dim=24).check()


def test_a_query_that_sees_no_key_gives_zero() -> None:
    case = make_case([5, 4], [3, 0], 0)
    case.check()
    assert case.run()[:2].abs().sum() == 0


def test_a_replayed_graph_gives_the_eager_bits() -> None:
    case = make_case([1] * 6, [5, 90, 300, 64, 65, 1000], 6, kv_heads=8, group=2, head_dim=128)
    eager = case.run()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            query = torch.cat(case.queries)
            captured = case.ctx.backend.forward(query, None, None, case.layer, case.ctx)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)


@pytest.mark.slow
def test_the_top_pages_of_a_pool_beyond_32_bit_offsets() -> None:
    from segue.attention.base import AttentionShape
    from segue.attention.context import Context
    from segue.attention.triton import TritonAttention
    from segue.kvcache.pool import KVPool
    from segue.kvcache.table import PageTable
    from tests.attention.oracle import attend

    pool = KVPool(
        num_pages=700,
        num_layers=28,
        page_size=128,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
    )
    assert pool.data.numel() > 2**32
    table = PageTable(max_running=2, max_seq_len=256, page_size=128, scratch_page=700, device="cuda")
    table.assign(0, 0, [699, 698])
    table.assign(1, 0, [697, 696])
    generator = torch.Generator("cuda").manual_seed(0)
    for page in range(696, 700):
        pool.data[page, 27].normal_(generator=generator)
    shape = AttentionShape(num_heads=16, num_kv_heads=8, head_dim=128, scale=0.1)
    query = torch.randn(21, 16, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    ctx = Context.build(
        input_ids=torch.zeros(21, dtype=torch.int64, device="cuda"),
        rows=[0, 1],
        q_lens=[1, 20],
        kv_lens=[200, 250],
        num_decode=1,
        page_table=table,
        kv=pool,
        backend=TritonAttention(shape, pool),
    )
    ctx.backend.prepare(ctx)
    output = ctx.backend.forward(query, None, None, 27, ctx).double().cpu()
    for tokens, pages, length in ((slice(0, 1), (699, 698), 200), (slice(1, 21), (697, 696), 250)):
        keys, values = (
            torch.cat([pool.data[page, 27, kind] for page in pages])[:length].cpu() for kind in (0, 1)
        )
        expected = attend(query[tokens].cpu(), keys, values, 0.1)
        torch.testing.assert_close(output[tokens], expected, atol=2e-2, rtol=2e-2)
