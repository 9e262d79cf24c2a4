"""An executor for CUDA whose tensors are the host's, and which launches no kernel: with Triton and no GPU.

Triton names the variants that it would compile for an H200; nothing is compiled. GEMMs by torch give zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segue.attention.base import AttentionShape
from segue.attention.flashinfer import FlashInferAttention
from segue.distributed.collectives import Collectives
from segue.distributed.info import TPInfo
from segue.kernels.cpu import ops as cpu
from segue.kernels.cpu.build import Kernels
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool, KVShape
from segue.layers.blocks import Linear
from segue.messages.control import EngineLimits
from segue.models.config import ModelConfig
from segue.models.decoder import build_model
from tests.support.fake_flashinfer import installed

# Of Qwen3-0.6B, but for the vocabulary: the plans of its GEMMs are measured.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 8256,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
Variants = dict[tuple[str, str], Any]  # (kernel, types and constants) -> what Triton's hook was told


class _Driver:
    """Takes the place of Triton's driver of a device."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    @property
    def utils(self) -> Any:
        return SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 227 << 10})

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class _Event:
    def __init__(self, *_: Any) -> None: ...

    record = synchronize = lambda self: None


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host's tensors look like those of an H200 to whatever chooses a kernel."""
    pytest.importorskip("triton")
    from triton.runtime import driver

    from segue.kernels.triton import gemm, launch, moe

    h200 = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30
    )
    silent = SimpleNamespace(
        capture_begin=lambda **options: None,
        **{name: lambda: None for name in ("capture_end", "replay", "synchronize")},
    )
    for name, value in {
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: h200,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: None,
        "empty_cache": lambda: None,
        "CUDAGraph": lambda: silent,
        "current_stream": lambda: silent,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Event", _Event)
    monkeypatch.setattr(cpu, "kernels", lambda: Kernels(why_not="the tensors are not the CPU's"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight))
    )
    monkeypatch.setattr(
        torch,
        "mm",
        lambda x, weight, out_dtype=None: x.new_zeros(len(x), weight.shape[1], dtype=out_dtype or x.dtype),
    )
    monkeypatch.setattr(
        torch,
        "_scaled_mm",
        lambda x, weight, out_dtype, **_: x.new_zeros(len(x), weight.shape[1], dtype=out_dtype),
    )
    caches = (launch.is_hopper, launch.num_sms, launch.device_facts, gemm.choose, moe.choose)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(driver, "_active", _Driver())
    yield
    for cache in caches:
        cache.cache_clear()


@contextmanager
def recorded(*_: Any) -> Iterator[Variants]:
    """Yield the variants that the block launches; none is compiled. See `compiled_together`."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    from segue.kernels.compilations import _zeros

    found: Variants = {}
    launch = JITFunction.run

    def run(function: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(function, *args, warmup=True, **options)

    def note(*, key: Any, fn: Any, compile: Any, **_: Any) -> bool:
        module = fn.module.rpartition(".")[2]
        found[f"{module}.{fn.name}", str(key)] = compile
        return True  # nothing is compiled

    with pytest.MonkeyPatch.context() as patch, _zeros():
        patch.setattr(JITFunction, "run", run)
        patch.setattr(knobs.runtime, "jit_cache_hook", note)
        yield found


def idle_flashinfer(shape: AttentionShape, pool: KVPool) -> FlashInferAttention:
    """Return the backend with functions of FlashInfer that do nothing."""
    with installed(SimpleNamespace(plan=lambda *_: [], paged_run=lambda **_: None)):
        return FlashInferAttention(shape, pool)


class FakeModel:
    """A model and the state of an engine, of the host's memory, that nothing is written to."""

    def __init__(
        self,
        *,
        rows: int = 192,
        chunk: int = 2304,
        max_seq_len: int = 4096,
        dtype: torch.dtype = torch.bfloat16,
        deterministic: bool = False,
        ranks: int = 1,
        one_shot: bool = False,
        flashinfer: bool = False,
        fp8_kv: bool = False,
        **config: Any,
    ) -> None:
        """Make rank 0 of an engine of these sizes; ``config`` changes that of the model."""
        from segue.attention.triton import TritonAttention, TritonInvariantAttention
        from segue.kernels.triton.all_reduce import OneShotAllReduce
        from segue.kernels.triton.moe import run_experts
        from segue.model_runner.batch_state import BatchState, CUDAWriter
        from segue.model_runner.cuda_executor import CUDAExecutor
        from segue.model_runner.sampler import Sampler

        self.limits = EngineLimits(
            num_pages=4,
            page_size=64,
            max_seq_len=max_seq_len,
            max_running_requests=rows,
            chunked_prefill_size=chunk,
        )
        self.config = found = ModelConfig.from_hf(QWEN3 | config)
        self.collectives = Collectives(TPInfo(0, ranks))
        if one_shot:  # its exchange is never launched
            fused = object.__new__(OneShotAllReduce)
            fused.max_rows = (3 << 20) // (8 * found.hidden_size * (ranks - 1))
            exchange = {"inboxes": torch.zeros(8, dtype=torch.int64), "RANK": 0, "WORLD": ranks}
            exchange["epochs"] = torch.zeros(rows, dtype=torch.int32)
            fused._squares = torch.zeros(8, dtype=torch.uint64)
            fused._sums = exchange | {"max_rows": fused.max_rows}
            fused.candidates = exchange | {"max_rows": rows}
            self.collectives.fused_all_reduce = fused
        self.model = build_model(
            found,
            dtype=dtype,
            collectives=self.collectives,
            moe_backend=lambda *tensors: run_experts(*tensors),
            deterministic=deterministic,
        ).to_empty(device="cpu")
        for module in self.model.modules():
            if isinstance(module, Linear) and (deterministic or module.scale is not None):
                module.build_derived(deterministic=deterministic)
        self.model.derive_qk_weights()
        angles = torch.zeros(max_seq_len, found.head_dim // 2)
        self.model.rotary._table = angles, angles.clone()
        shard = self.model.shard
        shape = KVShape(
            num_pages=4,
            num_layers=found.num_layers,
            page_size=64,
            num_kv_heads=shard.num_kv_heads,
            head_dim=found.head_dim,
            dtype=dtype,
            fp8=fp8_kv,
        )
        pool = KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8))
        attention = AttentionShape(
            num_heads=shard.num_heads,
            num_kv_heads=shard.num_kv_heads,
            head_dim=found.head_dim,
            scale=found.head_dim**-0.5,
        )
        table = PageTable(
            max_running=rows, max_seq_len=max_seq_len, page_size=64, scratch_page=4, device="cpu"
        )
        self.state = BatchState(table, max_seq_len)
        self.state.writer = CUDAWriter(torch.device("cpu"))
        backends = {True: TritonInvariantAttention, False: TritonAttention}
        backend = idle_flashinfer if flashinfer else backends[deterministic]
        self.executor = CUDAExecutor(
            model=self.model,
            state=self.state,
            kv=pool,
            backend=backend(attention, pool),
            sampler=Sampler(self.state),
            max_rows=rows,
            chunk=chunk,
            row_buckets=[1, 2, 4, 7, 8, 9, 16, 32, 48, 64, 100, 128, rows],
            token_buckets=[16, 48, 256, 1024, 1040, 2048, chunk + rows],
        )
