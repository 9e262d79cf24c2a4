"""Scoring again accepts the tokens that an engine produces, and no others."""

import dataclasses

import pytest
import torch

import segue
from bench.offline import Adapter, score_again, spread
from bench.rescore import MAX_BOUND, MIN_BOUND, Produced, Teacher, allowed, regrets, rescore, rounding
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


def test_the_tokens_of_an_engine_are_right(calls, teacher):
    assert len(calls) == 2
    for requests in calls.values():
        score = rescore(teacher, requests, MIN_BOUND)
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
            assert (found[:at] < MIN_BOUND).all()
            assert found[at] > MIN_BOUND


def test_tokens_of_another_seed_prompt_or_temperature_are_wrong(calls, teacher):
    drawn, greedy = calls.values()
    for wrong in (
        dataclasses.replace(drawn[0], seed=1),
        dataclasses.replace(drawn[0], prompt=drawn[1].prompt),
        dataclasses.replace(drawn[0], temperature=0.0),
        dataclasses.replace(greedy[0], temperature=0.6),
        dataclasses.replace(greedy[0], prompt=greedy[1].prompt),
    ):
        score = rescore(teacher, [wrong], MIN_BOUND)
        assert score.wrong > score.tokens / 5


@pytest.mark.parametrize("vocab", [100, 128, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
def test_a_token_that_the_sampler_draws_has_no_regret(vocab, temperature):
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


def test_with_nan_logits_every_token_is_wrong(monkeypatch, teacher, calls):
    monkeypatch.setattr(teacher, "regrets", lambda request: torch.full((3,), torch.nan))
    assert rescore(teacher, next(iter(calls.values()))[:1], MIN_BOUND).wrong == 3


def test_the_shortest_and_the_longest_request_are_scored():
    made = [Produced(prompt=[1] * n, output=[1], temperature=0.0, seed=0) for n in (5, 9, 1, 7, 3, 8)]
    assert [len(request.prompt) for request in spread(made, 4)] == [1, 3, 7, 9]
    assert len(spread(made[:2], 4)) == 2


def test_rounding_measures_the_effect_of_bfloat16_with_equal_weights(options, calls, teacher):
    request = next(iter(calls.values()))[0]
    assert rounding(teacher, teacher, request) == 0.0
    rounded = EngineConfig(**{**options, "dtype": "bfloat16"})
    coarse = Teacher(rounded)
    noise = rounding(coarse, coarse.in_float32(), request)
    _, logits = next(teacher.logits(request))
    assert 0.001 < noise / logits.std().item() < 0.1
    assert noise < rounding(coarse, teacher, request)  # the float32 teacher has unrounded weights


def test_experts_stay_in_bfloat16_and_compute_in_float32(tmp_path):
    tiny.save_qwen3_moe(tmp_path)
    teacher = Teacher(EngineConfig(**making.options(tmp_path, dtype="bfloat16")))
    exact, wide = teacher.in_float32(), Teacher(EngineConfig(**making.options(tmp_path, dtype="float32")))
    held = {name: each for name, each in exact._model.state_dict().items() if ".experts." in name}
    assert held and all(each.dtype == torch.bfloat16 for each in held.values())
    wide._model.load_state_dict(
        teacher._model.state_dict(), strict=False
    )  # which widens the same rounded weights
    wide._model.build_derived()
    request = Produced(
        prompt=making.prompt(40, seed=1), output=making.prompt(20, seed=2), temperature=0.0, seed=0
    )
    (_, found), (_, expected) = next(exact.logits(request)), next(wide.logits(request))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert rounding(teacher, exact, request) > 1e-4


def test_a_wrong_eager_forward_does_not_raise_the_bound():
    assert allowed(0.001) == MIN_BOUND
    assert allowed(0.05) == 0.4
    assert allowed(1.0) == allowed(float("inf")) == MAX_BOUND
    assert allowed(float("nan")) == MIN_BOUND


@pytest.mark.parametrize("fp8", [{}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}], ids=["", "fp8"])
def test_a_bfloat16_engine_may_differ_only_by_rounding(fp8, options, capsys):
    prompts = [making.prompt(30, seed=i) for i in range(5)]
    with segue.Engine(**{**options, "dtype": "bfloat16", **fp8}, embedded=True) as engine:
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
