"""Tiny random transformers models, our models with the same weights, and a paged batch that runs them."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from segue.attention.base import AttentionShape
from segue.attention.context import Context
from segue.attention.cpu import CPUAttention
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool, KVShape
from segue.memory import backing
from segue.models.config import ModelConfig
from segue.models.decoder import Decoder, build_model
from segue.models.sharding import Shard

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}


def hf_model(architecture: str, **options: Any) -> nn.Module:
    """Return a float32 model with random weights, biases and norms."""
    torch.manual_seed(1)
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    model = getattr(transformers, architecture)(config_class(**{**SIZES, **options})).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
    return model


def hf_config(model: nn.Module) -> dict[str, Any]:
    """Return the content of the model's `config.json`."""
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def our_model(model: nn.Module, collectives: Any = None, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return our model with the same weights, sharded for the rank of `collectives`."""
    config = ModelConfig.from_hf(hf_config(model))
    ours = build_model(config, dtype=dtype, collectives=collectives)
    weights = convert(model.state_dict(), config, ours.shard)
    expected = dict(ours.named_parameters())
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.shape == expected[name].shape, name
        owner, _, leaf = name.rpartition(".")
        setattr(ours.get_submodule(owner), leaf, nn.Parameter(weight.to(dtype), requires_grad=False))
    ours.build_derived()
    return ours


def convert(state: dict[str, Tensor], config: ModelConfig, sizes: Shard) -> dict[str, Tensor]:
    """Shard a transformers state dict by hand into our parameters of one rank."""
    size, rank = sizes.tp.size, sizes.tp.rank
    d = config.head_dim

    def rows(name: str) -> Tensor:
        return state[name].chunk(size, 0)[rank]

    def vocab(name: str) -> Tensor:
        whole = state[name]
        padding = whole.new_zeros(sizes.vocab_size * size - whole.shape[0], whole.shape[1])
        return torch.cat([whole, padding]).chunk(size, 0)[rank]

    def kv(name: str) -> Tensor:
        return state[name][sizes.kv_head_start * d : (sizes.kv_head_start + sizes.num_kv_heads) * d]

    out = {"embed.weight": vocab("model.embed_tokens.weight"), "norm.weight": state["model.norm.weight"]}
    if not config.tie_embeddings:
        out["lm_head.weight"] = vocab("lm_head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        attn = theirs + "self_attn."
        out[ours + "input_norm.weight"] = state[theirs + "input_layernorm.weight"]
        out[ours + "post_norm.weight"] = state[theirs + "post_attention_layernorm.weight"]
        for leaf in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = [rows(attn + f"q_proj.{leaf}"), kv(attn + f"k_proj.{leaf}"), kv(attn + f"v_proj.{leaf}")]
            out[ours + f"attn.qkv.{leaf}"] = torch.cat(parts)
        out[ours + "attn.o.weight"] = state[attn + "o_proj.weight"].chunk(size, 1)[rank]
        if config.o_bias:
            out[ours + "attn.o.bias"] = state[attn + "o_proj.bias"]
        if config.qk_norm:
            out[ours + "attn.q_norm.weight"] = state[attn + "q_norm.weight"]
            out[ours + "attn.k_norm.weight"] = state[attn + "k_norm.weight"]
        mlp = theirs + "mlp."
        if config.is_sparse(i):
            gate, up = state[mlp + "experts.gate_up_proj"].chunk(2, 1)
            out[ours + "mlp.router.weight"] = state[mlp + "gate.weight"]
            out[ours + "mlp.experts.gate_up"] = torch.cat(
                [gate.chunk(size, 1)[rank], up.chunk(size, 1)[rank]], 1
            )
            out[ours + "mlp.experts.down"] = state[mlp + "experts.down_proj"].chunk(size, 2)[rank]
            continue
        for leaf in ("weight", "bias") if config.mlp_bias else ("weight",):
            out[ours + f"mlp.gate_up.{leaf}"] = torch.cat(
                [rows(mlp + f"gate_proj.{leaf}"), rows(mlp + f"up_proj.{leaf}")]
            )
        out[ours + "mlp.down.weight"] = state[mlp + "down_proj.weight"].chunk(size, 1)[rank]
        if config.mlp_bias:
            out[ours + "mlp.down.bias"] = state[mlp + "down_proj.bias"]
    return {name: weight.contiguous() for name, weight in out.items()}


@dataclass
class Batch:
    """Runs ragged steps of several sequences on a model, with a paged KV pool that is filled with NaN."""

    model: Decoder
    page_size: int
    num_sequences: int
    max_len: int = 64
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        config, sizes = self.model.config, self.model.shard
        dtype = self.model.norm.weight.dtype
        pages_each = -(-self.max_len // self.page_size)
        kv_shape = KVShape(
            num_pages=pages_each * self.num_sequences,
            num_layers=config.num_layers,
            page_size=self.page_size,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )
        self.pool = KVPool(kv_shape, backing.zeros(kv_shape.num_bytes, torch.device("cpu")))
        self.pool.data.fill_(float("nan"))
        self.table = PageTable(
            max_running=self.num_sequences,
            max_seq_len=self.max_len,
            page_size=self.page_size,
            scratch_page=self.pool.scratch_page,
            device="cpu",
        )
        pages = torch.randperm(self.pool.num_pages, generator=torch.Generator().manual_seed(3)).tolist()
        for slot in range(self.num_sequences):
            self.table.assign(slot, 0, pages[slot * pages_each : (slot + 1) * pages_each])
        shape = AttentionShape(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        self.backend = CPUAttention(shape, self.pool)
        self.lengths = [0] * self.num_sequences

    def step(self, tokens: dict[int, list[int]], logits_indices: list[int] | None = None) -> Tensor | None:
        """Append tokens to slots, decode slots first.

        Returns the logits of every token, or those of the tokens `logits_indices`.
        """
        q_lens = [len(ids) for ids in tokens.values()]
        for slot, ids in tokens.items():
            self.lengths[slot] += len(ids)
        num_decode = next((i for i, q in enumerate(q_lens) if q != 1), len(q_lens))
        ctx = Context.build(
            input_ids=torch.tensor([i for ids in tokens.values() for i in ids]),
            slots=list(tokens),
            q_lens=q_lens,
            kv_lens=[self.lengths[slot] for slot in tokens],
            num_decode=num_decode,
            page_table=self.table,
            kv=self.pool,
            backend=self.backend,
            logits_indices=None if logits_indices is None else torch.tensor(logits_indices),
        )
        with torch.inference_mode():
            return self.model.logits(self.model(ctx))
