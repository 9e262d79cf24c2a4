"""Measures what FP8 costs in accuracy: perplexity and log-probabilities, against the same engine without it.

    python -m bench.fp8_accuracy [--model DIRECTORY] [--text FILE ...] [--bar 1.0]

The default text is the documentation, of which the first --tokens tokens count. It is cut into prompts
and the log-probability of each token but a prompt's first is compared. There is an engine with weights in
FP8, one with the KV cache, and one with both. An engine on CUDA also quantizes the activations of long
prompts; on a CPU, an engine of its own emulates that in float32.

The perplexity of the weights and of the KV cache in FP8, and of both, may be --bar percent above the other's.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import segue
from bench import report
from segue.kernels.fp8 import dequantize, quantize
from segue.layers import blocks

DOCS = Path(__file__).resolve().parents[1] / "docs"
PROMPT = 1024  # tokens


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """A GEMM by a weight in FP8, of activations that are quantized per token, as by `torch._scaled_mm`."""

    weight: Tensor
    dtype: torch.dtype
    num_bytes: int = 1

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        tokens, scales = quantize(x, num_scales=1)
        result = (tokens.float() @ self.weight.T).mul_(scales)
        return (result if bias is None else result.add_(bias)).to(self.dtype)


@contextmanager
def quantized_activations() -> Iterator[None]:
    """Have embedded engines quantize activations on a CPU too."""

    def pack(
        weight: Tensor, scales: Tensor, block: int, dtype: torch.dtype, **_: Any
    ) -> QuantizedActivations:
        return QuantizedActivations(dequantize(weight, scales, block), dtype)

    with patch.object(blocks, "pack_fp8", pack):
        yield


def logprobs(prompts: Sequence[list[int]], **options: Any) -> Tensor:
    """Return the log-probability of each token of the prompts but the first ones."""
    with segue.Engine(**options, embedded=True, log_level="warning") as engine:
        found = engine.generate(
            input_ids=list(prompts),
            sampling_params={"max_new_tokens": 1, "temperature": 0.0},
            return_logprob=True,
            logprob_start_len=0,
        )
    each = [entry[0] for one in found for entry in one["meta_info"]["input_token_logprobs"]]
    return torch.tensor([value for value in each if value is not None], dtype=torch.float64)


def compare(base: Tensor, other: Tensor) -> dict[str, float]:
    """Return by how many percent the perplexity rises, with its standard error, and the error per token."""
    differ = other - base
    return {
        "perplexity": math.exp(-other.mean()),
        "rise": 100 * (math.exp(-differ.mean()) - 1),
        "standard_error": 100 * differ.std().item() / len(differ) ** 0.5,
        "rms": differ.square().mean().sqrt().item(),
    }


def prompts_of(text: str, num_tokens: int, options: dict[str, Any]) -> list[list[int]]:
    """Return the first tokens of a text, cut into prompts."""
    from segue.config import EngineConfig
    from segue.launch.model_setup import find_model, load_tokenizer

    config = EngineConfig(**options)
    tokenizer = load_tokenizer(config, find_model(config))
    assert tokenizer is not None, "the model has no tokenizer"
    ids = tokenizer.encode(text)[:num_tokens]
    return [ids[start : start + PROMPT] for start in range(0, len(ids), PROMPT)]


def measure(prompts: Sequence[list[int]], **options: Any) -> dict[str, dict[str, float]]:
    """Return what `compare` finds for each engine in FP8."""
    base = logprobs(prompts, quantization="none", **options)
    found = {
        "weights": logprobs(prompts, quantization="fp8", **options),
        "KV cache": logprobs(prompts, quantization="none", kv_cache_dtype="fp8", **options),
        "weights and KV cache": logprobs(prompts, quantization="fp8", kv_cache_dtype="fp8", **options),
    }
    if options.get("device") == "cpu":
        with quantized_activations():
            found["weights and activations"] = logprobs(prompts, quantization="fp8", **options)
    return {"none": compare(base, base)} | {name: compare(base, each) for name, each in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(DOCS.glob("*.md")))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--bar", type=float, default=1.0)
    args = parser.parse_args()
    options = {"model": args.model, "device": args.device, "disable_prefix_cache": True}
    text = "\n".join(path.read_text() for path in args.text)
    prompts = prompts_of(text, args.tokens, options)
    found = measure(prompts, **options)
    report.show(
        f"{sum(map(len, prompts))} tokens on {args.device}",
        ("FP8", "perplexity", "rise", "error of log-probabilities (rms)"),
        [
            (
                name,
                f"{each['perplexity']:.3f}",
                f"{each['rise']:+.2f} ± {each['standard_error']:.2f} %",
                f"{each['rms']:.3f}",
            )
            for name, each in found.items()
        ],
    )
    print(f"saved {report.save(f'{args.device}_fp8_accuracy', {'tokens': args.tokens, 'engines': found})}")
    held = (found[name]["rise"] for name in ("weights", "KV cache", "weights and KV cache"))
    return 0 if max(held) <= args.bar else 1


if __name__ == "__main__":
    sys.exit(main())
