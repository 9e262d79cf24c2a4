"""Maps the name of an architecture to its model."""

from collections.abc import Callable

import torch

from segue.distributed.collectives import Collectives
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
    """Build this rank's shard of the model, with parameters on the `meta` device in `dtype`.

    With `deterministic` the bits of a token's results do not depend on the other tokens of a step.

    Raises:
        UnsupportedModelError: there is no model for `config.architecture`.
        TensorParallelError: the model cannot be split over so many ranks.
    """
    if config.architecture not in _MODELS:
        raise UnsupportedModelError(
            f"model architecture {config.architecture!r} is not supported; supported: {', '.join(_MODELS)}"
        )
    with torch.device("meta"):
        model = _MODELS[config.architecture](config, collectives or Collectives(), moe_backend, deterministic)
        return model.to(dtype)
