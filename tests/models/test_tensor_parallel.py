import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from segue.distributed.info import TPInfo
from tests.models.reference import Batch, hf_model, our_model

TOKENS = torch.randint(0, 131, (30,), generator=torch.Generator().manual_seed(5)).tolist()


class Exchange:
    """The state through which threads, one per rank, exchange tensors."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)


class ThreadCollectives:
    """Collectives between threads."""

    fused_all_reduce = None

    def __init__(self, tp: TPInfo, exchange: Exchange) -> None:
        self.tp = tp
        self.exchange = exchange

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self.exchange.parts[self.tp.rank] = tensor.clone()
        self.exchange.barrier.wait()
        parts = [part for part in self.exchange.parts if part is not None]
        self.exchange.barrier.wait()
        return parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def gather(self, tensor: Tensor) -> Tensor | None:
        parts = self._exchange(tensor)
        return torch.cat(parts, -1) if self.tp.is_first else None

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._exchange(tensor)[0])


def run(model: torch.nn.Module, size: int) -> list[Tensor | None]:
    exchange = Exchange(size)
    torch.set_grad_enabled(False)

    def rank(index: int) -> Tensor | None:
        ours = our_model(model, ThreadCollectives(TPInfo(index, size), exchange))
        batch = Batch(ours, page_size=4, num_sequences=1)
        batch.step({0: TOKENS[:20]})
        return batch.step({0: TOKENS[20:]})

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize(
    ("architecture", "options", "size"),
    [
        ("LlamaForCausalLM", {"num_attention_heads": 6, "num_key_value_heads": 2}, 2),
        (
            "LlamaForCausalLM",
            {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 81},
            3,
        ),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, 2),
        ("Qwen3ForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 2}, 4),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, 2),
    ],
)
def test_a_tensor_parallel_group_gives_the_logits_of_transformers(
    architecture: str, options: dict[str, Any], size: int
) -> None:
    model = hf_model(architecture, **options)
    first, *others = run(model, size)
    assert others == [None] * (size - 1)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, 20:]
    assert first is not None
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=0)
