"""All sampling parameters together: their order, mixed batches, every sampling mode."""

from typing import Any

import numpy as np
import pytest
import torch

from segue.kvcache.page_table import PageTable
from segue.messages.requests import SamplingParams, pack_ids
from segue.messages.steps import NON_FINITE, NewSlot, StepPlan
from segue.model_runner.batch_state import BatchState
from segue.model_runner.sampler import Sampled, Sampler

VOCAB = 700
PROMPT = [3, 4, 5]


class Slots:
    """A batch state with one slot per set of parameters; each slot has `PROMPT` and then `output`."""

    def __init__(self, *params: dict[str, Any], output: tuple[int, ...] = ()) -> None:
        self.count = len(params)
        tokens = [*PROMPT, *output]
        table = PageTable(max_running=self.count, max_seq_len=64, page_size=4, scratch_page=99, device="cpu")
        self.state = BatchState(table, max_seq_len=64)
        new_slots = [
            NewSlot(slot, pack_ids(tokens), len(PROMPT), SamplingParams(**{"max_new_tokens": 9, **options}))
            for slot, options in enumerate(params)
        ]
        slots = list(range(self.count))
        lens = [len(tokens)] * self.count
        flags = [1] * self.count
        self.state.apply(StepPlan(1, new_slots, [], 0, slots, [0] * self.count, lens, flags, flags, "full"))
        self.position = len(tokens)

    def sample(
        self, logits: torch.Tensor, sampling_mode: str = "full", slots: list[int] | None = None
    ) -> Sampled:
        slots = list(range(self.count)) if slots is None else slots
        positions = np.full(len(slots), self.position)
        return Sampler(self.state).sample(logits.clone(), np.array(slots), positions, sampling_mode)

    def tokens(self, logits: torch.Tensor, **options: Any) -> list[int]:
        return self.sample(logits, **options).tokens.tolist()


def _logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


GREEDY = {"temperature": 0.0}
MIXED = [
    GREEDY,
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "seed": 1, "top_k": 5},
    {"temperature": 1.2, "seed": 2, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 2.0, "seed": 3, "min_p": 0.05, "logit_bias": {8: 3.0}},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 3.0, "seed": 1, "bad_words": ((8,), (4, 5, 9)), "allowed_token_ids": pack_ids(range(50))},
]


def test_greedy_takes_the_most_likely_token():
    logits = _logits(2)
    for sampling_mode in ("plain", "full"):
        assert Slots(GREEDY, GREEDY).tokens(logits, sampling_mode=sampling_mode) == logits.argmax(-1).tolist()


def test_a_row_gets_the_same_token_in_any_batch():
    logits = _logits(len(MIXED))
    slots = Slots(*MIXED)
    together = slots.tokens(logits)
    for slot in range(len(MIXED)):
        assert slots.tokens(logits[slot : slot + 1], slots=[slot]) == [together[slot]]
    reversed_slots = list(range(len(MIXED)))[::-1]
    assert slots.tokens(logits.flip(0), slots=reversed_slots) == together[::-1]


def test_a_plain_row_gets_the_same_token_in_both_sampling_modes():
    logits = _logits(60)
    slots = Slots(*[{"temperature": 0.9, "seed": seed} if seed % 3 else GREEDY for seed in range(60)])
    assert slots.tokens(logits, sampling_mode="plain") == slots.tokens(logits, sampling_mode="full")


def test_plain_sampling_gives_the_same_bits_of_the_chosen_logprob():
    logits = _logits(40)
    kinds = [{"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "logprobs": 0}, {**GREEDY, "logprobs": 0}]
    slots = Slots(*[kinds[row % 3] for row in range(40)])
    plain, full = (slots.sample(logits, sampling_mode=sampling_mode) for sampling_mode in ("plain", "full"))
    assert plain.logprobs is not None and full.logprobs is not None
    assert plain.logprob_indices == full.logprob_indices == [row for row in range(40) if row % 3]
    assert torch.equal(plain.logprobs.chosen, full.logprobs.chosen)
    exact = logits.double().log_softmax(-1).gather(1, plain.tokens[:, None]).squeeze(1)
    requested = torch.tensor(plain.logprob_indices)
    assert (plain.logprobs.chosen - exact[requested]).abs().max() < 1e-5
    assert Slots(GREEDY).sample(logits[:1], sampling_mode="plain").logprobs is None


def test_a_row_with_filters_gets_the_same_token_and_logprob_in_both_sampling_modes():
    logits = _logits(60)
    kinds = [GREEDY, {"top_p": 0.8}, {"top_k": 3, "min_p": 0.1, "logprobs": 0}, {"logprobs": 0}]
    slots = Slots(*[{"temperature": 0.9, "seed": seed, **kinds[seed % 4]} for seed in range(60)])
    filtered, full = (
        slots.sample(logits, sampling_mode=sampling_mode) for sampling_mode in ("filtered", "full")
    )
    assert filtered.tokens.tolist() == full.tokens.tolist()
    assert filtered.logprobs is not None and full.logprobs is not None
    assert torch.equal(filtered.logprobs.chosen, full.logprobs.chosen)
    assert filtered.tokens.tolist() != slots.tokens(logits, sampling_mode="plain")


def test_a_draw_depends_on_seed_and_position_and_not_on_the_slot():
    logits = _logits(1).expand(4, -1)
    tokens = Slots(*[{"temperature": 1.5, "seed": 9}] * 4).tokens(logits)
    assert len(set(tokens)) == 1


def test_the_same_seed_draws_anew_at_each_position():
    logits = torch.zeros(1, VOCAB)
    drawn = {
        Slots({"temperature": 1.0, "seed": 4}, output=(1,) * n).tokens(logits, sampling_mode="plain")[0]
        for n in range(20)
    }
    assert len(drawn) > 15


def test_a_row_that_was_retracted_gets_the_same_token():
    # The tokens of the new slot include the output, which still begins at prompt_len.
    options = {"temperature": 1.0, "seed": 3, "frequency_penalty": 1.0, "repetition_penalty": 1.2}
    logits = _logits(1)
    running = Slots(options)
    running.state.write_tokens(np.array([0, 0]), np.array([3, 4]), torch.tensor([8, 9]))
    running.position = 5
    assert running.tokens(logits) == Slots(options, output=(8, 9)).tokens(logits)


def test_top_k_of_one_is_greedy():
    logits = _logits(30)
    tokens = Slots(*[{"temperature": 1.0, "seed": seed, "top_k": 1} for seed in range(30)]).tokens(logits)
    assert tokens == logits.argmax(-1).tolist()


def test_filtered_draws_follow_the_filtered_distribution():
    count = 4000
    slots = Slots(*[{"temperature": 1.0, "seed": seed, "top_k": 4, "top_p": 0.9} for seed in range(count)])
    logits = torch.full((VOCAB,), -9.0)
    logits[[10, 300, 50, 699]] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    counts = np.bincount(slots.tokens(logits.expand(count, -1)), minlength=VOCAB)
    expected = np.array([0.5, 0.3, 0.15]) / 0.95 * count
    assert counts[[10, 300, 50]].sum() == count
    assert ((counts[[10, 300, 50]] - expected) ** 2 / expected).sum() < 13.8  # 0.1 %


def test_penalties_depend_on_the_tokens_of_their_own_slot():
    logits = torch.zeros(2, VOCAB)
    logits[:, 42], logits[:, 7] = 2.0, 1.9
    slots = Slots({"temperature": 0.0, "presence_penalty": 0.5}, GREEDY, output=(42,))
    assert slots.tokens(logits) == [7, 42]


def test_logit_bias_is_added_after_penalties():
    # Before a repetition penalty of 4 the bias of 8 would be worth 2.
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 5.0
    options = {"temperature": 0.0, "repetition_penalty": 4.0, "logit_bias": {PROMPT[0]: 8.0}}
    assert Slots(options).tokens(logits) == [PROMPT[0]]


def test_a_bias_of_minus_100_bans_a_token():
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 11] = 50.0, 1.0
    assert Slots({"temperature": 0.0, "logit_bias": {9: -100.0}}).tokens(logits) == [11]


@pytest.mark.parametrize(("num_output", "token"), [(0, 11), (1, 11), (2, 9)])
def test_stop_tokens_are_masked_until_min_new_tokens(num_output, token):
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 10], logits[0, 11] = 5.0, 4.0, 3.0
    options = {"temperature": 0.0, "min_new_tokens": 2, "stop_token_ids": (9, 10)}
    assert Slots(options, output=(1,) * num_output).tokens(logits) == [token]


def test_a_bias_cannot_bring_a_masked_stop_token_back():
    logits = torch.zeros(1, VOCAB)
    options = {
        "temperature": 0.0,
        "min_new_tokens": 1,
        "stop_token_ids": (9,),
        "logit_bias": {9: 100.0, 4: 1.0},
    }
    assert Slots(options).tokens(logits) == [4]


def test_only_allowed_tokens_are_drawn_and_a_bias_cannot_bring_another_one_back():
    allowed = (7, 300, 301)
    options = {"allowed_token_ids": pack_ids(allowed), "logit_bias": {8: 100.0, 301: -100.0}}
    logits = _logits(40).repeat(2, 1)
    kinds = [{"temperature": 5.0, "seed": 1} | options] * 40 + [
        {"temperature": 1e20, "top_p": 0.9} | options
    ] * 40
    found = Slots(*kinds, {"temperature": 0.0}).tokens(torch.cat([logits, logits[:1]]))
    assert set(found[:-1]) <= set(allowed) and {7, 300} <= set(found[:40])
    assert found[-1] == logits[0].argmax().item(), "a row without rules is left alone"


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ((), {9}),
        ((8,), {9}),
        ((7, 8), {9, 11}),
        ((1, 7, 8), {9, 11}),
        ((8, 7), {9, 12}),
        ((5, 6), {9}),  # 5 is the prompt's last token: a word does not begin in the prompt
        ((7, 8, 7), {9, 12}),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_behind_the_others(output, banned):
    words = ((9,), (7, 8, 11), (7, 12), (5, 5, 6, 13))
    ends = [9, 11, 12, 13]
    logits = torch.zeros(len(ends) + 1, VOCAB)
    logits[:, 20] = 40.0
    for row, token in enumerate(ends):
        logits[row, token] = 50.0
    for options in ({"temperature": 0.0}, {"temperature": 0.1, "seed": 3}):
        # The other request has words of another length.
        kinds = [{**options, "bad_words": words}] * len(ends) + [{**options, "bad_words": ((2, 20),)}]
        found = Slots(*kinds, output=output).tokens(logits)
        assert found == [20 if token in banned else token for token in ends] + [20]


def test_where_the_rules_leave_no_token_an_allowed_one_is_drawn():
    options = {"allowed_token_ids": pack_ids([4, 5]), "bad_words": ((4,), (5,))}
    options |= {"min_new_tokens": 5, "stop_token_ids": (4, 5)}
    for kind in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 1e-5, "seed": 1}):
        assert Slots(kind | options).tokens(_logits(1))[0] in (4, 5)


def test_a_stop_token_may_be_allowed_and_is_still_masked_until_min_new_tokens():
    options = {"temperature": 0.0, "allowed_token_ids": pack_ids([9, 10]), "stop_token_ids": (9,)}
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 5.0
    options["min_new_tokens"] = 1
    assert Slots(options).tokens(logits) == [10]
    assert Slots(options, output=(10,)).tokens(logits) == [9]


@pytest.mark.parametrize(
    "rules", [{"logit_bias": {1: 1.0}}, {"bad_words": ((1,),)}, {"allowed_token_ids": b"\0" * 4}]
)
def test_rules_about_tokens_need_full_sampling(rules):
    """Graphs capture plain and filtered sampling, which know no rules."""
    assert SamplingParams(max_new_tokens=1, **rules).sampling_mode == "full"


def test_logprobs_are_of_the_raw_logits():
    logits = _logits(1)
    options = {
        "temperature": 3.0,
        "top_k": 3,
        "presence_penalty": 2.0,
        "logit_bias": {1: 50.0},
        "bad_words": ((logits.argmax().item(),),),
        "allowed_token_ids": pack_ids([1, 2]),
        "logprobs": 3,
    }
    sampled = Slots(options).sample(logits)
    assert sampled.logprobs is not None
    (entry,) = sampled.logprobs.messages()
    assert entry.token == sampled.tokens.item() == 1
    expected = logits.double().log_softmax(-1)[0]
    assert abs(entry.logprob - expected[1]) < 1e-5
    assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()


def test_only_rows_that_request_logprobs_get_them():
    sampled = Slots(GREEDY, {"logprobs": 0}, GREEDY, {"logprobs": 5}).sample(_logits(4))
    assert sampled.logprobs is not None
    assert sampled.logprob_indices == [1, 3]
    assert [len(entry.top) for entry in sampled.logprobs.messages()] == [0, 5]


def test_a_row_does_not_change_the_tokens_of_others():
    logits = _logits(len(MIXED))
    plain = Slots(*MIXED).tokens(logits)
    louder = logits.clone()
    louder[0] *= 3  # row 0 is greedy
    assert Slots(*MIXED).tokens(louder) == plain


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", MIXED, ids=str)
def test_a_row_with_non_finite_logits_has_no_token(options, value):
    logits, slots = _logits(3), Slots(options, options, options)
    before = slots.tokens(logits)
    logits[1, 400] = value
    found = slots.sample(logits)
    assert found.tokens.tolist() == [before[0], NON_FINITE, before[2]]
    if "logprobs" in options:
        assert found.logprobs is not None
        assert [bool(chosen.isnan()) for chosen in found.logprobs.chosen] == [False, True, False]
    if SamplingParams(**{"max_new_tokens": 9, **options}).sampling_mode == "filtered":
        assert slots.tokens(logits, sampling_mode="filtered") == [before[0], NON_FINITE, before[2]]


EXTREMES = [
    {"temperature": 1e-45},
    {"temperature": 1e-30, "seed": 1},
    {"temperature": 1e38, "seed": 1, "top_p": 0.9},
    {"temperature": 1e300, "seed": 1, "min_new_tokens": 9, "stop_token_ids": (3, 4)},
    {"temperature": 1.0, "top_p": 1e-300},
    {"temperature": 1e-5, "repetition_penalty": 100.0, "logit_bias": {3: -100.0}},
    {"temperature": 1e-5, "repetition_penalty": 0.01, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"temperature": 0.0, "min_new_tokens": 9, "stop_token_ids": tuple(range(VOCAB))},
    {"temperature": 1.0, "min_new_tokens": 9, "stop_token_ids": tuple(range(VOCAB))},
    {"temperature": 1e-30, "seed": 1, "allowed_token_ids": pack_ids([3]), "bad_words": ((3,), (3, 3))},
]


@pytest.mark.parametrize("options", EXTREMES, ids=lambda options: str(options)[:60])
def test_no_option_makes_finite_logits_infinite(options):
    (token,) = Slots(options).tokens(_logits(1) * 1e4)
    assert 0 <= token < VOCAB


def test_masked_tokens_are_not_drawn_at_the_highest_temperature():
    masked = {"min_new_tokens": 9, "stop_token_ids": tuple(range(1, VOCAB))}
    slots = Slots(*[{"temperature": 1e300, "seed": seed, **masked} for seed in range(20)])
    assert slots.tokens(_logits(1).expand(20, -1)) == [0] * 20
