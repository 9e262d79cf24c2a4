"""Odd settings and rare events on a CUDA device, each compared with an engine that is known to be correct."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import segue
from segue.messages.steps import NON_FINITE
from tests.gpu.test_runner import sync_debug_mode
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def generate(directory: Path, prompts: list[list[int]], params: Any, **options: Any) -> list[list[int]]:
    """Returns the output ids of an engine in float32, which is embedded by default."""
    options = making.options(directory, **{"device": "cuda", "page_size": 16, "embedded": True, **options})
    with segue.Engine(**options) as engine:
        replies = engine.generate(input_ids=prompts, sampling_params=params)
    return [reply["output_ids"] for reply in replies]


def greedy(count: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny.save_llama(directory)
    return directory


SLOW = pytest.mark.slow  # mostly compiling
ODD = {
    "one-row": {"max_running_requests": 1},
    "more-rows-than-graphs": {"max_running_requests": 600, "num_kv_tokens": 40_000},
    "chunk-1": {"chunked_prefill_size": 1},
    "no-overlap": {"disable_overlap": True},
    "short-context": {"max_model_len": 27},
}
ODD_PAGES = {
    "chunk-1-page-1-eager": {"chunked_prefill_size": 1, "page_size": 1, "disable_cuda_graph": True},
    "short-context-page-64": {"max_model_len": 27, "page_size": 64},
    "pages-longer-than-the-context": {"page_size": 1024, "num_kv_tokens": 16_384},
    "odd-page": {"page_size": 5, "num_kv_tokens": 600},
    "worker-process": {"embedded": False},
}


def params_of(cases: dict[str, Any], *marks: Any) -> list[Any]:
    return [pytest.param(case, id=name, marks=marks) for name, case in cases.items()]


@pytest.mark.parametrize("options", [*params_of(ODD), *params_of(ODD_PAGES, SLOW)])
def test_odd_settings_give_the_tokens_of_the_cpu(llama: Path, options: dict[str, Any]) -> None:
    count = 620 if options.get("max_running_requests", 0) > 300 else 20
    rng = random.Random(1)
    prompts = [making.prompt(rng.randint(1, 20), seed=i) for i in range(count)]
    params = [greedy(rng.randint(1, 12)) for _ in prompts]
    if "max_model_len" in options:
        params = [greedy(27)] * count  # to the end of the context
    on_cpu = generate(
        llama, prompts, params, device="cpu", max_running_requests=32, num_kv_tokens=4096,
        **{name: value for name, value in options.items() if name == "max_model_len"},
    )  # fmt: skip
    assert generate(llama, prompts, params, **options) == on_cpu


def test_300_rows_give_the_tokens_of_the_cpu(llama: Path) -> None:
    prompts = [making.prompt(1 + i % 17, seed=i) for i in range(300)]
    on_cpu = generate(llama, prompts, greedy(16), device="cpu", num_kv_tokens=4096)
    options = {"max_running_requests": 300, "num_kv_tokens": 300 * 48, "chunked_prefill_size": 4096}
    assert generate(llama, prompts, greedy(16), **options) == on_cpu


def test_requests_that_stop_early_free_their_slots_and_pages(llama: Path) -> None:
    """The engine computes one surplus token after each request's end and drops it."""
    prompts = [making.prompt(1 + i % 33, seed=i) for i in range(60)]
    free = generate(llama, prompts, greedy(30), device="cpu", num_kv_tokens=4096)
    params = [{**greedy(30), "stop_token_ids": [ids[i % 12]]} for i, ids in enumerate(free)]
    expected = [ids[: ids.index(ids[i % 12]) + 1] for i, ids in enumerate(free)]
    for options in ({}, {"disable_cuda_graph": True}, {"num_kv_tokens": 160}):
        assert generate(llama, prompts, params, **options) == expected


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
MANY_ODD_SHAPES = {
    "hidden_size": 96,
    "num_attention_heads": 24,
    "num_key_value_heads": 1,
    "vocab_size": 4099,
    "attention_bias": True,
    "mlp_bias": True,
    "rope_parameters": YARN,
}
ODD_SHAPES = {
    "one-kv-head-of-24": {"hidden_size": 96, "num_attention_heads": 24, "num_key_value_heads": 1},
    "one-kv-head-of-32": {"num_attention_heads": 32, "num_key_value_heads": 1},
    "groups-of-3": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    "wide-heads": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 256},
    "vocabulary-below-a-block": {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 97},
    "vocabulary-above-a-program": {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4099},
    "stretched-rope": {"num_attention_heads": 4, "num_key_value_heads": 4, "rope_parameters": YARN},
    "biased": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("sizes", [*params_of({"many": MANY_ODD_SHAPES}), *params_of(ODD_SHAPES, SLOW)])
def test_odd_shapes_give_the_tokens_of_the_cpu(tmp_path: Path, sizes: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(**{**tiny.SIZES, **sizes})
    model = tiny._save(tmp_path, transformers.LlamaForCausalLM, config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    vocab = config.vocab_size
    prompts = [[token % vocab for token in making.prompt(1 + 9 * i, seed=i)] for i in range(12)]
    sampled = {**greedy(20), "temperature": 0.8, "sampling_seed": 3}
    params = [sampled if i % 3 == 0 else greedy(20) for i in range(12)]
    on_cpu = generate(tmp_path, prompts, params, device="cpu", num_kv_tokens=4096)
    assert generate(tmp_path, prompts, params, num_kv_tokens=4096) == on_cpu


FULL = [
    {"temperature": 0.9, "top_k": 7},
    {"temperature": 1.1, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0, "logit_bias": {"5": 3.0, "11": -100}},
    {"temperature": 1.0},
    {"temperature": 0},
]


ENGINES: list[dict[str, Any]] = [
    {},
    {"disable_cuda_graph": True, "chunked_prefill_size": 7},
    {"num_kv_tokens": 160, "disable_prefix_cache": True},  # so few that some requests are retracted
]


@pytest.mark.parametrize("kinds", [FULL, FULL[-2:]], ids=["full", "plain"])
def test_seeded_draws_agree_with_the_cpu(llama: Path, kinds: list[dict[str, Any]]) -> None:
    prompts = [making.prompt(1 + i, seed=i) for i in range(36)]
    params = [
        {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": (i << 40) - 7, **kinds[i % len(kinds)]}
        for i in range(len(prompts))
    ]
    on_cpu = generate(llama, prompts, params, device="cpu", num_kv_tokens=4096)
    for options in ENGINES:
        found = generate(llama, prompts, params, **{"num_kv_tokens": 4096, **options})
        # A draw between nearly equal scores may differ, and then the tokens after it differ too.
        different = [i for i in range(len(prompts)) if found[i] != on_cpu[i]]
        assert len(different) <= 1, [(params[i], found[i], on_cpu[i]) for i in different]


def test_logprobs_agree_with_the_cpu(llama: Path) -> None:
    prompts = [making.prompt(5 + 11 * i, seed=i) for i in range(8)]
    replies = []
    for device in ("cpu", "cuda"):
        with segue.Engine(**making.options(llama, device=device, page_size=16), embedded=True) as engine:
            replies.append(
                engine.generate(
                    input_ids=prompts,
                    sampling_params=greedy(10),
                    return_logprob=True,
                    logprob_start_len=0,
                    top_logprobs_num=3,
                )
            )
    for on_cpu, found in zip(*replies, strict=True):
        assert found["output_ids"] == on_cpu["output_ids"]
        for name in ("input_token_logprobs", "output_token_logprobs"):
            ours, theirs = (
                [(entry[0], entry[1]) for entry in reply["meta_info"][name] if entry[0] is not None]
                for reply in (found, on_cpu)
            )
            assert [token for _, token in ours] == [token for _, token in theirs]
            assert max(abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True)) < 1e-4


@pytest.fixture(scope="module", params=[False, True], ids=["graphs", "eager"])
def runner(request: pytest.FixtureRequest, llama: Path) -> Any:
    runner = making.make_runner(llama, device="cuda", page_size=16, disable_cuda_graph=request.param)
    yield runner
    runner.close()


@pytest.fixture
def planner(runner: Any) -> Planner:
    """A planner without requests, on a runner that other tests may have used."""
    planner = Planner(runner)
    planner.step = runner._executor.state.step
    return planner


SAMPLING = {
    "plain": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.2, "logprobs": 2},
}


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
def test_a_row_of_nan_has_no_token_and_does_not_change_others(
    planner: Planner, params: dict[str, Any]
) -> None:
    def run(poisoned: bool) -> list[list[int]]:
        sequences = [planner.add(making.prompt(20, seed=i), seed=i, **params) for i in range(3)]
        for sequence in sequences:
            planner.prefill(sequence)
        if poisoned:
            page = planner.runner.kv.data[sequences[1].pages[0]]
            planner.runner.on_stream(lambda: page.fill_(float("nan")))
        planner.decode(sequences, 6)
        for sequence in sequences:
            planner.runner.on_stream(lambda row=sequence: planner.runner.kv.data[row.pages].zero_())
            planner.remove(sequence)
        return [sequence.output for sequence in sequences]

    healthy, poisoned = run(False), run(True)
    assert poisoned[1] == [healthy[1][0], *[NON_FINITE] * 6]
    assert [poisoned[0], poisoned[2]] == [healthy[0], healthy[2]]
    assert run(False) == healthy  # the NaN has left no trace


def test_unused_kv_slots_do_not_reach_the_output(planner: Planner, llama: Path) -> None:
    planner.runner.on_stream(lambda: planner.runner.kv.data.fill_(float("nan")))  # the scratch page as well
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    prompts = [making.prompt(length, seed=length) for length in (1, 15, 16, 40, 50)]
    sequences = [planner.add(prompt) for prompt in prompts]
    planner.run([(sequence, sequence.prompt_len) for sequence in sequences[:3]])
    planner.run([*((sequence, 1) for sequence in sequences[:3]), *((each, 33) for each in sequences[3:])])
    planner.run([*((sequence, 1) for sequence in sequences[:3]), (sequences[3], 7), (sequences[4], 17)])
    planner.decode(sequences, 20)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == tiny.reference(model, prompt, len(sequence.output))


@pytest.mark.parametrize("disable_cuda_graph", [False, True], ids=["graphs", "eager"])
def test_new_weights_in_the_arena_take_effect(tmp_path: Path, disable_cuda_graph: bool) -> None:
    """Captured graphs use the new weights and the tensors derived from them."""
    models, runners = [], []
    for seed in (1, 2):
        directory = tmp_path / str(seed)
        model = tiny.save_qwen3(directory)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3)
        model.save_pretrained(directory)
        models.append(model)
        runners.append(
            making.make_runner(directory, device="cuda", page_size=16, disable_cuda_graph=disable_cuda_graph)
        )
    runner, other = runners
    planner, prompt = Planner(runner), making.prompt(20)
    assert planner.generate(prompt, 10).output == tiny.reference(models[0], prompt, 10)

    def update() -> None:
        for mine, theirs in zip(runner.arena.slabs, other.arena.slabs, strict=True):
            mine.copy_(theirs)
        runner._executor.model.build_derived()

    runner.on_stream(update)
    assert planner.generate(prompt, 10).output == tiny.reference(models[1], prompt, 10)
    for each in runners:
        each.close()


def test_no_token_is_lost_with_as_many_unread_steps_as_the_ring_allows(planner: Planner, llama: Path) -> None:
    prompts = [making.prompt(length, seed=length) for length in (6, 30, 17)]
    expected = [planner.generate(prompt, 30).output for prompt in prompts]
    sequences = [planner.add(prompt) for prompt in prompts]
    for sequence in sequences:
        planner.prefill(sequence)
    for _ in range(9):
        in_flight = [planner.launch([(sequence, 1) for sequence in sequences]) for _ in range(3)]
        torch.cuda.synchronize()  # all steps have written their tokens before the first step is read
        for launched in in_flight:
            launched.read()
    assert [sequence.output for sequence in sequences] == [tokens[:28] for tokens in expected]


def test_an_abort_in_flight_does_not_change_other_requests(llama: Path) -> None:
    prompts = [making.prompt(10 + i, seed=i) for i in range(8)]
    options = making.options(llama, device="cuda", page_size=16, num_kv_tokens=8192)
    with segue.Engine(**options, embedded=True) as engine:
        expected = [
            engine.generate(input_ids=prompt, sampling_params=greedy(100))["output_ids"] for prompt in prompts
        ]
        streams = [
            engine.generate(input_ids=prompt, sampling_params=greedy(100), rid=f"r{i}", stream=True)
            for i, prompt in enumerate(prompts)
        ]
        updates = [next(stream) for stream in streams]
        for i in range(0, 8, 2):
            engine.abort_request(f"r{i}")
        for i, stream in enumerate(streams):
            for updates[i] in stream:
                pass
        late = engine.generate(input_ids=prompts, sampling_params=greedy(100))
        internal = engine.get_server_info()["internal_states"][0]
    for i, update in enumerate(updates):
        ids = update["output_ids"]
        assert ids == expected[i][: len(ids)]
        if i % 2:
            assert len(ids) == 100
        else:
            assert update["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    assert [reply["output_ids"] for reply in late] == expected
    assert internal["running_batch_size"] == 0


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draws_of_an_engine_follow_the_softmax(llama: Path, temperature: float) -> None:
    count, prompt = 4000, making.prompt(12, seed=5)
    options = making.options(llama, device="cuda", page_size=16, max_running_requests=64, num_kv_tokens=8192)
    with segue.Engine(**options, embedded=True) as engine:
        replies = engine.generate(
            input_ids=[prompt] * count,
            sampling_params=[
                {"temperature": temperature, "max_new_tokens": 1, "sampling_seed": seed}
                for seed in range(count)
            ],
        )
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1].double()
    expected = (logits / temperature).softmax(-1) * count
    found = torch.bincount(
        torch.tensor([reply["output_ids"][0] for reply in replies]), minlength=making.VOCAB
    )
    likely = expected > 5
    rest = torch.tensor([expected[~likely].sum(), found[~likely].sum()])
    chi2 = ((found - expected).square() / expected)[likely].sum() + (rest[1] - rest[0]) ** 2 / rest[0]
    degrees = int(likely.sum())
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5, (chi2, degrees)


def test_full_sampling_is_launched_without_waiting_for_the_device(planner: Planner) -> None:
    everything = {"logit_bias": {7: 20.0}, "min_new_tokens": 40, "stop_token_ids": (7, 9)}
    kinds = [*SAMPLING.values(), {"temperature": 0.9, **everything}, {"temperature": 0.0, **everything}]
    sequences = [planner.add(making.prompt(10 + i, seed=i), **kind) for i, kind in enumerate(kinds)]
    for sequence in sequences:
        planner.prefill(sequence)
    planner.decode(sequences, 3)
    for _ in range(3):
        sync_debug_mode("error")
        try:
            launched = planner.launch([(sequence, 1) for sequence in sequences])
        finally:
            sync_debug_mode("default")
        launched.read()


@SLOW
@pytest.mark.parametrize("seed", range(8))
def test_random_engines_and_requests_give_the_tokens_of_the_cpu(llama: Path, seed: int) -> None:
    rng = random.Random(seed)
    common_prefix = making.prompt(90, seed=99)
    prompts = [
        common_prefix[: rng.choice([0, 31, 64, 90])] + making.prompt(rng.randint(1, 60), seed=i)
        for i in range(80)
    ]
    params = [
        {
            "max_new_tokens": rng.randint(1, 60),
            "sampling_seed": rng.getrandbits(60),
            "stop_token_ids": rng.sample(range(making.VOCAB), rng.choice([0, 0, 5])),
            "min_new_tokens": rng.choice([0, 0, 0, 1]),
            **rng.choice(rng.choice([FULL, FULL[-1:]])),
        }
        for _ in prompts
    ]
    options = {
        "page_size": rng.choice([1, 16, 64]),
        "num_kv_tokens": rng.choice([320, 1000, 8192]),
        "max_running_requests": rng.choice([3, 12, 40]),
        "chunked_prefill_size": rng.choice([5, 48, 200, 2048]),
        "disable_cuda_graph": rng.random() < 0.2,
        "disable_overlap": rng.random() < 0.2,
        "disable_prefix_cache": rng.random() < 0.3,
    }
    on_cpu = generate(llama, prompts, params, device="cpu", num_kv_tokens=8192)
    found = generate(llama, prompts, params, **options)
    different = [i for i in range(len(prompts)) if found[i] != on_cpu[i]]
    assert len(different) <= 2, (options, [(params[i], found[i], on_cpu[i]) for i in different])
