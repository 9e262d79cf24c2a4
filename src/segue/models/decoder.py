"""The decoder-only transformer: Llama, Mistral, Qwen2, Qwen3, SmolLM and Qwen3-MoE, by config."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.attention.base import Context, PagedBackend
from segue.distributed.collectives import Collectives
from segue.kernels.activations import Activations, TokenQKV
from segue.kernels.batch_invariant import Gemm
from segue.kernels.cpu import ops as cpu
from segue.kernels.fp8 import FP8, ExpertWeights, FP8Experts
from segue.kernels.ops import Derived, embed, gate_up_silu, rms_norm, rotate, route
from segue.layers.blocks import Layer, Linear, RMSNorm, RowParallelLinear
from segue.layers.moe_backend import MoEBackend, run_by_expert
from segue.models.config import ModelConfig, MoEConfig
from segue.models.rope import Rotary, inverse_frequencies
from segue.models.sharding import Shard, shard
from segue.sizes import ceil_div

Angles = tuple[Tensor, Tensor]
"""The cosines and sines of RoPE, computed once per step for all layers; see `models.rope.Rotary.angles`."""


class Attention(Layer):
    """Projections, optional QK-norm, RoPE and attention over the paged cache."""

    def __init__(self, layer: int, config: ModelConfig, sizes: Shard, collectives: Collectives) -> None:
        """Make this rank's share; `layer` is the index into the KV pool."""
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = sizes.num_heads, sizes.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        width = self.num_heads * self.head_dim
        size = width + 2 * self.num_kv_heads * self.head_dim
        self.qkv = Linear(config.hidden_size, size, bias=config.qkv_bias, may_split=True)
        self.o = RowParallelLinear(width, config.hidden_size, collectives=collectives, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, self.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, self.eps) if config.qk_norm else None
        self.qk_weight: Tensor | None = None  # see `Decoder.derive_qk_weights`

    def forward(
        self, x: Activations, angles: Angles, ctx: Context, logits_indices: Tensor | None = None
    ) -> Tensor:
        """`[T, hidden] -> [T, hidden]`, or `[L, hidden]` of the tokens `logits_indices` (int `[L]`).

        The result is this rank's summand, which `RMSNorm` sums over the ranks.
        """
        attended = self._attend(self.qkv(x), angles, ctx).flatten(1)
        output: Tensor = self.o(
            attended if logits_indices is None else attended.index_select(0, logits_indices)
        )
        return output

    def _attend(self, qkv: Tensor, angles: Angles, ctx: Context) -> Tensor:
        """Returns the output of attention, `[T, num_heads, head_dim]`."""
        backend, is_token = ctx.backend, qkv.dim() == 2 and len(qkv) == ctx.num_decode == 1
        # A forward graph of one token has room for a decode row, but the token may be of a prompt.
        if isinstance(backend, PagedBackend) and is_token and not ctx.has_prefill:
            token = TokenQKV(qkv, self.qk_weight, self.eps, *angles)
            attended = backend.attend_token(token, self.layer, ctx)
            if attended is not None:
                return attended
        norm_rope_store = self._norm_rope_store_cuda if qkv.is_cuda else self._norm_rope_store
        query, key, value = norm_rope_store(qkv, angles, ctx)
        return ctx.backend.forward(query, key, value, self.layer, ctx)

    def _norm_rope_store(self, qkv: Tensor, angles: Angles, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Apply QK-norm and RoPE, and store this step's keys and values in the KV pool; for a CPU.

        `qkv` is `[T, (num_heads + 2 * num_kv_heads) * head_dim]`. Returns query, key and value, each
        `[T, heads, head_dim]`, keys and values as the pool has them.
        """
        heads = self.num_heads + self.num_kv_heads
        assert self.q_norm is None or self.qk_weight is not None, "build_derived comes first"
        if cpu.usable(qkv) and self.head_dim % 32 == 0 and not ctx.kv.is_fp8:
            cpu.norm_rope_store(
                qkv,
                self.qk_weight,
                self.eps,
                *angles,
                ctx.slot_mapping,
                ctx.kv.key_rows[self.layer],
                ctx.kv.value_rows[self.layer],
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
            )
            qkv = qkv.view(qkv.shape[0], -1, self.head_dim)
            return qkv[:, : self.num_heads], qkv[:, self.num_heads : heads], qkv[:, heads:]
        qkv = qkv.view(qkv.shape[0], -1, self.head_dim)
        qk = qkv[:, :heads]
        if self.qk_weight is not None:
            qk = rms_norm(qk, self.qk_weight, self.eps)
        qk = rotate(qk, *angles)
        query, key, value = qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, heads:]
        return query, *ctx.kv.write(self.layer, ctx.slot_mapping, key, value)

    def _norm_rope_store_cuda(self, qkv: Tensor, angles: Angles, ctx: Context) -> tuple[Tensor, None, None]:
        """As `_norm_rope_store`, in one kernel. Backends on CUDA read keys and values from the pool alone."""
        from segue.kernels.triton.norm import qk_norm_rope_store

        query = qk_norm_rope_store(
            qkv,
            self.qk_weight,
            self.eps,
            *angles,
            ctx.positions,
            ctx.slot_mapping,
            ctx.kv.key_rows[self.layer],
            ctx.kv.value_rows[self.layer],
            scales=ctx.kv.scales[self.layer] if ctx.kv.is_fp8 else None,
            dtype=ctx.kv.dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        return query, None, None


class MLP(Layer):
    """`down(silu(gate(x)) * up(x))`, with gate and up in one GEMM."""

    def __init__(self, config: ModelConfig, sizes: Shard, collectives: Collectives) -> None:
        """Make this rank's share."""
        super().__init__()
        hidden, own, bias = config.hidden_size, sizes.intermediate_size, config.mlp_bias
        self.gate_up = Linear(hidden, 2 * own, bias=bias)
        self.down = RowParallelLinear(own, hidden, collectives=collectives, bias=bias)

    def forward(self, x: Activations) -> Tensor:
        """`[T, hidden] -> [T, hidden]`; this rank's summand, which `RMSNorm` sums over the ranks."""
        own, block = self.gate_up, self.down.fp8_block(len(x))
        output: Tensor = self.down(gate_up_silu(x, own.weight, own.bias, own.packed, fp8_block=block))
        return output


class MoE(Layer):
    """Sums the outputs of each token's most probable experts, weighted by the router's probabilities.

    Each expert is sharded over the ranks like an MLP. CPUs multiply by the values of experts in FP8, which
    `packed` has by the name of the parameter.
    """

    def __init__(self, moe: MoEConfig, hidden_size: int, sizes: Shard, backend: MoEBackend) -> None:
        """Make this rank's share."""
        super().__init__()
        self.moe = moe
        self.backend = backend
        self.router = Linear(hidden_size, moe.num_experts)
        own = sizes.expert_intermediate_size
        self.experts = nn.ParameterDict(
            {
                "gate_up": torch.empty(moe.num_experts, 2 * own, hidden_size),
                "down": torch.empty(moe.num_experts, hidden_size, own),
            }
        ).requires_grad_(False)
        self.block: int | None = None  # of experts in FP8; see `FP8Experts`
        self.dtype = torch.float32  # of the activations of experts in FP8
        self.packed: dict[str, Tensor] = {}

    def make_fp8(self, block: int) -> None:
        """Have the experts in FP8, of undefined values; see `Linear.make_fp8`. The router stays as it is."""
        self.block, self.dtype = block, self.experts["gate_up"].dtype
        for name, weight in list(self.experts.items()):
            shape = (*weight.shape[:2], ceil_div(weight.shape[2], block or weight.shape[2]))
            scales = torch.empty(shape, device=weight.device)
            self.experts[name] = nn.Parameter(torch.empty_like(weight, dtype=FP8), requires_grad=False)
            self.experts[f"{name}_scale"] = nn.Parameter(scales, requires_grad=False)

    def weights(self, name: str) -> ExpertWeights:
        """Return the experts' weights for the backend: "gate_up" or "down"."""
        if (values := self.packed.get(name)) is not None:
            return values
        weight = self.experts[name]
        return weight if self.block is None else self._in_fp8(weight, self.experts[f"{name}_scale"])

    def _in_fp8(self, weight: Tensor, scales: Tensor) -> FP8Experts:
        assert self.block is not None
        return FP8Experts(weight, scales, self.block, self.dtype)

    def pack(self, weight: Tensor, scales: Tensor | None) -> Tensor | None:
        """Return the values of other weights in FP8 for a CPU; None: it would use the weights themselves."""
        if scales is None or weight.is_cuda:
            return None
        return self._in_fp8(weight, scales).values()

    def build_derived(
        self, packed: Mapping[Tensor, Derived] | None = None, changed: Collection[Tensor] | None = None
    ) -> int:
        """Pack the experts in FP8 again, as far as they are `changed` (None: all); returns the copies' bytes.

        What :meth:`pack` has made of them already is in `packed`, by the parameter.
        """
        for name in ("gate_up", "down") if self.block is not None else ():
            weight, scales = self.experts[name], self.experts[f"{name}_scale"]
            if changed is not None and {weight, scales}.isdisjoint(changed):
                continue
            self.packed.pop(name, None)  # frees its memory first
            values = (packed or {}).get(weight)
            if values is None:
                values = self.pack(weight, scales)
            if values is not None:
                self.packed[name] = cast(Tensor, values)
        return sum(values.nbytes for values in self.packed.values())

    def forward(self, x: Tensor, num_unpadded: Tensor | None = None) -> Tensor:
        """`[T, hidden] -> [T, hidden]`; this rank's summand, which `RMSNorm` sums over the ranks.

        Tokens after the first `num_unpadded` (int32 `[1]`) are routed to no expert.
        """
        weights, experts = route(
            self.router(x),
            self.moe.num_experts_per_tok,
            renormalise=self.moe.norm_topk_prob,
            num_unpadded=num_unpadded,
        )
        return self.backend(x, self.weights("gate_up"), self.weights("down"), weights, experts)


_Deriving = Linear | RMSNorm | MoE  # modules that derive something from their parameters


class DecoderLayer(Layer):
    """Attention and an MLP (or experts), each applied to the normalised residual stream."""

    def __init__(
        self, index: int, config: ModelConfig, sizes: Shard, collectives: Collectives, moe_backend: MoEBackend
    ) -> None:
        """Make layer `index`, counted from 0, for the rank with `sizes`."""
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, collectives)
        self.attn = Attention(index, config, sizes, collectives)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, collectives)
        self.is_sparse = config.is_sparse(index)
        if config.moe is not None and self.is_sparse:
            self.mlp: MLP | MoE = MoE(config.moe, config.hidden_size, sizes, moe_backend)
        else:
            self.mlp = MLP(config, sizes, collectives)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: Angles,
        ctx: Context,
        logits_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take and return the output of a branch, `[T, hidden]`, and the residual stream to add it to.

        A branch is attention or the MLP. The norm that follows adds its output, so a layer takes the output
        of the previous layer's MLP. `residual` is None in the first layer. With `logits_indices` (int `[L]`)
        only these tokens go through the MLP, and `[L, hidden]` is returned.
        """
        x, residual = self.input_norm(x, residual, reader=self.attn.qkv)
        x = self.attn(x, angles, ctx, logits_indices)
        x, residual = self.post_norm(
            x,
            residual if logits_indices is None else residual.index_select(0, logits_indices),
            reader=self.mlp.gate_up if isinstance(self.mlp, MLP) else None,
        )
        if self.is_sparse:
            return self.mlp(x, ctx.num_tokens if logits_indices is None else ctx.num_logits_indices), residual
        return self.mlp(x), residual


class Decoder(Layer):
    """One rank's shard of the model.

    Parameters are created on the default device of torch, usually `meta`.
    """

    def __init__(
        self, config: ModelConfig, collectives: Collectives, moe_backend: MoEBackend, deterministic: bool
    ) -> None:
        """Shard `config` for the rank of `collectives`; for `deterministic` see `EngineConfig`.

        Raises:
            TensorParallelError: the model cannot be split over so many ranks.
        """
        super().__init__()
        self.config = config
        self.collectives = collectives
        self.deterministic = deterministic
        self.shard = shard(config, collectives.tp)
        # This rank's rows of the table, padding included. `nn.Embedding()` would draw initial values, and on
        # the meta device import torch._dynamo for that: 800 modules, and a second of every start.
        rows, columns = self.shard.vocab_size, config.hidden_size
        self.embed = nn.Embedding(rows, columns, _weight=torch.empty(rows, columns)).requires_grad_(False)
        self.layers = nn.ModuleList(
            DecoderLayer(index, config, self.shard, collectives, moe_backend)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, collectives)
        self.lm_head = Linear(config.hidden_size, self.shard.vocab_size, float32_output=True)
        self._qk_weights: Tensor | None = None  # see `derive_qk_weights`
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        with torch.device("cpu"):
            self.rotary = Rotary(*inverse_frequencies(config.rope, config.head_dim), config.max_position)

    def forward(self, ctx: Context, *, reader: Linear | None = None) -> Activations:
        """Run a step and return hidden states after the last norm, equal on every rank.

        They are `[L, hidden]`, of the tokens `ctx.logits_indices`, or `[T, hidden]` if that is None. With a
        `reader`, the layer that alone reads them, the norm may be left to it; see `RMSNorm`.
        """
        ctx.backend.prepare(ctx)
        x = self.embeddings(ctx)
        angles = self.rotary.angles(ctx.positions, x.dtype)
        residual = None
        *layers, last = self.layers
        for layer in layers:
            x, residual = layer(x, residual, angles, ctx)
        x, residual = last(x, residual, angles, ctx, ctx.logits_indices)
        hidden: Activations = self.norm(x, residual, reader=reader)[0]
        return hidden

    def embeddings(self, ctx: Context) -> Tensor:
        """Return this rank's summand, which the first norm sums: ids of other ranks' shards give 0.

        `[T, hidden]`; those that the context has may be overwritten, so that it is good for one pass.
        """
        if ctx.input_embeds is not None:
            return ctx.input_embeds
        assert ctx.input_ids is not None, "a context has the one or the other"
        if self.shard.tp.size == 1:
            return F.embedding(ctx.input_ids, self.embed.weight)
        return embed(ctx.input_ids, self.embed.weight, self.shard.vocab_start)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return the float32 logits `[L, vocab_size]` of `[L, hidden]` on rank 0, None on other ranks."""
        logits = self.collectives.gather(self.lm_head(hidden))
        return None if logits is None else logits[:, : self.config.vocab_size]

    @contextmanager
    def distinct_layers(self) -> Iterator[None]:
        """Run only layers that launch different kernels while the block runs: to compile or to measure these.

        They are the first one, the last one, and one between them of each kind that the first one is not of.
        A layer between them launches what the first one does behind its first norm, and begins as the last
        one does, whose MLP alone may have fewer tokens.
        """
        layers = self.layers
        if len(layers) > 2:
            kinds = {cast(DecoderLayer, layer).is_sparse: layer for layer in layers[1:-1]}
            kinds.pop(cast(DecoderLayer, layers[0]).is_sparse, None)
            self.layers = nn.ModuleList([layers[0], *kinds.values(), layers[-1]])
        try:
            yield
        finally:
            self.layers = layers

    def weights_per_token(self) -> int:
        """Return how many weights of this rank's layers one token uses; of experts, only those it needs."""
        moe = self.config.moe
        used = 1.0 if moe is None else moe.num_experts_per_tok / moe.num_experts
        # Only the weights of experts have three dimensions.
        return sum(
            int(weight.numel() * (used if weight.dim() == 3 else 1)) for weight in self.layers.parameters()
        )

    def build_derived(
        self, changed: Collection[str] | None = None, packed: Mapping[str, Derived] | None = None
    ) -> int:
        """Derive tensors from the weights (packed copies) and return their bytes.

        Must be called when the weights are loaded, and after every change of them. `changed` names the
        changed parameters; None means all. What :meth:`packer` made of them before may be given, by name.
        """
        derived = self.rotary.build_derived(self.embed.weight.device)
        made: dict[Tensor, Derived] = {
            self.get_parameter(name): copy for name, copy in (packed or {}).items()
        }
        derived += self.derive_qk_weights()
        if changed is not None and self.embed.weight.is_cuda and not self.deterministic:
            return derived  # no other module derives anything then; to look them up would take 7 ms
        values: set[Tensor] | None = None
        if changed is not None:
            values = {self.get_parameter(name) for name in changed}
        for module in self._changed_by(values):
            if isinstance(module, Linear):
                gemm = cast(Gemm | None, made.get(module.get_parameter("weight")))
                derived += module.build_derived(gemm, deterministic=self.deterministic)
            elif isinstance(module, MoE):
                derived += module.build_derived(made, values)
            else:
                derived += module.build_derived()
        return derived

    def derive_qk_weights(self) -> int:
        """Concatenate each layer's query and key norms' weights, so that one pass normalises both.

        A few kernels fill one tensor of all layers, float32 `[num_layers, num_heads + num_kv_heads,
        head_dim]`, because generation stands still while an update does this. The tensor keeps its address,
        because captured graphs read from it. Returns its bytes: 0 for a model without these norms.
        """
        modules = [cast(DecoderLayer, layer).attn for layer in self.layers]
        norms: list[Tensor] = [
            norm.weight for each in modules for norm in (each.q_norm, each.k_norm) if norm is not None
        ]
        if not norms:
            return 0
        query, key = torch.stack(norms).view(len(modules), 2, 1, -1).unbind(1)
        heads = self.shard.num_heads
        if self._qk_weights is None:
            size = len(modules), heads + self.shard.num_kv_heads, query.shape[-1]
            self._qk_weights = torch.empty(size, dtype=torch.float32, device=query.device)
            for each, part in zip(modules, self._qk_weights, strict=True):
                each.qk_weight = part
        self._qk_weights[:, :heads] = query
        self._qk_weights[:, heads:] = key
        return self._qk_weights.nbytes

    def _changed_by(self, changed: set[Tensor] | None) -> list[_Deriving]:
        """Return the modules that derive something from these parameters; None: from any."""
        return [
            module
            for module in self.modules()
            if isinstance(module, _Deriving)
            and (changed is None or not changed.isdisjoint(module.parameters()))
        ]

    def packer(self, name: str) -> Callable[[Tensor, Tensor | None], Derived | None] | None:
        """Return what packs other values of the parameter `name`; None if no layer keeps a copy of it.

        Its second argument are the scales of a parameter in FP8.
        """
        if self.embed.weight.device.type != "cpu":
            return None
        parameter = self.get_parameter(name)
        for module in self.modules():
            if isinstance(module, Linear) and module.weight is parameter:
                return partial(module.pack, deterministic=self.deterministic) if module.may_copy else None
            if isinstance(module, MoE) and any(each is parameter for each in module.experts.values()):
                return None if module.block is None else module.pack
        return None

    def drop_packed(self) -> None:
        """Free the packed copies of the weights; `build_derived` makes them again."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.drop_packed()
            elif isinstance(module, MoE):
                module.packed.clear()


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    collectives: Collectives | None = None,
    moe_backend: MoEBackend = run_by_expert,
    deterministic: bool = False,
) -> Decoder:
    """Build this rank's shard of the model, with parameters on the `meta` device in `dtype`, or in FP8.

    With `deterministic` the bits of a token's results do not depend on the other tokens of a step.

    Raises:
        TensorParallelError: the model cannot be split over so many ranks.
    """
    with torch.device("meta"):
        model = Decoder(config, collectives or Collectives(), moe_backend, deterministic).to(dtype)
        if config.fp8 is not None:
            routers = {module.router for module in model.layers.modules() if isinstance(module, MoE)}
            for module in model.layers.modules():
                if isinstance(module, (Linear, MoE)) and module not in routers:
                    module.make_fp8(config.fp8.block)
        return model
