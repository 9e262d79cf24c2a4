"""A whole runner on a CUDA device, with and without captured graphs."""

import warnings
from dataclasses import replace

import pytest
import torch

from segue.attention import registry
from segue.logs import logger
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.fixture(params=[False, True], ids=["graphs", "eager"])
def runner(request, tmp_path):
    model = tiny.save_llama(tmp_path)
    runner = making.make_runner(
        tmp_path,
        device="cuda",
        dtype="float32",
        page_size=16,
        num_kv_tokens=None,
        max_running_requests=8,
        chunked_prefill_size=64,
        disable_cuda_graph=request.param,
    )
    runner.model = model
    yield runner
    runner.close()


def test_tokens_are_those_of_transformers(runner):
    planner = Planner(runner)
    prompts = [making.prompt(length, seed=length) for length in (6, 30, 17)]
    sequences = [planner.add(prompt) for prompt in prompts]
    in_flight = [planner.launch([(sequence, len(sequence.tokens)) for sequence in sequences[:2]])]
    in_flight.append(planner.launch([(sequences[0], 1), (sequences[1], 1), (sequences[2], 10)]))
    in_flight.pop(0).read()
    in_flight.append(planner.launch([(sequences[0], 1), (sequences[1], 1), (sequences[2], 7)]))
    in_flight.pop(0).read()
    for _ in range(15):
        in_flight.append(planner.launch([(sequence, 1) for sequence in sequences]))
        in_flight.pop(0).read()
    in_flight.pop(0).read()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == tiny.reference(runner.model, prompt, len(sequence.output))


def test_full_sampling_is_reproducible_and_top_k_of_one_is_greedy(runner):
    planner = Planner(runner)
    prompt = making.prompt(20, seed=1)
    sampled = planner.generate(prompt, 10, temperature=0.9, seed=3, top_p=0.9, logprobs=2)
    again = planner.generate(prompt, 10, temperature=0.9, seed=3, top_p=0.9, logprobs=2)
    assert sampled.output == again.output
    assert len(sampled.output) == 10 and all(entry is not None for entry in sampled.logprobs)
    greedy = planner.generate(prompt, 10, temperature=1.0, top_k=1)
    assert greedy.output == tiny.reference(runner.model, prompt, 10)


def test_a_hundred_alternatives_of_prompt_and_output_tokens(runner):
    prompt = making.prompt(30, seed=2)
    options = {"logprobs": 100, "prompt_logprobs_start": 1, "num_prompt_top": 100}
    sequence = Planner(runner).generate(prompt, 4, **options)
    with torch.no_grad():
        ids = torch.tensor([sequence.tokens[:-1]])
        expected = runner.model(ids).logits[0].log_softmax(-1)
    entries = [*sequence.prompt_logprobs, *sequence.logprobs]
    assert len(entries) == len(expected) == 33
    for entry, row in zip(entries, expected, strict=True):
        values = torch.tensor([value for _, value in entry.top])
        assert len(entry.top) == 100 and len({token for token, _ in entry.top}) == 100
        assert torch.allclose(values, row.topk(100).values, atol=1e-3)
        assert torch.allclose(values, row[[token for token, _ in entry.top]], atol=1e-3)


def test_both_sampling_modes_give_the_same_tokens_and_logprob_bits(runner):
    planner = Planner(runner)
    params = {"temperature": 0.8, "logprobs": 0}
    outputs = []
    for other in ({}, {"top_p": 0.9, "temperature": 1.0}):  # a neighbour that needs another sampling mode
        ours = [planner.add(making.prompt(12, seed=i), **params, seed=i) for i in range(3)]
        neighbour = planner.add(making.prompt(9, seed=7), **other)
        planner.run([*((sequence, 12) for sequence in ours), (neighbour, 9)])
        planner.decode([*ours, neighbour], 12)
        outputs.append([(s.output, [entry.logprob for entry in s.logprobs]) for s in ours])
        for sequence in [*ours, neighbour]:
            planner.remove(sequence)
    assert len(outputs[0][0][1]) == 13
    assert outputs[0] == outputs[1]


def test_given_sizes_are_captured_instead_of_the_default_ones(tmp_path):
    model = tiny.save_llama(tmp_path)
    options = {"page_size": 4, "chunked_prefill_size": 4, "max_running_requests": 8}
    lists = {"precompile_bs_paddings": [4], "precompile_token_paddings": [4]}
    runner = making.make_runner(tmp_path, device="cuda", **options, **lists)
    capture_sizes = runner._executor.capture_sizes
    planner, prompt = Planner(runner), making.prompt(30)
    found = planner.generate(prompt, 10, chunk=4).output
    runner.close()
    assert list(capture_sizes.decode) == list(capture_sizes.forward) == list(capture_sizes.prefill) == [4]
    assert found == tiny.reference(model, prompt, 10)


def sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the function is a prototype
        torch.cuda.set_sync_debug_mode(mode)


def test_a_step_is_launched_without_waiting_for_the_device(runner):
    planner = Planner(runner)
    sequences = [planner.add(making.prompt(length, seed=length), temperature=0.7) for length in (6, 30)]
    late = planner.add(making.prompt(17, seed=17))

    def step(work):
        launched = planner.launch(work)
        sync_debug_mode("default")
        launched.read()
        sync_debug_mode("error")

    step(
        [(sequences[0], 6), (sequences[1], 30)]
    )  # kernels are compiled and buffers allocated in the first step
    sync_debug_mode("error")
    try:
        for _ in range(3):
            step([(sequence, 1) for sequence in sequences])
        step([*((sequence, 1) for sequence in sequences), (late, 10)])
        step([*((sequence, 1) for sequence in sequences), (late, 7)])
        step([(sequence, 1) for sequence in [*sequences, late]])
    finally:
        sync_debug_mode("default")


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [("float32", "triton"), ("bfloat16", "triton"), ("bfloat16", "fa3"), ("bfloat16", "fa3,triton")],
)
def test_a_replay_gives_the_bits_of_the_same_bucket_run_eagerly(tmp_path, dtype, backend):
    if "fa3" in backend:
        pytest.importorskip("flash_attn_3._C")
    tiny.save_llama(tmp_path, head_dim=64)
    options = {
        "device": "cuda",
        "dtype": dtype,
        "attention_backend": backend,
        "page_size": 16,
        "max_running_requests": 8,
        "num_kv_tokens": 2048,
    }
    states = []
    for graphs in (True, False):
        runner = making.make_runner(tmp_path, **options, disable_cuda_graph=not graphs)
        assert runner.attention_backend == backend
        planner = Planner(runner)
        sequences = [planner.add(making.prompt(16, seed=i), temperature=0.9, seed=i) for i in range(4)]
        for sequence in sequences:
            planner.run([(sequence, 16)])
        for _ in range(20):
            planner.run([(sequence, 1) for sequence in sequences])
        states.append((runner.kv.data.clone(), [sequence.output for sequence in sequences]))
        runner.close()
    (graph_kv, graph_output), (eager_kv, eager_output) = states
    assert graph_output == eager_output
    assert torch.equal(graph_kv[:-1], eager_kv[:-1])  # the last page is scratch


def test_a_backend_that_cannot_be_captured_runs_eagerly_with_a_warning(tmp_path, monkeypatch, caplog):
    tiny.save_llama(tmp_path)
    entry = registry._BACKENDS["triton"]
    uncaptured = replace(entry, name="uncaptured", capabilities=replace(entry.capabilities, graphs=False))
    monkeypatch.setitem(registry._BACKENDS, "uncaptured", uncaptured)
    monkeypatch.setattr(logger, "propagate", True)  # another test may have changed it
    runner = making.make_runner(
        tmp_path, device="cuda", page_size=16, attention_backend="triton,uncaptured", max_running_requests=4
    )
    planner = Planner(runner)
    sequence = planner.add(making.prompt(20))
    reasons = [planner.run([(sequence, count)]).eager for count in (20, 1)]
    runner.close()
    assert reasons == ["disabled"] * 2
    assert sum("triton,uncaptured" in line for line in caplog.messages) == 1
