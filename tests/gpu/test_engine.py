"""The engine on a CUDA device under mixed traffic: chunks, decode rows and shared prefixes in one step."""

import random

import pytest

import segue
from tests.model_runner import making, tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("disable_cuda_graph", [False, True], ids=["graphs", "eager"])
def test_mixed_traffic_gives_the_tokens_of_transformers(tmp_path, page_size, disable_cuda_graph):
    model = tiny.save_llama(tmp_path)
    rng = random.Random(page_size)
    stem = making.prompt(70, seed=99)
    prompts = [
        (stem[: rng.choice([0, 33, 70])] + making.prompt(rng.randint(1, 90), seed=i)) for i in range(24)
    ]
    counts = [rng.randint(1, 40) for _ in prompts]
    options = making.options(
        tmp_path,
        device="cuda",
        page_size=page_size,
        num_kv_tokens=1500,  # too few for all requests: some wait, some are retracted
        max_running_requests=12,
        chunked_prefill_size=48,
        disable_cuda_graph=disable_cuda_graph,
    )
    with segue.Engine(**options, embedded=True) as engine:
        for _ in range(2):
            replies = engine.generate(
                input_ids=prompts,
                sampling_params=[{"temperature": 0, "max_new_tokens": count} for count in counts],
            )
            for prompt, count, reply in zip(prompts, counts, replies, strict=True):
                assert reply["output_ids"] == tiny.reference(model, prompt, count)


def test_a_seed_gives_the_same_draws_alone_and_in_a_batch(tmp_path):
    tiny.save_llama(tmp_path)
    options = making.options(tmp_path, device="cuda", page_size=16, max_running_requests=12)
    params = {"temperature": 1.0, "max_new_tokens": 30, "sampling_seed": 5}
    with segue.Engine(**options, embedded=True) as engine:
        alone = engine.generate(input_ids=making.prompt(20), sampling_params=params)
        batch = [making.prompt(20), *(making.prompt(10 + i, seed=i) for i in range(9))]
        together = engine.generate(input_ids=batch, sampling_params=params)
    assert alone["output_ids"] == together[0]["output_ids"]
    assert alone["output_ids"] != together[1]["output_ids"]


def test_server_info_has_what_capturing_the_graphs_of_each_kind_took(tmp_path):
    tiny.save_llama(tmp_path)
    options = making.options(tmp_path, device="cuda", page_size=16)
    with segue.Engine(**options, embedded=True) as engine:
        decided = engine.get_server_info()["decided"]
    costs = decided["graphs"]
    assert set(costs) == {"decode", "guided", "forward", "prefill", "sampling", "masked"}
    assert all(cost["num_graphs"] > 0 and cost["seconds"] > 0 for cost in costs.values())
    assert sum(cost["num_bytes"] for cost in costs.values()) > 0
    [step] = [step for step in decided["init_steps"] if step["name"] == "CUDA graphs"]
    assert all(f"{kind} {cost['num_graphs']} in " in step["detail"] for kind, cost in costs.items())


def test_steps_that_are_timed_at_start_leave_no_trace(tmp_path):
    model = tiny.save_llama(tmp_path)
    options = making.options(tmp_path, device="cuda", page_size=16, enable_laps_scheduler=True)
    prompts = [making.prompt(length, seed=length) for length in (3, 40, 200)]
    with segue.Engine(**options, embedded=True) as engine:
        last = engine.get_server_info()["decided"]["init_steps"][-1]
        assert last["name"] == "step times" and "prompt tokens: 1 in " in last["detail"]
        replies = engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 20})
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == tiny.reference(model, prompt, 20)
