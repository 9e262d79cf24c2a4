"""`--deterministic` on CUDA: a request's bits do not depend on batching, chunking and retraction."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import segue
from bench import suite
from segue.attention.base import AttentionShape, Context
from segue.errors import ConfigError
from segue.kernels.ops import add_rms_norm, silu_mul
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool, KVShape
from segue.memory import backing
from tests.attention.case import Case
from tests.attention.oracle import attend
from tests.attention.static import Static
from tests.gpu.test_attention import backend_factory
from tests.model_runner import making
from tests.model_runner.planner import Planner, Sequence

pytestmark = pytest.mark.gpu

BACKEND = "triton-invariant"
Bits = list[tuple[int, bytes]]
"""Each token of an output and its log-probability."""


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


# GEMMs.


@pytest.mark.parametrize(("size", "depth"), [(4096, 12288), (331, 1096), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_tiles_give_a_row_the_same_bits(size, depth, dtype) -> None:
    from segue.kernels.triton import gemm

    x, weight, bias = (normal(*shape, dtype=dtype) for shape in ((300, depth), (size, depth), (size,)))
    expected = gemm.run(next(iter(gemm.LARGE_M_PLANS)), x, weight, bias, torch.float32)
    exact = x.double() @ weight.double().T + bias.double()
    assert ((expected - exact).abs().max() / exact.abs().max()) < 1e-4
    for plan in {*gemm.LARGE_M_PLANS, *gemm.SMALL_M_PLANS, *gemm.SMALL_M_LARGE_N_PLANS}:
        for start, stop in ((0, 1), (299, 300), (37, 101), (0, 300)):
            found = gemm.run(plan, x[start:stop], weight, bias, torch.float32)
            assert torch.equal(found, expected[start:stop]), (plan, start, stop)


def test_a_gemm_gives_a_row_the_same_bits_in_any_batch() -> None:
    from segue.kernels.triton.gemm import TritonBatchInvariantGemm

    weight, x = normal(4096, 12288), normal(8192, 12288, seed=1)
    whole = TritonBatchInvariantGemm(weight, torch.float32)
    expected = whole(x, None)
    for rows in (1, 2, 8, 9, 16, 17, 33, 64, 65, 100, 128, 129, 250, 256, 257, 700, 1024, 4097, 8191):
        for start in {0, (8192 - rows) // 3, 8192 - rows}:
            found = whole(x[start : start + rows], None)
            assert torch.equal(found, expected[start : start + rows]), (rows, start)
    backwards = TritonBatchInvariantGemm(weight.flip(1).contiguous(), torch.float32)
    found = backwards(x[:1].flip(1).contiguous(), None)
    assert not torch.equal(found, expected[:1]), "another summation order has to give other bits"


@pytest.mark.parametrize("size", [1024, 4096])
def test_the_small_kernels_give_a_row_the_same_bits_in_any_batch(size) -> None:
    x, residual, weight = normal(64, size), normal(64, size, seed=1), normal(size, seed=2)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    gated = silu_mul(x, x.dtype)
    for rows in (1, 7, 8, 9, 40):
        alone = add_rms_norm(x[:rows].clone(), residual[:rows].clone(), weight, 1e-6)
        assert torch.equal(alone[0], normed[:rows]) and torch.equal(alone[1], total[:rows])
        assert torch.equal(silu_mul(x[:rows], x.dtype), gated[:rows])


# Attention.


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 1, 64), (2, 8, 64), (3, 3, 64), (8, 4, 128)])
def test_a_query_has_the_same_bits_in_decode_prefill_and_any_chunk(kv_heads, group, dim, page_size) -> None:
    length, heads = 1700, kv_heads * group
    pages = -(-length // page_size)
    sizes = KVShape(
        num_pages=pages,
        num_layers=2,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.bfloat16,
    )
    pool = KVPool(sizes, backing.zeros(sizes.num_bytes, torch.device("cuda")))
    pool.data.normal_(generator=torch.Generator("cuda").manual_seed(0))
    table = PageTable(
        max_running=1, max_seq_len=length, page_size=page_size, scratch_page=pool.scratch_page, device="cuda"
    )
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
    table.assign(0, 0, order)
    shape = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    backend = backend_factory(BACKEND, torch.bfloat16)(shape, pool)
    query = normal(length, heads, dim, seed=5)

    def run(queries: Tensor, q_lens: list[int], kv_lens: list[int], num_decode: int) -> Tensor:
        ctx = Context.build(
            input_ids=torch.zeros(sum(q_lens), dtype=torch.int64, device="cuda"),
            slots=[0] * len(q_lens),
            q_lens=q_lens,
            kv_lens=kv_lens,
            num_decode=num_decode,
            page_table=table,
            kv=pool,
            backend=backend,
        )
        backend.prepare(ctx)
        return backend.forward(queries, None, None, 1, ctx)

    whole = run(query, [length], [length], 0)
    keys, values = (torch.cat([pool.data[page, 1, kind] for page in order])[:length].cpu() for kind in (0, 1))
    expected = attend(query[-40:].cpu(), keys, values, shape.scale)
    torch.testing.assert_close(whole[-40:].double().cpu(), expected, atol=1e-2, rtol=1e-2)
    edges = [0, 1, 63, 64, 511, 512, 513, 1023, 1024, 1535, 1536, length - 1]
    some = torch.randint(0, length, (290,), generator=torch.Generator().manual_seed(1)).tolist()
    for indices in ([511], [512], [length - 1], edges, edges + some[:50], edges + some):
        found = run(query[indices], [1] * len(indices), [index + 1 for index in indices], len(indices))
        assert torch.equal(found, whole[indices]), len(indices)
    for start, stop in ((0, 5), (100, 164), (500, 700), (1023, length), (length - 1, length)):
        assert torch.equal(run(query[start:stop], [stop - start], [stop], 0), whole[start:stop]), start
    mixed = run(query[[9, 700, *range(40, 90)]], [1, 1, 50], [10, 701, 90], 2)
    assert torch.equal(mixed, whole[[9, 700, *range(40, 90)]])


@pytest.mark.parametrize("page_size", [5, 64, 128])
def test_attention_agrees_with_the_oracle_eager_and_padded(page_size) -> None:
    q_lens, kv_lens = [1, 1, 1, 1, 40, 3, 130, 1], [9, 300, 64, 1, 170, 3, 130, 1277]
    case = Case(
        q_lens,
        kv_lens,
        4,
        page_size=page_size,
        kv_heads=2,
        group=4,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
        make=backend_factory(BACKEND, torch.bfloat16),
    )
    case.check()
    eager, starts = case.run(), torch.tensor([0, *q_lens]).cumsum(0).tolist()
    for slots in (8, 100):
        static = Static(case, slots=slots, tokens=200)
        for members, num_decode in (([0, 4, 6], 1), ([0, 1, 2, 3, 7], 5), ([7, 3, 2, 1, 4, 5], 4), ([6], 0)):
            static.load(members, num_decode)
            expected = torch.cat([eager[starts[i] : starts[i + 1]] for i in members])
            assert torch.equal(static.run()[: len(expected)], expected), (slots, members)


def test_a_query_that_attends_to_no_key_gives_zero() -> None:
    make = backend_factory(BACKEND, torch.bfloat16)
    case = Case([5, 4], [3, 0], 0, head_dim=64, dtype=torch.bfloat16, device="cuda", make=make)
    case.check()
    assert case.run()[:2].abs().sum() == 0


# The whole runner.


def save_model(directory: Path, **sizes: Any) -> Path:
    """Save the configuration of a Qwen3-0.6B with few layers; the runner makes dummy weights."""
    path = directory / "model"
    path.mkdir()
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 4096, **sizes}
    (path / "config.json").write_text(json.dumps(suite.COMMON | suite.SHAPES["0.6b"] | sizes))
    return path


OPTIONS = {
    "load_format": "dummy",
    "device": "cuda",
    "dtype": "bfloat16",
    "page_size": 64,
    "num_kv_tokens": 64 * 1024,
    "max_running_requests": 80,
    "chunked_prefill_size": 1024,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("deterministic"))


def draw(length: int, seed: int) -> list[int]:
    return suite.draw_prompt(random.Random(seed), length)


def bits(sequence: Sequence, start: int = 0) -> Bits:
    entries = sequence.logprobs[start:]
    assert len(entries) == len(sequence.output) - start
    return [(entry.token, struct.pack("f", entry.logprob)) for entry in entries if entry is not None]


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 0},
    "drawn": {"logprobs": 0, "temperature": 0.9, "seed": 7},
    "filtered": {"logprobs": 0, "temperature": 1.1, "seed": 8, "top_p": 0.9, "top_k": 50},
}
NEEDLE, COUNT = draw(700, 1), 40


def run_needle_in_batch(
    planner: Planner, others: int, chunk: int, shared: int, params: dict[str, Any]
) -> Sequence:
    """Run the needle beside `others` that decode and new prompts; its first `shared` pages are cached."""
    early = [planner.add(draw(20 + 37 * i % 400, 100 + i)) for i in range(others)]
    for sequence in early:
        planner.prefill(sequence)
    first = planner.add(NEEDLE)
    planner.prefill(first)
    needle = planner.add(NEEDLE, **params)
    needle.pages, needle.computed = first.pages[:shared], shared * planner.runner.limits.page_size
    late = [planner.add(draw(30 + i, 500 + i), temperature=0.8, top_p=0.8) for i in range(others // 8)]
    neighbours = [(sequence, 1) for sequence in early]
    while needle.computed < len(NEEDLE):
        planner.run([*neighbours, (needle, min(chunk, len(NEEDLE) - needle.computed))])
    for sequence in late:  # mixed steps, and filtered sampling
        planner.run([*neighbours, (needle, 1), (sequence, len(sequence.tokens))])
    while len(needle.output) < COUNT:
        planner.run([*neighbours, (needle, 1), *((sequence, 1) for sequence in late)])
        if len(needle.output) == COUNT // 2:
            neighbours = neighbours[: others // 2]
    needle.pages = needle.pages[shared:]
    for sequence in (*early, *late, first, needle):
        planner.remove(sequence)
    return needle


def outcomes(planner: Planner, params: dict[str, Any]) -> Iterator[tuple[str, Bits]]:
    """Yield the needle's bits for many batchings and chunkings; the first one is the needle alone."""
    alone = planner.generate(NEEDLE, COUNT, **params)
    yield "alone", bits(alone)
    for chunk in (4, 64, 333):
        yield f"chunks of {chunk}", bits(planner.generate(NEEDLE, COUNT, chunk, **params))
    for others, chunk, shared in ((1, 700, 0), (7, 100, 3), (20, 256, 10), (64, 512, 1)):
        name = f"among {others}, chunks of {chunk}, {shared} pages shared"
        yield name, bits(run_needle_in_batch(planner, others, chunk, shared, params))
    for num_kept in (1, 17, COUNT - 1):  # retracted, and prefilled again with its tokens so far
        again = planner.add(alone.tokens[: len(NEEDLE) + num_kept], prompt_len=len(NEEDLE), **params)
        planner.prefill(again, 300)
        planner.decode([again], COUNT - num_kept - 1)
        planner.remove(again)
        yield f"retracted after {num_kept}", bits(alone)[:num_kept] + bits_after(again, num_kept)
    with_all_logprobs = {**params, "logprobs": 2, "prompt_logprobs_start": 0}
    yield (
        "with top logprobs and prompt logprobs",
        bits(planner.generate(NEEDLE, COUNT, 200, **with_all_logprobs)),
    )


def bits_after(sequence: Sequence, num_kept: int) -> Bits:
    entries = [entry for entry in sequence.logprobs if entry is not None]
    assert len(entries) == len(sequence.output) - num_kept
    return [(entry.token, struct.pack("f", entry.logprob)) for entry in entries]


def differing(planner: Planner, params: dict[str, Any]) -> list[str]:
    (_, expected), *rest = outcomes(planner, params)
    assert len(expected) == COUNT and len({token for token, _ in expected}) > 5
    return [name for name, found in rest if found != expected]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_a_request_has_the_same_bits_in_any_batch(model, eager) -> None:
    runner = making.make_runner(model, **OPTIONS, deterministic=True, disable_cuda_graph=eager)
    assert runner.attention_backend == BACKEND
    planner = Planner(runner)
    found = {name: differing(planner, params) for name, params in PARAMS.items()}
    runner.close()
    assert not any(found.values()), found


def test_graphs_eager_steps_and_pages_of_any_size_give_the_same_bits(model) -> None:
    results = []
    for changes in ({}, {"disable_cuda_graph": True}, {"page_size": 16}, {"chunked_prefill_size": 64}):
        runner = making.make_runner(model, **{**OPTIONS, **changes}, deterministic=True)
        results.append(bits(Planner(runner).generate(NEEDLE, COUNT, 64, **PARAMS["drawn"])))
        runner.close()
    assert all(result == results[0] for result in results)


def test_attention_that_depends_on_the_batch_fails_the_same_comparison(model, monkeypatch) -> None:
    from segue.attention.triton import TritonInvariantAttention

    forward = TritonInvariantAttention.forward

    def depends_on_batch(self: Any, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return forward(self, query, *arguments) * (1.0 if len(query) == 1 else 1.01)

    monkeypatch.setattr(TritonInvariantAttention, "forward", depends_on_batch)
    runner = making.make_runner(model, **OPTIONS, deterministic=True, disable_cuda_graph=True)
    found = differing(Planner(runner), PARAMS["greedy"])
    runner.close()
    assert found, "the comparison does not detect attention that depends on the batch"


def test_the_engine_gives_a_needle_the_same_bits_in_any_batch(model) -> None:
    params = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
    others = [draw(20 + 53 * i % 900, 1000 + i) for i in range(64)]
    found = []
    options = {"deterministic": True, "chunked_prefill_size": 512, "enable_batch_prefill_cuda_graph": True}
    with segue.Engine(str(model), **{**OPTIONS, **options}, embedded=True) as engine:

        def generate(prompts: list[list[int]], index: int) -> None:
            replies = engine.generate(
                input_ids=prompts,
                sampling_params=[params | {"max_new_tokens": COUNT + i % 7} for i in range(len(prompts))],
                return_logprob=True,
            )
            meta = replies[index]["meta_info"]
            found.append([(token, value) for value, token, _ in meta["output_token_logprobs"][:COUNT]])

        generate([NEEDLE], 0)
        generate([NEEDLE], 0)  # its prompt is in the cache
        generate([*others[:30], NEEDLE, *others[30:]], 30)
        generate([NEEDLE[:650] + others[0], NEEDLE, *others[:5]], 1)
        generate([*others[:3], NEEDLE], 3)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "fa3"}, "'fa3'.*--deterministic"),
        ({"attention_backend": "auto,triton"}, "'triton'.*--deterministic"),
        ({"dtype": "float32"}, "use one of them"),
    ],
)
def test_unsupported_options_are_refused(model, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        making.make_runner(model, **{**OPTIONS, "deterministic": True, **options})
