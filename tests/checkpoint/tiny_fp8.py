"""Writes tiny checkpoints in FP8, in the layouts that are published, and what their values are."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoint import tiny
from tests.models.reference import hf_config

BLOCK = 128
# Sizes that are no multiples of a block, except where two ranks cut columns.
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.05,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}


def _group(of_weights: str, **activations: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": of_weights, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, **activations}
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}


# Layout -> quantization_config, the suffix of scales, and whether there are scales of activations.
LAYOUTS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "blocks": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "weight_scale_inv",
        False,
    ),
    "rows": (
        {**COMPRESSED, "config_groups": _group("channel", strategy="token", dynamic=True)},
        "weight_scale",
        False,
    ),
    "tensors": (
        {**COMPRESSED, "config_groups": _group("tensor", strategy="tensor", dynamic=False)},
        "weight_scale",
        True,
    ),
    "static": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", True),
}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantized(layout: str, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a weight in FP8, its scales as the layout has them, and what the two mean, float32."""
    rows, columns = weight.shape
    size = {"blocks": (BLOCK, BLOCK), "rows": (1, columns)}.get(layout, (rows, columns))
    scales = torch.empty(-(-rows // size[0]), -(-columns // size[1]))
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    meant = torch.empty_like(weight, dtype=torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            box = (slice(i * size[0], (i + 1) * size[0]), slice(j * size[1], (j + 1) * size[1]))
            scales[i, j] = weight[box].abs().max() / 448
            values[box] = (weight[box] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
            meant[box] = values[box].float() * scales[i, j]
    return values, scales.view(1) if layout in ("tensors", "static") else scales, meant


def unstacked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gives each expert tensors of its own, as published checkpoints have them."""
    found = {}
    for name, tensor in state.items():
        if name.endswith(".experts.gate_up_proj") or name.endswith(".experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                names = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
                for projection, part in zip(names, matrix.chunk(len(names)), strict=True):
                    found[f"{name.rpartition('.')[0]}.{expert}.{projection}.weight"] = part.contiguous()
        else:
            found[name] = tensor
    return found


def stacked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undoes `unstacked`; also for scales, whose names say so."""
    found, experts = {}, dict[str, list[dict[str, Tensor]]]()
    for name, tensor in state.items():
        head, _, rest = name.partition(".experts.")
        if not rest:
            found[name] = tensor
            continue
        expert, projection, kind = rest.split(".")
        of_layer = experts.setdefault(head + ".experts." + kind.removeprefix("weight"), [])
        of_layer += [{} for _ in range(int(expert) + 1 - len(of_layer))]
        of_layer[int(expert)][projection] = tensor
    for name, parts in experts.items():
        head, _, suffix = name.rpartition(".")
        both = [torch.cat([each["gate_proj"], each["up_proj"]]) for each in parts]
        found[f"{head}.gate_up_proj{suffix}"] = torch.stack(both)
        found[f"{head}.down_proj{suffix}"] = torch.stack([each["down_proj"] for each in parts])
    return found


def write(directory: Path, layout: str, model: Any) -> dict[str, Tensor]:
    """Writes a model in a layout; returns the state dict with the values that this has, float32."""
    config, suffix, has_activations = LAYOUTS[layout]
    directory.mkdir(parents=True, exist_ok=True)
    whole = {**hf_config(model), "quantization_config": config, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(whole, default=str))
    tensors: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in unstacked(model.state_dict()).items():
        if not is_linear(name):
            tensors[name] = weight.bfloat16()
            meant[name] = tensors[name].float()
            continue
        values, scales, meant[name] = quantized(layout, weight)
        tensors[name] = values
        tensors[name.removesuffix("weight") + suffix] = scales
        if has_activations:
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor([0.02])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return meant


def model(kind: str = "llama", **options: Any) -> Any:
    experts = EXPERTS if kind == "qwen3-moe" else {}
    return tiny.make(kind, **{**SIZES, **experts, **options})


def two_models(kind: str, mean: float) -> list[Any]:
    """Makes two models with other values everywhere."""
    both = [model(kind) for _ in range(2)]
    torch.manual_seed(7)
    for parameter in both[1].parameters():
        parameter.data.normal_(mean=mean, std=0.2)
    return both


def write_each(models: Sequence[Any], root: Path, layouts: Iterable[str]) -> dict[str, list[Path]]:
    """Writes the models in each layout, and in float32; returns their paths by layout."""
    found = {"float32": [tiny.save(each, root / f"float32-{i}") for i, each in enumerate(models)]}
    for layout in layouts:
        found[layout] = [root / f"{layout}-{i}" for i in range(len(models))]
        for path, each in zip(found[layout], models, strict=True):
            write(path, layout, each)
    return found
