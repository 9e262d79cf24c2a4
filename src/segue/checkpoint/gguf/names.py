"""Maps the tensors of a GGUF file to the tensors of a Hugging Face checkpoint."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from segue.checkpoint.gguf.file import GGUFFile, GGUFTensor
from segue.errors import ModelFileError

_IGNORED = frozenset({"rope_freqs.weight"})  # the RoPE scaling; the converted config has it

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rows of a GGUF tensor that make up one checkpoint tensor, perhaps in another order."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]
    tensor: GGUFTensor
    first_row: int = 0
    # For llama, GGUF stores the q and k rows of a head as the pairs that RoPE rotates together, (0, D/2),
    # (1, D/2+1), …; a checkpoint has the first rows of all pairs, then the second rows. 0: the same order.
    head_dim: int = 0


def sources(file: GGUFFile, config: Mapping[str, Any]) -> list[Source]:
    """List all checkpoint tensors in `file`, in the order of its bytes. `config` is its `config.json`.

    Raises:
        ModelFileError: a tensor has no counterpart in a checkpoint of this architecture.
    """
    found: list[Source] = []
    for tensor in file.tensors.values():
        if tensor.name not in _IGNORED:
            found.extend(_sources_of(file, tensor, config))
    return found


def _sources_of(file: GGUFFile, tensor: GGUFTensor, config: Mapping[str, Any]) -> Iterable[Source]:
    stem, _, kind = tensor.name.rpartition(".")
    if stem in _TOP:
        yield Source(name=f"{_TOP[stem]}.{kind}", shape=tensor.shape, tensor=tensor)
        return
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    layer, leaf = match.groups() if match else ("", "")
    if leaf in _LAYER:
        is_paired = config["model_type"] == "llama" and leaf in ("attn_q", "attn_k") and kind == "weight"
        yield Source(
            name=f"model.layers.{layer}.{_LAYER[leaf]}.{kind}",
            shape=tensor.shape,
            tensor=tensor,
            head_dim=config["head_dim"] if is_paired else 0,
        )
    elif leaf in _EXPERTS and len(tensor.shape) == 3:
        experts, rows, columns = tensor.shape
        for expert in range(experts):
            yield Source(
                name=f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS[leaf]}.{kind}",
                shape=(rows, columns),
                tensor=tensor,
                first_row=expert * rows,
            )
    else:
        raise ModelFileError(
            f"model file {file.path}: tensor {tensor.name!r} is not part of this architecture; the model "
            "needs more than Segue implements"
        )
