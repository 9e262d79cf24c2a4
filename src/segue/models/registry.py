"""From an architecture's name to its model."""

from collections.abc import Callable

import torch

from segue.distributed.collectives import Collectives, SingleRank
from segue.errors import UnsupportedModelError
from segue.layers.moe_backend import MoEBackend, run_by_expert
from segue.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from segue.models.decoder import Decoder

ModelFactory = Callable[[ModelConfig, Collectives, MoEBackend, bool], Decoder]

_MODELS: dict[str, ModelFactory] = dict.fromkeys(SUPPORTED_ARCHITECTURES, Decoder)


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    collectives: Collectives | None = None,
    moe_backend: MoEBackend = run_by_expert,
    deterministic: bool = False,
) -> Decoder:
    """This rank's share of the model, its parameters on the `meta` device in `dtype`.

    With `deterministic` a token's results have the same bits whatever else is in a step.

    Raises:
        UnsupportedModelError: no model for `config.architecture`.
        TensorParallelError: the model cannot be cut into so many parts.
    """
    if config.architecture not in _MODELS:
        raise UnsupportedModelError(
            f"model architecture {config.architecture!r} is not supported; supported: {', '.join(_MODELS)}"
        )
    with torch.device("meta"):
        model = _MODELS[config.architecture](config, collectives or SingleRank(), moe_backend, deterministic)
        return model.to(dtype)
