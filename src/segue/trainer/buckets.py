"""The tensors to send and their order: in buckets, under their checkpoint names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from segue.errors import ConfigError
from segue.messages.weight_operations import Bucket

Weights = nn.Module | Mapping[str, Tensor]


@dataclass(slots=True)
class TensorBucket:
    """Describes the tensors that are sent together."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # by name, on the meta device
    num_bytes: int = 0

    @property
    def announced(self) -> Bucket:
        """The bucket as an engine is told of it."""
        return Bucket(
            names=list(self.tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()],
            shapes=[list(tensor.shape) for tensor in self.tensors.values()],
        )


def plan(weights: Weights, max_bytes: int) -> list[TensorBucket]:
    """Split all tensors into buckets of at most ``max_bytes``; a larger tensor has its own bucket.

    Raises:
        ConfigError: a tensor is sharded over processes.
    """
    buckets: list[TensorBucket] = []
    for name, tensor in tensors(weights, meta=True):
        if hasattr(tensor, "full_tensor"):
            raise ConfigError(
                f"{name!r} is sharded over ranks; gather it on all ranks, and send a mapping of full tensors"
            )
        if not buckets or buckets[-1].num_bytes + tensor.nbytes > max_bytes:
            buckets.append(TensorBucket())
        buckets[-1].tensors[name] = tensor
        buckets[-1].num_bytes += tensor.nbytes
    return buckets


def tensors(weights: Weights, *, meta: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors in a fixed order, tied ones once; with ``meta``, tensors on the meta device.

    A mapping's names are kept. A module's parameters get the names of its saved checkpoint, which is what an
    engine knows. transformers may save a tensor under another name than the module's, or split it: then its
    conversion copies tensors, one parameter at a time, to keep the copies small.
    """
    if not isinstance(weights, nn.Module):
        for name, tensor in _distinct(weights.items()):
            yield name, tensor.detach().to("meta") if meta else tensor.detach()
        return
    model = _unwrapped(weights)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shapes = {name: parameter.to("meta") for name, parameter in parameters.items()}
    # Found on the meta device, where nothing is copied.
    is_renamed = _as_saved(model, shapes).keys() != shapes.keys()
    for name, parameter in (shapes if meta else parameters).items():
        yield from (_as_saved(model, {name: parameter}) if is_renamed else {name: parameter}).items()


def device_of(weights: Weights) -> torch.device:
    """Returns the device of the first tensor; the CPU if there is none."""
    found = weights.parameters() if isinstance(weights, nn.Module) else iter(weights.values())
    return next((tensor.device for tensor in found), torch.device("cpu"))


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the tensor's bytes in row-major order, as ``uint8[n]``; a view if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside the wrappers of ``torch.compile`` and data parallelism."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _as_saved(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns parameters under the names, and in the shapes, in which transformers would save them."""
    transformers = sys.modules.get("transformers")  # if it is not imported, the model is none of its models
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, state))


def _distinct(items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor once: of several names for the same memory and shape, the first."""
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in items:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in seen:
            yield name, tensor
        seen.add(place)
