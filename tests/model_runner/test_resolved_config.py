"""The values of options that the user left open, and options that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from segue.checkpoint.source import ModelSource
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.errors import ConfigError, TensorParallelError
from segue.model_runner.resolved_config import ResolvedConfig, resolve_config
from segue.models.config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def _resolve_config(
    *, hf: dict[str, Any] | None = None, gguf: bool = False, rank: int = 0, **options: Any
) -> ResolvedConfig:
    source = ModelSource(
        name="tiny",
        format="gguf" if gguf else "safetensors",
        directory=Path("/m"),
        gguf=Path("/m.gguf") if gguf else None,
        tokenizer_directory=None,
        config=ModelConfig.from_hf({**LLAMA, **(hf or {})}).quantized(options.get("quantization", "auto")),
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        eos_token_ids=(),
    )
    return resolve_config(EngineConfig(**options), source, TPInfo(rank, max(1, rank + 1)))


@pytest.fixture
def cuda(monkeypatch):
    """A machine with two CUDA devices."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_sizes_on_a_cpu(no_cuda):
    resolved = _resolve_config()
    assert resolved.device.type == "cpu"
    assert (resolved.page_size, resolved.max_running_requests, resolved.chunked_prefill_size) == (16, 16, 512)


def test_sizes_on_cuda(cuda):
    resolved = _resolve_config(rank=1)
    assert resolved.device == torch.device("cuda", 1)
    assert (resolved.page_size, resolved.max_running_requests, resolved.chunked_prefill_size) == (
        64,
        256,
        8192,
    )


def test_options_of_the_user_have_priority(no_cuda):
    resolved = _resolve_config(page_size=1, max_running_requests=3, chunked_prefill_size=7, dtype="float16")
    assert (resolved.page_size, resolved.max_running_requests, resolved.chunked_prefill_size) == (1, 3, 7)
    assert resolved.dtype == torch.float16


@pytest.mark.parametrize(
    ("case", "option", "reason"),
    [
        ({}, "device", "torch sees no CUDA device"),
        ({"device": "cpu"}, "device", "--device names it"),
        ({}, "page_size", "the default on cpu"),
        ({"page_size": 16}, "page_size", "--page-size says so"),
        ({"hf": {"torch_dtype": "bfloat16"}}, "dtype", "the checkpoint is bfloat16"),
        (
            {"hf": {"torch_dtype": "float32"}},
            "dtype",
            "bfloat16 is precise enough for a checkpoint in float32",
        ),
        ({"gguf": True}, "dtype", "bfloat16 is precise enough for the quantised values of a GGUF file"),
        ({"dtype": "float32"}, "dtype", "--dtype names it"),
        ({"max_model_len": 20}, "max_model_len", "--max-model-len says so"),
        ({"max_model_len": 20}, "chunked_prefill_size", "16 requests of 20 tokens never need more"),
    ],
)
def test_each_value_has_a_reason(no_cuda, case, option, reason):
    assert _resolve_config(**case).reasons[option] == reason


def test_device_cpu_is_used_although_there_is_cuda(monkeypatch):
    monkeypatch.delattr(torch.cuda, "is_available")  # which would call the driver
    assert _resolve_config(device="cpu").device.type == "cpu"


def test_cuda_without_a_device_is_an_error(no_cuda):
    with pytest.raises(ConfigError, match="--device cpu"):
        _resolve_config(device="cuda")


def test_more_ranks_than_devices_is_an_error(cuda):
    with pytest.raises(TensorParallelError, match=r"tp=3.*2 CUDA devices"):
        _resolve_config(rank=2)


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rank": 1}, TensorParallelError, "deterministic=True with tp=2.*--tp 1"),
        ({"hf": EXPERTS}, ConfigError, "mixture of experts"),
        ({"dtype": "float32"}, ConfigError, "dtype='float32'.*bfloat16"),
        ({"quantization": "fp8"}, ConfigError, "weights in FP8: on CUDA there is no batch-invariant GEMM"),
    ],
)
def test_options_without_deterministic_kernels_on_cuda_are_refused(cuda, options, error, words):
    assert not _resolve_config(**options).deterministic
    with pytest.raises(error, match=f"{words}.*leave --deterministic out"):
        _resolve_config(**options, deterministic=True)
    assert _resolve_config(deterministic=True).deterministic


def test_fp8_is_refused_where_cuda_cannot_run_it(cuda, monkeypatch):
    assert _resolve_config(quantization="fp8", device="cpu", dtype="float32").dtype == torch.float32
    with pytest.raises(ConfigError, match=r"weights in FP8 with dtype='float32': .* use one of them"):
        _resolve_config(quantization="fp8", dtype="float32")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"weights in FP8 on compute capability \(8, 6\): .* \(8, 9\)"):
        _resolve_config(quantization="fp8")


def test_determinism_is_refused_on_devices_without_verified_kernels(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"capability \(8, 0\).*\(9, 0\) only"):
        _resolve_config(deterministic=True)


@pytest.mark.parametrize(
    ("stored", "gguf", "dtype"),
    [
        ("bfloat16", False, torch.bfloat16),
        ("float16", False, torch.float16),
        ("float32", False, torch.bfloat16),
        (None, False, torch.bfloat16),
        ("float16", True, torch.bfloat16),
    ],
)
def test_dtype_is_that_of_the_checkpoint_but_bfloat16_for_float32_and_gguf(no_cuda, stored, gguf, dtype):
    assert _resolve_config(hf={"torch_dtype": stored}, gguf=gguf).dtype == dtype


@pytest.mark.parametrize(("max_model_len", "max_len"), [(None, 2048), (100, 100), (5000, 2048)])
def test_max_len_is_the_minimum_of_the_model_and_the_option(no_cuda, max_model_len, max_len):
    assert _resolve_config(max_model_len=max_model_len).max_len == max_len


def test_a_chunk_that_is_never_full_is_reduced_and_logged(no_cuda, caplog):
    caplog.set_level("INFO", "segue")
    assert _resolve_config(chunked_prefill_size=32768, max_running_requests=16).chunked_prefill_size == 32768
    assert not caplog.records
    resolved = _resolve_config(chunked_prefill_size=32769, max_running_requests=16)
    assert (resolved.chunked_prefill_size, resolved.max_step_tokens) == (32768, 32768)
    assert "chunked_prefill_size is 32768, not 32769: 16 requests of 2048 tokens never" in caplog.text
    assert _resolve_config(max_running_requests=4096).max_step_tokens == 4096
