"""What the executor for CUDA does on the host, without CUDA: routes, inputs, sampling, results.

Kernels and graphs are replaced by plain torch: a replay runs the functions that were captured, on a CPU.
"""

import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import segue.model_runner
from segue.attention.base import AttentionShape, Context, PagedBackend
from segue.attention.flashinfer import FlashInferAttention
from segue.distributed.collectives import Collectives
from segue.distributed.info import TPInfo
from segue.kernels.compilations import Compilations
from segue.kvcache.pool import KVPool
from segue.messages.guided import GrammarSpec, GuidedVocabulary
from segue.model_runner import graphs, grid, static_inputs, warm_up
from segue.model_runner.step_times import time_steps
from segue.sampling.token_mask import forbid
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner
from tests.support.fake_flashinfer import FakeFlashInfer, installed

NAME = "segue.model_runner.cuda_executor"
# For each step, the tokens of each of four sequences; 0: the sequence is not in the step.
WORK = [(17, 0, 0, 0), (1, 30, 5, 0), (1, 1, 9, 40), (1, 1, 1, 1), (1, 1, 1, 1)]


class Paged(PagedBackend):
    """Attention that reads device tensors only, one sequence after the other."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        self._shape, self._pool = shape, pool

    def queries_per_block(self, tokens: int) -> int:
        return 16

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        raise AssertionError("forward does the work of both halves")

    prefill = decode

    def prepare(self, ctx: Context) -> None:
        assert not ctx.q_lens and not ctx.kv_lens and not ctx.slots

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        output, shape = torch.zeros_like(query), self._shape
        starts = ctx.cu_seqlens_q_device.tolist() if ctx.has_prefill else list(range(ctx.num_decode + 1))
        group = shape.num_heads // shape.num_kv_heads
        for i, (start, end) in enumerate(itertools.pairwise(starts)):
            if start == end:
                continue
            length, count = int(ctx.kv_lens_device[i]), end - start
            slots = ctx.slots_device[i].long().expand(length)
            rows = self._pool.token_rows(ctx.page_table.kv_slots(slots, torch.arange(length)))
            keys, values = (
                cached[layer][rows]
                .view(length, shape.num_kv_heads, shape.head_dim)
                .repeat_interleave(group, 1)
                for cached in (self._pool.key_rows, self._pool.value_rows)
            )
            scores = torch.einsum("qhd,khd->hqk", query[start:end], keys) * shape.scale
            hidden = torch.arange(length) > torch.arange(count)[:, None] + length - count
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
            output[start:end] = torch.einsum("hqk,khd->qhd", weights, values)
        return output


def sample_plain(
    logits: Tensor, slots: Tensor, positions: Tensor, masks: tuple[Tensor, Tensor] | None = None, **state: Any
) -> None:
    if masks is not None:
        rows = masks[1][slots.long()].nonzero().flatten()
        logits = logits.clone()
        forbid(logits, rows, masks[0][slots[rows].long()])
    tokens, ring_index = logits.argmax(-1), int(state["ring_index"])
    state["token_pool"][slots.long(), positions.long()] = tokens.int()
    state["ring"][ring_index, : len(tokens)] = tokens.int()
    chosen = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    state["logprob_ring"][ring_index, : len(tokens)] = chosen


def embed_inputs(inputs: Any, token_slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    slots, table = token_slots.long(), inputs._state.page_table
    rows = inputs._kv.token_rows(table.kv_slots(slots, positions.long()))
    return inputs._embedding(inputs._state.token_pool[slots, positions.long()].long()), rows


def replay(captured: Any, size: Any, rows: int) -> None:
    assert size in captured.sizes
    captured.run(size)


@pytest.fixture
def cuda_executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported with stand-ins for the modules that need Triton."""
    for name, members in (
        ("sampling", {"VocabShard": type("VocabShard", (), {}), "sample_plain": sample_plain}),
        ("all_reduce", {"OneShotAllReduce": type("OneShotAllReduce", (), {})}),
    ):
        module = ModuleType(f"segue.kernels.triton.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    silent = SimpleNamespace(
        capture_begin=lambda **options: None,
        **{name: lambda: None for name in ("capture_end", "replay", "synchronize")},
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: silent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: silent)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs.Graphs, "replay", replay)
    monkeypatch.setattr(static_inputs.DeviceInputs, "_embed_inputs", embed_inputs)
    before = sys.modules.pop(NAME, None)
    yield importlib.import_module(NAME)
    del sys.modules[NAME], segue.model_runner.cuda_executor  # type: ignore[attr-defined]
    if before is not None:
        sys.modules[NAME] = segue.model_runner.cuda_executor = before  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("llama")
    return directory, tiny.save_llama(directory)


@pytest.fixture
def make(llama: Any, cuda_executor: Any) -> Iterator[Any]:
    made = []

    def make(*, ranks: int = 1, captures: bool = True, has_grid: bool = False, backend: Any = Paged) -> Any:
        runner = making.make_runner(llama[0], chunked_prefill_size=256, page_size=16, num_kv_tokens=4096)
        made.append(runner)
        parts = runner._startup
        parts.model.collectives = Collectives(TPInfo(0, ranks))
        runner._executor = executor = cuda_executor.CUDAExecutor(
            model=parts.model,
            state=parts._state,
            kv=runner.kv,
            backend=backend(parts._shape, runner.kv),
            sampler=parts._sampler,
            max_rows=8,
            chunk=256,
        )
        if has_grid:
            sizes = grid.grid_sizes([1, 2, 4], [16, 32, 64], max_len=64, rows=8, tokens=264)
            grid.register(executor, sizes)
        if captures:
            assert executor.capture(lambda: 0, 1) == [] and executor.num_graphs > 20
        return runner

    yield make
    for runner in made:
        runner.close()


def drive(runner: Any, model: Any, **params: Any) -> tuple[list[Any], list[tuple[str | None, int]]]:
    """Run `WORK` greedily; return the sequences, and `(eager, padded_tokens)` of each step."""
    planner, steps = Planner(runner), []
    sequences = [planner.add(making.prompt(n, seed=n), **params) for n in (17, 30, 14, 40)]
    for work in WORK:
        result = planner.run([(sequence, n) for sequence, n in zip(sequences, work, strict=True) if n])
        steps.append((result.eager, result.padded_tokens))
    for sequence in sequences:
        prompt = sequence.tokens[: sequence.prompt_len]
        assert sequence.output == tiny.reference(model, prompt, len(sequence.output))
    return sequences, steps


@pytest.mark.parametrize("has_grid", [False, True])
def test_captured_steps_give_the_tokens_of_transformers(make: Any, llama: Any, has_grid: bool) -> None:
    _, steps = drive(make(has_grid=has_grid), llama[1])
    assert steps == [(None, 15), (None, 12), (None, 13), (None, 0), (None, 0)]


def with_flashinfer(shape: AttentionShape, pool: KVPool) -> FlashInferAttention:
    """Return the backend that plans on the host, with a reference for FlashInfer's functions."""
    with installed(FakeFlashInfer()):
        return FlashInferAttention(shape, pool)


@pytest.mark.parametrize("options", [{}, {"has_grid": True}, {"captures": False}], ids=str)
def test_a_backend_that_plans_on_the_host_gives_the_tokens_of_transformers(
    make: Any, llama: Any, options: dict[str, Any]
) -> None:
    """The plan must be that of the step, for each kind of graph, and when a graph is captured."""
    _, steps = drive(make(**options, backend=with_flashinfer), llama[1])
    assert [eager is None for eager, _ in steps] == [options.get("captures", True)] * len(WORK)


@pytest.mark.parametrize("backend", [Paged, with_flashinfer])
@pytest.mark.parametrize("captures", [False, True])
def test_the_warm_up_leaves_no_trace(
    make: Any, cuda_executor: Any, llama: Any, monkeypatch: pytest.MonkeyPatch, captures: bool, backend: Any
) -> None:
    runner, found = make(captures=False, backend=backend), Compilations()
    monkeypatch.setattr(cuda_executor, "compiled_together", lambda *_: nullcontext(found))
    monkeypatch.setattr(warm_up, "row_steps", lambda *_: {3, 8, 40})
    assert runner._executor.warm_up(runner.limits, captures=captures) is found
    written = runner.kv.data.view(len(runner.kv.data), -1).any(dim=1).nonzero().flatten()
    assert written.tolist() == [runner.kv.scratch_page]
    if captures:
        assert runner._executor.capture(lambda: 0, 1) == []
    _, steps = drive(runner, llama[1])
    assert [eager is None for eager, _ in steps] == [captures] * len(WORK)


def test_a_graph_has_all_layers_and_the_eager_run_before_it_those_that_differ(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(captures=False, has_grid=True)._executor
    now = SimpleNamespace(short=False, capturing=False)
    runs: list[tuple[bool, bool]] = []

    @contextmanager
    def short() -> Iterator[None]:
        now.short = True
        yield
        now.short = False

    def noted(run: Any, size: Any) -> None:
        runs.append((now.short, now.capturing))
        run(size)

    for name, kind in executor._graphs.items():
        assert (kind.shortened == executor.model.distinct_layers) == (name != "grid")
        kind.shortened, kind.run = short, partial(noted, kind.run)
    graph = SimpleNamespace(
        capture_begin=lambda **_: vars(now).update(capturing=True),
        capture_end=lambda: vars(now).update(capturing=False),
        replay=lambda: None,
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    assert executor.capture(lambda: 0, 1) == []
    num_sizes = sum(len(kind.sizes) for name, kind in executor._graphs.items() if name != "grid")
    ours, of_grid = runs[: 2 * num_sizes], runs[2 * num_sizes :]
    assert ours == [(True, False), (False, True)] * num_sizes and num_sizes > 20
    assert of_grid == [(True, False), (True, False), (False, True)] * len(executor._graphs["grid"].sizes)


def test_a_token_is_attended_to_in_one_kernel_only_where_it_decodes(make: Any) -> None:
    """A forward graph of one token, which `--precompile-token-paddings` may ask for, may have a prompt."""
    asked: list[Context] = []

    class Noted(Paged):
        def attend_token(self, *args: Any) -> None:
            asked.append(args[-1])

    executor = make(captures=False, backend=Noted)._executor
    with torch.inference_mode():
        executor._run_forward(executor._shape(1))
        assert asked == []
        executor._run_decode(1)
    assert len(asked) == len(executor.model.layers) and not any(ctx.has_prefill for ctx in asked)


def test_the_steps_that_are_timed_at_start_leave_no_trace(make: Any, llama: Any) -> None:
    runner = make()
    times = time_steps(runner._executor, runner.limits, making.VOCAB, lambda mine: [list(mine)])
    assert {time.work.prompt_tokens for time in times} == {1, 7, 31, 255}
    assert runner.kv.data.view(len(runner.kv.data), -1).any(dim=1).nonzero().tolist() == [
        [runner.kv.scratch_page]
    ]
    drive(runner, llama[1])


def test_prompts_alone_take_the_grid_where_it_is_registered(make: Any) -> None:
    runner = make(has_grid=True)
    replayed, planner = [], Planner(runner)
    kinds = runner._executor._graphs
    run, kinds["grid"].run = kinds["grid"].run, lambda size: (replayed.append(size), run(size))
    planner.run([(planner.add(making.prompt(n, seed=n)), n) for n in (60, 50)])
    assert replayed == [(2, 64)]


@pytest.mark.parametrize("options", [{"captures": False}, {"captures": False, "ranks": 2}], ids=str)
def test_without_graphs_steps_run_eagerly_and_give_the_same_tokens(
    make: Any, llama: Any, options: dict[str, Any]
) -> None:
    # Several ranks whose devices cannot address each other's memory: rank 0 samples from gathered logits.
    _, steps = drive(make(**options), llama[1])
    assert steps == [("disabled", 0)] * len(WORK)


def test_prompt_logprobs_run_eagerly_and_alternatives_are_sampled_behind_a_graph(
    make: Any, llama: Any
) -> None:
    sequences, steps = drive(make(), llama[1], logprobs=2, prompt_logprobs_start=0)
    assert [eager for eager, _ in steps] == ["prompt_logprobs"] * 3 + [None] * 2
    for sequence in sequences:
        assert len(sequence.prompt_logprobs) == sequence.prompt_len - 1
        assert all(entry.top[0] == (entry.token, entry.logprob) for entry in sequence.logprobs)


def test_captured_sampling_has_the_logprob_of_the_chosen_token(make: Any, llama: Any) -> None:
    sequences, steps = drive(make(), llama[1], logprobs=0)
    assert [eager for eager, _ in steps] == [None] * 5
    for sequence in sequences:
        logits = llama[1](torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        for i, entry in enumerate(sequence.logprobs):
            expected = logits[sequence.prompt_len - 1 + i, entry.token]
            assert entry.logprob == pytest.approx(float(expected), abs=1e-4)


def test_guided_steps_are_sampled_behind_a_graph_with_the_tokens_of_a_cpu(make: Any, llama: Any) -> None:
    tokens = [b"<end>", *(f"{number} ".encode() for number in range(1, making.VOCAB))]
    vocabulary = GuidedVocabulary(tokens=tokens, special_ids=[0], eos_ids=[0])
    outputs, kinds = [], []
    for runner in (make(), making.make_runner(llama[0])):
        runner.set_vocabulary(vocabulary)
        planner = Planner(runner)
        sequences = [
            planner.add(making.prompt(n, seed=n), logprobs=0, grammar=GrammarSpec("regex", regex))
            for n, regex in ((17, "([0-9]*[13579] ){9}"), (9, "(([0-9]*[02468] )([0-9]*7 )){4}"))
        ]
        sequences.append(planner.add(making.prompt(5)))
        steps = [planner.run([(each, len(each.tokens)) for each in sequences])]
        steps += [planner.run([(each, 1) for each in sequences]) for _ in range(5)]
        kinds.append([step.graph for step in steps])
        outputs.append([each.output for each in sequences])
        runner.close()
    assert outputs[0] == outputs[1] and kinds == [["prefill", *["guided"] * 5], [None] * 6]
    odd, mixed, free = outputs[0]
    assert all(token % 2 for token in odd) and [token % 2 for token in mixed] == [0, 1] * 3
    assert free == tiny.reference(llama[1], making.prompt(5), 6)
