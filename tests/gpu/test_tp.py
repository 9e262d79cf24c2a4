"""Tensor parallelism on several GPUs: the collective kernels alone, and engines compared with one GPU."""

import json
import random
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import segue
from bench import suite
from segue.distributed.groups import TPGroups, connect
from segue.distributed.info import TPInfo
from segue.messages.steps import NON_FINITE
from tests.gpu.ranks import free_memory, on_ranks
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner

NUM_GPUS = torch.cuda.device_count()
SIZES = [
    pytest.param(size, marks=pytest.mark.skipif(size > NUM_GPUS, reason=f"needs {size} GPUs"))
    for size in (2, 4)
]
pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(240)]

QWEN3_8B = suite.COMMON | suite.SHAPES["8b"] | {"num_hidden_layers": 4}


def _random(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def _exchange(tp: TPInfo, run_dir: Path) -> list[torch.Tensor]:
    """Run every fused kernel that exchanges data between ranks, check it with torch, return the results."""
    groups = connect(tp, rendezvous=run_dir / "rendezvous", device=torch.device("cuda", tp.rank))
    found = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for hidden, dtype in ((1000, torch.float32), (4096, torch.bfloat16)):
            found += _sums(groups, hidden, dtype)
        for vocab in (100, 151936):
            found += _samples(groups, vocab)
    torch.cuda.synchronize()
    groups.barrier()
    return [tensor.cpu() for tensor in found]


def _sums(groups: TPGroups, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Capture chains of three sums in a graph, replay it many times, and return the results."""
    from segue.kernels.triton.all_reduce import OneShotAllReduce

    size, rank = groups.tp.size, groups.tp.rank
    fused_all_reduce = OneShotAllReduce(groups, torch.device("cuda", rank), hidden, 8)
    weight = _random(0, (hidden,), dtype)
    found = []
    for rows, splits in ((1, 1), (3, 4), (min(200, fused_all_reduce.max_rows), 1), (1, 4)):
        parts = [[_random(9 * i + r, (splits, rows, hidden)) for r in range(size)] for i in range(3)]

        def chain(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            residual, outputs = None, []
            for x in inputs:
                normed, residual = fused_all_reduce.add_rms_norm(x, residual, weight, 1e-6)
                outputs += [normed, residual]
            return outputs

        inputs = [of_ranks[rank] for of_ranks in parts]
        chain(inputs)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        captured = chain(inputs)
        graph.capture_end()
        graph.replay()
        first = torch.stack(captured)
        num_different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(300):
            graph.replay()
            num_different += (torch.stack(captured) != first).sum()
        assert num_different.item() == 0, (hidden, rows, splits)
        residual = torch.zeros(rows, hidden, dtype=dtype, device="cuda")
        for i, of_ranks in enumerate(parts):
            total = torch.zeros(rows, hidden, device="cuda")
            for partials in of_ranks:
                summed = partials[0]
                for split in partials[1:]:
                    summed = summed + split
                total = total + summed
            residual = (total + residual.float()).to(dtype)
            assert torch.equal(first[2 * i + 1], residual), (hidden, rows, splits, i)
            exact = residual.float()
            normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
            torch.testing.assert_close(first[2 * i], normed.to(dtype), rtol=2e-2, atol=1e-3)
        found.append(first)
    return found


def _samples(groups: TPGroups, vocab: int) -> list[torch.Tensor]:
    """Check that sampling from vocabulary shards gives the tokens and log-probabilities of all logits."""
    from segue.kernels.triton.all_reduce import OneShotAllReduce
    from segue.kernels.triton.sampling import VocabShard, sample_plain
    from segue.models.sharding import shard_rows

    tp, device = groups.tp, torch.device("cuda", groups.tp.rank)
    shard_size = shard_rows(vocab, tp.size)
    shard = VocabShard(OneShotAllReduce(groups, device, 64, 40), tp.rank * shard_size, vocab)
    temperatures = torch.tensor([0.0, 0.7, 1.3, 0.0], device=device).repeat(10)
    columns = {
        "inverse_temperatures": torch.where(temperatures > 0, 1 / temperatures, 0.0),
        "seeds": torch.arange(-20, 20, device=device),
        "num_top": torch.tensor([-1, 0], device=device).repeat(20),
    }
    found = []
    for step in range(5):
        logits = 3 * _random(step, (40, vocab))
        logits[step, 1] = logits[step, -1] = 50.0  # equal logits, on two ranks
        logits[30:32, -1], logits[32:34, 0], logits[34:36] = torch.nan, torch.inf, -torch.inf
        rows = torch.randperm(40, generator=torch.Generator().manual_seed(step)).int().cuda()
        positions = torch.arange(step, step + 40, device=device, dtype=torch.int32)
        padded = torch.nn.functional.pad(logits, (0, shard_size * tp.size - vocab))
        results = []
        for local_logits, part in ((logits, None), (padded.chunk(tp.size, 1)[tp.rank], shard)):
            pool = torch.full((40, 60), -1, dtype=torch.int32, device=device)
            ring = torch.full((4, 40), -1, dtype=torch.int32, device=device)
            logprobs = torch.zeros(4, 40, device=device)
            ring_index = torch.tensor([step % 4], dtype=torch.int32, device=device)
            targets = {"token_pool": pool, "ring": ring, "logprob_ring": logprobs, "ring_index": ring_index}
            sample_plain(local_logits, rows, positions, **columns, **targets, part=part)
            results.append((pool, ring, logprobs))
        (pool, ring, logprobs), (sharded_pool, sharded_ring, sharded_logprobs) = results
        assert torch.equal(pool, sharded_pool) and torch.equal(ring, sharded_ring), (vocab, step)
        line = step % 4
        assert (ring[line, 30:36] == NON_FINITE).all() and (ring[line, :30] >= 0).all()
        for values in (logprobs, sharded_logprobs):
            values[line, 30:36] = 0.0  # log-probabilities of rows without a token are not read
        torch.testing.assert_close(logprobs, sharded_logprobs, atol=1e-5, rtol=1e-5)
        found += results[1]
    return found


@pytest.mark.parametrize("size", SIZES)
def test_fused_exchanges_equal_those_of_torch_and_are_the_same_on_all_ranks(size):
    first, *others = on_ranks(size, _exchange)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def _traffic(engine: segue.Engine, count: int) -> list[list[int]]:
    """Return the ids of mixed requests: chunks, shared prefixes, retractions, several sampling modes."""
    rng = random.Random(count)
    stem = making.prompt(70, seed=99)
    prompts = [
        stem[: rng.choice([0, 33, 70])] + making.prompt(rng.randint(1, 90), seed=i) for i in range(count)
    ]
    kinds = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"temperature": 0.7},
    ]
    params = [
        kinds[i % len(kinds)] | {"max_new_tokens": rng.randint(1, 40), "sampling_seed": i}
        for i in range(count)
    ]
    call = ThreadPoolExecutor(1).submit(engine.generate, input_ids=prompts, sampling_params=params)
    return [reply["output_ids"] for reply in call.result(timeout=100)]


@pytest.mark.parametrize("size", SIZES)
def test_ids_equal_those_of_one_gpu_and_a_thousand_requests_finish(tmp_path, size):
    tiny.save_qwen3(tmp_path)
    options = {"device": "cuda", "page_size": 16, "num_kv_tokens": 1500, "max_running_requests": 12}
    options |= {"chunked_prefill_size": 48}
    with segue.Engine(**making.options(tmp_path, **options), embedded=True) as engine:
        expected = _traffic(engine, 30)
    free_memory()
    with segue.Engine(**making.options(tmp_path, **options, tp=size)) as engine:
        assert _traffic(engine, 30) == expected
        ids = _traffic(engine, 1000)
    assert len(ids) == 1000 and all(ids)


class Greedy:
    """Generates greedy ids for three prompts, and scores given ids, on one rank of a runner."""

    LENGTHS = (5, 130, 300)

    def __init__(self, tp: TPInfo, run_dir: Path, directory: Path) -> None:
        options = {"device": "cuda", "dtype": "bfloat16", "page_size": 64, "num_kv_tokens": 8192}
        options |= {"load_format": "dummy", "max_model_len": 1024, "max_running_requests": 8}
        runner = making.make_runner(directory, tp, run_dir, **options, chunked_prefill_size=256)
        self.planner = Planner(runner)

    def generate(self) -> tuple[list[list[int]], list[float], list[int]]:
        """Return ids, their log-probabilities from decode graphs, and the padded tokens of each step."""
        sequences = [self.planner.add(making.prompt(n, seed=n), logprobs=0) for n in self.LENGTHS]
        for sequence in sequences:
            self.planner.prefill(sequence, 200)
        steps = [self.planner.run([(sequence, 1) for sequence in sequences]) for _ in range(99)]
        assert all(step.eager is None for step in steps)
        for sequence in sequences:
            self.planner.remove(sequence)
        logprobs = [entry.logprob for sequence in sequences for entry in sequence.logprobs]
        return [sequence.output for sequence in sequences], logprobs, [step.padded_tokens for step in steps]

    def score(self, forced: list[list[int]]) -> list[tuple[float, list[tuple[int, float]]]]:
        """Return the log-probability of each id, and those of the two most likely ids at its position."""
        found = []
        for n, ids in zip(self.LENGTHS, forced, strict=True):
            options = {"logprobs": 2, "prompt_logprobs_start": n, "num_prompt_top": 2}
            sequence = self.planner.add(making.prompt(n, seed=n) + ids, **options)
            self.planner.prefill(sequence, 200)
            self.planner.remove(sequence)
            found += [(entry.logprob, entry.top) for entry in sequence.prompt_logprobs]
        return found


def _score_and_generate(tp: TPInfo, run_dir: Path, directory: Path, forced: list[list[int]]):
    greedy = Greedy(tp, run_dir, directory)
    return greedy.score(forced), greedy.generate()


def _assert_near(found: list[float], expected: list[float]) -> None:
    differences = sorted(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert len(differences) == 300
    assert statistics.median(differences) <= 0.02 and differences[-4] <= 0.1, differences[-10:]


@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_scores_of_the_same_ids_are_near_those_of_one_gpu(tmp_path, size):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    alone = Greedy(TPInfo(), tmp_path, tmp_path)
    ids, _, _ = alone.generate()
    expected = alone.score(ids)
    alone.planner.runner.close()
    del alone
    first, *others = on_ranks(size, _score_and_generate, tmp_path, ids)
    found, (tp_ids, tp_logprobs, padded) = first
    assert all(generated == (tp_ids, tp_logprobs, padded) for _, generated in others)
    _assert_near([logprob for logprob, _ in found], [logprob for logprob, _ in expected])
    for (_, top), (_, expected_top) in zip(found, expected, strict=True):
        if expected_top[0][1] - expected_top[1][1] > 0.1:
            assert top[0][0] == expected_top[0][0]
    # One GPU gives the ids that the graphs of the ranks chose nearly the same scores.
    scored = Greedy(TPInfo(), tmp_path, tmp_path).score(tp_ids)
    _assert_near(tp_logprobs, [logprob for logprob, _ in scored])
