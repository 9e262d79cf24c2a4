"""Each Triton kernel compared with its plain-torch reference, over odd shapes."""

from typing import Any

import numpy as np
import pytest
import torch

from segue.kernels.ops import embed, linear, list_pages
from tests.kernels.formulas import rms_norm_reference, rotate_reference

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("splits", [0, 1, 4])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 576), (17, 1024), (256, 4096)])
@pytest.mark.parametrize("adds", [False, True])
def test_add_rms_norm(rows, size, splits, adds, dtype) -> None:
    from segue.kernels.triton.norm import add_rms_norm

    x = normal(splits, rows, size) if splits else normal(rows, size, dtype=dtype)
    residual = normal(rows, size, dtype=dtype, seed=1) if adds else None
    x[..., rows // 2, :] *= 1e-3 if dtype == torch.float32 else 0.0  # so small that eps dominates
    if residual is not None:
        residual[rows // 2] = 0
    weight = normal(size, dtype=dtype, seed=2)
    total = (x.sum(0) if splits else x.float()) + (residual.float() if adds else 0)
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-6)
    close(new_residual, total, dtype)
    close(normed, rms_norm_reference(new_residual, weight, 1e-6), dtype)
    assert normed.dtype == new_residual.dtype == dtype


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize(("rows", "size"), [(1, 24), (5, 1536), (33, 3072)])
def test_silu_mul(rows, size, splits, dtype) -> None:
    from segue.kernels.triton.gate_up_silu import silu_mul

    x = normal(splits, rows, 2 * size) if splits else normal(rows, 2 * size, dtype=dtype)
    x[..., 0, :4] = torch.tensor([-300.0, 300.0, -20.0, 0.0]) / max(1, splits)
    gate, up = (x.sum(0) if splits else x.float()).chunk(2, -1)
    close(silu_mul(x, dtype), torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("splits", [0, 3, 8, 12])  # 8 are the most that are all loaded before any is added
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (16, 8, 128), (4, 1, 24), (28, 4, 128)])
def test_qk_norm_rope_store(heads, kv_heads, dim, norms, splits, dtype) -> None:
    from segue.kernels.triton.norm import qk_norm_rope_store

    tokens, width = 7, (heads + 2 * kv_heads) * dim
    qkv = normal(splits, tokens, width) if splits else normal(tokens, width, dtype=dtype)
    qkv[..., 1, :] *= 1e-3  # so small that eps dominates
    weight = normal(heads + kv_heads, dim, seed=3) if norms else None
    positions = torch.tensor([0, 5, 3, 99, 7, 1, 2], device="cuda")
    rows = torch.tensor([12, 3, 40, 0, 7, 8, 9], device="cuda")
    angles = torch.arange(100, device="cuda")[:, None] * normal(dim // 2, seed=4)
    keys, values = (torch.full((50, kv_heads * dim), 5.0, device="cuda", dtype=dtype) for _ in range(2))
    cosines, sines = angles.cos(), angles.sin()
    torch.cuda.synchronize()  # the kernel reads all but `qkv` before the one before it has ended
    query = qk_norm_rope_store(
        qkv, weight, 1e-6, cosines, sines, positions, rows, keys, values,
        dtype=dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
    )  # fmt: skip
    plain = (qkv.sum(0) if splits else qkv.float()).view(tokens, -1, dim)
    qk = plain[:, : heads + kv_heads]
    if norms:
        qk = rms_norm_reference(qk.to(dtype).float(), weight, 1e-6)
    cos, sin = cosines[positions], sines[positions]
    qk = rotate_reference(qk, torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None])
    close(query, qk[:, :heads], dtype)
    close(keys[rows], qk[:, heads:].flatten(1), dtype)
    close(values[rows], plain[:, heads + kv_heads :].flatten(1), dtype)
    untouched = torch.ones(50, dtype=torch.bool, device="cuda").index_fill_(0, rows, False)
    assert (keys[untouched] == 5).all() and (values[untouched] == 5).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 2.5)])
@pytest.mark.parametrize("splits", [0, 3])
def test_keys_and_values_in_fp8_have_the_bits_of_a_cpu(splits, scales, dtype) -> None:
    from segue.kernels.fp8 import FP8, quantize_by
    from segue.kernels.triton.norm import qk_norm_rope_store

    heads, kv_heads, dim, tokens = 16, 8, 128, 7
    width = (heads + 2 * kv_heads) * dim
    qkv = normal(splits, tokens, width) if splits else normal(tokens, width, dtype=dtype)
    qkv[..., 1, :] *= 1e4  # too large for FP8
    qkv[..., 2, :] *= 1e-3
    rows = torch.arange(tokens, device="cuda")
    angles = torch.arange(100, device="cuda")[:, None] * normal(dim // 2, seed=4)

    def run(stored: torch.dtype, scales: tuple[float, float] | None) -> tuple[torch.Tensor, ...]:
        pool = [torch.zeros(tokens, kv_heads * dim, device="cuda").to(stored) for _ in range(2)]
        cosines, sines = angles.cos(), angles.sin()
        torch.cuda.synchronize()
        query = qk_norm_rope_store(
            qkv, None, 1e-6, cosines, sines, rows, rows, *pool,
            dtype=dtype, scales=scales, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        )  # fmt: skip
        return query, *pool

    query, *plain = run(dtype, None)
    same, *found = run(FP8, scales)
    assert torch.equal(query, same)
    for one, other, scale in zip(found, plain, scales, strict=True):
        expected = quantize_by(other.cpu(), scale)
        assert torch.equal(one.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 3, 16, 33, 70, 200])
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_gemm(rows, tma, splits, biased) -> None:
    from segue.kernels.triton.gemm import GemmPlan, run

    x = normal(rows, 1024, dtype=torch.bfloat16)
    weight = normal(192, 1024, dtype=torch.bfloat16, seed=1)
    bias = normal(192, dtype=torch.bfloat16, seed=2) if biased else None
    plan = GemmPlan(tma, 16 if rows <= 16 else 64, 64, 64, splits, 3, 4)
    result = run(plan, x, weight, bias, torch.float32)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    result = result.sum(0) if splits > 1 else result
    torch.testing.assert_close(result.double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 24), (1, 1024), (5, 1536), (180, 4096)])
@pytest.mark.parametrize("vocab_start", [0, 128])
def test_embed_inputs(num_tokens, size, vocab_start, dtype) -> None:
    from segue.kernels.triton.step_inputs import embed_inputs

    pool = torch.arange(5 * 300, dtype=torch.int32, device="cuda").view(5, 300) * 101 % 400
    table = torch.arange(5 * 32, dtype=torch.int32, device="cuda").view(5, 32) * 7
    table[4] += 2**30  # so that a token row takes more than 32 bits
    slots = torch.tensor([4, 0, 2] * 60, dtype=torch.int32, device="cuda")[:num_tokens]
    positions = torch.arange(180, dtype=torch.int32, device="cuda").flip(0)[:num_tokens]
    weight = normal(200, size, dtype=dtype)  # of a shard: there are ids before it and behind it
    embeddings, slot_mapping = embed_inputs(
        slots, positions, pool, table, weight, vocab_start, page_size=16, page_rows=16 * 6
    )
    at = slots.long(), positions.long()
    assert torch.equal(embeddings, embed(pool[at].long(), weight, vocab_start))
    pages = table[at[0], at[1] // 16].long()
    assert torch.equal(slot_mapping, pages * 96 + at[1] % 16)


@pytest.mark.parametrize("counts", [[1], [0, 0], [0, 128, 129, 1, 300, 0], [3] * 260])
def test_list_pages(counts) -> None:
    table = torch.arange(len(counts) * 320, dtype=torch.int32, device="cuda").view(-1, 320)
    slots = torch.arange(len(counts), dtype=torch.int32, device="cuda").flip(0)
    starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    end = sum(counts)
    found, expected = list_pages(table, slots, starts), list_pages(table.cpu(), slots.cpu(), starts.cpu())
    assert torch.equal(found[:end].cpu(), expected[:end])


def choose(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, **columns: Any
) -> torch.Tensor:
    """Returns the tokens that `sample_plain` writes to its ring, int64 `[B]`."""
    from segue.kernels.triton.sampling import sample_plain

    ring = torch.empty((1, len(logits)), dtype=torch.int32, device="cuda")
    ring_index = torch.zeros(1, dtype=torch.int32, device="cuda")
    sample_plain(logits, slots, positions, **columns, ring=ring, ring_index=ring_index)
    return ring[0].long()


@pytest.mark.parametrize("vocab", [100, 128, 4096, 50257])
def test_plain_sampling_chooses_the_tokens_of_the_cpu(vocab) -> None:
    from segue.kernels.triton.sampling import log_sum_exp, sample_plain
    from segue.sampling.gumbel_max import argmax, draw

    count = 70
    logits = normal(count, vocab) * 3 - 20  # negative, so that padding read as 0 would win
    rows = torch.randperm(90, device="cuda")[:count].int()
    temperatures = torch.tensor([0.0, 0.7, 1.3] * 30, device="cuda")
    for i in range(count):  # ties within a block, within a program and far apart: the first wins
        if i % 2 and temperatures[rows[i]] == 0:
            logits[i, [token for token in (i, i + 1, 300 + i, 4096 + i, 9000 + i) if token < vocab]] = 50.0
    logits[1:9, : vocab // 2] = -torch.inf
    inverse = torch.where(temperatures > 0, 1 / temperatures, 0.0)
    seeds = torch.arange(-40, 50, device="cuda")
    positions = torch.arange(3, 3 + count, dtype=torch.int32, device="cuda")
    pool = torch.full((90, 80), -1, dtype=torch.int32, device="cuda")
    ring = torch.full((4, 128), -1, dtype=torch.int32).pin_memory()
    logprob_ring = torch.ones(4, 128).pin_memory()
    num_top = torch.tensor([-1, 0] * 45, device="cuda")
    columns = {"inverse_temperatures": inverse, "seeds": seeds}
    sample_plain(
        logits, rows, positions, **columns, num_top=num_top, token_pool=pool, ring=ring,
        logprob_ring=logprob_ring, ring_index=torch.tensor([2], dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    sliced = logits.repeat(1, 2)[:, :vocab]  # not contiguous, like logits of a padded vocabulary
    chosen = choose(sliced, rows.long(), positions.long(), **columns)
    torch.cuda.synchronize()
    slots_on_cpu = rows.long().cpu()
    greedy = temperatures.cpu()[slots_on_cpu] == 0
    drawn = draw(logits.cpu(), inverse.cpu()[slots_on_cpu], seeds.cpu()[slots_on_cpu], positions.long().cpu())
    expected = torch.where(greedy, argmax(logits.cpu()), drawn)
    chosen_tokens = ring[2, :count].long()
    assert torch.equal(chosen_tokens[greedy], expected[greedy])
    # Sums that round differently on the other device may change a draw between nearly equal scores.
    assert (chosen_tokens != expected).sum() <= 1
    assert torch.equal(pool[rows.long(), positions.long()].cpu().long(), chosen_tokens)
    assert (ring[[0, 1, 3]] == -1).all() and (ring[2, count:] == -1).all()
    assert torch.equal(chosen.cpu(), chosen_tokens)
    # Full sampling's log-probabilities have the same bits; requests that ask for none get none.
    logprobs = (logits.gather(1, chosen[:, None]).squeeze(1) - log_sum_exp(logits)).cpu()
    has_logprob = num_top.cpu()[slots_on_cpu] >= 0
    assert torch.equal(logprob_ring[2, :count], torch.where(has_logprob, logprobs, torch.ones(count)))
    exact = logits.cpu().double().log_softmax(-1).gather(1, chosen_tokens[:, None]).squeeze(1)
    assert (logprobs - exact).abs().max() < 1e-5
    assert (logprob_ring[[0, 1, 3]] == 1).all()


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("vocab", [100, 5000, 151936])
def test_masks_give_the_tokens_of_masked_logits_and_the_logprobs_of_raw_ones(vocab, filters) -> None:
    from segue.kernels.triton.sampling import sample_plain
    from segue.sampling.token_mask import forbid

    count, slots = 40, 64
    raw = normal(count, vocab) * 3
    raw[3, vocab // 2], raw[4, vocab // 3] = torch.nan, torch.inf
    rows = torch.randperm(slots, device="cuda")[:count].int()
    positions = torch.arange(count, dtype=torch.int32, device="cuda")
    words = torch.randint(-(2**31), 2**31, (slots, (vocab + 31) // 32), dtype=torch.int32)
    words[5] = 0
    words[5, -1] = 1 << ((vocab - 1) % 32) if vocab % 32 else -(2**31)  # the last token alone
    guided = torch.tensor([0, 1] * (slots // 2), device="cuda")
    columns = {
        "inverse_temperatures": torch.tensor([0.0, 1.0, 0.7, 1.4] * (slots // 4), device="cuda"),
        "seeds": torch.arange(slots, device="cuda"),
        "num_top": torch.zeros(slots, dtype=torch.int64, device="cuda"),
        "filters": None,
    }
    if filters:
        top_k = torch.tensor([0, 5, 0, 9], device="cuda").repeat(slots // 4)
        top_p = torch.full((slots,), 0.9, device="cuda")
        columns["filters"] = (top_k, top_p, torch.zeros(slots, device="cuda"))
    found = []
    for masks in (None, (words.pin_memory(), guided), (words.cuda(), guided)):
        logits = raw.clone()
        if masks is None:
            masked = guided[rows.long()].nonzero().flatten()
            forbid(logits, masked, words.cuda()[rows[masked].long()])
        ring = torch.full((1, count), -7, dtype=torch.int32).pin_memory()
        logprobs = torch.zeros(1, count).pin_memory()
        sample_plain(
            logits, rows, positions, **columns, masks=masks, ring=ring, logprob_ring=logprobs,
            ring_index=torch.zeros(1, dtype=torch.int32, device="cuda"),
        )  # fmt: skip
        torch.cuda.synchronize()
        assert (ring[0, [3, 4]] == -1).all() and (ring[0, 5:] >= 0).all()
        found.append((ring[0].long(), logits.nan_to_num(1e9), logprobs[0]))
    for tokens, logits, logprobs in found[1:]:
        assert torch.equal(tokens, found[0][0]) and torch.equal(logits, found[0][1])
        exact = raw.double().log_softmax(-1).cpu().gather(1, tokens.clamp(min=0)[:, None]).squeeze(1)
        assert (logprobs - exact)[tokens >= 0].abs().max() < 1e-4


def _make_non_finite(logits: torch.Tensor) -> int:
    """Make the first rows non-finite, each temperature in each way; returns how many rows have no token."""
    logits[0:4] = torch.nan
    logits[4:8, 50:60] = torch.nan
    logits[8:12, -1] = torch.nan
    logits[12:16, 7] = torch.inf
    logits[16:20] = -torch.inf
    logits[20:24, ::2] = -torch.inf  # these rows have a token
    return 20


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("vocab", [100, 4096, 5000, 50257])
def test_rows_that_are_not_finite_have_no_token_and_do_not_change_others(vocab, filters) -> None:
    from segue.kernels.triton.sampling import sample_plain
    from segue.messages.steps import NON_FINITE

    count = 28
    index = torch.arange(count, dtype=torch.int32, device="cuda")
    temperatures = torch.tensor([0.0, 0.0, 0.9, 0.9] * 7, device="cuda")
    columns = {
        "inverse_temperatures": torch.where(temperatures > 0, 1 / temperatures, 0.0),
        "seeds": torch.arange(count, device="cuda"),
        "filters": None,
    }
    if filters:
        top_k = torch.tensor([0, 5], device="cuda").repeat(14)
        columns["filters"] = (
            top_k,
            torch.full((count,), 0.9, device="cuda"),
            torch.zeros(count, device="cuda"),
        )
    chosen_tokens = []
    for non_finite in (False, True):
        logits = normal(count, vocab)
        num_without_token = _make_non_finite(logits) if non_finite else 0
        ring = torch.full((1, count), -7, dtype=torch.int32).pin_memory()
        pool = torch.full((count, count), -7, dtype=torch.int32, device="cuda")
        sample_plain(
            logits, index, index, **columns, num_top=torch.tensor([-1, 0], device="cuda").repeat(14),
            logprob_ring=torch.zeros(1, count).pin_memory(), token_pool=pool, ring=ring,
            ring_index=torch.zeros(1, dtype=torch.int32, device="cuda"),
        )  # fmt: skip
        chosen = choose(logits, index.long(), index.long(), **columns)
        torch.cuda.synchronize()
        assert chosen.tolist() == ring[0].tolist()
        assert ring[0, :num_without_token].tolist() == [NON_FINITE] * num_without_token
        assert all(0 <= token < vocab for token in ring[0, num_without_token:].tolist())
        assert pool.diagonal().tolist() == ring[0].clamp(min=0).tolist()
        chosen_tokens.append(ring[0].tolist())
    assert chosen_tokens[1][24:] == chosen_tokens[0][24:]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draws_follow_the_distribution(temperature) -> None:
    from segue.kernels.triton.sampling import sample_plain

    count, vocab = 20000, 300
    logits = (normal(1, vocab) * 2).expand(count, -1).contiguous()
    temperatures = torch.full((1,), temperature, device="cuda")
    ring = torch.zeros((1, count), dtype=torch.int32).pin_memory()
    sample_plain(
        logits, torch.zeros(count, dtype=torch.int32, device="cuda"),
        torch.arange(count, dtype=torch.int32, device="cuda"),
        inverse_temperatures=1 / temperatures, seeds=torch.tensor([11], device="cuda"),
        num_top=torch.tensor([-1], device="cuda"),
        logprob_ring=torch.zeros(1, count).pin_memory(),
        token_pool=torch.zeros((1, count), dtype=torch.int32, device="cuda"), ring=ring,
        ring_index=torch.zeros(1, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    torch.cuda.synchronize()
    expected = (logits[0] / temperature).softmax(-1).double().cpu() * count
    found = torch.bincount(ring[0].long(), minlength=vocab).double()
    likely = expected > 5
    chi2 = ((found - expected).square() / expected)[likely].sum().item()
    degrees = int(likely.sum())
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("vocab", [50, 1000, 50257])
def test_filtered_draws_agree_with_the_cpu(vocab) -> None:
    from segue.sampling.gumbel_max import draw_candidates
    from segue.sampling.top_k_top_p import candidates

    count = 96
    each = torch.arange(count)
    logits = normal(count, vocab) * 3
    logits[3] = logits[3].round()  # ties
    logits[5], logits[5, 7] = -torch.inf, 1.0
    temperatures = torch.tensor([0.3, 0.0, 0.7, 1.0, 1.6, 1.0, 0.9])[each % 7]
    inverse = torch.where(temperatures > 0, 1 / temperatures, 0.0)
    columns = {"inverse_temperatures": inverse, "seeds": each - 20}
    top_k = torch.tensor([0, 5, 1, 50, 0, 20])[each % 6]
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.95, 1.0, 0.3, 1.0, 0.0])[each % 8]
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.05])[each % 5]
    rows, positions = torch.randperm(count), each + 3
    drawn = choose(
        logits,
        rows.cuda(),
        positions.cuda(),
        **{name: column.cuda() for name, column in columns.items()},
        filters=(top_k.cuda(), top_p.cuda(), min_p.cuda()),
    ).cpu()
    plain = choose(
        logits, rows.cuda(), positions.cuda(), **{name: column.cuda() for name, column in columns.items()}
    ).cpu()
    weights, ids = candidates(
        logits.cpu(),
        inverse_temperatures=inverse[rows],
        top_k=top_k[rows].clamp(max=vocab),
        top_p=top_p[rows],
        min_p=min_p[rows],
        max_top_k=50,
    )
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    filtered = (filtered & (temperatures > 0))[rows]
    expected = torch.where(filtered, draw_candidates(weights, ids, columns["seeds"][rows], positions), plain)
    # Sums that round differently may include or exclude a token at the threshold of top-p.
    assert (drawn != expected).sum() <= 1
    assert filtered.sum() > 50 and (drawn != plain).sum() > 10


@pytest.mark.parametrize("has_masks", [False, True])
def test_a_row_gets_the_same_bits_beside_any_others(has_masks) -> None:
    """Rows of all kinds, alone and together; rows without a filter also where no filters are given."""
    from segue.kernels.triton.sampling import log_sum_exp, sample_plain

    count, vocab = 24, 151936
    index, each = torch.arange(count, dtype=torch.int32, device="cuda"), torch.arange(count, device="cuda")
    raw = normal(count, vocab) * 3
    top_k = torch.where(each % 4 == 1, 20, 0)
    top_p = torch.where(each % 4 == 2, 0.8, 1.0)
    min_p = torch.where(each % 4 == 3, 0.05, 0.0)
    columns: dict[str, Any] = {"inverse_temperatures": torch.where(each % 3 == 0, 0.0, 1.3), "seeds": each}
    columns |= {"num_top": torch.where(each % 5 == 4, -1, 0)}
    if has_masks:
        words = torch.randint(-(2**31), 2**31, (count, (vocab + 31) // 32), dtype=torch.int32)
        columns["masks"] = words.cuda(), each % 2

    def sample(rows: torch.Tensor, filters: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ring = torch.full((1, count), -7, dtype=torch.int32, device="cuda")
        logprobs = torch.ones((1, count), device="cuda")
        pool = torch.zeros((count, count), dtype=torch.int32, device="cuda")
        sample_plain(
            raw[rows.long()], rows, rows, **columns, filters=filters, token_pool=pool, ring=ring,
            logprob_ring=logprobs, ring_index=torch.zeros(1, dtype=torch.int32, device="cuda"),
        )  # fmt: skip
        at = rows.long()
        assert torch.equal(pool[at, at], ring[0, : len(rows)])
        return ring[0, : len(rows)].long(), logprobs[0, : len(rows)]

    filters = top_k, top_p, min_p
    tokens, logprobs = sample(index, filters)
    for row in range(count):
        alone = sample(index[row : row + 1], filters)
        assert torch.equal(alone[0], tokens[row : row + 1]) and torch.equal(alone[1], logprobs[row : row + 1])
    unfiltered = sample(index, None)
    same = (each % 4 == 0) | (each % 3 == 0)
    assert torch.equal(unfiltered[0][same], tokens[same]) and torch.equal(unfiltered[1][same], logprobs[same])
    assert not torch.equal(unfiltered[0], tokens)
    full = raw.gather(1, tokens[:, None]).squeeze(1) - log_sum_exp(raw)
    assert torch.equal(logprobs, torch.where(columns["num_top"] >= 0, full, 1.0))


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("capacity", [16, 1 << 15])  # 109 words in several copies, or in one
def test_scattered_values_of_32_and_64_bits(is_captured: bool, capacity: int) -> None:
    from segue.model_runner.device_writer import CUDAWriter

    writer = CUDAWriter(torch.device("cuda"), capacity=capacity)
    small = torch.zeros(10, 7, dtype=torch.int32, device="cuda")
    floats = torch.zeros(9, device="cuda")
    wide = torch.zeros(50, dtype=torch.int64, device="cuda")
    if is_captured:
        with torch.cuda.stream(torch.cuda.Stream()):
            writer.capture()
        torch.cuda.synchronize()
    for round_ in range(1, 9):
        writer.write(small, np.arange(5, 12), np.arange(5, 12, dtype=np.int32) * round_)
        writer.write(floats, np.array([8, 0]), np.array([1.5, -2.5], dtype=np.float32) * round_)
        writer.write(wide, np.arange(50), np.arange(50) * round_ * (1 << 33) - 7)
        writer.flush()
        assert small.view(-1)[5:12].tolist() == [i * round_ for i in range(5, 12)]
        assert floats[[8, 0]].tolist() == [1.5 * round_, -2.5 * round_]
        assert wide.tolist() == [i * round_ * (1 << 33) - 7 for i in range(50)]
    assert small.count_nonzero() == 7


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])  # bytes by which addresses miss a multiple of 16
def test_many_copies_in_one_launch(offset) -> None:
    from segue.memory.tensor_ops import Copies

    sizes = [0, 16, 1 << 20, (3 << 20) + 48, 5 << 10] if offset == 0 else [0, 8, 24, (1 << 20) + 8, 40]
    sizes = [size + (size > 0) * offset for size in sizes]
    sources = [
        torch.randint(-128, 128, (size + 16,), dtype=torch.int8)[offset : offset + size] for size in sizes
    ]
    sources = [source.clone().pin_memory() if i == 1 else source.cuda() for i, source in enumerate(sources)]
    data = torch.full((sum(sizes) + 64 * len(sizes),), 77, dtype=torch.int8, device="cuda")
    targets, start = [], offset
    for size in sizes:
        targets.append(data[start : start + size])
        start += -(-size // 16) * 16 + 32
    Copies(list(zip(targets, sources, strict=True))).write()
    touched = torch.zeros_like(data, dtype=torch.bool)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu(), source.cpu())
        first_byte = target.data_ptr() - data.data_ptr() if len(target) else 0
        touched[first_byte : first_byte + len(target)] = True
    assert (data[~touched] == 77).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_are_finite_finds_values_that_are_not_finite(dtype, bad) -> None:
    from segue.memory.tensor_ops import are_finite

    largest = torch.finfo(dtype).max
    data = torch.full((9, 1 << 18), largest, dtype=dtype, device="cuda")
    tensors = [data[0], -data[1], data[2, :8], data[3, 1:4], data[4:6], data[6].view(512, 512).T, data[7]]
    assert are_finite(tensors, dtype) == [True] * 7
    for position in (0, 100_001, (1 << 18) - 1):
        data[7].fill_(-largest)[position] = bad
        assert are_finite(tensors, dtype) == [True] * 6 + [False]
    # One is in an unaligned tensor, which torch checks, and one is within a tensor.
    data[3, 3] = data[5, 7] = bad
    assert are_finite(tensors, dtype) == [True, True, True, False, False, True, False]
    if dtype == torch.float32:  # finite, but not after the cast
        assert are_finite([data[0], data[0] * 0], torch.bfloat16) == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 127, 1000, 4103])
@pytest.mark.parametrize(("inner", "hidden"), [(64, 64), (192, 128), (3072, 1024)])
def test_gate_up_silu_gemm_large_m(rows, inner, hidden, dtype) -> None:
    from segue.kernels.triton.gate_up_silu import run_large_m
    from segue.kernels.triton.launch import is_hopper

    if not is_hopper():
        pytest.skip("the kernel needs TMA")
    x = normal(rows, hidden, dtype=dtype)
    weight = normal(2 * inner, hidden, dtype=dtype, seed=1) * hidden**-0.5
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    close(run_large_m(x, weight), torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("rows", [1, 5, 40, 64])
@pytest.mark.parametrize("size", [(3072, 1024), (12288, 4096)])
def test_gate_up_silu_gemm_small_m(rows, size) -> None:
    from segue.kernels.triton.gate_up_silu import gate_up_silu

    inner, hidden = size
    x = normal(rows, hidden, dtype=torch.bfloat16)
    weight = normal(2 * inner, hidden, dtype=torch.bfloat16, seed=1) * hidden**-0.5
    gated = gate_up_silu(x, weight)
    if gated is None:
        pytest.skip("no plan is stored for this shape on this device")
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    close(gated, torch.nn.functional.silu(gate) * up, torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_gemm_without_a_stored_plan(biased, wide, dtype) -> None:
    x, weight = normal(7, 40, dtype=dtype), normal(24, 40, dtype=dtype, seed=1)
    bias = normal(24, dtype=dtype, seed=2) if biased else None
    result = linear(x, weight, bias, may_split=True, float32_output=wide)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert result.dtype == (torch.float32 if wide else dtype)
    if wide:
        torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-4)
    else:
        close(result, expected, dtype)
