from __future__ import annotations

from segue.frontend.choices import MAX_CHOICES, SEED_LIMIT, choice_seed


def test_the_first_choice_has_the_request_s_seed_and_no_two_choices_of_near_seeds_have_one() -> None:
    seeds = [0, 1, 2, 41, SEED_LIMIT - 2, SEED_LIMIT - 1]
    assert [choice_seed(seed, 0) for seed in seeds] == seeds
    found = {choice_seed(seed, choice) for seed in seeds for choice in range(MAX_CHOICES)}
    assert len(found) == len(seeds) * MAX_CHOICES
    assert all(0 <= seed < SEED_LIMIT for seed in found)
