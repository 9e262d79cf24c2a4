"""A whole runner on tiny models: hand-written plans give the results of transformers."""

import json
import math
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from segue.attention import registry as attention
from segue.attention.base import Context
from segue.attention.registry import Capabilities
from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.errors import ConfigError, OutOfMemoryError, TensorParallelError
from segue.layers import moe_backend
from segue.logs import logger
from segue.memory.budget import GIB, Demand, Reserve, formula_pages, standby_bytes
from segue.memory.rank_memory import PrivateMemory
from segue.model_runner.batch_state import PlanError
from segue.model_runner.grid import resolve_grid
from segue.model_runner.resolved_config import resolve_config
from segue.model_runner.runner import NUM_RECENT, ModelRunner
from segue.model_runner.startup import Startup
from segue.models.decoder import Decoder, DecoderLayer
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner

STEPS = [
    "device",
    "communication",
    "free memory",
    "weights",
    "GEMM plans",
    "page count",
    "KV pool",
    "page table",
    "attention backend",
    "MoE backend",
    "sampler",
    "kernels",
    "CUDA graphs",
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The directory of the checkpoint, and its transformers model."""
    directory = tmp_path_factory.mktemp("llama")
    return directory, tiny.save_llama(directory)


@pytest.fixture(scope="module")
def runner(llama):
    runner = making.make_runner(llama[0])
    yield runner
    runner.close()


@pytest.fixture
def planner(llama):
    """A planner with its own runner, because plans are numbered from 1."""
    runner = making.make_runner(llama[0])
    yield Planner(runner)
    runner.close()


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (5, 64), (37, 8), (70, 64), (33, 1)])
def test_greedy_tokens_are_those_of_transformers(llama, planner, length, chunk):
    prompt = making.prompt(length, seed=length)
    assert planner.generate(prompt, 24, chunk=chunk).output == tiny.reference(llama[1], prompt, 24)


def test_prefill_and_decode_share_a_step(llama, planner):
    prompts = [making.prompt(length, seed=length) for length in (3, 20, 45)]
    first = planner.add(prompts[0])
    planner.prefill(first)
    second = planner.add(prompts[1])
    planner.run([(first, 1), (second, 13)])
    third = planner.add(prompts[2])
    planner.run([(second, 7), (first, 1), (third, 45)])
    sequences = [first, second, third]
    planner.decode(sequences, 12)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        count = len(sequence.output)
        assert count >= 13
        assert sequence.output == tiny.reference(llama[1], prompt, count)


def test_a_step_may_be_launched_before_the_previous_result_is_read(llama, planner):
    prompts = [making.prompt(length, seed=length) for length in (6, 30)]
    sequences = [planner.add(prompt) for prompt in prompts]
    in_flight = [planner.launch([(sequences[0], 6), (sequences[1], 30)])]
    for _ in range(15):
        in_flight.append(planner.launch([(sequence, 1) for sequence in sequences]))
        in_flight.pop(0).read()
    in_flight.pop(0).read()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == tiny.reference(llama[1], prompt, 16)


def test_a_retracted_request_continues_with_the_same_tokens(planner):
    prompt = making.prompt(11)
    params = {"temperature": 1.1, "seed": 5, "top_p": 0.95, "frequency_penalty": 0.4}
    undisturbed = planner.generate(prompt, 30, **params).output
    first = planner.add(prompt, **params)
    planner.prefill(first)
    planner.decode([first], 9)
    planner.remove(first)
    other = planner.generate(making.prompt(40, seed=3), 5)
    again = planner.add(first.tokens, prompt_len=len(prompt), **params)
    planner.prefill(again, chunk=4)
    planner.decode([again], 19)
    assert other.slot == first.slot
    assert again.output == undisturbed


def test_a_request_samples_the_same_alone_in_a_batch_and_in_both_sampling_modes(planner):
    prompt = making.prompt(9)
    params = {"temperature": 0.9, "seed": 21}
    alone = planner.generate(prompt, 20, **params).output
    sequence = planner.add(prompt, **params)
    others = [planner.add(making.prompt(n, seed=n), temperature=1.0, seed=n, top_k=5) for n in (4, 17, 30)]
    planner.prefill(sequence)
    for other in others:
        planner.prefill(other)
    planner.decode([others[0], sequence, *others[1:]], 19)
    assert sequence.output == alone


def test_logprobs_are_those_of_transformers(llama, planner):
    prompt = making.prompt(12)
    sequence = planner.generate(prompt, 8, temperature=1.3, seed=2, top_k=10, logprobs=4)
    expected = llama[1](torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
    for i, entry in enumerate(sequence.logprobs):
        assert entry is not None
        row = expected[len(prompt) - 1 + i]
        assert entry.token == sequence.output[i]
        assert math.isclose(entry.logprob, row[entry.token], abs_tol=1e-4)
        assert [token for token, _ in entry.top] == row.topk(4).indices.tolist()


@pytest.mark.parametrize("chunk", [64, 7])
@pytest.mark.parametrize("first", [1, 10])
def test_prompt_logprobs_are_those_of_transformers(llama, planner, chunk, first):
    prompt = making.prompt(25)
    options = {"logprobs": 0, "prompt_logprobs_start": first, "num_prompt_top": 2}
    sequence = planner.generate(prompt, 3, chunk=chunk, **options)
    expected = llama[1](torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [entry.token for entry in sequence.prompt_logprobs] == prompt[first:]
    for position, entry in enumerate(sequence.prompt_logprobs, start=first):
        row = expected[position - 1]
        assert math.isclose(entry.logprob, row[prompt[position]], abs_tol=1e-4)
        assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
    assert [entry.top for entry in sequence.logprobs] == [[], [], []]
    assert sequence.output == tiny.reference(llama[1], prompt, 3)


def test_prompt_logits_are_computed_in_slices(llama, planner, monkeypatch):
    counts = []
    executor = planner.runner._executor
    monkeypatch.setattr(executor, "logits_bytes", 4 * 4 * making.VOCAB)  # four tokens
    compute = executor.model.logits
    monkeypatch.setattr(executor.model, "logits", lambda h: counts.append(len(h)) or compute(h))
    prompt = making.prompt(15)
    sequence = planner.generate(prompt, 1, prompt_logprobs_start=1)
    assert counts == [1, 4, 4, 4, 2]
    expected = llama[1](torch.tensor([prompt])).logits[0].log_softmax(-1)
    for position, entry in enumerate(sequence.prompt_logprobs, start=1):
        assert math.isclose(entry.logprob, expected[position - 1, prompt[position]], abs_tol=1e-4)


def test_a_request_can_have_the_maximum_length(llama, planner):
    max_len = planner.runner.limits.max_seq_len
    prompt = making.prompt(max_len - 10)
    sequence = planner.generate(prompt, 11)  # the last token is sampled from the last position
    assert len(sequence.tokens) == max_len + 1
    assert sequence.output[:10] == tiny.reference(llama[1], prompt, 10)


def test_a_bad_plan_fails_its_step_and_all_later_steps(planner):
    sequence = planner.add(making.prompt(5))
    plan = planner.plan([(sequence, 5)])
    planner.runner.forward_batch(plan).result()
    for _ in range(2):
        with pytest.raises(PlanError):
            planner.runner.forward_batch(plan).result()


def test_a_result_has_the_duration_of_its_step(planner):
    result = planner.run([(planner.add(making.prompt(5)), 5)])
    assert result.step == 1
    assert 0 < result.seconds < 60


def test_the_steps_are_reported_in_order_with_time_and_bytes(llama):
    config = EngineConfig(**making.options(llama[0]))
    steps, nums_steps = [], set()

    def report(step, num_steps):
        steps.append(step)
        nums_steps.add(num_steps)

    runner = ModelRunner(config, resolve(config.model, "auto", ""), TPInfo(), Path("/nonexistent"), report)
    runner.close()
    assert [step.name for step in steps] == STEPS and nums_steps == {len(STEPS)}
    assert all(step.seconds >= 0 for step in steps)
    by_name = {step.name: step for step in steps}
    assert by_name["weights"].num_bytes == runner.weight_bytes > 0
    assert by_name["KV pool"].num_bytes == runner.kv_bytes == 257 * 2 * 2 * 4 * 4 * 8 * 4
    assert by_name["free memory"].num_bytes > 1 << 20
    assert "longest sequence 256 tokens" in by_name["page count"].detail
    assert "eager" in by_name["CUDA graphs"].detail


def test_weight_updates_know_the_revision_that_is_served(llama):
    config = EngineConfig(**making.options(llama[0]) | {"model": "owner/name", "revision": "v2"})
    source = resolve(str(llama[0]), "auto", "")
    runner = ModelRunner(config, source, TPInfo(), Path("/nonexistent"), lambda *_: None)
    assert runner.served_weights().revisions == {"owner/name": "v2"}
    runner.close()


def test_limits_come_from_options(runner):
    limits = runner.limits
    assert (limits.num_pages, limits.page_size, limits.max_seq_len) == (256, 4, 256)
    assert (limits.max_running_requests, limits.chunked_prefill_size) == (8, 64)
    assert runner.vocab_size == making.VOCAB
    assert runner.attention_backend == "cpu"


def test_a_small_kv_cache_reduces_max_seq_len(llama):
    runner = making.make_runner(llama[0], num_kv_tokens=40)
    runner.close()
    assert runner.limits.max_seq_len == 40


def test_max_model_len_reduces_max_seq_len(llama):
    runner = making.make_runner(llama[0], max_model_len=100, num_kv_tokens=None)
    runner.close()
    assert runner.limits.max_seq_len == 100
    assert runner.limits.num_pages == 8 * 25  # all 8 requests at full length


def test_the_profile_run_splits_a_chunk_longer_than_the_model_allows(llama):
    runner = making.make_runner(llama[0], chunked_prefill_size=600)
    runner.close()
    assert runner.limits.chunked_prefill_size == 600


def test_defaults_on_a_cpu(llama):
    runner = making.make_runner(
        llama[0],
        dtype="auto",
        page_size=None,
        num_kv_tokens=None,
        max_running_requests=None,
        chunked_prefill_size=None,
    )
    runner.close()
    limits = runner.limits
    assert (limits.page_size, limits.max_running_requests, limits.chunked_prefill_size) == (16, 16, 512)
    assert limits.num_pages == 16 * 16
    assert runner.dtype == torch.bfloat16  # float32 checkpoints are served in bfloat16


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"num_kv_tokens": 4}, OutOfMemoryError, "--num-kv-tokens"),
        ({"memory_ratio": 0.01, "num_kv_tokens": 1 << 40}, OutOfMemoryError, "lower --num-kv-tokens"),
        ({"attention_backend": "nosuch"}, ConfigError, "nosuch"),
        ({"device": "cuda"}, ConfigError, "--device cpu"),
    ],
)
def test_options_that_cannot_work_raise_a_clear_error(llama, changes, error, words):
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(error, match=words):
        making.make_runner(llama[0], **changes)


def test_the_error_for_a_model_that_cannot_be_split_names_its_heads(llama, tmp_path):
    # Rank 0 of 3 fails alone, before it waits for other ranks.
    with pytest.raises(TensorParallelError, match=r"num_attention_heads 8.*num_key_value_heads 4"):
        making.make_runner(llama[0], TPInfo(0, 3), tmp_path)


def test_the_graph_self_check_without_graphs_is_ignored_with_a_warning(llama, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("WARNING", logger.name)
    making.make_runner(llama[0], graph_self_check=True).close()
    assert "--graph-self-check is ignored: there are no CUDA graphs" in caplog.text


def test_capture_sizes_are_ignored_with_one_warning_if_no_graph_is_captured(llama, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("WARNING", logger.name)
    lists = {"precompile_bs_paddings": "4", "precompile_token_paddings": "4"}
    making.make_runner(llama[0], chunked_prefill_size=4, page_size=4, **lists).close()
    assert [line for line in caplog.messages if "precompile" in line] == [
        "--precompile-bs-paddings and --precompile-token-paddings are ignored: no CUDA graphs are captured"
    ]


def test_a_grid_without_a_possible_size_is_ignored_with_a_warning(llama, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("WARNING", logger.name)
    options = making.options(llama[0], enable_batch_prefill_cuda_graph=True, batch_prefill_seq_lengths="512")
    config = EngineConfig(**options)
    resolved = resolve_config(config, resolve(config.model, config.load_format, config.cache_dir), TPInfo())
    resolved = replace(resolved, device=torch.device("cuda"))
    backend = SimpleNamespace(supports_batch_prefill_cuda_graph=lambda: True)
    assert resolve_grid(config, resolved, backend, "some", False, captures=True) == []
    assert "ignored: no size of" in caplog.text
    assert "--batch-prefill-max-seq-len 256" in caplog.text


def test_a_grid_on_a_cpu_is_ignored_and_one_line_says_so(llama, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)  # another test may have changed it
    caplog.set_level("WARNING", logger.name)
    runner = making.make_runner(llama[0], enable_batch_prefill_cuda_graph=True)
    assert [line for line in caplog.messages if "batch-prefill" in line] == [
        "--enable-batch-prefill-cuda-graph is ignored: it has no effect on a CPU, which has no CUDA graphs; "
        "leave the option out, or use a GPU"
    ]
    planner = Planner(runner)
    prompt = making.prompt(20)
    assert planner.generate(prompt, 5).output == tiny.reference(llama[1], prompt, 5)
    result = planner.run([(planner.add(prompt), 20)])
    assert (result.eager, result.padded_tokens) == ("disabled", 0)
    runner.close()
    with pytest.raises(NotImplementedError, match="CPUAttention"):
        runner._executor.backend.init_batch_prefill_cuda_graph_state(1, 16)


@pytest.mark.parametrize(
    ("supports", "moe", "captures", "why"),
    [
        (False, False, True, "attention backend 'some' does not support it; choose one that does"),
        (True, True, True, "a mixture of experts"),
        (True, False, False, "no CUDA graphs are captured"),
    ],
)
def test_a_grid_that_cannot_be_used_on_a_gpu_is_ignored_with_a_warning(
    llama, warnings, supports, moe, captures, why
):
    config = EngineConfig(**making.options(llama[0], enable_batch_prefill_cuda_graph=True))
    resolved = resolve_config(config, resolve(config.model, config.load_format, config.cache_dir), TPInfo())
    resolved = replace(resolved, device=torch.device("cuda"))
    backend = SimpleNamespace(supports_batch_prefill_cuda_graph=lambda: supports)
    assert resolve_grid(config, resolved, backend, "some", moe, captures=captures) == []
    assert f"--enable-batch-prefill-cuda-graph is ignored: {why}" in warnings.text


@pytest.mark.parametrize(("chunk", "rows"), [(4, 40), (1, 1), (64, 8)])
def test_the_profile_run_is_as_large_as_a_step_can_be(llama, monkeypatch, chunk, rows):
    counts, build, logits = [], Context.build, Decoder.logits

    def counting(**step):
        counts.append(len(step["input_ids"]))
        return build(**step)

    monkeypatch.setattr(Context, "build", counting)
    monkeypatch.setattr(Decoder, "logits", lambda model, h: counts.append(len(h)) or logits(model, h))
    making.make_runner(llama[0], chunked_prefill_size=chunk, max_running_requests=rows).close()
    assert counts == [max(chunk, rows), rows]


def test_the_profile_run_leaves_out_equal_layers(llama, monkeypatch, tmp_path):
    directory = shutil.copytree(llama[0], tmp_path / "deep")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    calls, call = [], DecoderLayer.__call__
    monkeypatch.setattr(
        DecoderLayer, "__call__", lambda layer, *args: calls.append(layer) or call(layer, *args)
    )
    runner = making.make_runner(directory, load_format="dummy")
    layers = list(runner.model.layers)
    runner.close()
    assert len(layers) == 5 and calls == [layers[0], layers[-1]]


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)  # another test may have changed it
    caplog.set_level("WARNING", logger.name)
    return caplog


def _demand(**changes):
    sizes = {"free_before": 80 * GIB, "memory_ratio": 0.9, "arena_bytes": 2 * GIB, "page_bytes": 1 << 20}
    limits = {"page_size": 16, "max_len": 4096, "max_running_requests": 8}
    return Demand(reserve=Reserve(batch_state=0, graphs=GIB), **{**sizes, **limits, **changes})


def _selection(graphs):
    capabilities = Capabilities(devices=("cuda",), dtypes=(torch.float32,), graphs=graphs)
    entry = attention.BackendEntry(name="some", capabilities=capabilities, backend="nowhere:Some")
    return attention.Selection(prefill=((1 << 30, entry),), decode=entry)


EXPERTS = moe_backend.MoEEntry(name="experts", devices=("cuda",), graph=False, run=moe_backend.run_by_expert)


@pytest.mark.parametrize(
    ("case", "warning"),
    [
        ({"selection": _selection(graphs=False)}, "attention backend some cannot.*--attention-backend"),
        ({"_experts": EXPERTS}, "MoE backend experts cannot be captured"),
        ({"demand": {"free_before": 4 * GIB}}, "1.00 GiB.*--memory-ratio"),
        ({"_can_capture_collectives": False}, "^$"),
    ],
)
def test_no_memory_is_reserved_for_graphs_that_cannot_be_captured(llama, warnings, case, warning):
    config = EngineConfig(**making.options(llama[0], num_kv_tokens=None))
    sparse = SimpleNamespace(config=SimpleNamespace(moe=object()))
    made = Startup(config, sparse, TPInfo(), Path("/nonexistent"))
    made.selection, made._can_capture_collectives = _selection(graphs=True), True
    made._experts, made.memory = replace(EXPERTS, graph=True), PrivateMemory(torch.device("cpu"))
    assert made._reserve_for_graphs(_demand()) == _demand() and not warnings.text
    dense = Startup(config, SimpleNamespace(config=SimpleNamespace(moe=None)), TPInfo(), Path("/nonexistent"))
    dense.selection, dense._can_capture_collectives, dense._experts = _selection(graphs=True), True, EXPERTS
    dense.memory = made.memory
    assert dense._reserve_for_graphs(_demand()) == _demand() and not warnings.text
    given = _demand(**case.get("demand", {}))
    for name in case.keys() - {"demand"}:
        setattr(made, name, case[name])
    demand = made._reserve_for_graphs(given)
    assert demand.reserve.graphs == 0 and formula_pages(demand) == formula_pages(given) + 1024
    assert re.search(warning, warnings.text)


@pytest.mark.parametrize("missing", [0, 1])
def test_an_engine_beside_another_captures_graphs_if_its_own_reserve_has_room(
    llama, monkeypatch, missing
) -> None:
    """The other engine's KV cache and weights, which are there, do not count against it."""
    config = EngineConfig(**making.options(llama[0], num_kv_tokens=None))
    dense = SimpleNamespace(config=SimpleNamespace(moe=None))
    made = Startup(config, dense, TPInfo(), Path("/nonexistent"))
    made.selection, made._can_capture_collectives, made._experts = _selection(graphs=True), True, EXPERTS
    demand = replace(_demand(free_before=GIB), num_engines=2, is_arena_shared=True, parks_kv=True)
    kv_bytes = 100 * GIB
    made.memory = SimpleNamespace(pinned_kv=lambda: SimpleNamespace(kv_bytes=kv_bytes))
    monkeypatch.setattr(made, "_free", lambda: standby_bytes(demand, kv_bytes) - missing)
    assert bool(made._reserve_for_graphs(demand).reserve.graphs) == (not missing)


def test_a_step_can_be_awaited_while_it_runs_and_long_after_it_has_ended(planner):
    runner, sequence = planner.runner, planner.add(making.prompt(5))
    may_run, has_ended = threading.Event(), threading.Event()
    runner._stream.submit(may_run.wait)  # the step behind it waits too

    def await_step() -> None:
        runner.queue_behind(1)
        has_ended.set()

    step = planner.launch([(sequence, 5)])
    waiter = threading.Thread(target=await_step)
    waiter.start()
    ended_early = has_ended.wait(0.05)
    may_run.set()  # before anything can fail: the runner's end waits for its steps
    assert not ended_early
    assert has_ended.wait(60) and step.output.ready()
    waiter.join()
    step.read()
    planner.decode([sequence], 2 * NUM_RECENT)
    assert len(runner._recent) == NUM_RECENT
    runner.queue_behind(1)


def test_a_step_that_failed_fails_whoever_awaits_it(planner):
    sequence = planner.add(making.prompt(5))
    plan = planner.plan([(sequence, 5)])
    plan.step = 7  # it should be the first one
    planner.runner.forward_batch(plan)
    with pytest.raises(PlanError):
        planner.runner.queue_behind(7)
