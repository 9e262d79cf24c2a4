"""Why the steps of an engine cannot be captured in CUDA graphs, as far as options and backends decide it."""

from __future__ import annotations

from segue.attention.registry import Selection
from segue.config import EngineConfig
from segue.layers.moe_backend import MoEEntry
from segue.models.config import ModelConfig


def why_unwanted(config: EngineConfig, device: str) -> str | None:
    """Return why CUDA graphs are not even tried on a type of device; None: they are."""
    if device == "cpu":
        return "a CPU has no CUDA graphs"
    return "--disable-cuda-graph says so" if config.disable_cuda_graph else None


def why_impossible(selection: Selection, model: ModelConfig, experts: MoEEntry) -> str | None:
    """Return why the steps of these backends cannot be captured; None: they can, if there is memory."""
    if not selection.graphs:
        return (
            f"attention backend {selection.name} cannot be captured in CUDA graphs; choose another one with "
            "--attention-backend"
        )
    if model.moe is not None and not experts.graph:
        return f"MoE backend {experts.name} cannot be captured in CUDA graphs"
    return None
