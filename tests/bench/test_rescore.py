"""Scoring again accepts what an engine produces, and nothing else."""

import dataclasses

import pytest
import torch

import segue
from bench.offline import Adapter, score_again, spread
from bench.rescore import LEAST_BOUND, MOST_BOUND, Produced, Teacher, allowed, regrets, rescore, rounding
from segue.config import EngineConfig
from segue.sampling.gumbel_max import argmax, draw
from tests.model_runner import making, tiny


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3")
    tiny.save_qwen3(directory)
    return making.options(directory, disable_prefix_cache=True)


@pytest.fixture(scope="module")
def calls(options):
    prompts = [making.prompt(10 + 9 * i, seed=i) for i in range(7)]
    with segue.Engine(**options, embedded=True) as engine:
        adapter = Adapter(engine)
        assert adapter(prompts, [40, 3, 25, 9, 30, 11, 1], 0.6) == [40, 3, 25, 9, 30, 11, 1]
        assert adapter(prompts[:3], [20, 20, 20], 0.0) == [20, 20, 20]
    return adapter.calls


@pytest.fixture(scope="module")
def teacher(options):
    return Teacher(EngineConfig(**options))


def test_what_an_engine_produces_is_what_it_should_have(calls, teacher):
    assert len(calls) == 2
    for requests in calls.values():
        score = rescore(teacher, requests, LEAST_BOUND)
        assert score.tokens == sum(len(request.output) for request in requests)
        assert score.equal == 1.0
        assert score.worst_regret < 1e-4
        assert score.wrong == 0


def test_one_wrong_token_is_found(calls, teacher):
    for requests in calls.values():
        for at in (0, 7, 19):
            output = list(requests[0].output)
            output[at] = (output[at] + 1) % making.VOCAB
            wrong = dataclasses.replace(requests[0], output=output)
            found = teacher.regrets(wrong)
            assert (found[:at] < LEAST_BOUND).all()
            assert found[at] > LEAST_BOUND


def test_tokens_of_another_seed_prompt_or_temperature_are_wrong(calls, teacher):
    drawn, greedy = calls.values()
    for wrong in (
        dataclasses.replace(drawn[0], seed=1),
        dataclasses.replace(drawn[0], prompt=drawn[1].prompt),
        dataclasses.replace(drawn[0], temperature=0.0),
        dataclasses.replace(greedy[0], temperature=0.6),
        dataclasses.replace(greedy[0], prompt=greedy[1].prompt),
    ):
        score = rescore(teacher, [wrong], LEAST_BOUND)
        assert score.wrong > score.tokens / 5


@pytest.mark.parametrize("vocab", [100, 128, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
def test_the_samplers_own_choice_has_no_regret(vocab, temperature):
    torch.manual_seed(vocab)
    logits = torch.randn(50, vocab) * 3
    positions = torch.arange(50) + 17
    if temperature:
        inverse, seeds = torch.full((50,), 1 / temperature), torch.full((50,), 5)
        tokens = draw(logits, inverse, seeds, positions)
    else:
        tokens = argmax(logits)
    assert regrets(logits, tokens, positions, 5, temperature).max() < 1e-5
    assert (regrets(logits, (tokens + 1) % vocab, positions, 5, temperature) > 0).all()


def test_logits_of_nan_make_no_token_right(monkeypatch, teacher, calls):
    monkeypatch.setattr(teacher, "regrets", lambda request: torch.full((3,), torch.nan))
    assert rescore(teacher, next(iter(calls.values()))[:1], LEAST_BOUND).wrong == 3


def test_the_shortest_and_the_longest_are_among_those_scored():
    made = [Produced(prompt=[1] * n, output=[1], temperature=0.0, seed=0) for n in (5, 9, 1, 7, 3, 8)]
    assert [len(request.prompt) for request in spread(made, 4)] == [1, 3, 7, 9]
    assert len(spread(made[:2], 4)) == 2


def test_rounding_is_what_bfloat16_changes_in_a_logit_of_the_same_weights(options, calls, teacher):
    request = next(iter(calls.values()))[0]
    assert rounding(teacher, teacher, request) == 0.0
    rounded = EngineConfig(**{**options, "dtype": "bfloat16"})
    coarse = Teacher(rounded)
    noise = rounding(coarse, Teacher(rounded.with_(dtype="float32"), weights=torch.bfloat16), request)
    _, logits = next(teacher.logits(request))
    assert 0.001 < noise / logits.std().item() < 0.1
    assert noise < rounding(coarse, teacher, request)  # whose weights are others


def test_an_eager_forward_that_is_wrong_itself_allows_no_more():
    assert allowed(0.001) == LEAST_BOUND
    assert allowed(0.05) == 0.4
    assert allowed(1.0) == allowed(float("inf")) == MOST_BOUND
    assert allowed(float("nan")) == LEAST_BOUND


def test_an_engine_in_bfloat16_is_held_to_what_rounding_explains(options, capsys):
    prompts = [making.prompt(30, seed=i) for i in range(5)]
    with segue.Engine(**{**options, "dtype": "bfloat16"}, embedded=True) as engine:
        adapter = Adapter(engine)
        adapter(prompts, [60] * 5, 0.6)
        adapter(prompts, [50] * 5, 0.0)
    scores = score_again(engine.config, adapter.calls)
    assert [score.wrong for score in scores.values()] == [0, 0]
    assert "rounding changes a logit by" in capsys.readouterr().out
    for requests in adapter.calls.values():
        wrong = [(token + 7) % making.VOCAB for token in requests[0].output]
        requests[:] = [dataclasses.replace(requests[0], output=wrong)]
    assert all(score.wrong > 0 for score in score_again(engine.config, adapter.calls).values())
