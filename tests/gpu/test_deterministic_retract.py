"""`--deterministic` on a CUDA device: a retraction changes no bit. tests/e2e has the same for the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import segue
from tests.e2e.engines import check_retracted_is_uninterrupted
from tests.model_runner import making, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": 1024}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("disable_cuda_graph", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_retracting_32_requests_3_times_each_changes_no_bit(
    tmp_path: Path, dtype: str, disable_cuda_graph: bool
) -> None:
    tiny.save_llama(tmp_path, **SIZES, **HEADS)
    options = making.options(
        tmp_path,
        device="cuda",
        dtype=dtype,
        page_size=16,
        num_kv_tokens=32768,
        max_running_requests=32,
        chunked_prefill_size=256,
        deterministic=True,
        disable_cuda_graph=disable_cuda_graph,
    )
    prompts = [making.prompt(1 + 7 * index, seed=index) for index in range(32)]
    with segue.Engine(**options, embedded=True, log_level="error") as engine:
        for seed in range(3):
            check_retracted_is_uninterrupted(engine, prompts, 400, pauses=3, seed=seed)
