"""Tests of the page-count formula and the ranks' agreement, with figures calculated by hand."""

from dataclasses import replace

import pytest

from segue.errors import MemoryImbalanceError, OutOfMemoryError
from segue.memory.budget import (
    GIB,
    Demand,
    Reserve,
    afford_graphs,
    agree_on_free,
    check_standby,
    formula_pages,
    plan_pages,
    standby_bytes,
)

CUDA = Demand(
    free_before=10_000_000,
    memory_ratio=0.88,
    arena_bytes=3_000_000,
    reserve=Reserve(batch_state=80_000, derived=20_000, activations=250_000, sampling=50_000, graphs=400_000),
    page_bytes=1000,
    page_size=64,
    max_len=32768,
    max_running_requests=256,
)
CPU = replace(CUDA, page_size=16, max_len=1000, max_running_requests=4, pool_limit=2_000_000)


def test_formula_is_ratio_minus_arena_minus_reserve_over_page_minus_one():
    # int(0.88 * 10,000,000) = 8,800,000; minus 3,000,000 and 800,000 leaves 5,000,000: 5000 pages
    assert formula_pages(CUDA) == 4999


def test_formula_rounds_pages_down():
    assert formula_pages(replace(CUDA, page_bytes=1001)) == 5_000_000 // 1001 - 1 == 4994


def test_formula_splits_a_shared_memory_over_local_ranks():
    # 8,800,000 - 2 * 3,800,000 = 1,200,000: 600 pages each, one is scratch
    assert formula_pages(replace(CUDA, local_ranks=2)) == 599


def test_formula_splits_a_device_over_engines_that_have_a_copy_of_the_weights_each():
    # 8,800,000 - 2 * 3,800,000 = 1,200,000: 600 pages each, one is scratch
    assert formula_pages(replace(CUDA, num_engines=2)) == 599


def test_formula_counts_weights_that_engines_share_once():
    # 8,800,000 - 3,000,000 - 2 * 800,000 = 4,200,000: 2100 pages each, one is scratch
    assert formula_pages(replace(CUDA, num_engines=2, is_arena_shared=True)) == 2099
    # 8,800,000 - 2 * (3,000,000 + 800,000) leaves 1,200,000 for two ranks: one engine has no other one
    assert formula_pages(replace(CUDA, local_ranks=2, is_arena_shared=True)) == 599


def test_formula_counts_the_kv_cache_once_if_only_the_engine_that_serves_has_it():
    parked = replace(CUDA, num_engines=2, is_arena_shared=True, parks_kv=True)
    # 11,900,000 - 4,600,000 - 6,291,456 (blocks around two pages) = 1,008,544: 1008 pages, one is scratch
    assert formula_pages(replace(parked, free_before=11_900_000, memory_ratio=1.0)) == 1007
    # each further engine that stands by takes 800,000 and its blocks; all of 40,000,000 may be used
    wide = replace(parked, free_before=40_000_000, memory_ratio=1.0)
    assert formula_pages(wide) == 29_108 - 1
    assert formula_pages(replace(wide, num_engines=3)) == 29_108 - 7_091 - 1
    assert formula_pages(replace(wide, num_engines=1)) == formula_pages(
        replace(wide, num_engines=1, parks_kv=False)
    )


def test_an_engine_that_stands_by_needs_no_memory_for_a_second_kv_cache():
    parked = replace(CUDA, parks_kv=True)
    check_standby(parked, 780_000 + (6 << 20), kv_bytes=1 << 40)
    with pytest.raises(OutOfMemoryError, match=r"1\.0 MiB are missing.*--num-shadows"):
        check_standby(parked, 780_000 + (5 << 20), kv_bytes=1 << 40)
    check_standby(parked, 780_000 + 5, kv_bytes=5)


def test_an_engine_that_cannot_have_the_pages_of_the_others_is_told_how_much_is_missing():
    # KV, and the reserve of 800,000 without 20,000 of packed copies, which were made with the weights
    check_standby(CUDA, 5_780_000, kv_bytes=5_000_000)
    with pytest.raises(OutOfMemoryError, match=r"1\.0 MiB are missing.*--num-shadows"):
        check_standby(CUDA, 5_780_000 - (1 << 20), kv_bytes=5_000_000)


def test_graphs_must_leave_at_least_as_much_to_kv_as_they_take():
    # 5,000,000 bytes are left for KV, beside 400,000 for graphs; 4,600,000 more of weights leave 400,000
    assert afford_graphs(CUDA)
    assert afford_graphs(replace(CUDA, arena_bytes=7_599_000))
    assert not afford_graphs(replace(CUDA, arena_bytes=7_601_000))


def test_graphs_give_way_to_kv_that_the_user_asked_for():
    # 5,000 pages with the scratch page, and 3,800,000 bytes of weights and reserve
    needed = 8_800_000
    assert afford_graphs(replace(CUDA, free_before=needed), 4999 * 64)
    assert not afford_graphs(replace(CUDA, free_before=needed - 1), 4999 * 64)


def test_separate_memory_is_not_limited_by_request_count_or_pool_limit():
    budget = plan_pages(CUDA)
    assert (budget.num_pages, budget.limited_by) == (4999, "free memory")
    assert (budget.num_pages + 1) * CUDA.page_bytes == 5_000_000


def test_cpu_pool_is_at_most_all_requests_at_full_length():
    assert plan_pages(CPU).num_pages == 4 * 63  # 1000 tokens are 63 pages of 16
    assert plan_pages(CPU).limited_by == "4 requests of 1000 tokens"


def test_one_short_request_at_a_time_still_gets_two_pages():
    assert plan_pages(replace(CPU, max_len=16, max_running_requests=1)).num_pages == 2


def test_cpu_pool_with_its_scratch_page_is_at_most_the_limit():
    budget = plan_pages(replace(CPU, max_running_requests=1000))
    assert (budget.num_pages, (budget.num_pages + 1) * 1000) == (1999, 2_000_000)


def test_cpu_pool_is_at_most_the_formula():
    budget = plan_pages(replace(CPU, free_before=4_400_000, max_running_requests=1000))
    assert (budget.num_pages, budget.limited_by) == (71, "free memory")  # 3,872,000 - 3,800,000: 72 pages


def test_max_seq_len_is_the_shorter_of_model_and_pool():
    assert plan_pages(CUDA).max_seq_len == 32768
    assert plan_pages(CUDA, num_kv_tokens=640).max_seq_len == 640


def test_num_kv_tokens_replaces_the_formula_and_rounds_up_to_pages():
    budget = plan_pages(CPU, num_kv_tokens=100)
    assert (budget.num_pages, budget.limited_by) == (7, "--num-kv-tokens")


def test_num_kv_tokens_may_use_more_than_the_ratio_but_not_more_than_is_free():
    assert plan_pages(CUDA, num_kv_tokens=64 * 6199).num_pages == 6199  # 6,200,000 bytes: all that are free
    with pytest.raises(OutOfMemoryError, match=r"num_kv_tokens=396800 .*lower --num-kv-tokens"):
        plan_pages(CUDA, num_kv_tokens=64 * 6200)


def test_two_pages_are_enough():
    demand = replace(CUDA, free_before=10_000_000, memory_ratio=0.3803)
    assert plan_pages(demand).num_pages == 2


def test_fewer_than_two_pages_says_what_to_change():
    demand = replace(CUDA, memory_ratio=0.3802)
    with pytest.raises(OutOfMemoryError) as caught:
        plan_pages(demand)
    for word in ("1 pages of 64 tokens", "memory_ratio 0.3802", "--memory-ratio", "--chunked-prefill-size"):
        assert word in caught.value.message
    assert caught.value.param == "memory_ratio"


def test_memory_that_does_not_even_hold_the_weights_is_out_of_memory():
    with pytest.raises(OutOfMemoryError, match="room for 0 pages"):
        plan_pages(replace(CUDA, arena_bytes=20_000_000))


def test_one_page_by_num_kv_tokens_says_the_least_number():
    with pytest.raises(OutOfMemoryError, match=r"raise --num-kv-tokens to 32 or more"):
        plan_pages(CPU, num_kv_tokens=16)


def test_ranks_agree_on_the_least():
    assert agree_on_free([7 * GIB, 6 * GIB, 8 * GIB], separate=True) == 6 * GIB


def test_ranks_two_gib_apart_are_allowed():
    assert agree_on_free([8 * GIB, 6 * GIB], separate=True) == 6 * GIB


def test_imbalance_names_ranks_and_bytes():
    free = [8 * GIB + 1, 7 * GIB, 6 * GIB]
    with pytest.raises(MemoryImbalanceError) as caught:
        agree_on_free(free, separate=True)
    for word in ("rank 2", str(6 * GIB), "rank 0", str(8 * GIB + 1)):
        assert word in caught.value.message


def test_ranks_that_share_memory_are_never_imbalanced():
    assert agree_on_free([9 * GIB, 1 * GIB], separate=False) == 1 * GIB


def test_an_engine_that_starts_beside_one_needs_its_reserve_and_the_kv_cache_or_the_little_that_it_parks():
    # 800,000 reserved, of which 20,000 are there with the weights
    assert standby_bytes(CUDA, kv_bytes=500_000) == 1_280_000
    parked = replace(CUDA, num_engines=2, is_arena_shared=True, parks_kv=True)
    assert standby_bytes(parked, kv_bytes=1_000_000_000) == 780_000 + parked.parked_bytes
    check_standby(parked, standby_bytes(parked, 1_000_000_000), 1_000_000_000)
