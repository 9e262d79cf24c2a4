"""Captured steps on a CUDA device: bits, padding, the grid of prefill graphs, copies, self-check, memory."""

import itertools
import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from segue.logs import logger
from segue.memory.budget import GRAPH_RESERVE
from segue.messages.guided import GrammarSpec, GuidedVocabulary
from segue.model_runner import startup
from segue.model_runner.graphs import GraphMismatchError
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner

pytestmark = pytest.mark.gpu

GRID = {"enable_batch_prefill_cuda_graph": True, "batch_prefill_seq_lengths": "16,32,64"}


@pytest.fixture
def make(tmp_path):
    """Make runners of one tiny model; all of them are closed at the end."""
    model = tiny.save_llama(tmp_path)
    made = []

    def make(**options):
        runner = making.make_runner(
            tmp_path,
            **{
                "device": "cuda",
                "page_size": 16,
                "num_kv_tokens": 4096,
                "chunked_prefill_size": 256,
                **options,
            },
        )
        runner.model = model
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.close()


def executor_of(runner):
    return runner._executor


def planner_of(runner):
    """Return a planner that continues the step numbers of earlier plans."""
    planner = Planner(runner)
    planner.step = executor_of(runner).state.step
    return planner


def prompts(*lengths):
    return [making.prompt(length, seed=length) for length in lengths]


WORK = [  # for each step, the tokens of each of four sequences; 0: the sequence is not in the step
    (17, 0, 0, 0),
    (1, 30, 5, 0),
    (1, 1, 9, 40),
    (1, 1, 1, 1),
    (1, 1, 1, 1),
]


def drive(runner, **params):
    """Run the steps of `WORK`; return the sampled tokens, and `(eager, padded_tokens)` of each step."""
    planner = planner_of(runner)
    sequences = [planner.add(prompt, seed=i, **params) for i, prompt in enumerate(prompts(17, 30, 14, 40))]
    results = [
        planner.run([(sequence, n) for sequence, n in zip(sequences, work, strict=True) if n])
        for work in WORK
    ]
    return [sequence.output for sequence in sequences], [(r.eager, r.padded_tokens) for r in results]


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        ("float32", "triton"),
        *(("bfloat16", name) for name in ("triton", "fa3", "fa3,triton", "flashinfer", "flashinfer,triton")),
    ],
)
@pytest.mark.parametrize("grid", [{}, GRID], ids=["ragged", "grid"])
def test_a_replay_gives_the_same_bits_as_the_same_bucket_run_eagerly(make, tmp_path, dtype, backend, grid):
    # After every replay the self-check runs the same bucket eagerly, with the same padding and splits. It
    # compares the hidden states of forward graphs, and the logits of decode and sampling graphs.
    if "fa3" in backend:
        pytest.importorskip("flash_attn_3._C")
    if "flashinfer" in backend:
        pytest.importorskip("flashinfer")
        tiny.save_llama(tmp_path, head_dim=64)  # it has no kernels for smaller heads
    runner = make(dtype=dtype, attention_backend=backend, graph_self_check=True, **grid)
    for temperature in (0.0, 0.8):
        outputs, steps = drive(runner, temperature=temperature)
        assert all(eager is None for eager, _ in steps)
        assert all(len(output) > 0 for output in outputs)


@pytest.mark.parametrize("grid", [{}, GRID], ids=["ragged", "grid"])
def test_the_same_bucket_replayed_twice_gives_the_same_bits(make, grid):
    runner = make(dtype="bfloat16", graph_self_check=True, **grid)
    executor, seen = executor_of(runner), []
    for _ in range(2):
        runner.kv.data.zero_()
        torch.cuda.synchronize()
        planner = planner_of(runner)
        sequences = [planner.add(prompt) for prompt in prompts(20, 50, 9)]
        planner.run([(sequence, len(sequence.tokens)) for sequence in sequences])
        hidden = executor._sampled_hidden[:3].clone()
        for _ in range(3):
            planner.run([(sequence, 1) for sequence in sequences])
        torch.cuda.synchronize()
        seen.append((hidden, executor._checked_logits[:3].clone(), runner.kv.data[:-1].clone()))
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("grid", [{}, GRID], ids=["ragged", "grid"])
def test_the_replay_of_each_graph_at_start_changes_no_output(make, monkeypatch, grid):
    replay, replays, outputs = torch.cuda.CUDAGraph.replay, [], []
    for replays_at_start in (True, False):

        def noted(graph, replays_at_start=replays_at_start):
            replays.append(graph)
            if replays_at_start:
                replay(graph)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", noted)
        runner = make(dtype="bfloat16", **grid)
        monkeypatch.undo()
        # One more is that of the writer to the device.
        assert len(replays) == len(set(replays)) == executor_of(runner).num_graphs + 1
        replays.clear()
        pages = runner.kv.data.view(len(runner.kv.data), -1).any(dim=1).nonzero().flatten().tolist()
        assert set(pages) <= {runner.kv.scratch_page}
        outputs.append([drive(runner, temperature=temperature) for temperature in (0.0, 0.8)])
    assert outputs[0] == outputs[1]


def test_guided_steps_have_graphs_and_the_tokens_of_a_cpu(make):
    # With several rows in use, out of order, and rows without a grammar between them.
    tokens = [b"<end>", *(f"{number} ".encode() for number in range(1, making.VOCAB))]
    vocabulary = GuidedVocabulary(tokens=tokens, special_ids=[0], eos_ids=[0])
    outputs, kinds = [], []
    for options in ({"graph_self_check": True}, {"disable_cuda_graph": True}, {"device": "cpu"}):
        runner = make(dtype="float32", **options)
        runner.set_vocabulary(vocabulary)
        planner = planner_of(runner)
        sequences = [
            planner.add(
                prompt,
                logprobs=0,
                seed=index,
                temperature=index / 2,
                grammar=GrammarSpec("regex", "([0-9]*[13579] ([0-9]*[02468] )){9}") if index != 2 else None,
            )
            for index, prompt in enumerate(prompts(17, 30, 14, 40, 9))
        ]
        planner.run([(each, len(each.tokens)) for each in sequences])
        steps, launched = [], None
        for step in range(8):  # the next step is launched before the last one is read, as when serving
            behind = planner.launch([(each, 1) for each in sequences[step % 2 :]])
            if launched is not None:
                steps.append(launched.read())
            launched = behind
        steps.append(launched.read())
        kinds.append({step.graph for step in steps})
        outputs.append([each.output for each in sequences])
        assert not any(step.failures for step in steps)
    assert kinds == [{"guided"}, {None}, {None}]
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == outputs[2][0]  # greedy: a draw may differ where sums round differently
    for index in (0, 1, 3, 4):
        assert [token % 2 for token in outputs[0][index]] == [1, 0, 1, 0, 1, 0, 1, 0, 1][
            : len(outputs[0][index])
        ]


def test_padding_of_an_earlier_step_changes_nothing(make):
    # Fillers are rewritten in every step, and the results of padding go to the dummy slot.
    outputs, _ = drive(make(dtype="float32", **GRID))
    used = make(dtype="float32", **GRID)
    planner = planner_of(used)
    earlier = [planner.add(prompt, temperature=0.9) for prompt in prompts(61, 47, 33, 62)]
    planner.run([(sequence, len(sequence.tokens)) for sequence in earlier])
    planner.decode(earlier, 3)
    for sequence in earlier:
        planner.remove(sequence)
    state = executor_of(used).state
    assert int(state.page_table.data[state.page_table.dummy_slot].min()) == used.kv.scratch_page
    again = planner_of(used)
    sequences = [again.add(prompt, seed=i) for i, prompt in enumerate(prompts(17, 30, 14, 40))]
    for work in WORK:
        again.run([(sequence, n) for sequence, n in zip(sequences, work, strict=True) if n])
    assert [sequence.output for sequence in sequences] == outputs


@pytest.mark.parametrize("options", [{}, GRID, {"disable_cuda_graph": True}], ids=["ragged", "grid", "eager"])
def test_prefill_steps_give_the_tokens_of_transformers(make, options):
    runner = make(dtype="float32", **options)
    planner = planner_of(runner)
    for lengths in ((20,), (3,), (50, 41, 60), (16, 16), (64, 33)):
        sequences = [planner.add(prompt) for prompt in prompts(*lengths)]
        # Compute a part of each prompt first: padding at the front of a prompt must not attend to it.
        if len(lengths) == 2:
            planner.run([(sequence, 5) for sequence in sequences])
        result = planner.run([(s, len(s.tokens) - s.computed) for s in sequences])
        if options is GRID:
            assert result.eager is None and result.padded_tokens > 0
        planner.decode(sequences, 4)
        for sequence, length in zip(sequences, lengths, strict=True):
            assert sequence.output == tiny.reference(runner.model, making.prompt(length, seed=length), 5)
            planner.remove(sequence)


def test_one_prompt_uses_the_grid_and_prompt_logprobs_run_eagerly(make):
    runner = make(dtype="float32", **GRID)
    planner = planner_of(runner)
    alone = planner.add(making.prompt(20, seed=1))
    result = planner.run([(alone, 20)])
    assert (result.eager, result.padded_tokens) == (
        None,
        12,
    )  # padded to 32 tokens, in the grid as in a prefill graph
    two = [planner.add(prompt) for prompt in prompts(60, 50)]
    assert planner.run([(sequence, len(sequence.tokens)) for sequence in two]).padded_tokens == 2 * 64 - 110
    scored = planner.add(making.prompt(20, seed=1), prompt_logprobs_start=0, logprobs=0)
    result = planner.run([(scored, 20)])
    assert (result.eager, result.padded_tokens) == ("prompt_logprobs", 0)
    assert scored.output == alone.output[:1] and len(scored.prompt_logprobs) == 19


def test_the_self_check_finds_a_graph_that_reads_stale_memory(make):
    for kind in ("inputs", "weights"):
        runner = make(dtype="float32", graph_self_check=True)
        planner = planner_of(runner)
        planner.generate(making.prompt(30, seed=1), 1)  # so that the graph reads old inputs of its own bucket
        executor = executor_of(runner)
        if kind == "inputs":  # as if the static buffer had been allocated again
            stale = executor._inputs._buffer  # stays allocated, so that its indices stay valid
            executor._inputs._buffer = stale.clone()
        else:
            norm = executor.model.layers[1].post_norm
            norm.weight = torch.nn.Parameter(norm.weight * 1.5, requires_grad=False)
        torch.cuda.synchronize()
        with pytest.raises(
            GraphMismatchError,
            match=r"the (forward|prefill) graph of size 32 is wrong: \d+ of 64 values.*most",
        ):
            planner.generate(making.prompt(20, seed=2), 3)


def sync_debug_mode(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the function is a prototype
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("options", [{}, GRID], ids=["ragged", "grid"])
def test_a_replay_copies_its_inputs_in_one_copy_and_never_waits(make, options):
    runner = make(dtype="float32", **options)
    planner = planner_of(runner)
    old = [planner.add(prompt) for prompt in prompts(20, 33, 47, 18, 25)]
    planner.run([(sequence, len(sequence.tokens)) for sequence in old])
    planner.decode(old, 2)
    new = [planner.add(prompt) for prompt in prompts(61, 50)]
    steps = {
        "decode": [(sequence, 1) for sequence in old],
        "prompts": [(sequence, len(sequence.tokens)) for sequence in new],
        "mixed": [*((sequence, 1) for sequence in old), (planner.add(making.prompt(40)), 40)],
    }
    for name, work in steps.items():
        has_device_writes = name != "decode"
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as trace:
            sync_debug_mode("error")
            try:
                launched = planner.launch(work)
            finally:
                sync_debug_mode("default")
            torch.cuda.synchronize()
        assert launched.read().eager is None
        copies = [event.name for event in trace.events() if event.name.startswith("Memcpy")]
        to_device = [copy for copy in copies if "HtoD" in copy]
        assert len(to_device) <= 1 + has_device_writes, (name, copies)
        assert not any("DtoH" in copy for copy in copies), (name, copies)


def test_what_the_graphs_of_each_kind_have_cost_is_known(make):
    runner = make(dtype="bfloat16", chunked_prefill_size=2048, **GRID)
    costs = runner.graph_costs
    assert set(costs) == {"decode", "guided", "sampling", "masked", "forward", "prefill", "grid"}
    assert sum(cost.num_graphs for cost in costs.values()) == executor_of(runner).num_graphs
    assert all(cost.num_graphs > 0 and cost.seconds > 0 for cost in costs.values())
    # The kinds share a pool, so a small kind may find all the memory that it needs there.
    assert costs["forward"].num_bytes > 0
    assert 0 < sum(cost.num_bytes for cost in costs.values()) < GRAPH_RESERVE


def test_graphs_take_less_than_the_reserve(make):
    # The model is tiny; bench/start_time measures what the graphs of real models take.
    free = torch.cuda.mem_get_info()[0]
    runner = make(dtype="bfloat16", max_running_requests=64, chunked_prefill_size=2048, **GRID)
    assert executor_of(runner).num_graphs > 90
    assert free - torch.cuda.mem_get_info()[0] < GRAPH_RESERVE


def test_sizes_that_do_not_fit_the_reserve_are_left_out_with_a_warning_and_run_eagerly(
    make, monkeypatch, caplog
):
    monkeypatch.setattr(logger, "propagate", True)  # another test may have changed it
    caplog.set_level("WARNING", logger.name)
    free = itertools.count(80 << 30, -1 << 20)  # every call returns 1 MiB less
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 80 << 30))
    monkeypatch.setattr(startup, "GRAPH_RESERVE", 36 << 20)  # one call per graph, and one per kind
    runner = make(dtype="float32")
    assert executor_of(runner).num_graphs == 31  # decode 8, sampling 8, guided 4, masked 8, forward 3
    assert "31 CUDA graphs took" in caplog.text
    assert "sizes left out, to run eagerly: forward 48, 64," in caplog.text
    assert "Lower --max-running-requests" in caplog.text
    planner = planner_of(runner)
    sequence = planner.add(making.prompt(120))
    assert planner.run([(sequence, 100)]).eager == "tokens"
    assert planner.run([(sequence, 20)]).eager is None
    assert planner.run([(sequence, 1)]).eager is None
