"""The sizes of a model's shards on the ranks of a tensor-parallel group."""

from dataclasses import dataclass

from segue.distributed.info import TPInfo
from segue.errors import TensorParallelError
from segue.models.config import ModelConfig
from segue.sizes import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The sizes of one rank's shard of the model. Starts are indices into the whole model."""

    tp: TPInfo
    num_heads: int
    head_start: int
    num_kv_heads: int  # at least one: with more ranks than KV heads, neighbouring ranks hold the same head
    kv_head_start: int
    intermediate_size: int
    expert_intermediate_size: int  # 0 without experts
    vocab_size: int  # vocabulary rows of this rank, padding included
    vocab_start: int


VOCAB_BLOCK = 128  # rows: sampling draws whole blocks of the vocabulary, so no block lies on two ranks


def shard_rows(vocab_size: int, tp_size: int) -> int:
    """Return the vocabulary rows of each rank, padding included: whole blocks, and equally many per rank."""
    if tp_size == 1:
        return vocab_size
    return ceil_div(vocab_size, tp_size * VOCAB_BLOCK) * VOCAB_BLOCK


def shard(config: ModelConfig, tp: TPInfo) -> Shard:
    """Return the sizes of the shard of rank `tp.rank` of `tp.size`.

    Raises:
        TensorParallelError: the heads or the intermediate size cannot be split into `tp.size` equal shards.
    """
    check_tp_size(config, tp.size)
    expert_size = config.moe.expert_intermediate_size if config.moe else 0
    rows = shard_rows(config.vocab_size, tp.size)
    heads = config.num_heads // tp.size
    return Shard(
        tp=tp,
        num_heads=heads,
        head_start=tp.rank * heads,
        num_kv_heads=max(1, config.num_kv_heads // tp.size),
        kv_head_start=tp.rank * config.num_kv_heads // tp.size,
        intermediate_size=config.intermediate_size // tp.size,
        expert_intermediate_size=expert_size // tp.size,
        vocab_size=rows,
        vocab_start=tp.rank * rows,
    )


def allowed_sizes(config: ModelConfig) -> list[int]:
    """Return all tensor-parallel sizes that split the model into equal shards, ascending."""
    return [size for size in range(1, config.num_heads + 1) if not _violations(config, size)]


def _violations(config: ModelConfig, size: int) -> list[str]:
    """Return the rules that a tensor-parallel size breaks for this model, one text per rule.

    The intermediate size of dense layers does not count if every layer has experts.
    """
    found = []
    if config.num_heads % size:
        found.append("num_attention_heads must be a multiple of the size")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        found.append("num_key_value_heads must be a multiple or a divisor of the size")
    sizes = [config.moe.expert_intermediate_size] if config.moe else []
    if not all(config.is_sparse(layer) for layer in range(config.num_layers)):
        sizes.insert(0, config.intermediate_size)
    found.extend(
        f"the intermediate size {value} must be a multiple of the size" for value in sizes if value % size
    )
    return found


def check_tp_size(config: ModelConfig, size: int) -> None:
    """Raise TensorParallelError if the heads or the intermediate size cannot be split into `size` shards."""
    violations = _violations(config, size)
    if violations:
        allowed = ", ".join(map(str, allowed_sizes(config)))
        raise TensorParallelError(
            f"tensor-parallel size {size} does not fit this model (num_attention_heads {config.num_heads}, "
            f"num_key_value_heads {config.num_kv_heads}): {'; '.join(violations)}. Sizes that fit: {allowed}",
            param="tp",
        )
