"""A whole runner on a CUDA device, with a plain attention backend that only tests know."""

import pytest
import torch
import torch.nn.functional as F

from segue.attention import registry
from segue.attention.base import AttentionShape, Capabilities
from segue.attention.context import Context
from segue.kvcache.pool import KVPool
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner

pytestmark = pytest.mark.gpu


class PlainAttention:
    """One sequence at a time, in stock torch."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        self.shape = shape
        self.pool = pool

    def prepare(self, ctx: Context) -> None:
        pass

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, ctx: Context
    ) -> torch.Tensor:
        outputs, start = [], 0
        for row, q_len, kv_len in zip(ctx.rows, ctx.q_lens, ctx.kv_lens, strict=True):
            pages = ctx.page_table.data[row, : -(-kv_len // self.pool.page_size)].long()
            keys = self.pool.data[pages, layer, 0].flatten(0, 1)[:kv_len].transpose(0, 1)
            values = self.pool.data[pages, layer, 1].flatten(0, 1)[:kv_len].transpose(0, 1)
            mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)
            q = query[start : start + q_len].transpose(0, 1)
            out = F.scaled_dot_product_attention(
                q[None], keys[None], values[None], mask, scale=self.shape.scale, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1).flatten(1))
            start += q_len
        return torch.cat(outputs)


@pytest.fixture(scope="module")
def backend():
    entry = registry.BackendEntry(
        name="plain",
        capabilities=Capabilities(
            devices=("cuda",),
            dtypes=(torch.float32,),
            page_sizes=None,
            decode_graph=False,
            prefill_graph=False,
            deterministic=True,
            indexes_by_row=True,
        ),
        make=PlainAttention,
    )
    registry.register(entry)
    return entry.name


def test_tokens_are_those_of_transformers(backend, tmp_path):
    model = tiny.save_llama(tmp_path)
    runner = making.make_runner(
        tmp_path, device="cuda", attention_backend=backend, page_size=16, num_kv_tokens=None
    )
    planner = Planner(runner)
    prompts = [making.prompt(length, seed=length) for length in (6, 30)]
    sequences = [planner.add(prompt) for prompt in prompts]
    in_flight = [planner.launch([(sequences[0], 6), (sequences[1], 30)])]
    for _ in range(15):
        in_flight.append(planner.launch([(sequence, 1) for sequence in sequences]))
        in_flight.pop(0).read()
    in_flight.pop(0).read()
    sampled = planner.generate(prompts[0], 10, temperature=0.9, seed=3, top_p=0.9, logprobs=2)
    runner.close()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == tiny.reference(model, prompt, 16)
    assert len(sampled.output) == 10 and all(entry is not None for entry in sampled.logprobs)
