"""The CUDA backends compared with the oracle, eager and captured."""

from collections.abc import Callable

import pytest
import torch

from segue.attention import registry
from segue.attention.base import AttentionBackend, AttentionShape, Context
from segue.kvcache.pool import KVPool, KVShape
from segue.memory import backing
from tests.attention.case import TOLERANCE, Case
from tests.attention.oracle import attend
from tests.attention.static import Static

pytestmark = pytest.mark.gpu

ALONE = ["triton", "fa3", "flashinfer"]
BACKENDS = [*ALONE, "fa3,triton", "triton,fa3", "flashinfer,triton", "triton,flashinfer"]


def backend_factory(name: str, dtype: torch.dtype) -> Callable[[AttentionShape, KVPool], AttentionBackend]:
    """Returns the backend's factory, which skips the test if the backend does not support the setting."""

    def make(shape: AttentionShape, pool: KVPool) -> AttentionBackend:
        setting = registry.Setting(
            shape=shape, device=torch.device("cuda", 0), dtype=dtype, page_size=pool.page_size
        )
        for half in set(name.split(",")):
            found = registry.unsupported_reasons(registry._BACKENDS[half].capabilities, setting)
            if found:
                pytest.skip(f"{half}: {'; '.join(found)}")
        return registry.select(name, setting).make(shape, pool)

    return make


def make_case(name, q_lens, kv_lens, num_decode, dtype=torch.bfloat16, **options) -> Case:
    return Case(
        q_lens, kv_lens, num_decode, device="cuda", make=backend_factory(name, dtype), dtype=dtype, **options
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 128, 256])
@pytest.mark.parametrize("name", ALONE)
def test_decode(name, page_size, dtype) -> None:
    lens = [1, 7, 33, 700, 64, 129]
    make_case(name, [1] * 6, lens, 6, dtype, page_size=page_size, head_dim=64).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 1), (8, 2), (3, 3), (2, 4), (4, 7), (1, 8)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", BACKENDS)
def test_mixed_steps(name, kv_heads, group, head_dim, dtype) -> None:
    make_case(
        name,
        [1, 1, 20, 130, 3],
        [9, 300, 150, 130, 500],
        2,
        dtype,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
    ).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "page_size"), [(24, 5), (64, 16), (128, 64)])
@pytest.mark.parametrize("name", ["triton", "triton-invariant"])
def test_a_cache_in_fp8(name, head_dim, page_size, dtype) -> None:
    """Decode of few rows, whose keys are split, and of many, which are planned; prompts and mixed steps."""
    many = [1 + 37 * i % 400 for i in range(150)]
    options = {"page_size": page_size, "kv_heads": 2, "group": 4, "head_dim": head_dim, "scales": (0.3, 2.5)}
    for q_lens, kv_lens, num_decode in (
        ([1] * 4, [1, 700, 33, 64], 4),
        ([1] * 152, [*many, 3000, 1], 152),
        ([1, 1, 20, 130, 3], [9, 300, 150, 130, 500], 2),
        ([300, 129, 64, 5], [300, 400, 128, 3], 0),
    ):
        make_case(name, q_lens, kv_lens, num_decode, dtype, **options).check()


@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", BACKENDS)
def test_prompts_of_any_length_on_pages_of_any_size(name, head_dim, page_size) -> None:
    q_lens, kv_lens = [1, 1, 300, 129, 64, 5], [64, 129, 300, 400, 128, 257]
    make_case(name, q_lens, kv_lens, 2, page_size=page_size, kv_heads=2, group=2, head_dim=head_dim).check()


@pytest.mark.parametrize("count", [1, 3, 8, 40])
@pytest.mark.parametrize("name", ALONE)
def test_every_number_of_splits(name, count) -> None:
    lens = [1 + 37 * i % 900 for i in range(count)]
    make_case(name, [1] * count, lens, count, kv_heads=8, group=2, head_dim=128).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 2), (3, 3), (1, 8)])
@pytest.mark.parametrize("name", ALONE)
def test_rows_much_longer_than_the_others(name, kv_heads, group, dtype) -> None:
    """Triton divides the keys of long rows among programs of their own, which `plan_decode` plans."""
    lens = [*[1 + 37 * i % 400 for i in range(150)], 9000, 1, 3000]
    make_case(
        name, [1] * len(lens), lens, len(lens), dtype, kv_heads=kv_heads, group=group, head_dim=64
    ).check()


def test_more_heads_than_there_are_programs_to_share() -> None:
    """A single row is planned too, and its plan has room for one item more than there are rows."""
    make_case("triton", [1], [3000], 1, kv_heads=129, group=1, head_dim=64).check()


def test_small_odd_heads() -> None:
    make_case("triton", [1, 20], [9, 150], 1, torch.float32, group=3, head_dim=24).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_largest_group(dtype) -> None:
    make_case("triton", [1, 20], [90, 150], 1, dtype, kv_heads=1, group=64, head_dim=64).check()


@pytest.mark.parametrize("name", ALONE)
def test_a_query_that_attends_to_no_key_gives_zero(name) -> None:
    case = make_case(name, [5, 4], [3, 0], 0, head_dim=64)
    case.check()
    assert case.run()[:2].abs().sum() == 0


def capture(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    run()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        output = run()
    return graph, output


@pytest.mark.parametrize("name", ["triton", "fa3"])  # FlashInfer plans such a step in `prepare`
def test_a_replayed_decode_step_gives_the_eager_bits(name) -> None:
    case = make_case(name, [1] * 6, [5, 90, 300, 64, 65, 1000], 6, kv_heads=8, group=2, head_dim=128)
    eager = case.run()
    query = torch.cat(case.queries)

    def run() -> torch.Tensor:
        case.ctx.backend.prepare(case.ctx)
        return case.ctx.backend.forward(query, None, None, case.layer, case.ctx)

    graph, captured = capture(run)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)


def check_replays(case: Case, static: Static, steps: list[tuple[list[int], int]]) -> None:
    """Capture the first step; compare replays of all steps with the oracle and with eager runs."""
    static.load(*steps[0])
    graph, output = capture(static.run)
    for members, num_decode in steps:
        static.load(members, num_decode)
        graph.replay()
        torch.cuda.synchronize()
        replayed, at = output.clone(), 0
        for i in members:
            expected = attend(
                case.queries[i].cpu(), case.keys[i].cpu(), case.values[i].cpu(), case.shape.scale
            )
            found = replayed[at : at + len(case.queries[i])].double().cpu()
            torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
            at += len(case.queries[i])
        assert torch.equal(static.run()[:at], replayed[:at]), "an eager run of the same shape differs"


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("slots", [8, 300])
@pytest.mark.parametrize("name", BACKENDS)
def test_captured_steps_of_any_mix_agree_with_the_oracle(name, slots, page_size) -> None:
    q_lens, kv_lens = [1, 1, 1, 1, 40, 3, 130, 1], [9, 300, 64, 1, 170, 3, 130, 77]
    case = make_case(name, q_lens, kv_lens, 4, kv_heads=4, group=2, head_dim=128, page_size=page_size)
    steps = [([0, 4, 6], 1), ([0, 1, 2, 3, 7], 5), ([6], 0), ([3, 2, 1, 4, 5, 7], 3), ([0, 7], 1)]
    check_replays(case, Static(case, slots=slots, tokens=200), steps)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_captured_step_whose_longest_row_changes(name) -> None:
    lens = [*[1 + 37 * i % 400 for i in range(30)], 5000, 7000]
    case = make_case(name, [1] * 32, lens, 32, kv_heads=8, group=2, head_dim=128)
    steps = [
        (list(range(30)), 30),
        ([30, *range(20)], 21),
        ([3, 4, 31, 30], 4),
        ([31], 1),
        (list(range(32)), 32),
    ]
    check_replays(case, Static(case, slots=40, tokens=64), steps)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_captured_step_of_thousands_of_tokens(name) -> None:
    q_lens, kv_lens = [1, 1, 2048, 1500, 700, 2900], [900, 64, 2048, 3000, 700, 2900]
    case = make_case(name, q_lens, kv_lens, 2, kv_heads=2, group=2, head_dim=128, page_size=64)
    steps = [([0, 1, 2, 3], 2), ([0, 4], 1), ([5, 4], 0), ([1, 0], 2)]
    check_replays(case, Static(case, slots=257, tokens=4096), steps)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("name", ALONE)
def test_the_top_pages_of_a_pool_beyond_32_bit_offsets(name, page_size) -> None:
    from segue.kvcache.page_table import PageTable

    num_pages, dtype = 76800 // page_size, torch.bfloat16
    sizes = KVShape(
        num_pages=num_pages,
        num_layers=28,
        page_size=page_size,
        num_kv_heads=8,
        head_dim=128,
        dtype=dtype,
    )
    pool = KVPool(sizes, backing.zeros(sizes.num_bytes, torch.device("cuda")))
    assert pool.data.numel() > 2**32
    each = 256 // page_size
    table = PageTable(
        max_running=2, max_seq_len=256, page_size=page_size, scratch_page=num_pages, device="cuda"
    )
    pages = [list(range(num_pages - 1 - row * each, num_pages - 1 - (row + 1) * each, -1)) for row in (0, 1)]
    generator = torch.Generator("cuda").manual_seed(0)
    for row in (0, 1):
        table.assign(row, 0, pages[row])
        for page in pages[row]:
            pool.data[page, 27].normal_(generator=generator)
    shape = AttentionShape(num_heads=16, num_kv_heads=8, head_dim=128, scale=0.1)
    query = torch.randn(21, 16, 128, generator=generator, device="cuda", dtype=dtype)
    ctx = Context.build(
        input_ids=torch.zeros(21, dtype=torch.int64, device="cuda"),
        slots=[0, 1],
        q_lens=[1, 20],
        kv_lens=[200, 250],
        num_decode=1,
        page_table=table,
        kv=pool,
        backend=backend_factory(name, dtype)(shape, pool),
    )
    ctx.backend.prepare(ctx)
    output = ctx.backend.forward(query, None, None, 27, ctx).double().cpu()
    for tokens, row, length in ((slice(0, 1), 0, 200), (slice(1, 21), 1, 250)):
        keys, values = (
            torch.cat([pool.data[page, 27, kind] for page in pages[row]])[:length].cpu() for kind in (0, 1)
        )
        expected = attend(query[tokens].cpu(), keys, values, 0.1)
        torch.testing.assert_close(output[tokens], expected, atol=2e-2, rtol=2e-2)
