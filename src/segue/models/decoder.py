"""The decoder-only transformer: Llama, Mistral, Qwen2, Qwen3, SmolLM and Qwen3-MoE, by config."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from segue.attention.context import Context
from segue.distributed.collectives import Collectives
from segue.errors import UnsupportedModelError
from segue.layers.attention import Angles, Attention
from segue.layers.blocks import MLP, Layer, Linear, ParallelHead, RMSNorm, VocabParallelEmbedding
from segue.layers.moe import MoE
from segue.layers.moe_backend import MoEBackend, run_by_expert
from segue.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from segue.models.rope import Rotary, inverse_frequencies
from segue.models.sharding import Shard, shard


class DecoderLayer(Layer):
    """Attention and an MLP (or experts), each applied to the normalised residual stream."""

    def __init__(
        self,
        index: int,
        config: ModelConfig,
        sizes: Shard,
        collectives: Collectives,
        moe_backend: MoEBackend,
        deterministic: bool,
    ) -> None:
        """Make layer `index`, counted from 0, for the rank with `sizes`."""
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, collectives)
        self.attn = Attention(
            layer=index,
            hidden_size=config.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm=config.qk_norm,
            eps=config.rms_norm_eps,
            collectives=collectives,
            deterministic=deterministic,
        )
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, collectives)
        self.is_sparse = config.is_sparse(index)
        if config.moe is not None and self.is_sparse:
            self.mlp: MLP | MoE = MoE(
                hidden_size=config.hidden_size,
                num_experts=config.moe.num_experts,
                num_experts_per_tok=config.moe.num_experts_per_tok,
                intermediate_size=sizes.expert_intermediate_size,
                norm_topk_prob=config.moe.norm_topk_prob,
                backend=moe_backend,
                deterministic=deterministic,
            )
        else:
            self.mlp = MLP(
                config.hidden_size,
                sizes.intermediate_size,
                bias=config.mlp_bias,
                collectives=collectives,
                deterministic=deterministic,
            )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: Angles,
        ctx: Context,
        logits_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take and return the output of a branch, `[T, hidden]`, and the residual stream to add it to.

        With `logits_indices` (int `[L]`) only these tokens go through the MLP, and `[L, hidden]` is returned.
        """
        x, residual = self.input_norm(x, residual)
        x = self.attn(x, angles, ctx, logits_indices)
        x, residual = self.post_norm(
            x, residual if logits_indices is None else residual.index_select(0, logits_indices)
        )
        if self.is_sparse:
            return self.mlp(x, ctx.num_tokens if logits_indices is None else ctx.num_logits_indices), residual
        return self.mlp(x), residual


class Decoder(Layer):
    """One rank's shard of the model.

    Parameters are created on the default device of torch, usually `meta`.
    """

    def __init__(
        self,
        config: ModelConfig,
        collectives: Collectives,
        moe_backend: MoEBackend,
        deterministic: bool = False,
    ) -> None:
        """Shard `config` for the rank of `collectives`; for `deterministic` see `EngineConfig`.

        Raises:
            TensorParallelError: the model cannot be split over so many ranks.
        """
        super().__init__()
        self.config = config
        self.shard = shard(config, collectives.tp)
        self.embed = VocabParallelEmbedding(
            self.shard.vocab_size, config.hidden_size, collectives=collectives
        )
        self.layers = nn.ModuleList(
            DecoderLayer(index, config, self.shard, collectives, moe_backend, deterministic)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, collectives)
        self.lm_head = ParallelHead(
            self.shard.vocab_size,
            config.hidden_size,
            config.vocab_size,
            tied=self.embed if config.tie_embeddings else None,
            collectives=collectives,
            deterministic=deterministic,
        )
        with torch.device("cpu"):
            self.rotary = Rotary(*inverse_frequencies(config.rope, config.head_dim), config.max_position)

    def forward(self, ctx: Context) -> Tensor:
        """Run a step and return hidden states after the last norm, equal on every rank.

        They are `[L, hidden]`, of the tokens `ctx.logits_indices`, or `[T, hidden]` if that is None.
        """
        ctx.backend.prepare(ctx)
        x = self.embed(ctx.input_ids)
        angles = self.rotary.angles(ctx.positions, x.dtype)
        residual = None
        *layers, last = self.layers
        for layer in layers:
            x, residual = layer(x, residual, angles, ctx)
        x, residual = last(x, residual, angles, ctx, ctx.logits_indices)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return the float32 logits `[L, vocab_size]` of `[L, hidden]` on rank 0, None on other ranks."""
        logits: Tensor | None = self.lm_head(hidden)
        return logits

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits of `[L, hidden]` for this rank's vocabulary shard, padding included."""
        return self.lm_head.local(hidden)

    def weights_per_token(self) -> int:
        """Return how many weights of this rank's layers one token uses; of experts, only those it needs."""
        moe = self.config.moe
        used = 1.0 if moe is None else moe.num_experts_per_tok / moe.num_experts
        return sum(
            int(weight.numel() * (used if weight.dim() == 3 else 1)) for weight in self.layers.parameters()
        )

    def build_derived(self, changed: Collection[str] | None = None) -> int:
        """Derive tensors from the weights (packed copies) and return their bytes.

        Must be called when the weights are loaded, and after every change of them. `changed` names the
        changed parameters; None means all.
        """
        owners = (Linear, RMSNorm, Attention, ParallelHead)
        derived = sum(
            module.build_derived()
            for name, module in self.named_modules()
            if isinstance(module, owners) and (changed is None or self._depends(name, changed))
        )
        return derived + self.rotary.build_derived(self.embed.weight.device)

    def _depends(self, name: str, changed: Collection[str]) -> bool:
        """Whether the module `name` has one of the `changed` parameters, or shares one."""
        if name == "lm_head" and self.config.tie_embeddings:
            name = "embed"
        return any(f"{name}.{leaf}" in changed for leaf, _ in self.get_submodule(name).named_parameters())


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
    if config.architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"model architecture {config.architecture!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    with torch.device("meta"):
        return Decoder(config, collectives or Collectives(), moe_backend, deterministic).to(dtype)
