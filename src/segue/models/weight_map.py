"""The weight map: from tensor names of a checkpoint to slices of the fused parameters of one rank.

A fused parameter holds several tensors of the checkpoint, such as the projections of query, key and value.
Experts occur in two forms: each has tensors of its own, or one tensor stacks all experts of a layer.

The map is plain data. To load a checkpoint, to apply a weight update and to check that either is complete are
loops over it: `for part in weight_map.slices[name]: parameter[part.destination].copy_(tensor[part.source])`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from segue.distributed.info import TPInfo
from segue.errors import TensorParallelError
from segue.memory.arena import TensorSpec
from segue.models.config import ModelConfig
from segue.models.sharding import Shard, shard
from segue.sizes import ceil_div

Box = tuple[slice, ...]  # one slice per dimension, with explicit start and stop
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a checkpoint tensor, and the box of a parameter that it fills.

    The destination may have one more dimension than the source, a leading 1.
    """

    parameter: str
    destination: Box
    source: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The float32 scales of a parameter in FP8, which are a parameter too, with as many rows."""

    name: str
    shape: Shape
    block: int  # consecutive weights of a row that have one scale; 0: all of the row


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The elements of the parameters that a set of checkpoint names fails to write exactly once."""

    missing: dict[str, int]  # parameter -> number of elements that are not written
    repeated: dict[str, int]  # parameter -> number of elements that are written more than once


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """All names that a checkpoint of one architecture may use, and the slices of one rank."""

    # Parameter of this rank -> its shape.
    parameters: dict[str, Shape] = field(default_factory=dict)
    # Checkpoint name -> shape of the whole tensor.
    shapes: dict[str, Shape] = field(default_factory=dict)
    # Checkpoint name -> slices of this rank, perhaps none.
    slices: dict[str, tuple[Slice, ...]] = field(default_factory=dict)
    # Parameter -> vocabulary rows without a token; they are zero.
    padding: dict[str, Box] = field(default_factory=dict)
    # Checkpoint name of a tied tensor, which may be absent -> what it is tied to.
    aliases: dict[str, str] = field(default_factory=dict)
    # Name of a tensor with all experts of a layer -> the names of each expert's own tensors, its other form.
    stacked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Parameter in FP8 -> its scales, which are not among `parameters`: writing the parameter makes them.
    scales: dict[str, Scales] = field(default_factory=dict)

    def specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Return all parameters, scales included, of an engine whose weights are in `dtype` or in FP8."""
        found = [
            TensorSpec(name=name, shape=shape, dtype=torch.float8_e4m3fn if name in self.scales else dtype)
            for name, shape in self.parameters.items()
        ]
        return found + [
            TensorSpec(name=each.name, shape=each.shape, dtype=torch.float32) for each in self.scales.values()
        ]

    def is_fp8(self, name: str) -> bool:
        """Whether the checkpoint tensor `name` fills parameters in FP8."""
        return any(part.parameter in self.scales for part in self.slices.get(name, ()))

    def weight_of_scale(self, name: str) -> str | None:
        """Return the tensor in FP8 whose scales a checkpoint calls `name`; None: there is none."""
        if not self.scales:
            return None
        weight, _, kind = name.rpartition("_")
        weight = weight.removesuffix("_scale") if kind == "inv" else weight if kind == "scale" else ""
        return weight if self.is_fp8(weight) else None

    @property
    def names(self) -> list[str]:
        """The names of a full checkpoint, every tensor once, without the names of stacked tensors."""
        stacked = self.stacked.keys()
        return [name for name in self.slices if name not in stacked]

    def missing(self, names: Collection[str]) -> list[str]:
        """Return the names of `self.names` that `names` contains neither directly nor stacked."""
        given = set(names)
        for name in given & self.stacked.keys():
            given.update(self.stacked[name])
        return [name for name in self.names if name not in given]

    def coverage(self, names: Iterable[str] | None = None) -> Coverage:
        """Count the elements that `names` (by default all of `self.names`) do not write exactly once.

        GuidedVocabulary padding counts as written, because it is zeroed and not loaded.
        """
        boxes: dict[str, list[Box]] = {parameter: [] for parameter in self.parameters}
        for parameter, box in self.padding.items():
            boxes[parameter].append(box)
        for name in self.names if names is None else names:
            for part in self.slices[name]:
                boxes[part.parameter].append(part.destination)
        counted = {name: _count_coverage(shape, boxes[name]) for name, shape in self.parameters.items()}
        return Coverage(
            missing={name: missing for name, (missing, _) in counted.items() if missing},
            repeated={name: repeated for name, (_, repeated) in counted.items() if repeated},
        )


def box_of(parameter: Tensor, part: Slice) -> Tensor:
    """Return the part of `parameter` that a tensor writes: one expert's matrix loses its leading 1."""
    view = parameter[part.destination]
    return view[0] if view.dim() > len(part.source) else view


def build(config: ModelConfig, tp: TPInfo) -> WeightMap:
    """Build the weight map of rank `tp.rank` of `tp.size`.

    Raises:
        TensorParallelError: the model cannot be split over `tp.size` ranks.
    """
    weight_map = WeightMap()
    _WeightMapBuilder(weight_map, config, shard(config, tp)).add_model()
    if config.fp8 is not None:
        _add_scales(weight_map, config.fp8.block)
    return weight_map


def _add_scales(weight_map: WeightMap, block: int) -> None:
    """Add the scales of the decoder's linear layers and experts: not of embeddings, head and routers."""
    for name, shape in weight_map.parameters.items():
        if name.startswith("layers.") and len(shape) > 1 and not name.endswith(".router.weight"):
            weight_map.scales[name] = Scales(
                name=f"{name.removesuffix('weight')}scale" if len(shape) == 2 else f"{name}_scale",
                shape=(*shape[:-1], ceil_div(shape[-1], block) if block else 1),
                block=block,
            )
    for name, parts in weight_map.slices.items():
        for part in parts:
            columns = part.source[-1]
            if part.parameter not in weight_map.scales or not block:
                continue
            if columns.start % block or (
                columns.stop % block and columns.stop != weight_map.shapes[name][-1]
            ):
                raise TensorParallelError(
                    f"the tensor-parallel size gives this rank columns {columns.start} to {columns.stop} of "
                    f"{name!r}; they must begin and end at multiples of {block}, because blocks of as many "
                    "columns have a scale of their own: use another --tp",
                    param="tp",
                )


class _WeightMapBuilder:
    """Adds the entries of a weight map; `theirs` is a name in the checkpoint, `ours` one in the model.

    Each method adds the parameters of one part of the model, and for each the slices that fill it. Of a
    dimension that is split over the ranks, this rank has `width` of `total` rows or columns, from `first` on.
    """

    def __init__(self, weight_map: WeightMap, config: ModelConfig, sizes: Shard) -> None:
        self.map, self.config, self.sizes = weight_map, config, sizes

    def add_model(self) -> None:
        """Add all entries. If the embeddings are tied, the head is only an alias of them."""
        self._vocabulary("model.embed_tokens.weight", "embed.weight")
        for layer in range(self.config.num_layers):
            self._layer(layer, f"model.layers.{layer}", f"layers.{layer}")
        self._whole("model.norm.weight", "norm.weight", (self.config.hidden_size,))
        if self.config.tie_embeddings:
            self.map.aliases["lm_head.weight"] = "model.embed_tokens.weight"
        else:
            self._vocabulary("lm_head.weight", "lm_head.weight")

    def _layer(self, layer: int, theirs: str, ours: str) -> None:
        """Add one decoder layer, with an MLP or experts."""
        hidden = self.config.hidden_size
        self._whole(f"{theirs}.input_layernorm.weight", f"{ours}.input_norm.weight", (hidden,))
        self._attention(f"{theirs}.self_attn", f"{ours}.attn")
        self._whole(f"{theirs}.post_attention_layernorm.weight", f"{ours}.post_norm.weight", (hidden,))
        if self.config.is_sparse(layer):
            self._experts(f"{theirs}.mlp", f"{ours}.mlp")
        else:
            self._mlp(f"{theirs}.mlp", f"{ours}.mlp")

    def _attention(self, theirs: str, ours: str) -> None:
        """Add the attention of one layer: the fused query, key and value rows, norms, and output columns."""
        config, sizes, size = self.config, self.sizes, self.config.head_dim
        first, width, total = sizes.head_start * size, sizes.num_heads * size, config.num_heads * size
        kv = (sizes.kv_head_start * size, sizes.num_kv_heads * size, config.num_kv_heads * size)
        rows = {"q_proj": (first, width, total), "k_proj": kv, "v_proj": kv}
        self._fused_rows(theirs, f"{ours}.qkv", rows, config.hidden_size, bias=config.qkv_bias)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                self._whole(f"{theirs}.{name}.weight", f"{ours}.{name}.weight", (size,))
        shape = (config.hidden_size, total)
        self._columns(f"{theirs}.o_proj", f"{ours}.o", first, width, shape, bias=config.o_bias)

    def _mlp(self, theirs: str, ours: str) -> None:
        """Add a dense MLP: the fused rows of gate and up, and the columns of down."""
        config, width = self.config, self.sizes.intermediate_size
        first = self.sizes.tp.rank * width
        rows = {name: (first, width, config.intermediate_size) for name in ("gate_proj", "up_proj")}
        self._fused_rows(theirs, f"{ours}.gate_up", rows, config.hidden_size, bias=config.mlp_bias)
        shape = (config.hidden_size, config.intermediate_size)
        self._columns(f"{theirs}.down_proj", f"{ours}.down", first, width, shape, bias=config.mlp_bias)

    def _experts(self, theirs: str, ours: str) -> None:
        """Add the router and the experts of one layer, with both forms of names: per expert, and stacked.

        Each expert is split over the ranks like an MLP. The model has all experts of a layer in two
        parameters, `gate_up` and `down`, whose first dimension is the expert.
        """
        moe, hidden, width = self.config.moe, self.config.hidden_size, self.sizes.expert_intermediate_size
        assert moe is not None
        count, total = moe.num_experts, moe.expert_intermediate_size
        first = self.sizes.tp.rank * width
        # `mine`: this rank's part of the checkpoint's dimension; `own`: the same part in the parameter.
        all_rows, mine, own = _span(0, hidden), _span(first, width), _span(0, width)
        gate_up, down = f"{ours}.experts.gate_up", f"{ours}.experts.down"
        self._whole(f"{theirs}.gate.weight", f"{ours}.router.weight", (count, hidden))
        self.map.parameters[gate_up] = (count, 2 * width, hidden)
        self.map.parameters[down] = (count, hidden, width)
        halves = {"gate_proj": _span(0, width), "up_proj": _span(width, width)}
        names = [f"{theirs}.experts.{expert}" for expert in range(count)]
        for expert, name in enumerate(names):
            one = _span(expert, 1)
            for projection, half in halves.items():
                part = Slice(gate_up, (one, half, all_rows), (mine, all_rows))
                self._add(f"{name}.{projection}.weight", (total, hidden), part)
            part = Slice(down, (one, all_rows, own), (all_rows, mine))
            self._add(f"{name}.down_proj.weight", (hidden, total), part)
        # transformers 5 stacks the experts of a layer in two tensors, and its state dicts have their names.
        every, stacked = _span(0, count), f"{theirs}.experts"
        parts = (
            Slice(gate_up, (every, half, all_rows), (every, _span(start + first, width), all_rows))
            for half, start in zip(halves.values(), (0, total), strict=True)
        )
        self._add(f"{stacked}.gate_up_proj", (count, 2 * total, hidden), *parts)
        part = Slice(down, (every, all_rows, own), (every, all_rows, mine))
        self._add(f"{stacked}.down_proj", (count, hidden, total), part)
        self.map.stacked[f"{stacked}.gate_up_proj"] = tuple(f"{n}.{p}.weight" for n in names for p in halves)
        self.map.stacked[f"{stacked}.down_proj"] = tuple(f"{name}.down_proj.weight" for name in names)

    def _vocabulary(self, theirs: str, ours: str) -> None:
        """Add this rank's rows of the embeddings or the head, `real` ones and then padding up to its size."""
        config, sizes = self.config, self.sizes
        self.map.parameters[ours] = (sizes.vocab_size, config.hidden_size)
        real = min(max(config.vocab_size - sizes.vocab_start, 0), sizes.vocab_size)
        columns = _span(0, config.hidden_size)
        part = Slice(ours, (_span(0, real), columns), (_span(sizes.vocab_start, real), columns))
        self._add(theirs, (config.vocab_size, config.hidden_size), *([part] if real else []))
        if real < sizes.vocab_size:
            self.map.padding[ours] = (_span(real, sizes.vocab_size - real), columns)

    def _fused_rows(
        self, theirs: str, ours: str, rows: Mapping[str, tuple[int, int, int]], columns: int, *, bias: bool
    ) -> None:
        """Add the weights, and with `bias` the biases, of projections whose rows one parameter holds.

        `rows` maps each projection to the first row of this rank, its number of rows, and the total.
        """
        start = 0
        for name, (first, width, total) in rows.items():
            to, source = _span(start, width), _span(first, width)
            weight = Slice(f"{ours}.weight", (to, _span(0, columns)), (source, _span(0, columns)))
            self._add(f"{theirs}.{name}.weight", (total, columns), weight)
            if bias:
                self._add(f"{theirs}.{name}.bias", (total,), Slice(f"{ours}.bias", (to,), (source,)))
            start += width
        self.map.parameters[f"{ours}.weight"] = (start, columns)
        if bias:
            self.map.parameters[f"{ours}.bias"] = (start,)

    def _columns(self, theirs: str, ours: str, first: int, width: int, shape: Shape, *, bias: bool) -> None:
        """Add this rank's columns of a row-parallel layer; the bias is whole, and rank 0 adds it."""
        self.map.parameters[f"{ours}.weight"] = (shape[0], width)
        rows = _span(0, shape[0])
        weight = Slice(f"{ours}.weight", (rows, _span(0, width)), (rows, _span(first, width)))
        self._add(f"{theirs}.weight", shape, weight)
        if bias:
            self._whole(f"{theirs}.bias", f"{ours}.bias", (shape[0],))

    def _whole(self, theirs: str, ours: str, shape: Shape) -> None:
        """Add a tensor that every rank holds whole, such as the weight of a norm."""
        box = tuple(_span(0, size) for size in shape)
        self.map.parameters[ours] = shape
        self._add(theirs, shape, Slice(ours, box, box))

    def _add(self, name: str, shape: Shape, *parts: Slice) -> None:
        self.map.shapes[name] = shape
        self.map.slices[name] = parts


def _span(start: int, size: int) -> slice:
    return slice(start, start + size)


def _count_coverage(shape: Shape, boxes: list[Box]) -> tuple[int, int]:
    """Return the number of elements of `shape` in no box, and the number in more than one box.

    The edges of the boxes split the tensor into cells, each of which is entirely inside or outside each box.
    """
    edges = [
        sorted({0, size, *(e for box in boxes for e in (box[dim].start, box[dim].stop))})
        for dim, size in enumerate(shape)
    ]
    cells = np.zeros([len(edge) - 1 for edge in edges], dtype=np.int32)
    # Per dimension: an edge -> the index of the first cell behind it.
    index = [{edge: cell for cell, edge in enumerate(line)} for line in edges]
    for box in boxes:
        cells[
            tuple(slice(cells_at[s.start], cells_at[s.stop]) for cells_at, s in zip(index, box, strict=True))
        ] += 1
    volume = np.ones_like(cells, dtype=np.int64)
    for dim, line in enumerate(edges):
        volume *= np.diff(line).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    assert volume.sum() == prod(shape), f"a box reaches beyond {shape}"
    return int(volume[cells == 0].sum()), int(volume[cells > 1].sum())
